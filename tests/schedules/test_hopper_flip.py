"""The Hopper rows family with live rows as columns: knobs, heights, and CUDA source."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pit_tvm.errors import ScheduleError
from pit_tvm.gates import PLAIN, Gate
from pit_tvm.schedules.hopper_knobs import SHARED_LIMIT, RowsOptions, RowsTile
from pit_tvm.schedules.hopper_rows import rows_kernel
from pit_tvm.selection.gpu_fit import HEIGHT_STEP
from tests.schedules.cuda_text import boxes, cuda_text

WIDE = RowsTile(flip=1, tile_m=144, tile_n=256)
LOW = RowsTile(flip=1, tile_m=32, tile_n=128, stages=8)
SHARED_DEPTH = RowsTile(flip=1, tile_m=32, tile_n=128, stages=8, cluster=2)


def source_of(dtype: str = "float16", knobs: RowsTile = LOW, **options: Any) -> str:
    return cuda_text(rows_kernel(dtype, knobs, **options))


def widths_of(source: str) -> set[int]:
    return {int(n) for n in re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16", source)}


@pytest.mark.parametrize(
    ("knobs", "word"),
    [
        ({"tile_m": 100}, "tile_m"),
        ({"tile_m": 272}, "tile_m"),
        ({"tile_n": 192}, "tile_n"),
        ({"tile_m": 176, "tile_n": 256, "stages": 2}, "accumulators"),
        ({"lag": 1}, "lag"),
        ({"tile_n": 256, "cluster": 2}, "cluster"),
        ({"stages": 99}, "shared memory"),
        ({"consumers": 3}, "consumers"),
    ],
)
def test_a_tile_that_cannot_be_built_says_which_rule_it_breaks(
    knobs: dict[str, int], word: str
) -> None:
    with pytest.raises(ScheduleError, match=word):
        RowsTile(**{"flip": 1, "tile_m": 64, "tile_n": 128, **knobs}).check()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"accumulate": 2}, "accumulate"),
        ({"live_bits": True}, "live_bits"),
        ({"gate": PLAIN}, "tile_n 128 per consumer"),
    ],
)
def test_options_that_it_does_not_compute_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ScheduleError, match=word):
        RowsOptions("float16", **options).check(LOW)


@pytest.mark.parametrize("knobs", [WIDE, LOW, SHARED_DEPTH])
def test_tiles_of_use_fit_the_chip(knobs: RowsTile) -> None:
    knobs.check()
    producer, consumer = knobs.registers
    assert 128 * (producer + knobs.consumers * consumer) <= 65536
    assert knobs.shared_bytes <= SHARED_LIMIT


def test_every_height_has_an_instruction_that_holds_it() -> None:
    for tall in range(16, 257, 16):
        widths = RowsTile(flip=1, tile_m=tall, tile_n=128).widths
        assert list(widths) == sorted(set(widths)) and widths[-1] == tall
        assert all(width % 8 == 0 for width in widths)
    assert set(range(96, 145, HEIGHT_STEP)) <= set(WIDE.widths)


def test_weights_are_the_instructions_rows_and_live_rows_its_columns() -> None:
    source = source_of("bfloat16")
    assert "m64n32k16.f32.bf16.bf16" in source
    assert widths_of(source) == set(LOW.widths)
    assert "cp.async.cg.shared.global" in source  # live rows
    assert "cp.async.bulk.tensor.3d" in source  # weights [groups, n, k] by TMA
    assert "stmatrix.sync.aligned.m8n8.x4.trans" in source


@pytest.mark.parametrize(("layout", "bits"), [("nk", "00"), ("kn", "10")])
def test_either_layout_of_the_weights_is_read_as_it_is(layout: str, bits: str) -> None:
    source = source_of(rhs_layout=layout, bias=True)
    found = set(re.findall(r"ps0, 1, 1, ([01]), ([01]);", source))
    assert found == {tuple(bits)}
    assert boxes(source) == (2 if layout == "kn" else 1)
    assert "bias_ptr" in source


def test_gated_pairs_meet_in_one_thread() -> None:
    knobs = RowsTile(flip=1, tile_m=32, tile_n=256)
    source = source_of(knobs=knobs, gate=PLAIN, act="silu", row_scale=True)
    assert boxes(source) == 2 and "pit_gate(" in source and "per_row_ptr" in source


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_pairs_beside_each_other_meet_by_a_shuffle(layout: str) -> None:
    gate = Gate(7.0, interleaved=True)
    source = source_of(knobs=RowsTile(flip=1, tile_m=32, tile_n=256), gate=gate, rhs_layout=layout)
    assert boxes(source) == (1 if layout == "nk" else 4)
    assert "__shfl_xor_sync" in source and "stmatrix" not in source


def test_two_ctas_share_a_tiles_depth() -> None:
    source = source_of(knobs=SHARED_DEPTH)
    assert "mapa.shared::cluster" in source and "ld.shared::cluster" in source
    assert "multicast" not in source
    assert "mapa.shared::cluster" not in source_of()
