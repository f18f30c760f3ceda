"""The GPU benchmark's suites of sparse operands, in a dry run on the CPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import bench_gpu_conversion as conversion
import bench_gpu_decode as decode
import bench_gpu_grains as grains
import bench_gpu_granularity as granularity
import bench_gpu_measure as measure
import bench_gpu_outputs as outputs
import bench_gpu_report as report
import bench_gpu_sread as sread
import bench_gpu_weights as weights
import bench_rows as base
import numpy as np
import pytest
import torch

DRY = measure.GpuSettings(1, 0, quick=True, device="cpu", tiles=2)


@pytest.mark.parametrize(
    "case",
    [
        *(conversion.Conversion((32, 1), 0.9, told, 128) for told in ("mask", *conversion.OTHERS)),
        conversion.Conversion((1, 64), 0.5, size=192),
        conversion.Conversion((64, 64), 0.5, size=256),
    ],
)
def test_conversions_are_exact(case: conversion.Conversion) -> None:
    row = conversion.measure_conversion(case, DRY)
    assert row.errors == {"pit": 0.0} and row.facts["live"] > 0
    assert ("over_csr" in row.facts) == (case.told in ("mask", "values"))
    assert ("over_blocks" in row.facts) == case.mapped
    assert report.Printer(conversion.CONVERSION, [row.label]).row(row)
    peers = {target.name.split()[-1] for target in conversion.conversion_targets([row])}
    assert peers == {name[5:] for name in row.facts if name.startswith("over_")}


def test_wrong_maps_are_seen() -> None:
    want = [np.arange(64, 128), np.arange(0)]
    found = SimpleNamespace(tensor=torch.tensor([[0, 1], [0, 0]]))
    assert conversion.same_blocks(found, want)
    found.tensor[1, 0] = 1
    assert not conversion.same_blocks(found, want)
    assert not conversion.same_blocks(found, want[:1])


def test_a_conversion_lists_what_products_read() -> None:
    made = conversion.list_conversions(True)
    assert {(case.told, case.mapped) for case in made} == {
        *(("mask", False), ("mask", True), ("bits", False), ("bits", True)),
        *(("blocks", False), ("values", False), ("values", True)),
    }


@pytest.mark.parametrize("case", [sread.Segment(4, "cache", 256), sread.Segment(32, "memory", 128)])
def test_segments_are_right(case: sread.Segment) -> None:
    row = sread.measure_segment(case, DRY)
    assert row.wrong == [] and set(row.errors) == {"dense", "ordered", "pit"}
    assert row.facts["over_dense"] == row.us("dense") / row.us("pit")
    moved = 2 * case.rows * case.bytes
    assert row.facts["pit_gbps"] == pytest.approx(1e-3 * moved / row.us("pit"))
    assert report.Printer(sread.SREAD, [row.label]).row(row)
    targets = sread.sread_targets([row])
    assert len(targets) == (case.bytes >= sread.LEAST[case.place])


@pytest.mark.gpu
def test_conversions_and_segments_are_right_on_a_gpu() -> None:
    settings = replace(DRY, device="cuda")
    rows = [
        conversion.measure_conversion(conversion.Conversion(grain, 0.9, told, 512), settings)
        for grain in ((32, 1), (32, 64))
        for told in ("mask", "bits", "values")
    ]
    rows += [sread.measure_segment(sread.Segment(16, "cache", 1024), settings)]
    assert [row.wrong for row in rows] == [[]] * len(rows)


def test_segments_are_as_wide_as_their_tiles() -> None:
    for case in sread.list_segments(False):
        tile = case.tile("sm_90a")
        assert (tile.tile_n, case.rows * case.bytes) == (case.elements, sread.PLACES[case.place])
        assert case.rows % tile.tile_m == case.elements % tile.tile_k == 0
    assert {case.bytes for case in sread.list_segments(True)} == {16, 32, 64, 128, 256, 512}


@pytest.mark.parametrize(
    ("grain", "dtype"),
    [
        *(((32, 1), "float16"), ((64, 64), "float16"), ((1, 1), "float16")),
        *(((1, 64), "float16"), ((1, 64), "float32"), ((32, 1), "tf32")),
    ],
)
def test_products_of_sparse_operands_are_right(grain: tuple[int, int], dtype: str) -> None:
    tf32 = dtype == "tf32"
    case = grains.Grain(grain, 0.9, "float32" if tf32 else dtype, (128, 128, 128), tf32=tf32)
    row = granularity.measure_grain(case, DRY)
    assert row.facts["dtype"] == dtype
    assert row.wrong == [] and {"dense", "turned", "pit", "rows"} <= set(row.errors)
    own = "rows" if (grain, dtype) == ((1, 64), "float16") else "pit"
    assert row.facts["over_dense"] == min(row.us("dense"), row.us("turned")) / row.us(own)
    assert report.Printer(granularity.GRANULARITY, [row.label]).row(row)
    targets = granularity.granularity_targets([row])
    kind = "fp32 " if dtype == "float32" else ""
    name = f"granularity: {kind}{'x'.join(map(str, grain))} 90 %, over dense"
    goals = [name] * (grain in grains.GOALS and not tf32)
    assert [t.name for t in targets] == [*goals, "granularity: over dense, every row"]


def test_tensor_cores_are_measured_without_compressed_peers() -> None:
    suite = granularity.TENSOR
    row = suite.measure(grains.Grain((32, 1), 0.5, sizes=(128, 128, 128)), DRY)
    assert row.wrong == [] and row.label == "128^3 fp16 32x1 50 %"
    assert report.Printer(suite, [row.label]).row(row)
    assert [t.name for t in suite.targets([row])] == ["tensorcore: over dense, every row"]


def test_only_cubes_have_goals_of_their_own() -> None:
    case = grains.Grain((32, 1), 0.9, sizes=(4096, 3072, 768))
    assert case.label == "4096x3072x768 fp16 32x1 90 %" and not case.cube
    facts = {"grain": [32, 1], "zeros": 0.9, "cube": case.cube, "over_dense": 1.5}
    targets = granularity.granularity_targets([base.Row(case.label, False, {}, facts)])
    assert [target.name for target in targets] == ["granularity: over dense, every row"]


@pytest.mark.parametrize(
    ("layout", "told", "grain", "dtype", "lhs"),
    [
        ("nk", "mask", (64, 64), "float16", "mk"),
        ("kn", "blocks", (64, 64), "float16", "mk"),
        ("kn", "mask", (32, 1), "float16", "km"),
        ("kn", "mask", (1, 64), "float32", "mk"),
    ],
)
def test_products_of_pruned_weights_are_right(
    layout: str, told: str, grain: tuple[int, int], dtype: str, lhs: str
) -> None:
    case = weights.Weights((128, 256, 192), grain, 0.9, layout, told, dtype, lhs)
    row = weights.measure_weights(case, DRY)
    assert row.wrong == [] and {"dense", "pit"} <= set(row.errors)
    assert report.Printer(weights.WEIGHTS, [row.label]).row(row)
    names = [target.name for target in weights.weights_targets([row])]
    assert names == ["weights: over dense, every row"]


@pytest.mark.parametrize("told", ["blocks", "mask"])
def test_live_blocks_of_a_product_are_right(told: str) -> None:
    case = outputs.Output((128, 192, 96), (64, 64), 0.5, told)
    row = outputs.measure_output(case, DRY)
    assert row.wrong == [] and {"dense", "pit"} <= set(row.errors)
    assert report.Printer(outputs.OUTPUTS, [row.label]).row(row)
    names = [target.name for target in outputs.outputs_targets([row])]
    assert names == ["outputs: over dense, every row"]


def test_the_least_blocks_are_pruned() -> None:
    weight = torch.ones(4, 6)
    weight[2:, :3] = 9
    assert weights.live_blocks(weight, (2, 3), 0.75).tolist() == [[False, False], [True, False]]


@pytest.mark.parametrize("layout", ["kn", "nk"])
def test_products_of_a_few_rows_are_right(layout: str) -> None:
    row = decode.measure_step(decode.Step(1, (96, 256), layout=layout), DRY)
    assert row.wrong == [] and {"dense", "turned", "pit"} == set(row.errors)
    assert report.Printer(decode.DECODE, [row.label]).row(row)
    names = [target.name for target in decode.decode_targets([row])]
    assert names == ["decode: 1 rows, 95 % zeros, over dense", "decode: every row"]
