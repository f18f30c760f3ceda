"""Costs of tiles by TensorIR: terms fitted to records, and the choice between them and dense."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pit_tvm.selection.gpu_general import (
    GeneralDense,
    GeneralRates,
    GeneralWork,
    Terms,
    general_rates,
    select_general,
    tile_us,
)
from pit_tvm.structs import MicroTile, Plan, Tile, TileTask
from pit_tvm.tile_db.record import TileRecord, make_provenance
from pit_tvm.tile_db.store import TileStore

KNOBS = (("reg_m", 8), ("reg_n", 8), ("stages", 2))
LARGE = Tile("rows-cuda", "sm_90a", "float32", 128, 128, 16, KNOBS)
SMALL = replace(LARGE, tile_m=64, tile_n=64)
LIVE_ROWS = MicroTile("lhs", "m", 0, (1, 0))
TERMS = {LARGE: Terms(0.08, 2.0, 0.05, 5.0), SMALL: Terms(0.025, 1.0, 0.01, 3.0)}


def of_rows(live: int, n: int = 4096, k: int = 4096) -> GeneralWork:
    return GeneralWork((live,), 8192, n, k, 1, 4, "rows")


def rates(records: list[TileRecord], *tiles: Tile) -> GeneralRates:
    return general_rates(records, "float32", "sm_90a", "torch", tiles or (LARGE, SMALL))


def recorded(seed: int = 0) -> list[TileRecord]:
    """Records of tiles that take what `TERMS` say, within a percent, and of the library."""
    rng = np.random.default_rng(seed)
    provenance = make_provenance("h200-sm_90a", "sm_90a", 132)
    made = []
    for m in (64, 512, 2048, 8192):
        for n, k in ((4096, 4096), (1024, 1024)):
            task = TileTask("rows-cuda", "sm_90a", "float32", m, n, k)
            for tile, terms in TERMS.items():
                us = 3.0 + terms.us(*of_rows(m, n, k).load(tile))
                secs = 1e-6 * us * (1.0 + 0.01 * rng.standard_normal())
                made.append(TileRecord("pit", provenance, tile, task, (secs,)))
            library = 3e-6 + 2e-12 * m * n * k / 51.0
            made.append(TileRecord("library", provenance, None, task, (library,), note="torch"))
    return made


def plan(live: int, given: GeneralRates) -> Plan:
    dense = GeneralDense(8192, 4096, 4096, 1, 4, "torch")
    work = of_rows(live)
    return select_general(LIVE_ROWS, work, given.tiles, dense, given, (4.0, 0.0, 0.0), live / 8192)


def test_terms_are_those_of_the_records() -> None:
    fitted = rates(recorded())
    assert fitted.tuned and set(fitted.tiles) == set(TERMS)
    for live in (100, 700, 1500, 5000):
        for n, k in ((4096, 4096), (2048, 512)):
            for tile, terms in TERMS.items():
                us, _ = tile_us(tile, of_rows(live, n, k), fitted)
                assert us == pytest.approx(
                    3.0 + terms.us(*of_rows(live, n, k).load(tile)), rel=0.06
                )


def test_without_records_tiles_are_untuned() -> None:
    fitted = rates([])
    assert not fitted.tuned and fitted.tiles == (LARGE, SMALL)
    assert not plan(300, fitted).tuned and plan(300, rates(recorded())).tuned


@pytest.mark.parametrize("records", [[], recorded()])
def test_dense_wins_where_everything_lives(records: list[TileRecord]) -> None:
    fitted = rates(records)
    assert plan(8192, fitted).choice.kind == "dense"
    few = plan(300, fitted)
    assert few.choice.kind == "pit" and {c.kind for c in few.candidates} == {"pit", "dense"}


def test_records_of_another_family_or_type_do_not_count() -> None:
    others = [
        replace(r, tile=None, kind="library", note="x") if r.tile is None else r for r in recorded()
    ]
    assert not rates(others, replace(LARGE, family="columns-cuda-32")).tuned
    halves = general_rates(others, "float16", "sm_90a", "torch", (replace(LARGE, dtype="float16"),))
    assert not halves.tuned


def test_the_deepest_band_decides_the_end() -> None:
    fitted = general_rates([], "float32", "sm_90a", "torch", (replace(LARGE, tile_m=32),))
    (tile,) = fitted.tiles
    even, uneven = (
        tile_us(tile, GeneralWork(lists, 4096, 128, 4096, 1, 4, "depth"), fitted)[0]
        for lists in ((100,) * 128, (4096, *(69,) * 127))
    )
    assert uneven > 3 * even


# Rows, columns, depth, share of zeros, and the time on an H200 without a launch.
MEASURED = [
    *((4096, 4096, 4096, 0.5, 1921), (4096, 4096, 4096, 0.9, 415), (4096, 4096, 4096, 0.95, 226)),
    *((4096, 4096, 4096, 0.99, 65), (1024, 4096, 4096, 0.99, 34), (16384, 4096, 4096, 0.99, 182)),
    *((4096, 3072, 768, 0.8, 162), (4096, 768, 3072, 0.9, 86), (32768, 3072, 768, 0.95, 312)),
]


@pytest.mark.parametrize(("m", "n", "k", "zeros", "us"), MEASURED)
def test_tiles_of_pieces_cost_what_was_measured(
    m: int, n: int, k: int, zeros: float, us: float
) -> None:
    counts = np.random.default_rng(0).binomial(m, 1 - zeros, k // 64)
    own = replace(LARGE, tile_m=32, tile_k=32, knobs=(("reg_m", 4), *KNOBS[1:]))
    fitted = general_rates([], "float32", "sm_90a", "torch", (own,), "pieces")
    found, bound = tile_us(own, GeneralWork(tuple(counts), m, n, 64, 1, 4, "pieces"), fitted)
    assert found == pytest.approx(us, rel=0.12) and bound < us


@pytest.mark.parametrize(
    ("zeros", "times"), [(0.5, 0.95), (0.8, 1.03), (0.9, 1.20), (0.95, 1.33), (0.99, 1.19)]
)
def test_rows_gathered_by_elements_cost_what_was_measured(zeros: float, times: float) -> None:
    fitted = general_rates([], "float32", "sm_90a", "torch", (LARGE,), "pieces")
    work = GeneralWork((round(4096 * (1 - zeros)),) * 64, 4096, 4096, 64, 1, 4, "pieces")
    whole, single = (
        tile_us(LARGE, replace(work, scattered=(share, 0.0)), fitted)[0] for share in (0.0, 1.0)
    )
    assert single / whole == pytest.approx(times, rel=0.15)


@pytest.mark.parametrize(("live", "us"), [(819, 2119), (410, 1565), (205, 856), (41, 215)])
def test_a_dense_operand_gathered_by_elements_costs_what_was_measured(live: int, us: float) -> None:
    fitted = replace(rates([], LARGE), terms={LARGE: Terms(0.0, 0.0)})
    work = GeneralWork((live,) * 128, 4096, 4096, 4096, 1, 2, "depth", scattered=(0.0, 1.0))
    assert tile_us(LARGE, work, fitted)[0] == pytest.approx(us, rel=0.45)
    stored = replace(work, scattered=(0.0, 0.0))
    assert tile_us(LARGE, stored, fitted)[0] < 10


def test_one_cta_takes_all_tiles_of_a_piece() -> None:
    fitted = general_rates([], "float32", "sm_90a", "torch", (LARGE,), "pieces")
    even, uneven = (
        tile_us(LARGE, GeneralWork(lists, 8192, 128, 64, 1, 4, "pieces"), fitted)[0]
        for lists in ((128,) * 64, (8192, *(0,) * 63))
    )
    assert uneven > 20 * even


@pytest.mark.parametrize(
    ("family", "axis"),
    [
        ("rows-cuda", "rows"),
        ("columns-cuda-32", "depth"),
        ("columns-cuda-64", "depth"),
        ("columns-cuda-128", "depth"),
    ],
)
def test_shipped_records_are_reproduced(family: str, axis: str) -> None:
    records = TileStore.open(device="h200-sm_90a", isa="sm_90a").all()
    for dtype in ("float32", "float16"):
        own = [r for r in records if r.tile and (r.tile.family, r.tile.dtype) == (family, dtype)]
        if not own:
            continue
        fitted = general_rates(records, dtype, "sm_90a", "torch", [r.tile for r in own], axis)
        errors = []
        for r in (r for r in own if r.tile in fitted.tiles):
            t = r.task
            lists = (t.m,) if axis == "rows" else (t.k,) * (t.m // r.tile.tile_m)
            us, bound = tile_us(r.tile, GeneralWork(lists, t.m, t.n, t.k, 1, 4, axis), fitted)
            errors.append(abs(us / (1e6 * r.secs) - 1))
        assert len(errors) > 8 and np.median(errors) < 0.1 and max(errors) < 0.5
