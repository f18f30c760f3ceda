"""Which blocks of an operand live, as the GPU's family of live blocks reads it: a map of bytes.

A block mask is such a map already. Other masks, and values, are read once by one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..schedules.hopper_knobs import TILE_K
from ..structs import BitMask, BlockMask, MicroTile, SparsitySpec
from .argument import MOST_ELEMENTS
from .cuda_arrays import empty_of
from .cuda_detect import MaskPlans, rows_of
from .cuda_detect_plan import MaskPlan
from .cuda_modules import CudaKernels, GetModule
from .cuda_view import view_of

MOST_BITS = 16  # of an entry that a kernel reads as it is


def _span(value: Any) -> int:
    """Elements from the first one of a tensor to its last, in memory."""
    steps = zip(value.shape, value.stride(), strict=True)
    return 1 + sum((extent - 1) * stride for extent, stride in steps)


@dataclass(frozen=True)
class BlockMap:
    """A map on the device; ``places`` are the numbers high, deep, beside and along of
    `pit_tvm.schedules.hopper_blocks.blocks_kernel`."""

    tensor: Any
    size: int  # elements from the first to the last
    places: tuple[int, int, int, int]

    @cached_property
    def views(self) -> tuple[Any, ...]:
        """What a kernel takes of it; holds as long as the map does."""
        return view_of(self.tensor, "uint8", (self.size,)), *self.places


class Mapper:
    """Finds what lives of one operand, in a form that a product reads itself. Threads may share it.

    ``spec`` and ``micro_tile`` are the operand's.
    """

    def __init__(self, get_module: GetModule, spec: SparsitySpec, micro_tile: MicroTile) -> None:
        self._kernels, self._spec, self._micro_tile = CudaKernels(get_module), spec, micro_tile
        self._plans = MaskPlans(whole=True)

    def map(self, value: Any, shape: tuple[int, ...]) -> Any:
        """What ``value`` tells of the pattern of an operand of this ``shape``, on its device and on
        the current stream.

        Raises
        ------
        ShapeError, DTypeError
            As `CudaDetector.detect`.
        """
        argument, plan = self._plans.of(self._spec, value, shape, self._micro_tile)
        return self._read(argument, value, shape, plan)

    def count(self, found: Any, shape: tuple[int, ...]) -> Any:
        """What lives of every slot, as plans count it: a CUDA tensor, int32."""
        raise NotImplementedError

    def _read(self, argument: str, value: Any, shape: tuple[int, ...], plan: MaskPlan) -> Any:
        raise NotImplementedError


class BlockMapper(Mapper):
    """Makes maps of blocks; the micro-tile's other extent is the band's."""

    def __init__(self, get_module: GetModule, spec: SparsitySpec, micro_tile: MicroTile) -> None:
        super().__init__(get_module, spec, micro_tile)
        self._band_dim = 1 - micro_tile.dim
        self._height = micro_tile.extents[self._band_dim]

    def count(self, found: BlockMap, shape: tuple[int, ...]) -> Any:
        """Live steps of every band: a CUDA tensor, int32."""
        bands, steps = -(-shape[self._band_dim] // self._height), -(-shape[self._k] // TILE_K)
        count = empty_of("int32", found.tensor, (bands,))
        self._kernels.blocks("count_steps")(*found.views, steps, count)
        return count

    @property
    def _k(self) -> int:
        return self._micro_tile.dim

    def _read(self, argument: str, value: Any, shape: tuple[int, ...], plan: MaskPlan) -> BlockMap:
        if isinstance(self._spec, BlockMask):
            return self._given(self._spec, value)
        return self._folded(argument, value, shape, plan.keep)

    def _given(self, spec: BlockMask, value: Any) -> BlockMap:
        high, deep = (
            spec.extents[self._band_dim] // self._height,
            spec.extents[self._k] // TILE_K,
        )
        if _span(value) > MOST_ELEMENTS:  # kernels count places in 32 bits
            value = value.contiguous()
        strides = value.stride()
        places = (high, deep, strides[self._band_dim], strides[self._k])
        return BlockMap(value, _span(value), places)

    def _folded(self, argument: str, value: Any, shape: tuple[int, ...], keep: int) -> BlockMap:
        extents = (self._height, TILE_K) if self._k else (TILE_K, self._height)
        down, across = (-(-s // e) for s, e in zip(shape, extents, strict=True))
        made = empty_of("uint8", value, (down, across))
        bits = 1 if isinstance(self._spec, BitMask) else 8 * value.element_size()
        if bits > MOST_BITS:  # values told by another array than an operand of the family
            value, bits, keep = value != 0, 8, -1
        address, stride, wide = rows_of(argument, value)
        fold = self._kernels.blocks(f"map_blocks_{bits}")
        fold(address, stride, *shape, *extents, wide, keep, made)
        beside, along = (across, 1) if self._k else (1, across)
        return BlockMap(made, down * across, (1, 1, beside, along))
