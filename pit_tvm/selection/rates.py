"""What tiles and libraries cost on a device: measured records, or an instruction set's defaults."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..remember import remember
from ..structs import Tile, TileTask
from ..tile_db.record import TileRecord

Cost = Callable[[float, float], float]

# Without records: cautious rates per thread in 1e9 operations per second, by instruction set, and
# what a library's dense product reaches beside them.
_TILE_GFLOPS = {"avx512": 60.0, "avx2": 40.0, "generic": 8.0}
_DENSE_OVER_TILE = 1.3
_GRID = 8  # steps of a size's logarithm in which the nearest measurement is looked up: 13 %
_DEFAULT_PROFILE = {
    "gather_gbps": 8.0,
    "gather_cached_gbps": 30.0,
    "launch_us": 10.0,
    "detect_gbps": 8.0,
    "store_gbps": 4.0,
    "generic_gflops": 0.5,  # of one thread under the generic schedule
}


@dataclass(frozen=True)
class Rates:
    """Costs of one data type on one device with ``threads`` threads.

    ``tiles``: measurements of each tile, and estimates on tasks where only others were measured.
    ``dense``: measurements of the library's product. ``profile``: constants of the device (GB/s
    and microseconds). ``tuned`` is False if all ``tiles`` are generic, measured by nobody.
    """

    isa: str
    threads: int
    tiles: dict[Tile, tuple[tuple[TileTask, float], ...]]
    dense: tuple[tuple[TileTask, float], ...]
    profile: dict[str, float] = field(default_factory=dict)
    tuned: bool = True
    _costs: dict[object, Cost] = field(default_factory=dict, repr=False, compare=False)

    def constant(self, name: str) -> float:
        """A constant of the device, or its default."""
        return self.profile.get(name) or _DEFAULT_PROFILE[name]

    def is_tuned(self, tile: Tile) -> bool:
        """Whether the tile was measured: a family without records has generic ones."""
        return self.tuned and bool(self.tiles.get(tile))

    def tile_us(self, tile: Tile, m: float, n: int, k: float) -> float:
        """Microseconds of a product of ``m x n x k`` live steps by ``tile``, gather included."""
        return self.cost(tile, n)(m, k)

    def dense_us(self, m: int, n: int, k: int) -> float:
        """Microseconds of the library's dense product."""
        return self.cost(None, n)(m, k)

    def cost(self, tile: Tile | None, n: int) -> Cost:
        """Microseconds by ``m`` and ``k`` of products with ``n`` columns, by ``tile`` or, if it is
        None, by the library: that of the measured product nearest in shape, in proportion to the
        work."""
        found = self._costs.get((tile, n))
        return found or remember(self._costs, (tile, n), self._cost(tile, n))

    def _cost(self, tile: Tile | None, n: int) -> Cost:
        log_n, units = math.log(max(n, 1)), dict[tuple[int, int], float]()

        def cost(m: float, k: float) -> float:
            at = (
                round(_GRID * math.log(m)) if m > 1.0 else 0,
                round(_GRID * math.log(k)) if k > 1.0 else 0,
            )
            unit = units.get(at)
            if unit is None:
                unit = self._unit(tile, at[0] / _GRID, log_n, at[1] / _GRID)
                remember(units, at, unit)
            return unit * m * n * k

        return cost

    def _unit(self, tile: Tile | None, log_m: float, log_n: float, log_k: float) -> float:
        """Microseconds of one multiplication and addition near these sizes."""
        measured = self.dense if tile is None else self.tiles.get(tile, ())
        if not measured:
            rate = _TILE_GFLOPS[self.isa] * self.threads
            return 2e-3 / (rate if tile else _DENSE_OVER_TILE * rate)

        def distance(entry: tuple[TileTask, float]) -> float:
            of_m, of_n, of_k = entry[0].logs
            return abs(log_m - of_m) + abs(log_n - of_n) + abs(log_k - of_k)

        task, secs = min(measured, key=distance)
        return 1e6 * secs / (task.m * task.n * task.k)


def _complete(tiles: dict[Tile, list[tuple[TileTask, float]]]) -> None:
    """Estimate each tile on the tasks of its family where only others were measured.

    It is as far behind the fastest tile there as on its own nearest task; without that, a tile
    that nobody tried on a hard shape would look better there than those that were.
    """
    fastest: dict[str, dict[TileTask, float]] = {}
    for tile, entries in tiles.items():
        best = fastest.setdefault(tile.family, {})
        for task, secs in entries:
            best[task] = min(secs, best.get(task, math.inf))
    for tile, entries in tiles.items():
        own = list(entries)
        for task in fastest[tile.family].keys() - {known for known, _ in own}:
            near, secs = min(own, key=lambda entry, to=task: _distance(entry[0], to))  # type: ignore[misc]
            behind = secs / fastest[tile.family][near]
            entries.append((task, fastest[tile.family][task] * behind))


def _distance(one: TileTask, other: TileTask) -> float:
    return sum(abs(a - b) for a, b in zip(one.logs, other.logs, strict=True))


def rates_from_records(
    records: Sequence[TileRecord],
    dtype: str,
    isa: str,
    threads: int,
    library: str,
    generic: Sequence[Tile],
) -> Rates:
    """Rates of one data type: records of a store, or ``generic`` tiles where it has none.

    ``library`` names the BLAS of the dense candidate, "numpy" or "torch". Records of another
    number of threads are scaled in proportion.
    """
    tiles: dict[Tile, list[tuple[TileTask, float]]] = {}
    dense: list[tuple[TileTask, float]] = []
    profile: dict[str, float] = {}
    for record in records:
        share = record.provenance.threads / threads
        if record.kind == "profile":
            profile.update(record.profile)
        elif record.task is None or record.task.dtype != dtype:
            continue
        elif record.kind == "pit" and record.tile is not None and record.tile.isa == isa:
            tiles.setdefault(record.tile, []).append((record.task, record.secs * share))
        elif record.kind == "library" and record.note == library:
            dense.append((record.task, record.secs * share))
    tuned = bool(tiles)
    _complete(tiles)
    for tile in generic:
        if not any(known.family == tile.family for known in tiles):
            tiles[tile] = []
    frozen = {tile: tuple(entries) for tile, entries in tiles.items()}
    return Rates(isa, threads, frozen, tuple(dense), profile, tuned)
