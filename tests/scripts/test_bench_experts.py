"""The benchmark of whole mixture-of-experts models: a dry run, and what it compares."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_experts
import pytest
import torch
from bench_experts import Kind
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from pit_tvm.torch import host

DRY = ["--device", "cpu", "--quick", "--batch", "2", "--tokens", "8", "--rounds", "2"]


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    """What the benchmark registers is gone afterwards."""
    yield
    ALL_EXPERTS_FUNCTIONS._global_mapping.pop(bench_experts.OURS, None)


def test_a_dry_run_measures_compares_and_writes(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "rows.json"
    options = [*DRY, "--no-torch-compile", "--json", str(file)]
    assert bench_experts.main(["olmoe-1b-7b", "gpt-oss-20b", *options]) == 0
    written = json.loads(file.read_text())
    assert written["quick"] and [row["model"] for row in written["rows"]] == [
        "olmoe-1b-7b",
        "gpt-oss-20b",
    ]
    for row in written["rows"]:
        assert row["ratio"] == pytest.approx(row["ms"]["torch"] / row["ms"]["pit-tvm"])
        assert 0 < row["error"] < bench_experts.ERROR_LIMIT
        assert all(len(found) == 2 for found in row["samples"].values())
    assert "0 wrong results" in capsys.readouterr().out


def test_training_steps_are_measured_and_their_gradients_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = tmp_path / "rows.json"
    options = [*DRY, "--train", "--no-torch-compile"]
    assert bench_experts.main(["olmoe-1b-7b", *options, "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["train"] and 0 < row["error"] < bench_experts.ERROR_LIMIT
    assert "tokens, forward and backward" in capsys.readouterr().out

    def nothing(left: Any, right: Any, ids: Any, groups: int) -> Any:
        return left.new_zeros(groups, left.shape[1], right.shape[1])

    monkeypatch.setattr(host, "outer_groups", nothing)
    assert bench_experts.main(["olmoe-1b-7b", *options]) == 1


def test_wrong_experts_are_seen(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from pit_tvm.torch import experts

    monkeypatch.setattr(experts, "moe_feed_forward", lambda x, *given, **named: x + torch.nan)
    assert bench_experts.main(["mixtral-8x7b", *DRY, "--no-torch-compile"]) == 1
    assert "1 wrong results: mixtral-8x7b" in capsys.readouterr().out


def test_contenders() -> None:
    options = bench_experts.parse(["all"])
    assert options.models == list(bench_experts.CASES)
    made, cases = bench_experts._contenders, bench_experts.CASES
    plain = {"torch": Kind("grouped_mm"), "pit-tvm": Kind("pit_tvm")}
    compiled = {f"{key}, torch.compile": replace(one, compiled=True) for key, one in plain.items()}
    assert made(cases["olmoe-1b-7b"], options) == plain | compiled
    found = made(cases["gpt-oss-20b"], bench_experts.parse(["all", "--no-torch-compile"]))
    assert {key: one.attention for key, one in found.items()} == {
        "torch": None,
        "pit-tvm": "pit_tvm",
        "torch, FlexAttention": "flex_attention",
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_without_a_gpu(capsys: Any) -> None:
    assert bench_experts.main(["olmoe-1b-7b", "--quick"]) == 2
    assert "expected a CUDA device" in capsys.readouterr().err


def test_seeds_are_not_negative() -> None:
    with pytest.raises(SystemExit):
        bench_experts.parse(["all", "--seed", "-1"])
