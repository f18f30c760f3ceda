"""Rows gathered, or one after another, stored where ids say: the m-axis family on the GPU."""

from __future__ import annotations

from typing import Any

import pytest

from pit_tvm.runtime.cuda_rows import RowsKernels
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.schedules.hopper_rows import RowsTile
from pit_tvm.schedules.hopper_space import ROWS, as_tile

torch = pytest.importorskip("torch")

TILES = (
    RowsTile(),
    RowsTile(tile_n=128, cluster=2, stages=5, lag=1),
    RowsTile(tile_n=128, cluster=2, stages=4, late=1),
    RowsTile(tile_n=168, stages=4, lag=2, late=4),
    RowsTile(tile_m=256, tile_n=96, stages=2, late=16),
    RowsTile(tile_m=64, tile_n=128, consumers=1, stages=4),
    RowsTile(flip=1, tile_m=144, tile_n=256),
    RowsTile(flip=1, tile_m=32, tile_n=128, stages=8, cluster=2),
)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("knobs", TILES, ids=range(len(TILES)))
def test_rows_go_where_their_ids_say(knobs: RowsTile, packed: bool, dtype: str) -> None:
    kernel = RowsKernels(KernelCache(), "sm_90a").product(
        as_tile(knobs, ROWS, dtype), 0, bias=True, act="relu", packed=packed
    )
    kind: Any = getattr(torch, dtype)
    for rows, live, n, k in (
        (300, 300, 520, 328),
        (300, 171, 128, 64),
        (64, 1, 24, 8),
        (9, 0, 8, 8),
    ):
        x, weight, bias = (
            torch.randn(shape, device="cuda").to(kind) for shape in ((rows, k), (1, n, k), (1, n))
        )
        x[live:] = float("nan")  # rows beyond the live ones count for nothing
        ids = torch.randperm(3 * rows, device="cuda")[:rows].int().view(1, rows)
        count = torch.full((1,), live, dtype=torch.int32, device="cuda")
        out = torch.full((3 * rows, n), float("nan"), dtype=kind, device="cuda")
        named = ids[0, :live].long()
        own = (
            x if packed else x.new_full((3 * rows, k), float("nan")).index_copy(0, named, x[:live])
        )
        kernel(own, ids, count, weight, bias, out)
        wide = x[:live].double() @ weight[0].double().T + bias[0].double()
        scale = wide.abs() + wide.square().mean().sqrt()
        assert (((out[named].double() - wide.relu()).abs() / scale) < 2.0**-7).all()
        others = torch.ones(3 * rows, dtype=torch.bool, device="cuda").index_fill(0, named, False)
        assert out[others].isnan().all()
