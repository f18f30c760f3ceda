"""The suite ``sread``: what SRead and SWrite add to a dense tile, by the bytes of a segment.

Every row of a tall lhs and of the result is one segment, as wide as the tile: 16 to 512 bytes of
float32, read from and written to memory, or the second-level cache where all of it fits.

* dense: the tile on all rows, without an index;
* ordered: the same tile with SRead and SWrite, by a list of all rows in order: what an index costs;
* pit: the same by a list in random order: segments that lie apart as well.

The paper calls what is added negligible from 32 bytes on, on GPUs with slower memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from bench_gpu_measure import (
    Contender,
    GpuSettings,
    fresh_memory,
    generator,
    measure,
    normal,
    on,
    poisoned,
)
from bench_gpu_pit import internals, operator
from bench_rows import ERROR_LIMIT, Column, Row, Suite, Target, fact_column, limits, time_column

import pit_tvm
from pit_tvm.structs import Tile

FAMILY = "sread"  # of tiles that are chosen here, not tuned
ITEM = 4  # bytes of an element
# Elements of a segment: rows of a tile, its depth, rows and columns of a thread.
TILES = {
    4: (256, 4, 1, 4),
    8: (128, 8, 1, 4),
    16: (128, 16, 2, 4),
    32: (128, 32, 4, 4),
    64: (128, 32, 8, 4),
    128: (128, 32, 8, 8),
}
PLACES = {"memory": 2**26, "cache": 2**23}  # bytes of the lhs, and of the result
QUICK_BYTES = 2**15
LEAST = {"memory": 128, "cache": 32}  # bytes of a segment, from where
SHARE = 0.9  # of the dense tile's speed is the goal


@dataclass(frozen=True)
class Segment:
    """A product of ``rows`` rows of ``elements`` float32 by as many columns."""

    elements: int
    place: str
    rows: int
    held_out: bool = False

    @property
    def bytes(self) -> int:
        """Width of a segment."""
        return ITEM * self.elements

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        return f"{self.place} {self.bytes} bytes"

    def tile(self, isa: str) -> Tile:
        """The dense tile."""
        rows, depth, reg_m, reg_n = TILES[self.elements]
        knobs = (("reg_m", reg_m), ("reg_n", reg_n), ("stages", 2))
        return Tile(FAMILY, isa, "float32", rows, self.elements, depth, knobs)


def list_segments(quick: bool) -> list[Segment]:
    """Cases of the suite."""
    return [
        Segment(elements, place, (QUICK_BYTES if quick else size) // (ITEM * elements))
        for place, size in PLACES.items()
        for elements in TILES
    ]


def segment_operator(case: Segment, target: str) -> pit_tvm.Operator:
    """The operator that gathers rows of a case."""
    return operator("matmul", pit_tvm.Rows(), "float32", target, (case.elements, case.elements))


def measure_segment(case: Segment, settings: GpuSettings) -> Row:
    """One width: the dense tile, and the same with SRead and SWrite."""
    with fresh_memory(settings.device):
        rng = settings.rng(case.label)
        made = generator(rng, settings.device)
        lhs = normal(made, (case.rows, case.elements), "float32")
        rhs = normal(made, (case.elements, case.elements), "float32")
        want = lhs.double() @ rhs.double()
        orders = {"dense": None, "ordered": np.arange(case.rows), "pit": rng.permutation(case.rows)}

        def error(out: torch.Tensor) -> float:
            worst = float((out.double() - want).abs().max() / want.abs().max())
            return worst if np.isfinite(worst) else float("inf")

        contenders = {}
        for name, order in orders.items():
            ids = None if order is None else on(settings.device, order.astype(np.int32))
            contenders[name] = Contender(_run(case, settings, (lhs, rhs), ids), error)
        found = measure(contenders, settings)
    us = {name: stat.median for name, stat in found.stats.items()}
    moved = 2e-3 * case.rows * case.bytes  # of the lhs and the result, per nanosecond
    facts = {"place": case.place, "bytes": case.bytes, "without_graph": found.plain}
    facts |= {f"{name}_gbps": moved / each for name, each in us.items()}
    facts |= {
        "over_dense": us["dense"] / us["pit"],
        "ordered_over_dense": us["dense"] / us["ordered"],
    }
    return Row(case.label, case.held_out, found.stats, facts, found.errors, ERROR_LIMIT)


def _run(
    case: Segment,
    settings: GpuSettings,
    arrays: tuple[torch.Tensor, torch.Tensor],
    ids: torch.Tensor | None,
) -> Callable[[], torch.Tensor]:
    """The tile on lhs and rhs, ``arrays``: on rows ``ids``, or without an index."""
    call, out = segment_operator(case, settings.target), poisoned(arrays[0].shape, arrays[0])
    if settings.device != "cuda":
        return lambda: (
            arrays[0] @ arrays[1] if ids is None else call(*arrays, sparsity=ids, out=out)
        )
    made = internals(call)
    tile, given = case.tile(made.target.isa), list(arrays)
    kernel = made.kernels.dense(tile) if ids is None else made.kernels.product(tile)
    if ids is not None:
        given += [ids.unsqueeze(0), ids.new_tensor([case.rows])]

    def run() -> torch.Tensor:
        kernel(*given, out)
        return out

    return run


def sread_targets(rows: Sequence[Row]) -> list[Target]:
    """The limits on what SRead and SWrite cost."""
    made = []
    for place, least in LEAST.items():
        here = [r for r in rows if r.facts["place"] == place and r.facts["bytes"] >= least]
        name = f"sread: {place}, {least} bytes and more, over the dense tile"
        made += limits(here, name, SHARE, lambda row: float(row.facts["over_dense"]))
    return made


SREAD = Suite(
    name="sread",
    title="a dense tile with and without SRead and SWrite, by width of a segment; us",
    cases=list_segments,
    measure=measure_segment,
    columns=(
        *(
            column
            for name in ("dense", "ordered", "pit")
            for column in (time_column(name, name, 1), fact_column("GB/s", f"{name}_gbps", ".0f"))
        ),
        fact_column("ordered/dense", "ordered_over_dense", ".2f"),
        fact_column("pit/dense", "over_dense", ".2f"),
        Column("errors", lambda row: f"{row.error:.1e}"),
    ),
    targets=sread_targets,
)
