"""What products over live rows and live columns of an operand cost on a GPU, beside others.

What lives of both operands is packed, and then multiplied as rows are. Costs are in microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..structs import Candidate, MicroTile
from .gpu_cost import GpuRates, GpuWork, select_gpu
from .gpu_turn import whole_us

_BYTES = 2  # of an element
_STEP = 64  # of k, that a tile takes at once
_GATHERED = 16  # elements of a sector, which is read as a whole
# A launch with what keeps it apart, what it reads and writes, and that of what is turned; a list of
# columns beside those of rows. By these, 177 products of 59 patterns cost 3 % more or less in the
# median (tuning_logs/h200-sm_90a/bench_grid.json).
_PACK_US, _PACK_GBPS, _TURNED_GBPS = 5.6, 4000.0, 2200.0
_BESIDE_US = 1.0
# Of a product that is turned back, how often its size is moved where no row lives: what is written
# alone takes longer than half (tuning_logs/h200-sm_90a/turn.json).
_WRITTEN = 1.5


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

    def back_us(self, work: GpuWork) -> float:
        """Microseconds in which the product is turned back."""
        moved = _WRITTEN + (2.0 - _WRITTEN) * work.live / max(self.stored, 1)
        return whole_us(self.out_bytes, moved) if self.out_bytes else 0.0


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
    plan = select_gpu(family, micro_tile, replace(work, k=deep), None, rates, packing.stored)
    moved = (("pack", packing.us(work, columns)), ("turn", packing.back_us(work)))
    return tuple(_packed(c, moved, columns / max(work.k, 1)) for c in plan.candidates)


def _packed(candidate: Candidate, moved: tuple[tuple[str, float], ...], share: float) -> Candidate:
    parts = dict(candidate.parts)
    shown = (("index", parts.pop("index") + _BESIDE_US), *moved, *parts.items())
    cost = candidate.cost_us + _BESIDE_US + sum(us for _, us in moved)
    return candidate._replace(cost_us=cost, parts=shown, covered=candidate.covered * share)
