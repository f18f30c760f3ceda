"""What products over live rows and live columns of an operand cost on a GPU, beside others.

What lives of both operands is packed, and then multiplied as rows are; or rows alone are gathered,
of an operand that is turned as a whole where it must be. Costs are in microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..structs import Candidate, MicroTile
from .gpu_cost import GpuDense, GpuRates, GpuWork, select_gpu
from .gpu_turn import whole_us

_BYTES = 2  # of an element
_STEP = 64  # of k, that a tile takes at once
_GATHERED = 16  # elements of a sector, which is read as a whole
# A launch with what keeps it apart, what it reads and writes, and that of what is turned; a list of
# columns beside those of rows. By these, 177 products of 59 patterns cost 4 % more or less in the
# median (tuning_logs/h200-sm_90a/bench_grid.json).
_PACK_US, _PACK_GBPS, _TURNED_GBPS = 5.6, 4000.0, 2200.0
_BESIDE_US = 1.0
# How often the bytes of a product that is turned back are moved where no row lives: they are only
# written, which takes longer than half of reading and writing (tuning_logs/h200-sm_90a/turn.json).
_WRITTEN = 1.5
_HIDDEN_US = 2.0  # of turning rows back that a product of all of k has just written


@dataclass(frozen=True)
class Packing:
    """What is packed before a product: live columns of the live rows of one operand, and what they
    meet of the dense one.

    ``contiguous``: rows of k lie in the dense operand as they are. ``turned``: they do in the other
    one, of ``stored`` rows. ``out_bytes``: those of the product, if it is turned back afterwards.
    """

    contiguous: bool
    stored: int
    turned: bool = False
    out_bytes: float = 0.0

    def us(self, work: GpuWork, columns: int) -> float:
        """Microseconds; what does not lie side by side is read by sectors."""
        sectors = min(work.k, columns * _GATHERED)
        dense = work.n * ((columns if self.contiguous else sectors) + columns)
        own, gbps = work.live * sectors, _PACK_GBPS
        if self.turned:
            own, gbps = columns * min(self.stored, work.live * _GATHERED), _TURNED_GBPS
        moved = (own + work.live * columns) / gbps + dense / _PACK_GBPS
        return _PACK_US + 1e-3 * _BYTES * moved

    def whole_us(self, work: GpuWork) -> float:
        """Microseconds in which the operand is turned as a whole."""
        return whole_us(_BYTES * self.stored * work.k) if self.turned else 0.0

    def back_us(self, work: GpuWork) -> float:
        """Microseconds in which the product is turned back."""
        moved = _WRITTEN + (2.0 - _WRITTEN) * work.live / max(self.stored, 1)
        return whole_us(self.out_bytes, moved) if self.out_bytes else 0.0


def rows_alone(
    family: str,
    micro_tile: MicroTile,
    work: GpuWork,
    dense: GpuDense | None,
    packing: Packing,
    rates: GpuRates,
) -> tuple[Candidate, ...]:
    """Candidates for ``work``, a product of all of k, and the dense one if given: as of
    `select_gpu`, and what turning takes."""
    plan = select_gpu(family, micro_tile, work, dense, rates, packing.stored)
    back = max(packing.back_us(work) - _HIDDEN_US, 0.0)
    moved = (("turn", packing.whole_us(work) + back),)
    beside = _BESIDE_US if packing.out_bytes else 0.0  # dead rows are known by either list's bits
    return tuple(c if c.tile is None else _moved(c, moved, beside) for c in plan.candidates)


def both_axes(
    family: str,
    micro_tile: MicroTile,
    work: GpuWork,
    columns: int,
    packing: Packing,
    rates: GpuRates,
) -> tuple[Candidate, ...]:
    """Candidates for ``work``, a product of all of k, over ``columns`` of k alone.

    The parts of a cost are those of `select_gpu`, with detection on both axes, and what packing
    takes.
    """
    deep = max(-(-columns // _STEP), 1) * _STEP
    # One launch lists what lives and what does not, and so short a product hides no zeros.
    short = replace(work, k=deep, splits=False, hides=False)
    plan = select_gpu(family, micro_tile, short, None, rates, packing.stored)
    moved = (("pack", packing.us(work, columns)), ("turn", packing.back_us(work)))
    share = columns / max(work.k, 1)
    found = (_moved(candidate, moved, _BESIDE_US) for candidate in plan.candidates)
    return tuple(c._replace(covered=c.covered * share) for c in found)


def _moved(candidate: Candidate, moved: tuple[tuple[str, float], ...], beside: float) -> Candidate:
    """A candidate before which operands are ``moved``; ``beside``: what its index takes more."""
    parts = dict(candidate.parts)
    shown = (("index", parts.pop("index") + beside), *moved, *parts.items())
    cost = candidate.cost_us + beside + sum(us for _, us in moved)
    return candidate._replace(cost_us=cost, parts=shown)
