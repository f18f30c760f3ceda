"""The GPU benchmark's attention with gradients: right on the CPU, judged, and its goals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import bench_gpu_attention as attention
import bench_gpu_attention_training as training
import bench_gpu_measure as measure
import pytest
import torch
from bench_rows import Row, Stat

DRY = measure.GpuSettings(1, 0, quick=True, device="cpu")
CASES = {case.label: case for case in training.list_training(True)}
WINDOW = attention.Attended("window", 2, 160, 16, reach=12, seen=3)


def _row(kind: str, sdpa: float, **facts: Any) -> Row:
    return Row("x", False, {"pit": Stat(1, 1, 1, 1)}, {"kind": kind, "over_sdpa": sdpa, **facts})


def test_cases_are_those_of_attention() -> None:
    all_cases = attention.list_attention(True)
    assert list(CASES) == [case.label for case in all_cases if case.share == 1]
    full = training.list_training(False)
    assert len([case for case in full if case.held_out]) == 2
    assert {case.kind for case in full} == {case.kind for case in CASES.values()}


def test_contenders_are_right() -> None:
    row = training.measure_training(WINDOW, DRY)
    assert row.wrong == [] and set(row.errors) == {"pit", "sdpa"}
    assert set(row.stats) == {"pit", "sdpa", "full"}
    assert row.facts["over_sdpa"] == row.us("sdpa") / row.us("pit")
    (target,) = training.ATTENTION_TRAINING.targets([row])
    assert target.name == "attention-training: window, over sdpa"


def test_gradients_that_are_wrong_are_seen() -> None:
    qkv, mask = attention.make_data(WINDOW, DRY)
    down = torch.randn(qkv[0].shape).bfloat16()
    want = training.wanted_gradients(qkv, mask, down)
    made, _ = training.steps(qkv, mask, "cpu", down)
    found = made["pit"]()
    assert training.gradient_error(found, want) < training.LIMIT
    assert training.gradient_error([each[:, :1] for each in found], want) == math.inf
    found[1][0, 1, 7, 3] = float("nan")
    assert training.gradient_error(found, want) == math.inf
    mask[80, 80] = False
    assert training.gradient_error(made["pit"](), want) > training.LIMIT


def test_goals_are_those_of_attention_by_another_name() -> None:
    rows = [_row("window", 2.0, over_flex=1.3), _row("full", 0.9)]
    found = [(t.name, t.limit, t.got) for t in training.training_targets(rows)]
    assert found == [
        ("attention-training: window, over sdpa", 1.5, 2.0),
        ("attention-training: window, over flex", 1.2, 1.3),
        ("attention-training: other masks, over sdpa", 0.97, 0.9),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_contenders_are_right_on_a_gpu(case: attention.Attended) -> None:
    row = training.measure_training(case, replace(DRY, device="cuda"))
    assert row.wrong == [] and "without_flex" not in row.facts
    assert set(row.errors) == {"pit", "sdpa", "flex"}
    assert not {"pit", "sdpa", "full", "flex"} & set(row.facts["without_graph"])
