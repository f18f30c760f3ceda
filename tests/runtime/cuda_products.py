"""What tests of the GPU's products share: errors, candidates to run, calls in CUDA graphs."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from pit_tvm.reference.index import index_lists
from pit_tvm.runtime.cuda_view import CudaView
from pit_tvm.runtime.cuda_workspace import new_index
from pit_tvm.runtime.dlpack import Header
from pit_tvm.structs import Candidate, MicroTile, Plan, Tile


def roundings(out: Any, want: npt.NDArray[np.float64]) -> float:
    """The worst error of a CUDA tensor, relative to the root mean square, in roundings of its type;
    infinite if something was not written."""
    got = out.cpu().double().numpy()
    unit = 2.0**-11 if str(out.dtype) == "torch.float16" else 2.0**-8
    scale = np.abs(want) + np.sqrt(np.square(want).mean()) + 1e-30
    worst = float((np.abs(got - want) / scale).max(initial=0.0)) / unit
    return worst if np.isfinite(worst) else float("inf")


def memory(view: Any) -> Any:
    """The numbers of a `CudaView`, or of a tensor, on the CPU."""
    if not isinstance(view, CudaView):
        return view.numpy()
    kinds = {0: "int32", 1: "uint32", 2: "float16"}
    header = Header.from_address(view.value or 0)
    kind, shape = np.dtype(kinds[header.code]), view.shape
    raw = (ctypes.c_char * (math.prod(shape) * kind.itemsize)).from_address(header.data)
    return np.frombuffer(raw, kind).reshape(shape)


def find_on_cpu(
    self: Any, spec: Any, value: Any, shape: tuple[int, ...], micro_tile: MicroTile, *_: Any
) -> Any:
    """`CudaDetector.prepared` for tensors on the CPU."""

    def run(given: Any, take: Any) -> Any:
        lists = index_lists(spec, given.numpy(), shape, micro_tile)
        index = new_index(given, "live", len(lists), shape[micro_tile.dim])
        for slot, ids in enumerate(lists):
            index.ids[slot, : len(ids)] = index.ids.new_tensor(ids)
            index.count[slot] = len(ids)
            lives = np.isin(np.arange(index.ids.shape[1]), ids)
            index.lines.numpy()[slot] = np.packbits(lives, bitorder="little").view(np.uint32)
        return index, None

    return run


def tiled(plan: Plan, at: int = 0) -> Candidate:
    """The plan's candidate number ``at`` of those that have a tile."""
    return [c for c in plan.candidates if c.tile is not None][at]


def by_tile(tile: Tile) -> Callable[[Plan], Candidate]:
    """What makes a call run a tile, wherever it stands in the plan."""
    return lambda plan: tiled(plan)._replace(tile=tile)


def check_replays(made: Any, cases: Sequence[Any], choose: Any = tiled) -> None:
    """An operator's call with the first case must not wait for the device, and once recorded in a
    CUDA graph compute the others, whose arrays take the place of the first one's.

    A case has ``arrays``, ``value``, ``out``, ``want`` and ``error()``.
    """
    import torch

    first, stream = cases[0], torch.cuda.Stream()
    call = partial(made._dispatcher.run, first.arrays, first.value, first.out, choose=choose)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        call()
        torch.cuda.set_sync_debug_mode("error")
        call()
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    for case in cases:
        for mine, new in zip((*first.arrays, first.value), (*case.arrays, case.value), strict=True):
            mine.copy_(new.clone())
        first.want = case.want
        first.out.fill_(torch.nan)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert first.error() < 4
