"""The Hopper rows family as CUDA source; running it needs the GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pit_tvm.errors import ScheduleError
from pit_tvm.gates import PLAIN, Gate
from pit_tvm.schedules.hopper_rows import RowsTile, rows_kernel
from tests.schedules.cuda_text import boxes, cuda_text


def source_of(dtype: str = "float16", knobs: RowsTile | None = None, **options: Any) -> str:
    return cuda_text(rows_kernel(dtype, RowsTile() if knobs is None else knobs, **options))


def transposed(source: str) -> bool:
    """Whether the wgmma instructions read rhs with n contiguous (the last immediate)."""
    found = set(re.findall(r"ps0, 1, 1, 0, ([01]);", source))
    assert len(found) == 1
    return found == {"1"}


@pytest.mark.parametrize(("dtype", "kind"), [("float16", "f16"), ("bfloat16", "bf16")])
def test_rows_are_gathered_by_cp_async_and_multiplied_by_wgmma(dtype: str, kind: str) -> None:
    source = source_of(dtype)
    assert f"wgmma.mma_async.sync.aligned.m64n256k16.f32.{kind}.{kind}" in source
    assert "cp.async.cg.shared.global" in source
    assert "cp.async.bulk.tensor.3d" in source  # rhs [groups, n, k] by TMA


def test_tile_width_decides_the_instruction_and_clusters_multicast() -> None:
    source = source_of(knobs=RowsTile(tile_n=128, cluster=2))
    assert "m64n128k16" in source and "m64n256k16" not in source
    assert "multicast::cluster" in source


@pytest.mark.parametrize("flip", [0, 1])
@pytest.mark.parametrize("options", [{}, {"rhs_layout": "kn"}, {"packed": True}])
def test_how_far_matrices_of_weights_are_apart_takes_64_bits(
    flip: int, options: dict[str, Any]
) -> None:
    source = source_of(
        knobs=RowsTile(tile_m=64, tile_n=64, consumers=1, stages=4, flip=flip), **options
    )
    told = re.findall(r"auto tensormap_arg_\d+ = (.*\b[nk]\W.*\b[nk]\W.*);", source)
    assert len(told) == 1  # k * n elements; others are those of a row
    assert len(re.findall(r"\(uint64_t\)[nk]\b", told[0])) == 2


def test_bias_and_activation_are_parameters() -> None:
    plain = source_of()
    full = source_of(bias=True, act="relu")
    assert "bias_ptr" not in plain and "bias_ptr" in full
    assert "pit_relu" in full and "pit_relu" not in plain


def test_relu_of_nan_is_nan() -> None:
    source = source_of(act="relu")
    assert "max.NaN.f32" in source and "fmax" not in source  # fmaxf takes the number of the two


@pytest.mark.parametrize("cluster", [1, 2])
def test_row_major_rhs_is_read_by_64_column_boxes_and_transposed_by_wgmma(cluster: int) -> None:
    rows = source_of(knobs=RowsTile(cluster=cluster))
    columns = source_of(knobs=RowsTile(cluster=cluster), rhs_layout="kn")
    assert not transposed(rows) and transposed(columns)
    # The CTAs of a cluster take their part of the boxes, or all where they are apart.
    assert boxes(rows) == cluster and boxes(columns) == 4


def test_gated_pairs_fetch_both_halves_and_multiply() -> None:
    alone = source_of(gate=PLAIN, act="silu")
    pair = source_of(knobs=RowsTile(cluster=2), gate=PLAIN, act="silu")
    assert boxes(alone) == 2 and boxes(pair) == 2  # one half for each CTA of the cluster
    assert "pit_gate(" in alone


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_pairs_beside_each_other_are_finished_in_one_thread(layout: str) -> None:
    gate = Gate(7.0, 1.702, 1.0, interleaved=True)
    source = source_of(gate=gate, act="silu", bias=True, rhs_layout=layout)
    assert boxes(source) == (1 if layout == "nk" else 4)
    assert "stmatrix" not in source and "-1.702f * x" in source and "x > 7.0f ? 7.0f" in source


@pytest.mark.parametrize("knobs", [RowsTile(), RowsTile(flip=1, tile_n=128, cluster=2)], ids=str)
def test_a_deep_product_ends_where_the_device_says(knobs: RowsTile) -> None:
    assert "depth_ptr" not in source_of(knobs=knobs)
    source = source_of(knobs=knobs, deep=True)
    body = source[source.index('extern "C" __global__') :]
    steps = "((max(depth_ptr[0], 1) + 63) / 64)"
    assert body.count("depth_ptr[") == 1 and steps in body
    # What the kernel before this one writes is read when that is done.
    assert body.index("griddepcontrol_wait") < body.index(steps)


def test_row_scale_is_an_operand() -> None:
    assert "__restrict__ per_row_ptr" not in source_of()
    assert "float* __restrict__ per_row_ptr" in source_of(row_scale=True)


@pytest.mark.parametrize("flip", [0, 1])
def test_a_bias_of_rows_is_added_before_the_activation(flip: int) -> None:
    knobs = RowsTile(flip=1, tile_m=32, tile_n=128, consumers=1) if flip else RowsTile()
    source = source_of(knobs=knobs, row_bias=True, act="relu")
    assert "half* __restrict__ per_row_ptr" in source
    body = source[source.index('extern "C" __global__') :]
    # A number that is added where an accumulator becomes an activation's argument.
    assert re.search(r"pit_relu\(\(acc_ptr\[\d+\] \+ ", body) and " * held_per_row" not in body


@pytest.mark.parametrize("other", [{"row_scale": True}, {"gate": PLAIN}])
def test_a_bias_of_rows_excludes_what_it_would_mean_twice(other: dict[str, Any]) -> None:
    with pytest.raises(ScheduleError, match="row_bias"):
        rows_kernel("float16", RowsTile(), row_bias=True, **other)


def test_accumulation_is_an_unordered_float32_addition_without_staging() -> None:
    source = source_of(accumulate=6)
    assert "red.relaxed.gpu.global.add.v2.f32" in source
    assert "float* __restrict__ out_ptr" in source
    assert "stmatrix" not in source
    assert "red.relaxed" not in source_of()


@pytest.mark.parametrize(
    ("dtype", "kind", "cols"), [("float16", "f16", 64), ("bfloat16", "bf16", 32)]
)
def test_live_bits_are_found_in_staged_rows_and_stored_16_bytes_at_once(
    dtype: str, kind: str, cols: int
) -> None:
    source = source_of(dtype, RowsTile(store_cols=cols), act="relu", live_bits=True)
    body = source[source.index('extern "C" __global__') :]
    assert "uchar* __restrict__ live_bits_ptr" in body
    assert body.count(f"pit_live_{kind}_{cols // 16}(") == 256 // cols
    assert len(re.findall(r"\(uint4\*\)\(live_bits_ptr", body)) == 1
    assert f"set.neu.u32.{kind}x2" in source


def test_late_rows_are_copied_in_bulk_between_products() -> None:
    at_once, late = source_of(knobs=RowsTile(stages=3)), source_of(knobs=RowsTile(stages=3, late=4))
    bulk = "cp.async.bulk.global.shared::cta.bulk_group"
    assert bulk in late and bulk not in at_once
    # Memory is free again once copies have read it; rows are there once copies are done.
    assert late.count("pit_bulk_read();") == late.count("pit_bulk_done();") == 1
    assert late.rindex("pit_bulk_done();") > late.rindex("pit_bulk_copy(")


@pytest.mark.parametrize(
    ("knobs", "options", "says"),
    [
        ({"late": 4, "stages": 3}, {"accumulate": 1}, "for late"),
        ({"late": 4, "stages": 3}, {"live_bits": True}, "for late"),
        ({"late": 17, "stages": 3}, {}, "late from 0 to 16"),
        ({"late": 4, "flip": 1, "tile_n": 128}, {}, "late 0"),
        ({"late": 4}, {}, "shared memory"),
    ],
)
def test_rows_that_cannot_be_late_are_refused(
    knobs: dict[str, int], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ScheduleError, match=says):
        rows_kernel("float16", RowsTile(**knobs), **options)


def test_live_bits_are_asked_for() -> None:
    source = source_of(act="relu")
    assert "live_bits_ptr" not in source and "pit_live" not in source


@pytest.mark.parametrize("knobs", [{"tile_m": 100}, {"tile_n": 12}, {"stages": 99}])
def test_knobs_that_no_kernel_can_have_are_refused(knobs: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(knobs))):
        rows_kernel("float16", RowsTile(**knobs))


@pytest.mark.parametrize("flip", [0, 1])
def test_a_slot_of_one_product_begins_at_its_own_column(flip: int) -> None:
    knobs = RowsTile(tile_m=64, tile_n=64, consumers=1, stages=4, flip=flip, most_groups=256)
    source = source_of(knobs=knobs, rhs_layout="kn", bias=True, slot=128)
    assert "walk_group_ptr[0] * 128" in source and boxes(source) == 1


@pytest.mark.parametrize("lag", [0, 1])
def test_packed_rows_come_by_tma(lag: int) -> None:
    knobs = RowsTile(tile_m=64, tile_n=64, consumers=1, stages=4, lag=lag)
    gathered, packed = (source_of(knobs=knobs, packed=option) for option in (False, True))
    assert boxes(packed) == boxes(gathered) + 1
    assert "lhs_tensormap" in packed and "lhs_tensormap" not in gathered
    copies = [len(re.findall(r"ptx_cp_async_cg\w*\(", part)) for part in (gathered, packed)]
    assert copies[0] > copies[1]
    assert "ids_ptr[" in packed  # where rows are stored


def test_packed_rows_of_flipped_tiles_are_read_in_the_order_of_the_list() -> None:
    knobs = RowsTile(tile_m=64, tile_n=64, consumers=1, stages=4, flip=1)
    parts = [source_of(knobs=knobs, packed=packed) for packed in (False, True)]
    places = [re.findall(r"rows_ptr\[\d+\] = .*walk_row0_ptr\[0\].*;", part) for part in parts]
    assert not places[0] and len(places[1]) == 64 // 16


@pytest.mark.parametrize(("options", "groups"), [({"share": 2}, 1), ({}, 2)])
def test_packed_rows_are_those_of_one_list(options: dict[str, int], groups: int) -> None:
    with pytest.raises(ScheduleError, match="packed"):
        rows_kernel("float16", RowsTile(most_groups=groups), packed=True, **options)
