"""Algorithm 1 of PIT (SOSP'23, section 3.3): over tiles, PIT axes and micro-tiles, the cheapest.

Costs are in microseconds. A candidate costs its index, its product counted in live tiles, what the
epilogue and the dead part of the output take, and its launch. Dense is a candidate wherever it
gives the promised result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..structs import Candidate, MicroTile, Plan, Tile
from .rates import Rates

GENERIC = "generic"  # the dense candidate that no library computes
ALL = 0.999  # share of live micro-tiles from which nothing is saved
_PREDICTION_ERROR = 1.25
_SHOWN_US = 0.05  # plans print less as 0.0, of which nothing is a multiple


@dataclass(frozen=True)
class Route:
    """One PIT axis and micro-tile that an operator can be run on.

    ``family``: tile family, "" for the generic schedule. ``index_bytes``: bytes that detection
    reads. The kernel runs ``slots`` lists; a list has ``entries`` entries if everything is live
    (with ``shared`` all lists together have), an entry standing for ``m x k`` dense steps at
    ``n`` columns. ``extra_bytes``: output traffic beside the kernel's own; ``mask_bytes`` come to
    it in proportion to what is live. ``splits``: the slots cut the depth, not the rows.
    ``floor_bytes``: what the kernel writes however little is live.
    """

    micro_tile: MicroTile
    family: str
    index_bytes: float
    slots: int
    entries: int
    entry_m: float
    entry_k: float
    n: int
    extra_bytes: float = 0.0
    mask_bytes: float = 0.0
    shared: bool = False
    splits: bool = False
    floor_bytes: float = 0.0


@dataclass(frozen=True)
class DenseRoute:
    """The whole operand: product sizes per matrix, matrices, and epilogue traffic in bytes."""

    m: int
    n: int
    k: int
    batch: int
    extra_bytes: float
    note: str


class _Way(NamedTuple):
    """A route with one tile: ``product`` gives microseconds by the entries that live in a list."""

    number: int
    micro_tile: MicroTile
    tile: Tile | None
    product: Callable[[float], float]
    entries: int
    sharers: int
    extra_bytes: float
    mask_bytes: float
    index_part: tuple[str, float]


class Selection:
    """Algorithm 1 for one product: what no count changes is worked out once.

    ``dense`` is None where the dense product never gives the promised result.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        dense: DenseRoute | None,
        rates: Rates,
        tiles: Sequence[Tile],
    ) -> None:
        self._launch = ("launch", rates.constant("launch_us"))
        self._store_gbps = rates.constant("store_gbps")
        self._dense = None if dense is None else _dense(dense, rates)
        self._ways = [
            _Way(
                number,
                route.micro_tile,
                tile,
                _product(route, tile, rates),
                route.entries,
                route.slots if route.shared else 1,
                route.extra_bytes,
                route.mask_bytes,
                ("index", route.index_bytes / rates.constant("detect_gbps") * 1e-3),
            )
            for number, route in enumerate(routes)
            for tile in _tiles(route, tiles)
        ]
        weighed = {way.tile for way in self._ways if way.tile is not None}
        self._tuned = frozenset(tile for tile in weighed if rates.is_tuned(tile))

    def plan(self, covered: Sequence[float], *, whole: bool = True) -> Plan:
        """The plan for one pattern: all candidates, and the cheapest of them; where nothing is
        saved, the library's product unless a tile of ours would be much cheaper.

        ``covered``: share of live micro-tiles on each route. ``whole``: whether the dense product
        gives the promised result on this pattern.
        """
        candidates = self._sparse(covered)
        dense = self._dense if whole else None
        if dense is not None:
            candidates.append(dense)
        if dense is None or dense.note == GENERIC:
            choice = min(candidates, key=_cost)
        else:
            choice = min(candidates, key=_doubted)
        tuned = bool(self._tuned) if choice.kind == "dense" else choice.tile in self._tuned
        return Plan(choice, tuple(candidates), _reason(choice, candidates, dense), tuned)

    def _sparse(self, covered: Sequence[float]) -> list[Candidate]:
        """Every route with every tile of its family."""
        launch, store_gbps = self._launch, self._store_gbps
        candidates = []
        for (
            number,
            micro_tile,
            tile,
            product_of,
            entries,
            sharers,
            extra,
            mask,
            index,
        ) in self._ways:
            share = covered[number]
            product = product_of(share * entries / sharers)
            other = (extra + share * mask) / store_gbps * 1e-3
            parts = (index, ("product", product), ("output", other), launch)
            cost = index[1] + product + other + launch[1]
            candidates.append(Candidate("pit", micro_tile, tile, cost, parts, share))
        return candidates


