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
def rows() -> Any:
    found = json.loads(TIMES.read_text(encoding="utf-8"))["rows"]
    assert len(found) == 59
    return found


def plan_of(row: dict[str, Any]) -> Plan:
    """What selection decides for a product that was timed."""
    label = row["label"]
    side = "rhs" if "sparse rhs" in label else "lhs"
    stored = {"transpose_lhs": "lhs [k, m]" in label, "transpose_rhs": "rhs [n, k]" in label}
    tensors = op.matmul(None, None, None, dtype="float16", **stored)
    target = "cuda -arch=sm_90a -model=h200"
    made: Any = pit_tvm.compile(tensors, sparse={side: pit_tvm.Grid()}, target=target)
    m, n, k = map(int, label.split()[0].split("x"))
    layout = made._dispatcher.binder.layout_of({"m": m, "n": n, "k": k}, "torch")
    shares = (row["live rows"], m if side == "lhs" else n), (row["live columns"], k)
    counts = tuple(round(share * of) for share, of in shares)
    found: Plan = made._dispatcher.planner.plan(layout, counts, False)
    return found


def kind_of(candidate: str) -> str:
    """Of a candidate by its text: whether it is dense, gathers rows, or both axes."""
    return "dense" if candidate.startswith("dense") else "both" if " and " in candidate else "rows"


def test_plans_are_near_the_best_of_what_was_timed(rows: Any) -> None:
    lost, off = [], []
    for row in rows:
        us = row["us"]
        timed = [("dense", us["dense"]), (row["kernel"], us["pit"])]
        timed += [(text, us[name]) for name, text in row["others"].items()]
        best = {kind_of(text): time for text, time in sorted(timed, key=lambda t: -t[1])}
        choice = plan_of(row).choice
        lost.append(best[kind_of(str(choice))] / min(best.values()) - 1)
        off += [abs(choice.cost_us / time - 1) for text, time in timed if text == str(choice)]
    assert np.mean(lost) < 0.01 and np.median(lost) == 0 and max(lost) < 0.1
    assert len(off) > 45 and np.median(off) < 0.05


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


def test_parts_of_a_cost_add_up(rows: Any) -> None:
    for candidate in plan_of(rows[0]).candidates:
        parts = [us for name, us in candidate.parts if name != "bound"]
        assert sum(parts) == pytest.approx(candidate.cost_us)
