"""The GPU benchmark's attention by masks: its masks, right on the CPU, judged, and its goals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import bench_gpu
import bench_gpu_attention as attention
import bench_gpu_measure as measure
import bench_gpu_plot as plot
import bench_gpu_report as report
import numpy as np
import pytest
import torch
from bench_rows import Array, Row, Stat
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

DRY = measure.GpuSettings(1, 0, quick=True, device="cpu")
CASES = {case.label: case for case in attention.list_attention(True)}
WINDOW = attention.Attended("window", 2, 160, 16, reach=12, seen=3)


def mask_of(case: attention.Attended) -> Array:
    return attention.make_mask(case, DRY.rng(case.label), "cpu").numpy()


# --------------------------------------------------------------------------------------------
# Cases


def test_every_shape_is_compiled_once_and_those_held_out_are_nobody_elses() -> None:
    full = attention.list_attention(False)
    shapes = [(case.heads, case.kv_heads, case.tokens, case.dim) for case in full]
    assert len([shape for shape, _ in groupby(shapes)]) == len(set(shapes))
    held = {shape for shape, case in zip(shapes, full, strict=True) if case.held_out}
    others = {shape for shape, case in zip(shapes, full, strict=True) if not case.held_out}
    assert len(held) == 3 and not held & others
    assert {case.kind for case in full} == {case.kind for case in CASES.values()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_token_sees_itself(case: attention.Attended) -> None:
    mask = mask_of(case)
    assert mask.shape == (case.tokens, case.tokens) and mask.dtype == bool
    assert mask.diagonal().all() and np.array_equal(mask, mask_of(case))


def test_windows_have_tokens_that_all_see() -> None:
    at = np.arange(160)
    near = abs(at[:, None] - at) <= 12
    mask = mask_of(WINDOW)
    seen = np.flatnonzero(mask.all(0))
    assert len(seen) == 3 and not mask.all(1).any()
    near[:, seen] = True
    assert np.array_equal(mask, near)
    mask = mask_of(replace(WINDOW, kind="global"))
    assert np.array_equal(mask, mask.T) and mask.all(0).sum() == 3


def test_blocks_and_elements_have_their_density() -> None:
    mask = mask_of(attention.Attended("blocks", 1, 2048, 16, density=0.25))
    blocks = mask.reshape(16, 128, 16, 128).swapaxes(1, 2)
    live = blocks.all((2, 3))
    assert np.array_equal(live, blocks.any((2, 3)))
    assert np.diagonal(live).all() and 64 <= live.sum() <= 80
    mask = mask_of(attention.Attended("random", 1, 1024, 16, density=0.01))
    assert (mask.sum() - 1024) / mask.size == pytest.approx(0.01, abs=0.002)


def test_documents_are_packed_and_causal() -> None:
    mask = mask_of(attention.Attended("documents", 1, 6000, 16))
    assert np.array_equal(mask, np.tril(mask))
    first = mask.argmax(1)  # of each token's document
    starts, lengths = np.unique(first, return_counts=True)
    assert np.array_equal(starts, np.cumsum(lengths) - lengths)
    assert np.array_equal(mask.sum(1), np.arange(6000) - first + 1)
    assert 300 < lengths.mean() < 800 and len(set(lengths)) > 3


def test_tokens_pick_their_own_of_those_before() -> None:
    mask = mask_of(attention.Attended("picked", 4, 1024, 16, density=0.1, share=2))
    assert np.array_equal(mask, np.tril(mask)) and len(np.unique(mask, axis=0)) == 1024
    assert (mask.sum() - 1024) / np.tril(np.ones(mask.shape), -1).sum() == pytest.approx(0.1, 0.03)


# --------------------------------------------------------------------------------------------
# Results are right, and wrong ones are seen


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_contenders_are_right(case: attention.Attended) -> None:
    row = attention.measure_attention(case, DRY)
    assert row.wrong == [] and set(row.errors) == {"pit", "sdpa"} and row.error < 3
    assert set(row.stats) == {"pit", "sdpa", "full"} and row.held_out == case.held_out
    for peer in ("sdpa", "full"):
        assert row.facts[f"over_{peer}"] == row.us(peer) / row.us("pit")
    assert not {"live", "over_flex", "without_flex"} & set(row.facts)
    seen = int(mask_of(case).sum())
    assert row.facts["density"] == seen / case.tokens**2
    assert row.facts["operations"] == 4 * case.heads * case.dim * seen
    suite = attention.ATTENTION
    assert report.Printer(suite, [row.label]).row(row).startswith(row.label)
    (target,) = suite.targets([row])
    assert target.got == row.facts["over_sdpa"] and target.held_out == case.held_out


def test_what_is_wrong_is_seen() -> None:
    qkv, mask = attention.make_data(WINDOW, DRY)
    want = attention.wanted(qkv, mask)
    run = attention.runs(qkv, mask, "cpu")[0]["pit"]
    out = run()
    assert attention.attention_error(out, want) < attention.LIMIT
    assert attention.attention_error(out[:, :1], want) == math.inf
    out[0, 1, 7, 3] = float("nan")
    assert attention.attention_error(out, want) == math.inf
    mask[80, 80] = False
    assert attention.attention_error(run(), want) > attention.LIMIT


def test_float64_is_computed_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, mask = attention.make_data(WINDOW, DRY)
    want = attention.wanted(qkv, mask)
    q, k, v = (each.double() for each in qkv)
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert torch.allclose(want, whole, rtol=1e-12, atol=1e-12)
    monkeypatch.setattr(attention, "CHUNK", 48)
    assert torch.allclose(attention.wanted(qkv, mask), want, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_sees_the_same_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    flex = (flex_attention, create_block_mask)
    monkeypatch.setattr(attention, "compiled_flex", lambda *shape: flex)
    qkv, mask = attention.make_data(WINDOW, DRY)
    made, missing = attention.runs(qkv, mask, "cuda")
    assert missing == "" and list(made) == ["pit", "sdpa", "full", "flex", "flex_mask"]
    found = attention.attention_error(made["flex"](), attention.wanted(qkv, mask))
    assert found < attention.LIMIT
    monkeypatch.setattr(attention, "runs", lambda *given: (made, ""))
    row = attention.measure_attention(WINDOW, DRY)
    assert row.wrong == [] and set(row.errors) == {"pit", "sdpa", "flex"}
    both = row.us("flex") + row.us("flex_mask")
    assert row.facts["over_flex"] == both / row.us("pit")


def test_what_torch_cannot_compile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise RuntimeError("no\ngraph")

    monkeypatch.setattr(attention, "compiled_flex", broken)
    qkv, mask = attention.make_data(WINDOW, DRY)
    made = attention.runs(qkv, mask, "cuda")
    assert set(made[0]) == {"pit", "sdpa", "full"} and made[1] == "RuntimeError: no graph"
    monkeypatch.setattr(attention, "runs", lambda *given: made)
    row = attention.measure_attention(WINDOW, DRY)
    assert row.wrong == [] and row.facts["without_flex"] == "RuntimeError: no graph"


def test_goals_are_of_the_kinds_that_they_name() -> None:
    def row(kind: str, sdpa: float, held_out: bool = False, **facts: float) -> Row:
        facts = {"kind": kind, "over_sdpa": sdpa, **facts}  # type: ignore[dict-item]
        return Row("x", held_out, {"pit": Stat(1, 1, 1, 1)}, facts)

    rows = [row("window", 2.0, over_flex=1.3), row("window", 1.4), row("blocks", 1.6, True)]
    rows += [row("blocks", 3.0, over_flex=0.5), row("full", 0.98), row("causal", 0.96)]
    found = [(t.name, t.limit, t.got, t.held_out) for t in attention.attention_targets(rows)]
    assert found == [
        ("attention: window, over sdpa", 1.5, 1.4, False),
        ("attention: blocks, over sdpa", 1.5, 3.0, False),
        ("attention: blocks, over sdpa", 1.5, 1.6, True),
        ("attention: window, over flex", 1.2, 1.3, False),
        ("attention: other masks, over sdpa", 0.97, 0.96, False),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_contenders_are_right_on_a_gpu(case: attention.Attended) -> None:
    row = attention.measure_attention(case, replace(DRY, device="cuda"))
    assert row.wrong == [] and "without_flex" not in row.facts
    assert set(row.errors) == {"pit", "sdpa", "flex"} and row.facts["over_flex"] > 0
    assert not {"pit", "sdpa", "full", "flex"} & set(row.facts["without_graph"])
    assert row.facts["density"] <= row.facts["live"] <= 1.0


# --------------------------------------------------------------------------------------------
# The command


def test_a_dry_run_is_right(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    options = ("--device", "cpu", "--quick", "--rounds", "1", "--match", "causal")
    assert bench_gpu.main(["attention", *options, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    (row,) = document["suites"]["attention"]["rows"]
    assert row["label"] == "causal 2x512x64" and "failed" not in row["facts"]
    assert set(plot.series([row])) == {"pit", "sdpa", "full"}
    assert document["targets"][-1]["name"] == "attention: other masks, over sdpa"
