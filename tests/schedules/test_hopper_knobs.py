"""Which knobs and options of the Hopper rows family fit together."""

from __future__ import annotations

from typing import Any

import pytest

from pit_tvm.errors import ScheduleError
from pit_tvm.gates import PLAIN, Gate
from pit_tvm.schedules.hopper_knobs import SHARED_LIMIT, RowsOptions, RowsTile

PAIRED = Gate(interleaved=True)


def test_the_defaults_fit() -> None:
    RowsTile().check()
    RowsOptions("float16").check(RowsTile())
    assert RowsTile().shared_bytes <= SHARED_LIMIT


@pytest.mark.parametrize("consumers", [1, 2])
def test_registers_stay_within_one_multiprocessor(consumers: int) -> None:
    producer, consumer = RowsTile(tile_m=64 * consumers, consumers=consumers).registers
    assert 128 * (producer + consumers * consumer) <= 65536
    assert producer % 8 == 0 and consumer % 8 == 0


@pytest.mark.parametrize(
    ("knobs", "word"),
    [
        ({"consumers": 3}, "consumers"),
        ({"tile_m": 100}, "tile_m"),
        ({"tile_n": 12}, "tile_n"),
        ({"tile_m": 256}, "accumulators"),
        ({"store_cols": 48}, "store_cols"),
        ({"lag": 3}, "lag"),  # the consumers hold a stage, and nothing is announced
        ({"lag": 1, "stages": 2}, "lag"),
        ({"cluster": 4}, "cluster"),
        ({"stages": 99}, "shared memory"),
        ({"stages": 1}, "2 stages"),  # the first step of k keeps it until the second has come
        ({"stages": 1, "flip": 1, "tile_n": 128}, "2 stages"),
        ({"raster": 0}, "raster"),
        ({"raster": 2**20}, "raster"),
        ({"most_groups": 0}, "most_groups"),
        ({"most_groups": 1025, "stages": 2}, "most_groups"),
    ],
)
def test_a_tile_that_cannot_be_built_says_which_rule_it_breaks(
    knobs: dict[str, int], word: str
) -> None:
    with pytest.raises(ScheduleError, match=word):
        RowsTile(**knobs).check()


@pytest.mark.parametrize(
    ("options", "knobs", "word"),
    [
        ({"dtype": "float32"}, {}, "dtype"),
        ({"share": 0}, {}, "share"),
        ({"accumulate": -1}, {}, "accumulate"),
        ({"act": "tanh"}, {}, "act"),
        ({"accumulate": 2, "live_bits": True}, {}, "live_bits"),
        ({"live_bits": True}, {"flip": 1, "tile_m": 64, "tile_n": 128}, "live_bits"),
        (
            {"live_bits": True},
            {"tile_n": 168, "stages": 5, "store_cols": 128, "most_groups": 256},
            "shared memory",
        ),
        ({"rhs_layout": "mn"}, {}, "rhs_layout"),
        ({"slot": 128}, {}, "slot"),
        ({"slot": 256, "accumulate": 1}, {}, "slots"),
        ({"act": "relu", "gate": Gate(alpha=2.0)}, {}, "alpha"),
        ({"gate": PAIRED, "accumulate": 1}, {}, "interleaved"),
        ({"gate": PAIRED}, {"tile_n": 168, "stages": 5}, "multiple of 16"),
        ({"gate": PAIRED, "rhs_layout": "kn"}, {"tile_n": 96, "stages": 5}, "multiple of 64"),
        ({"rhs_layout": "kn"}, {"tile_n": 168, "stages": 5}, "multiple of 64"),
        ({"rhs_layout": "kn", "gate": PLAIN}, {"tile_n": 192}, "multiple of 128"),
        ({"gate": PLAIN}, {"tile_n": 168, "stages": 5}, "multiple of 16"),
        ({"packed": True, "fills": True}, {}, "packed with fills"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: dict[str, Any], knobs: dict[str, int], word: str
) -> None:
    with pytest.raises(ScheduleError, match=word):
        RowsOptions(**{"dtype": "float16", **options}).check(RowsTile(**knobs))


@pytest.mark.parametrize(
    ("options", "knobs", "pieces"),
    [
        ({}, {}, 1),
        ({}, {"cluster": 2}, 2),
        ({}, {"cluster": 2, "tile_n": 168}, 1),
        ({"rhs_layout": "kn"}, {}, 4),
        ({"gate": PLAIN}, {}, 2),
        ({"gate": PLAIN}, {"cluster": 2}, 2),
        ({"gate": PAIRED}, {}, 1),
        ({"gate": PAIRED, "rhs_layout": "kn"}, {}, 4),
        ({"gate": PLAIN, "rhs_layout": "kn"}, {"cluster": 2}, 4),
    ],
)
def test_rhs_boxes_of_one_tile(options: dict[str, Any], knobs: dict[str, int], pieces: int) -> None:
    assert RowsOptions("float16", **options).pieces(RowsTile(**knobs)) == pieces
