"""Predicted costs of products over live rows and live columns on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pit_tvm
from pit_tvm import op
from pit_tvm.selection.gpu_cost import GpuWork
from pit_tvm.selection.gpu_grid import Packing
from pit_tvm.structs import Plan

TIMES = Path(__file__).parents[2] / "tuning_logs" / "h200-sm_90a" / "grid.json"


@pytest.fixture(scope="module")
def times() -> Any:
    return json.loads(TIMES.read_text(encoding="utf-8"))


def plan_of(row: dict[str, Any]) -> Plan:
    """What selection decides for a product that was timed."""
    tensors = op.matmul(None, None, None, dtype="float16", transpose_rhs=row["rhs"] == "nk")
    target = "cuda -arch=sm_90a -model=h200"
    made: Any = pit_tvm.compile(tensors, sparse={"lhs": pit_tvm.Grid()}, target=target)
    layout = made._dispatcher.binder.layout_of({name: row[name] for name in "mnk"}, "torch")
    counts = int(row["m"] * row["live_rows"]), int(row["k"] * row["live_columns"])
    found: Plan = made._dispatcher.planner.plan(layout, counts, False)
    return found


def test_plans_are_near_the_best_of_what_was_timed(times: Any) -> None:
    lost = []
    for row in times["products"]:
        choice = plan_of(row).choice
        also = choice.micro_tile is not None and choice.micro_tile.also is not None
        kind = "dense" if choice.kind == "dense" else "both" if also else "rows"
        lost.append(row[kind] / min(row["both"], row["rows"], row["dense"]) - 1)
    assert np.mean(lost) < 0.01 and np.median(lost) == 0


def test_packing_takes_longer_the_more_lives_and_where_columns_are_scattered() -> None:
    work = GpuWork(1000.0, 4096, 4096)
    found = [Packing(True, 4096).us(work, columns) for columns in (0, 64, 512, 4096)]
    assert found == sorted(found) and found[0] < found[-1]
    assert Packing(False, 4096).us(work, 512) > Packing(True, 4096).us(work, 512)


def test_a_turned_operand_is_read_by_sectors_of_its_rows() -> None:
    few, many = GpuWork(10.0, 64, 4096), GpuWork(4096.0, 64, 4096)
    plain, turned = (Packing(True, 4096, turned) for turned in (False, True))
    assert turned.us(few, 4096) > plain.us(few, 4096)
    assert turned.us(many, 100) < plain.us(many, 100)


def test_parts_of_a_cost_add_up(times: Any) -> None:
    for candidate in plan_of(times["products"][0]).candidates:
        parts = [us for name, us in candidate.parts if name != "bound"]
        assert sum(parts) == pytest.approx(candidate.cost_us)
