"""Algorithm 1 of PIT (SOSP'23, section 3.3): over tiles, PIT axes and micro-tiles, the cheapest.

Costs are in microseconds. A candidate costs its index, its product counted in live tiles, what the
epilogue and the dead part of the output take, and its launch. Dense is a candidate wherever it
gives the promised result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..structs import Candidate, MicroTile, Plan, Tile
from .rates import Rates

GENERIC = "generic"  # the dense candidate that no library computes
ALL = 0.999  # share of live micro-tiles from which nothing is saved
_PREDICTION_ERROR = 1.25


@dataclass(frozen=True)
class Route:
    """One PIT axis and micro-tile that an operator can be run on.

    ``family``: tile family, "" for the generic schedule. ``index_bytes``: bytes that detection
    reads. ``covered``: share of micro-tiles that are live. What the kernel runs is
    ``slots`` lists of ``live`` entries each, an entry standing for ``m x k`` dense steps at
    ``n`` columns. ``extra_bytes``: output traffic beside the kernel's own.
    ``splits``: the slots cut the depth, not the rows. ``floor_bytes``: what the kernel writes
    however little is live.
    """

    micro_tile: MicroTile
    family: str
    covered: float
    index_bytes: float
    slots: int
    live: float
    entry_m: float
    entry_k: float
    n: int
    extra_bytes: float = 0.0
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


def select(
    routes: Sequence[Route], dense: DenseRoute | None, rates: Rates, tiles: Sequence[Tile]
) -> Plan:
    """The plan for one pattern: all candidates, and the cheapest of them; where nothing is saved,
    the library's product unless a tile of ours would be much cheaper."""
    candidates = [c for route in routes for c in _sparse(route, tiles, rates)]
    if dense is not None:
        candidates.append(_dense(dense, rates))
    library = dense is not None and dense.note != GENERIC
    choice = min(candidates, key=lambda c: c.cost_us * (_doubt(c) if library else 1.0))
    return Plan(choice, tuple(candidates), _reason(choice, candidates), rates.tuned)


def _doubt(candidate: Candidate) -> float:
    """Factor on the cost of what saves no work: its one merit is a tile that would beat a library
    at its own product, which predictions cannot promise."""
    saves = candidate.kind == "dense" or candidate.covered < ALL
    return 1.0 if saves else _PREDICTION_ERROR


def _sparse(route: Route, tiles: Sequence[Tile], rates: Rates) -> Iterator[Candidate]:
    """A route with every tile of its family."""
    index = route.index_bytes / rates.constant("detect_gbps") * 1e-3
    launch = rates.constant("launch_us")
    other = route.extra_bytes / rates.constant("store_gbps") * 1e-3
    for tile in tiles if route.family else (None,):
        if tile is None:
            steps = route.slots * route.live * route.entry_m * route.entry_k * route.n
            product = _generic_us(steps, rates)
        elif tile.family == route.family:
            product = _product_us(route, tile, rates)
        else:
            continue
        parts = (("index", index), ("product", product), ("output", other), ("launch", launch))
        cost = index + product + other + launch
        yield Candidate("pit", route.micro_tile, tile, cost, parts, route.covered)


def _product_us(route: Route, tile: Tile, rates: Rates) -> float:
    """Live tiles times their cost; tails of register blocks and idle threads counted."""
    live = route.live
    if route.entry_m == 1:  # entries are rows: they are computed in register blocks
        reg_m = tile.knob("reg_m")
        live = -(-live // reg_m) * reg_m
        rows, m, k = live, live, route.entry_k
    else:
        rows, m, k = route.entry_m, route.entry_m, live
    # All slots are one product of the kind that was measured.
    if route.splits:
        total = rates.tile_us(tile, m, route.n, k * route.slots)
    else:
        total = rates.tile_us(tile, m * route.slots, route.n, k)
    total = max(total, route.floor_bytes / rates.constant("store_gbps") * 1e-3)
    return total * _imbalance(route.slots, rows, route.n, tile, rates.threads)


def _imbalance(slots: int, rows: float, n: int, tile: Tile, threads: int) -> float:
    """How much longer the busiest thread works than if all had the same number of rows."""
    blocks = max(1, -(-n // tile.tile_n))
    tasks = slots * -(-rows // tile.tile_m) * blocks
    if not tasks:
        return 1.0
    busiest = -(-tasks // threads) * min(rows, tile.tile_m) / blocks
    return max(1.0, threads * busiest / (slots * rows))


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


def _reason(choice: Candidate, candidates: Sequence[Candidate]) -> str:
    others = [c.cost_us for c in candidates if c.kind != choice.kind]
    if not others:
        return f"cheapest of {len(candidates)}; {choice.kind} only"
    other = "dense" if choice.kind == "pit" else "pit"
    return f"cheapest of {len(candidates)}, {min(others) / max(choice.cost_us, 1e-9):.2f}x {other}"
