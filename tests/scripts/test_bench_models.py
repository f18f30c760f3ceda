"""The benchmark of whole models: a dry run, its lengths, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_models
import bench_models_cases as cases
import pytest
import torch


@pytest.fixture
def row() -> dict[str, Any]:
    """What is measured of a model, as far as it is printed."""
    of_both = {"torch": 2.0, "pit-tvm": 1.0}
    return {
        **{"model": "a", "dtype": "float16", "batch": [4, 48], "fill": 0.5, "bound_ms": 0.1},
        **{"ms": of_both, "ratio": {"torch": 2.0}, "fc2": None, "goal": None, "index_share": 0.1},
        **{"peak_bytes": {"torch": 1 << 20}, "kept_bytes": {"torch": 1 << 20}, "error": 1e-3},
        **{"compile_seconds": 3.0, "not_skipped": 0},
    }


def test_a_dry_run_measures_compares_and_writes(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "rows.json"
    options = ["--device", "cpu", "--quick", "--rounds", "2", "--no-torch-compile"]
    assert bench_models.main(["opt-13b-step", *options, "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    (row,) = written["rows"]
    assert written["quick"] and row["model"] == "opt-13b-step" and row["batch"][1] == 1
    assert set(row["ms"]) == {"torch", "pit-tvm", "index", "fc2, torch", "fc2, pit-tvm"}
    assert row["ratio"] == {"torch": pytest.approx(row["ms"]["torch"] / row["ms"]["pit-tvm"])}
    assert row["fc2"] == pytest.approx(row["ms"]["fc2, torch"] / row["ms"]["fc2, pit-tvm"])
    assert 0 < row["error"] < row["error_limit"] and row["not_skipped"] == 1
    assert all(len(found) == 2 for found in row["samples"].values())
    printed = capsys.readouterr().out
    assert "over torch" in printed and "fc2" in printed and "0 wrong results" in printed


@pytest.mark.parametrize("name", [n for n, case in cases.CASES.items() if case.goal is None])
def test_families_without_heads_take_small_batches(name: str) -> None:
    case = cases.CASES[name]
    ids, mask = case.batch_of(1, True)
    assert ids.shape == mask.shape == (4, cases.QUICK_TOKENS)
    with torch.no_grad():
        hidden = case.make(True)(input_ids=ids, attention_mask=mask)[0]
    assert hidden.shape[:2] == ids.shape and bool(hidden[mask.bool()].isfinite().all())


def test_a_row_without_a_goal_names_none(row: dict[str, Any]) -> None:
    assert "goal" not in bench_models.text(row)
    assert "(goal 2.5x over torch.compile)" in bench_models.text({**row, "goal": 2.5})


def test_bars_for_every_contender_of_a_model(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {"model": "a", "ratio": {"torch": 2.0, "packed by hand": 1.1}},
        {"model": "b", "ratio": {"torch": 3.0}},
    ]
    bench_models.draw(rows, tmp_path / "rows.png")
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", cases.CASES)
def test_lengths_are_as_said(name: str) -> None:
    case = cases.CASES[name]
    ids, mask = case.batch_of(1, False)
    assert mask.shape == ids.shape == (case.batch, case.tokens)
    lengths = mask.sum(1)
    assert lengths.min() >= 1 and abs(float(lengths.double().mean()) - case.mean) < 0.15 * case.mean
    edge = mask[:, -1] if case.left else mask[:, 0]
    assert bool(edge.all())
    assert bool((mask.diff(dim=1) != 0).sum(1).le(1).all())  # live tokens without gaps


def test_other_seeds_give_other_batches() -> None:
    case = cases.CASES["bert-base"]
    assert not torch.equal(case.batch_of(1, False)[1], case.batch_of(2, False)[1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_without_a_gpu(capsys: Any) -> None:
    assert bench_models.main(["bert-base", "--quick"]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_nan_is_an_error() -> None:
    mask = torch.ones(1, 2, dtype=torch.long)
    good = torch.ones(1, 2, 3)
    assert bench_models.deviation(good, good, mask) == 0
    assert bench_models.deviation(good * float("nan"), good, mask) == float("inf")


@pytest.mark.parametrize("given", [[], ["gpt"], ["all", "--seed", "-1"], ["all", "--rounds", "0"]])
def test_bad_arguments(given: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench_models.parse(given)