def _cost(candidate: Candidate) -> float:
    return candidate.cost_us


def _doubted(candidate: Candidate) -> float:
    """Cost, but more of it for what saves no work: its one merit is a tile that would beat a
    library at its own product, which predictions cannot promise."""
    saves = candidate.covered < ALL or candidate.kind == "dense"
    return candidate.cost_us if saves else candidate.cost_us * _PREDICTION_ERROR


def _tiles(route: Route, tiles: Sequence[Tile]) -> Sequence[Tile | None]:
    """The tiles of a route's family; none for the generic schedule."""
    return [tile for tile in tiles if tile.family == route.family] if route.family else [None]


def _product(route: Route, tile: Tile | None, rates: Rates) -> Callable[[float], float]:
    """Live tiles times their cost; tails of register blocks and idle threads counted."""
    if tile is None:
        return lambda live: _generic_us(
            route.slots * live * route.entry_m * route.entry_k * route.n, rates
        )
    cost, slots = rates.cost(tile, route.n), route.slots
    floor = route.floor_bytes / rates.constant("store_gbps") * 1e-3
    imbalance = _imbalance(slots, route.n, tile, rates.threads)
    # All slots are one product of the kind that was measured.
    if route.entry_m == 1:  # entries are rows: they are computed in register blocks
        reg_m, k = tile.knob("reg_m"), route.entry_k
        depth, lists = (k * slots, 1) if route.splits else (k, slots)

        def by_rows(live: float) -> float:
            live = -(-live // reg_m) * reg_m
            return max(cost(live * lists, depth), floor) * imbalance(live)

        return by_rows
    m, uneven = route.entry_m, imbalance(route.entry_m)
    stacked = m if route.splits else m * slots

    def by_depth(live: float) -> float:
        return max(cost(stacked, live * slots if route.splits else live), floor) * uneven

    return by_depth


def _imbalance(slots: int, n: int, tile: Tile, threads: int) -> Callable[[float], float]:
    """How much longer the busiest thread works than if all had the same number of rows, by the
    rows of a slot."""
    tile_m, blocks = tile.tile_m, max(1, -(-n // tile.tile_n))
    columns = slots * blocks

    def imbalance(rows: float) -> float:
        tasks = columns * -(-rows // tile_m)
        if not tasks:
            return 1.0
        busiest = -(-tasks // threads) * (rows if rows < tile_m else tile_m) / blocks
        ratio = threads * busiest / (slots * rows)
        return ratio if ratio > 1.0 else 1.0

    return imbalance


def _generic_us(steps: float, rates: Rates) -> float:
    return 2e-3 * steps / (rates.constant("generic_gflops") * rates.threads)


def _dense(route: DenseRoute, rates: Rates) -> Candidate:
    if route.note == GENERIC:
        product = _generic_us(route.batch * route.m * route.n * route.k, rates)
    else:
        product = route.batch * rates.dense_us(route.m, route.n, route.k)
    other = route.extra_bytes / rates.constant("store_gbps") * 1e-3
    parts = (("product", product), ("output", other))
    return Candidate("dense", None, None, product + other, parts, 1.0, route.note)


def _reason(choice: Candidate, candidates: Sequence[Candidate], dense: Candidate | None) -> str:
    """How many were weighed, and how far behind the best of the other kind is; or why the cheapest
    is not taken."""
    number = len(candidates)
    other = "dense" if choice.kind == "pit" else "pit"
    if dense is None or number == 1:
        return f"cheapest of {number}; {choice.kind} only"
    least = min(candidates, key=_cost)
    if least.cost_us < choice.cost_us:
        gain = choice.cost_us / max(least.cost_us, 1e-9)
        why = f"saves no work: below the margin of {_PREDICTION_ERROR}x"
        return f"not the cheapest of {number}: {least} is predicted {gain:.2f}x faster but {why}"
    best = dense if choice is not dense else min(candidates[:-1], key=_cost)
    if choice.cost_us < _SHOWN_US:
        return f"cheapest of {number}, {best.cost_us - choice.cost_us:.1f} us less than {other}"
    return f"cheapest of {number}, {best.cost_us / max(choice.cost_us, 1e-9):.2f}x {other}"
