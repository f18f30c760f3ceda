"""The GPU benchmark's attention of few queries: right on the CPU, judged, and its goals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import bench_gpu_attention_decode as decode
import bench_gpu_measure as measure
import pytest
from bench_rows import Row, Stat

DRY = measure.GpuSettings(1, 0, quick=True, device="cpu")
CASES = {case.label: case for case in decode.list_decoding(True)}


def test_shapes_that_are_held_out_are_nobody_elses() -> None:
    full = decode.list_decoding(False)
    shapes = [(one.batch, one.heads, one.kv_heads, one.keys, one.dim) for one in full]
    held = {shape for shape, one in zip(shapes, full, strict=True) if one.held_out}
    assert len(held) == 3 and not held & {
        shape for shape, one in zip(shapes, full, strict=True) if not one.held_out
    }
    assert {one.kind for one in full} == {one.kind for one in CASES.values()} == set(decode.GOALS)


@pytest.mark.parametrize("label", CASES)
def test_contenders_are_right(label: str) -> None:
    row = decode.measure_decoding(CASES[label], DRY)
    assert row.wrong == [] and set(row.errors) == {"pit", "listed", "sdpa"}
    assert set(row.stats) == {"pit", "listed", "sdpa", "full"}
    assert row.facts["over_sdpa"] == row.us("sdpa") / row.us("pit")


def test_masks_are_those_of_their_kind() -> None:
    seen = {label: decode.make_data(case, DRY)[1][:, 0] for label, case in CASES.items()}
    for label, masks in seen.items():
        kind, mask = CASES[label].kind, masks.flatten(0, 1)
        assert mask.any(dim=1).all() and bool(mask.all()) == (kind == "full")
        if kind in ("ragged", "drafted"):  # no key behind one that is not there
            assert not (mask[:, 1:] & ~mask[:, :-1]).any()
        if kind == "drafted":
            assert (masks.sum(dim=2).diff(dim=1) == 1).all() and masks.shape[1] == decode.DRAFTED
        if kind == "picked":
            assert 0.05 < float(mask.float().mean()) < 0.25


def test_a_key_that_is_missing_is_seen() -> None:
    case = replace(CASES["full 3x4/2x300x64"], keys=40)
    qkv, mask = decode.make_data(case, DRY)
    want = decode.wanted(qkv, mask)
    made, _ = decode.runs(qkv, mask, "cpu")
    assert decode.attention_error(made["pit"](), want) < decode.LIMIT
    mask[..., 7] = False
    assert decode.attention_error(made["pit"](), want) > decode.LIMIT


def test_goals() -> None:
    def row(kind: str, over: float) -> Row:
        facts: dict[str, Any] = {"kind": kind, "over_sdpa": over}
        return Row("x", False, {"pit": Stat(1, 1, 1, 1)}, facts)

    found = decode.decoding_targets([row("ragged", 1.4), row("ragged", 2.0), row("full", 0.9)])
    assert [(t.name, t.limit, t.got) for t in found] == [
        ("attention-decode: ragged, over sdpa", 1.3, 1.4),
        ("attention-decode: full, over sdpa", 0.97, 0.9),
    ]
