"""The suite ``conversion``: the index of one matrix, against converting it to other formats (the
paper's figure 17), for every granularity, share of zeros, and way to tell the pattern.

It is ``index`` for all that a product's lhs may come with: a boolean mask, a bit mask, a block
mask, or values. Grains r x 1 and 1 x 64 are listed, wider ones mapped block by block, as products
read them; a block mask of those is read as it is.

* csr: ``to_sparse_csr`` of the mask or of the values, which lists elements;
* bsr: ``to_sparse_bsr`` with blocks of the grain;
* blocks: FlexAttention's ``create_block_mask``, where blocks are wide and high.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bench_gpu_cases import QUICK
from bench_gpu_index import COLUMNS, block_masker, compared, same_lists
from bench_gpu_measure import Contender, GpuSettings, fresh_memory, on
from bench_gpu_pit import block_mapper, detection
from bench_rows import Array, Row, Suite, Target, block_mask, fact, limits

import pit_tvm
from pit_tvm.reference.index import index_lists
from pit_tvm.schedules.hopper_knobs import TILE_K
from pit_tvm.structs import MicroTile, SparsitySpec

SIZE = 4096
GRAINS = ((32, 1), (64, 1), (128, 1), (1, 64), (32, 64), (64, 64))
ZEROS = (0.5, 0.9, 0.95, 0.99)
OTHERS = ("bits", "blocks", "values")  # told so at one share of zeros only:
OTHER_ZEROS = 0.9
SPEED_UP = 10.0  # over any peer


@dataclass(frozen=True)
class Conversion:
    """The index of a ``size`` x ``size`` matrix whose zeros come in blocks of ``grain``, ``told``
    by a "mask", "bits", "blocks" or "values"."""

    grain: tuple[int, int]
    zeros: float
    told: str = "mask"
    size: int = SIZE
    held_out: bool = False

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        grain = "x".join(map(str, self.grain))
        return f"{self.size}^2 {self.told} {grain} {100 * self.zeros:g} %"

    @property
    def mapped(self) -> bool:
        """Whether products read a map of blocks, not lists."""
        return min(self.grain) > 1

    @property
    def spec(self) -> SparsitySpec:
        """What an operator would be told of the matrix."""
        kinds = {
            "mask": pit_tvm.Mask,
            "bits": pit_tvm.BitMask,
            "blocks": pit_tvm.BlockMask,
            "values": pit_tvm.Values,
        }
        return kinds[self.told](*self.grain)

    @property
    def micro_tile(self) -> MicroTile:
        """What is listed."""
        rows = self.grain[0]
        if rows == 1:
            return MicroTile("lhs", "m", 0, self.grain)
        return MicroTile("lhs", "k", 1, (rows, 1))

    def pattern(self, mask: Array) -> Array:
        """What a call passes for a ``mask``."""
        if self.told == "bits":
            return np.packbits(mask, axis=-1, bitorder="little")
        if self.told == "blocks":
            return np.ascontiguousarray(mask[:: self.grain[0], :: self.grain[1]])
        return mask.astype(np.float16) if self.told == "values" else mask


def list_conversions(quick: bool) -> list[Conversion]:
    """Cases of the suite."""
    size = SIZE // QUICK if quick else SIZE
    made = [Conversion(grain, zeros, size=size) for grain in GRAINS for zeros in ZEROS]
    made += [Conversion(grain, OTHER_ZEROS, told, size) for told in OTHERS for grain in GRAINS]
    return [case for case in made if case.told != "blocks" or not case.mapped]


def measure_conversion(case: Conversion, settings: GpuSettings) -> Row:
    """One index and its peers."""
    shape = (case.size, case.size)
    mask = block_mask(settings.rng(case.label), shape, case.grain, case.zeros)
    want = index_lists(pit_tvm.Mask(), mask, shape, case.micro_tile)
    with fresh_memory(settings.device):
        value = on(settings.device, case.pattern(mask))
        right = same_blocks if case.mapped and settings.device == "cuda" else same_lists
        ours = Contender(
            _ours(case, settings, value),
            lambda found: 0.0 if right(found, want) else float("inf"),
        )
        facts = {"told": case.told, "grain": list(case.grain), "zeros": case.zeros}
        facts["live"] = sum(map(len, want))
        return compared(case, {"pit": ours, **_peers(case, value)}, settings, facts)


def _ours(case: Conversion, settings: GpuSettings, value: torch.Tensor) -> Callable[[], Any]:
    shape = (case.size, case.size)
    if case.mapped and settings.device == "cuda":
        mapper = block_mapper(settings.target, case.spec, case.micro_tile)
        return lambda: mapper.map(value, shape)
    return detection(settings, case.spec, value, shape, case.micro_tile)


def same_blocks(found: Any, want: Sequence[Array]) -> bool:
    """Whether a map has exactly the blocks live in which columns of ``want`` are: a list for each
    band, of which a block has `TILE_K`."""
    bands = found.tensor.cpu().numpy()
    if len(bands) != len(want):
        return False
    pairs = zip(bands, want, strict=True)
    return all(np.array_equal(np.flatnonzero(a), np.unique(b // TILE_K)) for a, b in pairs)


def _peers(case: Conversion, value: torch.Tensor) -> dict[str, Contender]:
    if case.told not in ("mask", "values"):
        return {}
    peers = {"csr": value.to_sparse_csr, "bsr": lambda: value.to_sparse_bsr(case.grain)}
    if case.mapped and case.told == "mask":
        peers["blocks"] = block_masker(value, case.grain)
    return {name: Contender(run, capture=False) for name, run in peers.items()}


def conversion_targets(rows: Sequence[Row]) -> list[Target]:
    """The limit on the least speed-up over each peer."""
    made = []
    for peer in ("csr", "bsr", "blocks"):
        over = f"over_{peer}"
        here = [row for row in rows if over in row.facts]
        made += limits(here, f"conversion: over {peer}", SPEED_UP, fact(over))
    return made


CONVERSION = Suite(
    name="conversion",
    title="the index of a matrix, or another format of it; us",
    cases=list_conversions,
    measure=measure_conversion,
    columns=COLUMNS,
    targets=conversion_targets,
)
