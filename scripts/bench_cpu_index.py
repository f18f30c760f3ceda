"""The suite ``index``: online detection in a boolean mask, against numpy and torch.

Two peers do less or other work: ``np.nonzero`` and torch's compressed rows list elements. numpy's
``logical_or.reduceat`` and ``nonzero`` give the same micro-tiles as pit-tvm. The bound is a loop
that only reads the mask, with as many threads and with one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
import tvm
from bench_cpu_cases import Indexed, list_indexed
from bench_cpu_measure import interleave
from bench_rows import Array, Column, Row, Settings, Suite, Target, block_mask, limits, time_column
from tvm.script import tirx as T

import pit_tvm
from pit_tvm.runtime.detect import Detector, compile_kernel
from pit_tvm.runtime.detect_workspace import Workspace
from pit_tvm.structs import Index, MicroTile
from pit_tvm.target import resolve_target

INDEX_US = 1500.0
READ_BLOCK, READ_LANES = 1 << 12, 64  # bytes of one task of the bound, and of one of its loads


def read_blocks(parallel: bool) -> tvm.IRModule:
    """Reads ``src``, uint8, in whole blocks; ``seen``: uint8 ``[blocks, READ_LANES]``, their OR."""
    loop = T.parallel if parallel else T.serial

    @T.prim_func(s_tir=True)
    def main(p_src: T.handle, p_seen: T.handle):
        size, blocks = T.int64(), T.int64()
        src = T.match_buffer(p_src, (size,), "uint8", align=1)
        seen = T.match_buffer(p_seen, (blocks, READ_LANES), "uint8", align=1)
        for block in loop(blocks):
            acc = T.alloc_buffer((READ_LANES,), "uint8")
            for w in T.vectorized(READ_LANES):
                acc[w] = T.uint8(0)
            for step in range(READ_BLOCK // READ_LANES):
                for w in T.vectorized(READ_LANES):
                    acc[w] = acc[w] | src[block * READ_BLOCK + step * READ_LANES + w]
            for w in T.vectorized(READ_LANES):
                seen[block, w] = acc[w]

    return tvm.IRModule({"main": main})


def readers(mask: Array) -> dict[str, Callable[[], object]]:
    """The bound by contender: all threads, and one."""
    flat, target = mask.reshape(-1).view(np.uint8), resolve_target("llvm").tvm_target
    seen = np.empty((flat.size // READ_BLOCK, READ_LANES), np.uint8)

    def reader(parallel: bool) -> Callable[[], object]:
        kernel = compile_kernel("read_blocks", lambda: read_blocks(parallel), target)
        return lambda: kernel(flat, seen)

    return {"read": reader(True), "read_alone": reader(False)}


def measure_index(case: Indexed, settings: Settings) -> Row:
    """One mask: pit-tvm's index; numpy for the same micro-tiles; numpy and torch by elements."""
    mask = block_mask(settings.rng(case.label), case.shape, case.grain, case.zeros)
    dim = case.grain.index(1)
    micro_tile = MicroTile("lhs", "mk"[dim], dim, case.grain)
    detector, workspace = Detector(resolve_target("llvm").tvm_target), Workspace()
    tensor = torch.from_numpy(mask)

    def detect() -> Index:
        return detector.detect(pit_tvm.Mask(), mask, case.shape, micro_tile, workspace=workspace)

    runs: dict[str, Callable[[], object]] = {
        "pit": detect,
        "numpy_micro": lambda: np.nonzero(live_micro_tiles(mask, case.grain)),
        "numpy": lambda: np.nonzero(mask),
        "torch": tensor.to_sparse_csr,
        **readers(mask),
    }
    with warnings.catch_warnings():
        # torch calls the layout a beta once per process.
        warnings.filterwarnings("ignore", "Sparse CSR", UserWarning)
        stats = interleave(runs, settings.repeats)
    same = same_index(detect(), live_micro_tiles(mask, case.grain), dim)
    facts = {"grain": "x".join(map(str, case.grain)), "zeros": case.zeros}
    return Row(case.label, case.held_out, stats, facts, {"pit": 0.0 if same else float("inf")})


def live_micro_tiles(mask: Array, grain: tuple[int, int]) -> Array:
    """bool, one element per micro-tile: whether any of its elements is True; numpy's way."""
    rows, columns = grain
    if rows > 1:
        return np.logical_or.reduceat(mask, np.arange(0, len(mask), rows), axis=0)
    return np.logical_or.reduceat(mask, np.arange(0, mask.shape[1], columns), axis=1)


def same_index(index: Index, live: Array, dim: int) -> bool:
    """Whether the lists are exactly the live micro-tiles, in any order; slots are the other
    dimension of ``live``."""
    slots = live if dim == 1 else live.T
    if index.count.tolist() != slots.sum(axis=1).tolist():
        return False
    lists = zip(index.ids, index.count, slots, strict=True)
    return all(np.array_equal(np.sort(ids[:n]), np.flatnonzero(s)) for ids, n, s in lists)


def index_targets(rows: Sequence[Row]) -> list[Target]:
    """The limit at 32x1."""
    chosen = [row for row in rows if row.facts["grain"] == "32x1"]
    name = "index: us for a 4096x4096 mask at 32x1"
    return limits(chosen, name, INDEX_US, lambda row: row.us("pit"), at_least=False)


INDEX = Suite(
    name="index",
    title="index of a boolean mask (size, micro-tile, zeros), medians in us",
    cases=list_indexed,
    measure=measure_index,
    columns=(
        time_column("pit", "pit", 1),
        time_column("only read", "read", 1),
        Column("pit / read", lambda row: f"{row.us('pit') / row.us('read'):.2f}"),
        time_column("read, 1 thread", "read_alone", 1),
        time_column("numpy any + nonzero", "numpy_micro", 1),
        time_column("numpy nonzero", "numpy", 1),
        time_column("torch to_sparse_csr", "torch", 1),
        Column("right", lambda row: "no" if row.wrong else "yes"),
    ),
    targets=index_targets,
)
