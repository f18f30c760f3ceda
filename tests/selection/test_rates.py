"""What tiles and libraries cost: the nearest record in proportion to the work, or guesses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pit_tvm.selection.rates import Rates, rates_from_records
from pit_tvm.structs import Tile, TileTask
from pit_tvm.tile_db.record import Provenance, TileRecord

ISA, FAMILY = "avx512", "contraction-rows"
SIZES = st.integers(1, 8192)


def tile(tile_m: int = 96, family: str = FAMILY, isa: str = ISA) -> Tile:
    return Tile(family, isa, "float32", tile_m, 4096, 256, (("reg_m", 12),))


def task(m: int, n: int, k: int, dtype: str = "float32") -> TileTask:
    return TileTask(FAMILY, ISA, dtype, m, n, k)


def provenance(threads: int = 2) -> Provenance:
    return Provenance("xeon-avx512", "x86-64-v4", threads, "0.27", "0.1.0", "2025-01-02", 8)


def tuned(of: Tile, what: TileTask, secs: float, threads: int = 2) -> TileRecord:
    return TileRecord("pit", provenance(threads), tile=of, task=what, run_secs=(secs,))


def library(what: TileTask, secs: float, name: str = "numpy", threads: int = 2) -> TileRecord:
    return TileRecord("library", provenance(threads), task=what, run_secs=(secs,), note=name)


def rates(records: list[TileRecord], generic: tuple[Tile, ...] = (), **other: object) -> Rates:
    options = {"dtype": "float32", "isa": ISA, "threads": 2, "library": "numpy", **other}
    return rates_from_records(records, generic=generic, **options)  # type: ignore[arg-type]


def test_measured_shape_costs_what_was_measured() -> None:
    own = rates([tuned(tile(), task(512, 768, 384), 3e-4)])
    assert own.tile_us(tile(), 512, 768, 384) == pytest.approx(300)
    assert own.tuned


def test_other_shapes_follow_the_nearest_record_in_proportion_to_the_work() -> None:
    small, large = task(64, 64, 64), task(1024, 1024, 1024)
    own = rates([tuned(tile(), small, 1e-5), tuned(tile(), large, 1e-2)])
    assert own.tile_us(tile(), 32, 64, 64) == pytest.approx(5)
    assert own.tile_us(tile(), 1024, 512, 1024) == pytest.approx(5000)
    # 8 x 64 is nearer to 64 than to 1024 in the logarithm, not in the difference to 512.
    assert own.tile_us(tile(), 200, 200, 200) == pytest.approx(10 * (200 / 64) ** 3)


@given(SIZES, SIZES, SIZES)
def test_cost_is_proportional_to_the_work_near_one_record(m: int, n: int, k: int) -> None:
    own = rates([tuned(tile(), task(512, 768, 384), 3e-4)], generic=(tile(8),))
    for each in (tile(), tile(8)):
        unit = own.tile_us(each, 1, 1, 1)
        assert own.tile_us(each, m, n, k) == pytest.approx(unit * m * n * k)


def test_nothing_to_compute_costs_nothing() -> None:
    own = rates([tuned(tile(), task(512, 768, 384), 3e-4), library(task(8, 8, 8), 1e-3)])
    assert own.tile_us(tile(), 0, 768, 384) == own.dense_us(0, 768, 384) == 0


def test_records_of_other_numbers_of_threads_are_scaled() -> None:
    what = task(512, 768, 384)
    for threads, expected in ((1, 150), (2, 300), (8, 1200)):
        own = rates([tuned(tile(), what, 3e-4, threads), library(what, 3e-4, threads=threads)])
        assert own.tile_us(tile(), 512, 768, 384) == pytest.approx(expected)
        assert own.dense_us(512, 768, 384) == pytest.approx(expected)


def test_each_tile_has_its_own_records() -> None:
    what = task(512, 768, 384)
    own = rates([tuned(tile(96), what, 3e-4), tuned(tile(48), what, 2e-4)])
    assert set(own.tiles) == {tile(96), tile(48)}
    assert own.tile_us(tile(48), 512, 768, 384) == pytest.approx(200)


def test_other_types_instruction_sets_and_libraries_are_left_out() -> None:
    what = task(512, 768, 384)
    other = Tile(FAMILY, "avx2", "float32", 48, 4096, 256, (("reg_m", 6),))
    records = [
        tuned(tile(), task(512, 768, 384, "int8"), 1e-9),
        tuned(other, what, 1e-9),
        library(what, 1e-9, "torch"),
        library(task(512, 768, 384, "int8"), 1e-9),
    ]
    own = rates(records)
    assert own.tiles == {} and own.dense == () and not own.tuned
    assert rates(records, library="torch").dense == ((what, 1e-9),)


def test_without_records_generic_tiles_stand_in_untuned() -> None:
    generic = (tile(), tile(family="contraction-depth"))
    own = rates([], generic)
    assert set(own.tiles) == set(generic) and not own.tuned
    assert own.tile_us(tile(), 512, 768, 384) > own.dense_us(512, 768, 384) > 0


def test_generic_tiles_fill_only_the_families_without_records() -> None:
    depth = tile(family="contraction-depth")
    own = rates([tuned(tile(48), task(512, 768, 384), 3e-4)], (tile(), depth))
    assert set(own.tiles) == {tile(48), depth} and own.tuned


@pytest.mark.parametrize("isa", ["avx512", "avx2", "generic"])
def test_more_threads_and_wider_vectors_are_faster_by_default(isa: str) -> None:
    one, four = (rates([], (tile(isa=isa),), isa=isa, threads=t) for t in (1, 4))
    arguments = (tile(isa=isa), 512, 768, 384)
    assert one.tile_us(*arguments) == pytest.approx(4 * four.tile_us(*arguments))
    assert one.dense_us(512, 768, 384) == pytest.approx(4 * four.dense_us(512, 768, 384))
    widest = rates([], (tile(),), threads=1).tile_us(tile(), 512, 768, 384)
    assert one.tile_us(*arguments) >= widest


def test_constants_are_the_device_s_or_defaults() -> None:
    profile = TileRecord("profile", provenance(), profile=(("launch_us", 3.5),))
    assert rates([profile]).constant("launch_us") == 3.5
    assert rates([]).constant("launch_us") > 0
    with pytest.raises(KeyError):
        rates([]).constant("no such constant")
