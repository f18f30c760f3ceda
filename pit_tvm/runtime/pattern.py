"""What selection knows of one call's sparsity: covered densities, and a key for its decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

from ..selection.cover import bucket, reading
from ..structs import BitMask, Grid, MicroTile
from .detect_sample import Lines, Sample
from .program import Program

_Covered = tuple[float, ...]


class Pattern:
    """Covered density of each of a program's routes, and the key under which plans are kept.

    ``covered`` may be a function that works the densities out, since a plan that is kept needs
    the key alone.
    """

    __slots__ = ("_covered", "key")

    def __init__(self, covered: _Covered | Callable[[], _Covered], key: object) -> None:
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

    def pattern(self, sample: Sample) -> Pattern:
        """Pattern of a mask of which ``sample`` was taken."""

        def covered() -> _Covered:
            known = (*sample.densities.tolist(), 1.0)
            return tuple([read(known) for read in self._readings])

        return Pattern(covered, sample.key)


def _reading(program: Program, micro_tile: MicroTile) -> Callable[[Sequence[float]], float]:
    """Covered density of a micro-tile from the densities of a sample, and 1 after them."""
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


def lines_of(program: Program) -> Lines | None:
    """Lines to sample: some rows of the operand, and what crosses them where both are gathered."""
    con, spec = program.contraction, program.spec
    axes = con.axes_of(program.operand) if con else ()
    if con is None or isinstance(spec, BitMask) and axes[-1] == con.row:
        return None
    return Lines(axes.index(con.row), axes.index(program.beside), isinstance(spec, Grid))
