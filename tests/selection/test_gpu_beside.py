"""What rows of zeros cost that a product stores while it computes, by what was timed on an H100."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pit_tvm.runtime.cuda_rows import rates_of
from pit_tvm.selection.gpu_cost import GpuRates, GpuWork
from pit_tvm.tile_db.store import TileStore

TIMES = Path(__file__).parents[2] / "tuning_logs" / "h100-sm_90a" / "beside.json"
H100 = {"store_gbps": 2830.0, "gather_gbps": 2500.0}  # of its memory, slower than an H200's


@pytest.fixture(scope="module")
def rates() -> GpuRates:
    store = TileStore.over_shipped(None)
    return replace(rates_of(store, "float16", "sm_90a", "torch", {}), profile=H100)


def work_of(row: dict[str, Any], hides: bool = True) -> GpuWork:
    (rows, n, k), live = row["sizes"], row["live"]
    return GpuWork(float(live), n, k, extra_bytes=2.0 * (rows - live) * n, hides=hides)


def test_what_zeros_add_is_near_what_was_timed(rates: GpuRates) -> None:
    off = []  # of rows less than 0.9 full: above that cuBLAS computes all
    for row in json.loads(TIMES.read_text(encoding="utf-8"))["rows"]:
        us = row["us"]
        added = rates.beside_us(work_of(row), us["pit"] - us["index"])
        off.append(abs(us["pit"] + added - us["zero"]) / us["zero"])
    assert len(off) > 40 and np.median(off) < 0.04 and max(off) < 0.15


def test_a_product_hides_zeros_but_for_a_part_where_memory_has_time(rates: GpuRates) -> None:
    row = {"sizes": (32768, 3072, 768), "live": 16384}
    alone = rates.beside_us(work_of(row, hides=False), 100.0)
    found = [rates.beside_us(work_of(row), product) for product in (0.0, 100.0, 1000.0)]
    assert found[0] == alone > found[1] > found[2] > 0
