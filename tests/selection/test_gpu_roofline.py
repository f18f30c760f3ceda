"""What limits GPU tiles, without any record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from pit_tvm.selection import gpu_roofline
from pit_tvm.selection.gpu_roofline import Product, TileSizes, tile_sizes
from pit_tvm.structs import Tile

CACHED, MEMORY = 8800.0, 4160.0


def tile(m: int = 128, n: int = 256, cluster: int = 1, flip: int = 0) -> Tile:
    knobs = {"cluster": cluster, "consumers": 1 if m == 64 else 2, "flip": flip, "sms": 132}
    return Tile("rows", "sm_90a", "float16", m, n, 64, tuple(knobs.items()))


def us(
    tiles: Sequence[Tile],
    live: float,
    n: int = 4096,
    k: int = 4096,
    counts: tuple[int, ...] = (),
    groups: int = 1,
) -> list[float]:
    return of_sizes(tile_sizes(tiles), Product(live, n, k, max(groups, len(counts), 1), counts))


def of_sizes(sizes: TileSizes, work: Product) -> list[float]:
    return sizes.roofline(work, CACHED, 1e-3 * work.bytes_of_memory / MEMORY).tolist()


def test_few_tiles_take_as_long_as_one() -> None:
    one, many = us([tile()], 128, 256)[0], us([tile()], 128, 256 * 64)[0]
    assert many < 1.5 * one


def test_a_wave_that_is_nearly_empty_costs_less_than_a_full_one() -> None:
    full, more, twice = (us([tile()], m, 33 * 256)[0] for m in (512, 513, 1024))
    assert full < more < twice < 2.1 * full


def test_memory_is_not_filled_by_few_tiles_in_the_last_wave() -> None:
    kinds = [tile(64, 128), tile(64, 192), tile(128, 256)]
    for n, k in ((6144, 3072), (3072, 3072)):
        work = Product(12, n, k, 32, (1,) * 12 + (0,) * 20)
        left = [12 * -(-n // kind.tile_n) / 132 % 1.0 for kind in kinds]
        times = of_sizes(tile_sizes(kinds), work)
        least = 1e-3 * work.bytes_of_memory / MEMORY
        assert all(least < one < 1.6 * least for one in times)
        assert (times[0] < times[2]) == (left[0] > left[2])


def test_the_last_band_of_a_group_costs_what_its_warpgroups_compute() -> None:
    half, whole = (us([tile()], 1, counts=(c,) * 132)[0] for c in (128 + 64, 128 + 65))
    assert half < whole


def test_tiles_that_fit_their_height_save_rows() -> None:
    high = [tile(192, 128, flip=1), tile(192, 128)]
    fitted, fixed = us(high, 0, counts=(104,) * 64)
    assert fitted < 0.95 * fixed
    assert us(high[:1], 1000) == pytest.approx(us([high[0], tile(64, 64)], 1000)[:1])


@pytest.mark.parametrize("counts", [(), (700, 0, 9, 64, 8000)])
@pytest.mark.parametrize("often", [0, 10**6])
def test_what_a_table_says_is_what_its_tiles_do(
    counts: tuple[int, ...], often: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = tile_sizes([tile(), tile(192, 128, flip=1), tile(128, 64, 2), tile(64, 64)])
    lives = (0, 1, 8, 2047, 2048, 32759, 32760, 40000)
    works = [Product(live, 4096, 4096, max(len(counts), 1), counts) for live in lives]
    apart = [of_sizes(replace(sizes, _tables={}, _weights={}), work) for work in works]
    monkeypatch.setattr(gpu_roofline, "_OFTEN", often)
    for work, alone in zip((*works, *reversed(works)), (*apart, *reversed(apart)), strict=True):
        assert of_sizes(sizes, work) == pytest.approx(alone, rel=1e-12)
    monkeypatch.setattr(gpu_roofline, "_TABLED", 0)
    others = replace(sizes, _tables={}, _weights={})
    assert [of_sizes(others, work) for work in works] == apart


def test_tables_are_of_weights_that_come_often_and_grow_with_what_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_roofline, "_OFTEN", 2)
    sizes = tile_sizes([tile()])
    lengths = []
    for live in (9, 9, 9, 9000, 9):
        of_sizes(sizes, Product(live, 4096, 4096))
        (weights,) = sizes._weights.values()
        lengths.append(len(weights.table))
    assert lengths[:2] == [0, 0] and 0 < lengths[2] < lengths[3] == lengths[4]
    of_sizes(sizes, Product(9, 4096, 2048))
    assert len(sizes._weights) == 2 and set(sizes._tables) == {4096}
    of_sizes(sizes, Product(9, 4096, 4096, 2, (4, 5)))
    assert len(sizes._weights) == 3 and set(sizes._tables) == {4096, None}


def test_a_split_depth_halves_the_steps() -> None:
    shared, alone = us([tile(128, 128, 2, flip=1), tile(128, 128, 1, flip=1)], 128, 2048)
    assert shared < 0.8 * alone


def test_small_tiles_read_more_from_the_cache() -> None:
    small, large = us([tile(64, 64), tile()], 16384)
    assert small > 1.3 * large


@pytest.mark.parametrize("groups", [8, 64, 128])
def test_weights_of_groups_are_read_from_memory(groups: int) -> None:
    took = us([tile(), tile(64, 64)], 0, counts=(1,) * groups)
    assert min(took) > 2e-3 * groups * 4096 * 4096 / MEMORY


def test_groups_without_rows_cost_nothing() -> None:
    assert us([tile()], 304, counts=(304, 0, 0)) == pytest.approx(us([tile()], 304))


def test_nothing_live_takes_no_time() -> None:
    for counts in ((), (0, 0)):
        assert us([tile(), tile(flip=1)], 0, counts=counts) == [0.0, 0.0]


def test_random_groups_take_as_long_as_drawn_ones() -> None:
    rng = np.random.default_rng(3)
    tiles = [tile(), tile(192, 128, flip=1), tile(128, 192, 2)]
    drawn = [
        us(tiles, 8192, counts=tuple(np.bincount(rng.integers(64, size=8192)).tolist()))
        for _ in range(20)
    ]
    assert us(tiles, 8192, groups=64) == pytest.approx(np.mean(drawn, axis=0).tolist(), rel=0.06)
