"""Random records for tests."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from pit_tvm.structs import Tile, TileTask
from pit_tvm.tile_db.record import Provenance, TileRecord
from pit_tvm.tile_db.store import TileStore

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
SIZES = st.integers(1, 4096)
SECS = st.floats(1e-9, 1e3)
TASKS = st.builds(
    TileTask,
    family=st.sampled_from(["contraction", "other"]),
    isa=st.sampled_from(["avx512", "avx2"]),
    dtype=st.sampled_from(["float32", "int8"]),
    m=SIZES,
    n=SIZES,
    k=SIZES,
)
PROVENANCES = st.builds(
    Provenance,
    device=st.sampled_from(["xeon-avx512", "epyc-avx2"]),
    arch=NAMES,
    threads=st.integers(1, 128),
    tvm=NAMES,
    pit_tvm=NAMES,
    date=st.datetimes().map(lambda date: date.isoformat()),
    trials=st.integers(0, 999),
)
TRACES = st.lists(st.integers(), max_size=3).map(
    lambda decisions: json.dumps([[["Instruction", []]], decisions], separators=(",", ":"))
)


@st.composite
def tile_records(draw: st.DrawFn) -> TileRecord:
    """A tuned tile, with or without trace."""
    task = draw(TASKS)
    # No knob's own name, which hypothesis finds in the package: some have to be 1 at least.
    knobs = draw(st.dictionaries(NAMES.map("any {}".format), st.integers(-5, 5), max_size=3))
    extents = (draw(SIZES), draw(SIZES), draw(SIZES))
    tile = Tile(task.family, task.isa, task.dtype, *extents, tuple(sorted(knobs.items())))
    return TileRecord(
        "pit",
        draw(PROVENANCES),
        tile=tile,
        task=task,
        run_secs=tuple(draw(st.lists(SECS, min_size=1, max_size=4))),
        trace=draw(st.one_of(st.just(""), TRACES)),
    )


@st.composite
def any_records(draw: st.DrawFn) -> TileRecord:
    """A record of any kind."""
    kind = draw(st.sampled_from(["pit", "library", "profile"]))
    if kind == "pit":
        return draw(tile_records())
    if kind == "library":
        secs = tuple(draw(st.lists(SECS, min_size=1, max_size=4)))
        note = draw(st.sampled_from(["numpy", "torch"]))
        return TileRecord(kind, draw(PROVENANCES), task=draw(TASKS), run_secs=secs, note=note)
    profile = draw(st.dictionaries(NAMES, SECS, min_size=1, max_size=3))
    return TileRecord(kind, draw(PROVENANCES), profile=tuple(sorted(profile.items())))


def example_record(device: str = "xeon-avx512", secs: float = 1e-3, tile_m: int = 32) -> TileRecord:
    """One fixed tuned tile; 2 * 64 * 32 * 16 operations."""
    isa = device.rpartition("-")[2]
    return TileRecord(
        "pit",
        Provenance(device, "x86-64-v4", 2, "0.27", "0.1.0", "2025-01-02T03:04:05", 8),
        tile=Tile("contraction", isa, "float32", tile_m, 64, 256, (("reg_m", 8),)),
        task=TileTask("contraction", isa, "float32", 64, 32, 16),
        run_secs=(secs,),
    )


def libraries(store: TileStore, dtype: str) -> list[TileRecord]:
    """Measured dense products of libraries."""
    found = [record for record in store.all() if record.kind == "library"]
    return [record for record in found if record.task is not None and record.task.dtype == dtype]


def constants_of(store: TileStore) -> dict[str, float]:
    """A device's constants, of which the last ones count."""
    return {name: value for record in store.all() for name, value in record.profile}
