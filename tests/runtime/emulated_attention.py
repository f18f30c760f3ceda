"""Attention by masks with the kernels of a GPU, run by a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pit_tvm.runtime.cuda_build import cuda_source
from pit_tvm.runtime.cuda_listed_mask import CudaMaskLists, Lists, lists_module, tiled_shape
from pit_tvm.runtime.cuda_masked_attention import CudaMaskedAttention
from pit_tvm.runtime.cuda_modules import named_module
from pit_tvm.runtime.cuda_view import CudaView
from pit_tvm.runtime.dlpack import Header
from pit_tvm.runtime.kernel_cache import KernelCache
from tests.runtime.cuda_emulation import Emulator, OnDevice


class _Kernels:
    """Compiled for a CPU, of CPU tensors."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator
        self._made: dict[object, Any] = {}

    def run(self, key: object, module: Callable[[], Any], name: str) -> Any:
        if key not in self._made:
            source = cuda_source(module(), tirx=True)
            self._made[key] = self._emulator.compile_source(source).mod
        kernel = self._made[key][name]

        def call(*args: Any) -> None:
            assert any(isinstance(each, torch.Tensor) for each in args)  # it tells the stream
            kernel(*map(_on_device, args))

        return call


def _on_device(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return OnDevice(value.numpy())
    if isinstance(value, CudaView):
        Header.from_address(value.value or 0).device_id = 0
    return value


class _Lists(CudaMaskLists):
    def __init__(self, cache: KernelCache, kernels: _Kernels) -> None:
        super().__init__(cache, "sm_90a")
        self._own = kernels

    def _new(self, like: Any, shape: tuple[int, ...]) -> Any:
        return super()._new(like, shape).fill_(2**30)  # nothing that could be meant

    def kernel(self, name: str, option: bool = False) -> Any:
        return self._own.run("lists", lists_module, f"{name}_{option:d}")


class EmulatedAttention(CudaMaskedAttention):
    """The class on CPU tensors, with the kernels of an architecture; memory that is kept holds
    nothing that could be meant."""

    def __init__(self, cache: KernelCache, emulator: Emulator, arch: str) -> None:
        super().__init__(cache, arch)
        self._own = _Kernels(emulator)
        self.lists = _Lists(cache, self._own)
        self._memory = self  # type: ignore[assignment]

    def keep(self, make: Any, like: Any, *size: Any) -> Any:
        made = make(like, *size)
        made._laid.fill_(torch.nan)
        return made

    def by_mask(
        self, q: Any, k: Any, v: Any, mask: Any, scale: float, out: Any, *others: Any
    ) -> None:
        """Attention by a mask that is listed for it."""
        tiles = tiled_shape((*q.shape[:3], k.shape[2]), k.shape[1], mask.shape[:3])
        lists, _ = self.lists.of_queries(mask, tiles)
        self(q, k, v, lists, scale, out, None, *others)

    def _get(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        return self._own.run(key, lambda: named_module({"main": make()}), "main")


def counted(lists: Lists) -> np.ndarray:
    """How much each tile's list names, [planes, tiles]; what fills its last step is checked."""
    ids, work = lists.ids.numpy(), lists.work.numpy()
    found = np.zeros(ids.shape[:2], np.int64)
    for plane, tile in np.ndindex(*found.shape):
        steps = work[plane][work[plane, :, 0] == tile][:, 2].max(initial=0)
        own = ids[plane, tile, : steps * 64]
        found[plane, tile] = (own >= 0).sum()
        assert (own[found[plane, tile] :] == -1).all() and len(own) - found[plane, tile] < 64
    return found


def random_mask(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """With queries that see all keys and none, and keys that all see and none."""
    mask = rng.random(shape) < rng.choice([0.003, 0.1, 0.6])
    mask[..., rng.integers(shape[-1])] = rng.random() < 0.5
    mask[..., rng.integers(shape[-2]), :] = True
    mask[..., rng.integers(shape[-2]), :] = False
    return mask
