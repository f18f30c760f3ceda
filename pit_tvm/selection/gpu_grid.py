"""What products over live rows and live columns of an operand cost on a GPU, beside others.

What lives of both operands is packed, and then multiplied as rows are. Costs are in microseconds.
"""

from __future__ import annotations

from dataclasses import replace

from ..structs import Candidate, MicroTile
from .gpu_cost import GpuRates, GpuWork, select_gpu

_BYTES = 2  # of an element
_STEP = 64  # of k, that a tile takes at once
_GATHERED = 16  # elements of a sector, which is read as a whole
# Two launches with what keeps them apart, and what both read and write. By these, plans of 54
# products (tuning_logs/h200-sm_90a/grid.json) lose 0.8 % in the mean to the best of both axes, rows
# alone and dense.
_PACK_US, _PACK_GBPS = 13.0, 3300.0


def both_axes(
    family: str,
    micro_tile: MicroTile,
    work: GpuWork,
    columns: int,
    contiguous: bool,
    rates: GpuRates,
    stored_rows: int,
) -> tuple[Candidate, ...]:
    """Candidates for ``work``, a product of all of k, over ``columns`` of k alone.

    ``contiguous``: rows of k lie in the dense operand as they are. The parts of a cost are those of
    `select_gpu`, with detection on either axis, and what packing takes.
    """
    deep = max(-(-columns // _STEP), 1) * _STEP
    plan = select_gpu(family, micro_tile, replace(work, k=deep), None, rates, stored_rows)
    packing = packing_us(work, columns, contiguous)
    return tuple(_packed(c, packing, columns / max(work.k, 1)) for c in plan.candidates)


def packing_us(work: GpuWork, columns: int, contiguous: bool) -> float:
    """Microseconds in which live columns of the live rows, and of all of the dense operand, are
    packed; columns that are not contiguous are read by sectors."""
    sectors = min(work.k, columns * _GATHERED)
    dense = work.n * ((columns if contiguous else sectors) + columns)
    size = _BYTES * (work.live * (sectors + columns) + dense)
    return _PACK_US + 1e-3 * size / _PACK_GBPS


def _packed(candidate: Candidate, packing: float, share: float) -> Candidate:
    parts = dict(candidate.parts)
    index = parts.pop("index")
    shown = (("index", 2.0 * index), ("pack", packing), *parts.items())
    cost = candidate.cost_us + index + packing
    return candidate._replace(cost_us=cost, parts=shown, covered=candidate.covered * share)
