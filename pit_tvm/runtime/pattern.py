"""What selection knows of one call's sparsity: covered densities, and a key for its decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

from ..selection.cover import bucket, reading
from ..structs import MicroTile
from .program import Program

_Covered = tuple[float, ...]


class Pattern:
    """Covered density of each of a program's routes, and the key under which plans are kept.

    ``covered`` may be a function that works the densities out, since a plan that is kept needs
    the key alone.
    """

    __slots__ = ("_covered", "key")

    def __init__(self, covered: _Covered | Callable[[], _Covered], key: tuple[int, ...]) -> None:
        self._covered, self.key = covered, key

    @property
    def covered(self) -> _Covered:
        """Share of live micro-tiles on each route."""
        if not isinstance(self._covered, tuple):
            self._covered = self._covered()
        return self._covered


class Sampler:
    """Makes patterns of the samples of one program, if it takes any."""

    def __init__(self, program: Program) -> None:
        routes = program.routes if program.spec.promises_zero else ()
        self._readings = [_reading(program, route.micro_tile) for route in routes]

    def pattern(
        self, densities: Sequence[float], rows_live: float, beside_live: float = 1.0
    ) -> Pattern:
        """Pattern of a mask from sampled covered densities (``Detector.sample``), live rows, and
        what lives along the axis beside them."""
        known = (*densities, beside_live, rows_live, 1.0)

        def covered() -> _Covered:
            return tuple([read(known) for read in self._readings])

        return Pattern(covered, tuple([bucket(density) for density in known]))


def _reading(program: Program, micro_tile: MicroTile) -> Callable[[Sequence[float]], float]:
    """Covered density of a micro-tile from what is ``known`` of a pattern; see `Sampler`."""
    con, extents = program.contraction, micro_tile.extents
    if con is None or micro_tile.axis in con.batch:
        return itemgetter(-1)
    axes = con.axes_of(micro_tile.operand)
    row, beside = axes.index(con.row), axes.index(program.beside)
    if micro_tile.also is not None:
        return lambda known: known[-2] * known[-3]
    if extents[beside] == 0:
        return itemgetter(-2)
    pair = (extents[row], extents[beside])
    return reading(pair if row < beside else pair[::-1])


def counted(program: Program, live: int, total: int) -> Pattern:
    """Pattern of slices that are named: an exact count."""
    share = live / total if total else 0.0
    return Pattern((share,) * len(program.routes), (bucket(share), int(live == total)))
