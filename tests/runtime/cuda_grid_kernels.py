"""What kernels of live rows and live columns do, on tensors on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pit_tvm.reference.index import index_lists
from tests.runtime.cuda_products import memory

torch = pytest.importorskip("torch")


def find_along(self: Any, spec: Any, value: Any, shape: Any, tile: Any, _: Any, split: bool) -> Any:
    """`CudaDetector.prepared` for tensors on the CPU, in memory that the caller gives."""

    def run(given: Any, take: Any) -> Any:
        (live,) = index_lists(spec, given.numpy(), shape, tile)
        lists = {"live": live}
        if split:
            lists["dead"] = np.setdiff1d(np.arange(shape[tile.dim]), live)
        found = [take(given, role, 1, shape[tile.dim]) for role in lists]
        for index, ids in zip(found, lists.values(), strict=True):
            index.ids[0, : len(ids)] = index.ids.new_tensor(ids)
            index.count[0] = len(ids)
        return (*found, None)[:2]

    return run


def find_axes(self: Any, spec: Any, value: Any, shape: Any, tiles: Any, **given: Any) -> Any:
    """The same of `CudaDetector.detect_axes`."""
    take, split = given["take"], given["split"]
    live, dead = find_along(self, spec, value, shape, tiles[0], False, split)(value, take)
    for dim, lines in enumerate(given["lines"]):  # bits of either axis, all of them in one line
        alive = np.packbits(value.numpy().any(1 - dim), bitorder="little")
        lines.zero_()
        lines[-1].view(torch.uint8)[: len(alive)] = torch.from_numpy(alive)
    beside, _ = find_along(self, spec, value, shape, tiles[1], False, False)(
        value, lambda like, role, *of: take(like, "beside", *of)
    )
    return live, dead, beside


def gather(self: Any, dtype: str, layout: str, turned: bool) -> Any:
    def run(source: Any, rows: Any, lives: Any, *rest: Any) -> None:
        ids, count, dense, packed, beside = map(memory, rest)
        live, lines = count[0], memory(source).T if turned else memory(source)
        deep, kept, ids = -(-live // 64) * 64, memory(rows)[0, : memory(lives)[0]], ids[0, :live]
        packed[kept, :deep] = 0
        packed[kept, :live] = lines[kept][:, ids]
        if layout == "kn":
            beside[:deep] = 0
            beside[:live, : dense.shape[1]] = dense[ids]
        else:
            beside[: len(dense), :deep] = 0
            beside[: len(dense), :live] = dense[:, ids]

    return run


def product(self: Any, tile: Any, groups: int, **given: Any) -> Any:
    def run(own: Any, ids: Any, count: Any, *rest: Any) -> None:
        if given.get("fills"):
            dead, deads, *rest = rest
            memory(rest[-1])[memory(dead)[0, : memory(deads)[0]]] = 0
        (depth,) = rest[:1] if given.get("deep") else [None]
        (right,), *bias, out = map(memory, rest[1:] if given.get("deep") else rest)
        deep = memory(own).shape[1] if depth is None else -(-int(memory(depth)[0]) // 64) * 64
        live = memory(ids)[0, : memory(count)[0]]
        right = right[:, :deep].T if given["rhs_layout"] == "nk" else right[:deep]
        # Columns beyond n hold anything, and are cut off.
        with np.errstate(invalid="ignore", over="ignore"):
            sums = memory(own)[live, :deep].astype(float) @ right.astype(float)
            if given.get("row_bias"):
                out[live] = sums + bias[0][live, None]
            else:
                out[live] = sums + (bias[0] if bias else 0.0)

    return run


def turned(self: Any, array: Any, dtype: str) -> Any:
    return array.t().contiguous()


def pad_copy(self: Any, source: Any, made: Any) -> None:
    made.zero_()
    made[..., : source.shape[-1]] = source[..., : made.shape[-1]]


def fill_rows(self: Any, out: Any, index: Any, row: Any = None) -> None:
    out[index.ids[0, : index.count[0]].long()] = 0 if row is None else row


def turn_rows(self: Any, dtype: str, bias: bool, act: str) -> Any:
    def run(source: Any, alive: Any, *rest: Any) -> None:
        (*biases, turned) = rest
        bits = np.bitwise_or.reduce(alive.numpy(), axis=0).view(np.uint8)
        lives = np.unpackbits(bits, bitorder="little").astype(bool)
        turned.zero_()
        if bias:
            turned[:, : len(biases[0])] = biases[0]
        live = np.flatnonzero(lives)
        turned[:, live] = source[live].t()

    return run
