"""Which kernels detect the micro-tiles of one operand on a CUDA device, and on which grids.

    bands of rows, positions are columns   list_columns, or fold_columns then emit
    slots of columns, positions are rows   list_rows, or fold_rows then emit
    block masks                            list_blocks, or fold_blocks then emit

Plans hold numbers alone: addresses and strides come with each call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import AxisError, DTypeError, ShapeError, mismatch
from ..structs import BitMask, BlockMask, Mask, MicroTile, SparsitySpec, Values
from .cuda_detect_block_lists import MOST_BLOCKS
from .cuda_detect_columns import FOLD_THREADS, vector_of
from .cuda_detect_device import BYTES
from .cuda_detect_rows import ROW_WORDS
from .cuda_detect_rows import THREADS as ROW_THREADS
from .cuda_detect_strips import CTAS, LANES, MOST_WORDS, STRIP_BYTES

MOST_POSITIONS = 1 << 30  # sums of two extents stay below 2**31
SMS = 132  # of an H200; a guide for the grids' sizes, not a limit
SM_BYTES_PER_US = 60_000  # that one multiprocessor reads
DEVICE_BYTES_PER_US = 4_000_000
SECOND_KERNEL_US = 4.5
MOST_PARTS = 32  # lines that make up one slot
MOST_BAND = 128  # rows of a band whose bits are one line in any case
FEW_BLOCKS = 4  # across a slot, which one thread reads one after the other
TILE_BYTES = 1 << 16  # that a CTA of the folding kernels should read at least
ROW_BYTES = 2048  # that it should read of one row

# Bits of an element, and those of a 32-bit word that make it live: all but signs.
INTEGERS = {f"{u}int{bits}": bits for u in ("", "u") for bits in (8, 16, 32, 64)}
FLOATS = {
    "float16": (16, 0x7FFF7FFF),
    "bfloat16": (16, 0x7FFF7FFF),
    "float32": (32, 0x7FFFFFFF),
    "float64": (64, 0x7FFFFFFF),
    "float8_e4m3fn": (8, 0x7F7F7F7F),
    "float8_e5m2": (8, 0x7F7F7F7F),
}


@dataclass(frozen=True)
class Fold:
    """One launch that turns entries into bits: kernel, numbers between strides and ``wide``."""

    kernel: str
    numbers: tuple[int, ...]
    parts: int = 1


@dataclass(frozen=True)
class MaskPlan:
    """How the index of one operand is built.

    ``lists``: kernel and numbers of the direct way, where it is the quicker one; ``fold`` is what
    `emit` follows. ``value_shape`` is that of the user's array. ``grain`` positions of ``extent``
    belong to each of the ``entries`` along the PIT axis.
    """

    value_shape: tuple[int, ...]
    keep: int  # as int32
    slots: int
    extent: int
    entries: int
    grain: int
    fold: Fold
    lists: tuple[str, tuple[int, ...]] | None = None

    @property
    def words(self) -> int:
        """Words of one line of bits."""
        return -(-self.entries // 32)


def grain_of(spec: SparsitySpec, micro_tile: MicroTile) -> int:
    """Positions on the PIT axis that a bit of a line stands for."""
    return spec.extents[micro_tile.dim] if isinstance(spec, BlockMask) else 1


def check_extents(shape: tuple[int, ...]) -> None:
    """Refuse extents that 32-bit positions cannot hold (ShapeError)."""
    if any(not 0 <= extent < MOST_POSITIONS for extent in shape):
        raise ShapeError(mismatch("shape", f"extents below {MOST_POSITIONS}", shape))


def plan_mask(
    spec: SparsitySpec,
    dtype: str,
    shape: tuple[int, ...],
    micro_tile: MicroTile,
    clusters: bool = True,
    whole: bool = False,
) -> MaskPlan:
    """The plan of a mask, bit mask, block mask or of values, on GPUs with ``clusters`` of CTAs or
    without. ``whole``: folding gives one line of bits for each slot, not several parts of it.

    Raises
    ------
    AxisError
        The operand has no two dimensions.
    ShapeError
        Micro-tile or block mask do not fit the operand, or an extent is 2**30 or more.
    DTypeError
        The array's type ``dtype`` is none of which the specification can be made.
    """
    operand = micro_tile.operand
    if len(shape) != 2:
        raise AxisError(mismatch(f"operand {operand}", "2 dimensions", f"shape {shape}"))
    if len(micro_tile.extents) != 2:
        raise ShapeError(mismatch("micro_tile.extents", "2 extents", micro_tile.extents))
    check_extents(shape)
    bits, keep = _element(spec, dtype, operand)
    pit = micro_tile.dim
    extent, other = shape[pit], shape[1 - pit]
    band = min(micro_tile.extents[1 - pit] or max(other, 1), max(other, 1))
    slots = -(-other // band) if micro_tile.extents[1 - pit] else 1
    common: dict[str, Any] = {"keep": keep, "slots": slots, "extent": extent}
    if isinstance(spec, BlockMask):
        return _plan_blocks(spec, shape, pit, band, common)
    rows, cols = shape
    value_shape = (rows, -(-cols // 8)) if bits == 1 else shape
    common |= {"value_shape": value_shape, "entries": extent, "grain": 1}
    if pit == 0:
        fold = _fold_rows(rows, cols, band, slots, bits, whole)
        lists = _list_rows(rows, cols, band, slots, bits) if clusters else None
        return MaskPlan(fold=fold, lists=lists, **common)
    fold = _fold_columns(rows, cols, band, slots, bits, whole or band <= MOST_BAND)
    return MaskPlan(fold=fold, lists=_list_columns(rows, cols, band, slots, bits), **common)


def _element(spec: SparsitySpec, dtype: str, operand: str) -> tuple[int, int]:
    """Bits of an entry, and those of a word that count, as an int32."""
    argument = f"sparsity of {operand} ({type(spec).__name__})"
    if isinstance(spec, Values):
        if dtype in FLOATS:
            return FLOATS[dtype]
        if dtype in INTEGERS or dtype == "bool":
            return INTEGERS.get(dtype, 8), -1
        raise DTypeError(mismatch(argument, "floating point or integers", dtype))
    allowed = ("uint8",) if isinstance(spec, BitMask) else ("bool", "uint8")
    if not isinstance(spec, (Mask, BitMask, BlockMask)):
        raise AxisError(mismatch("spec", "a mask or values", type(spec).__name__))
    if dtype not in allowed:
        advice = "use Values to detect non-zeros" if isinstance(spec, Mask) else ""
        raise DTypeError(mismatch(argument, " or ".join(allowed), dtype, advice))
    return 1 if isinstance(spec, BitMask) else 8, -1


def _plan_blocks(
    spec: BlockMask, shape: tuple[int, ...], pit: int, band: int, common: dict[str, Any]
) -> MaskPlan:
    if len(spec.extents) != 2:
        raise ShapeError(mismatch("BlockMask", "2 block extents", spec.extents))
    value_shape = tuple(-(-s // e) for s, e in zip(shape, spec.extents, strict=True))
    other = shape[1 - pit]
    grain, height = (min(spec.extents[d], max(shape[d], 1)) for d in (pit, 1 - pit))
    entries = value_shape[pit]
    fold = Fold("fold_blocks", (entries, other, band, height))
    direct = entries <= MOST_BLOCKS and band <= FEW_BLOCKS * height
    lists = ("list_blocks", (entries, grain, shape[pit], other, band, height)) if direct else None
    own: dict[str, Any] = {"value_shape": value_shape, "entries": entries, "grain": grain}
    return MaskPlan(fold=fold, lists=lists, **own, **common)


def _lanes(cols: int, bits: int, threads: int) -> int:
    """Logarithm of the threads that share a row, at least 5; their bits fit ``threads`` words."""
    most = (threads // 4 if bits == 1 else threads).bit_length() - 1
    vectors = -(-cols // vector_of(bits))
    return min(max(5, (vectors - 1).bit_length() if vectors else 0), most)


def _list_columns(
    rows: int, cols: int, band: int, slots: int, bits: int
) -> tuple[str, tuple[int, ...]] | None:
    """The direct way, unless too few CTAs would read too much."""
    size = -(-cols * bits // 8) * band
    if not _worth_it(slots, size):
        return None
    threads = 1024 if size > TILE_BYTES else 256
    numbers = (rows, cols, band, _lanes(cols, bits, threads))
    return f"list_columns_{bits}_{threads}", numbers


def _worth_it(ctas: int, size: int) -> bool:
    """Whether so many CTAs that read ``size`` bytes each are faster than two kernels."""
    alone = -(-ctas // SMS) * size / SM_BYTES_PER_US
    return alone <= size * ctas / DEVICE_BYTES_PER_US + SECOND_KERNEL_US


def _list_rows(
    rows: int, cols: int, width: int, slots: int, bits: int
) -> tuple[str, tuple[int, ...]] | None:
    """The direct way, where slots are whole vectors and few CTAs need not read too much."""
    vector = vector_of(bits)
    if slots != 1 and width % vector:
        return None
    across = -(-min(width, max(cols, 1)) // vector)  # vectors of a slot
    high = -(-rows // (32 * CTAS))
    several = max(1, min(LANES // across, MOST_WORDS // max(high, 1)))
    chunks = -(-across // LANES)
    if high > MOST_WORDS or not _worth_it(
        -(-slots // several) * CTAS, high * 32 * chunks * STRIP_BYTES
    ):
        return None
    return f"list_rows_{bits}", (rows, cols, width, several, min(across, LANES), chunks, high)


def _fold_columns(rows: int, cols: int, band: int, slots: int, bits: int, whole: bool) -> Fold:
    least = max(1, -(-band // (1 if whole else MOST_PARTS)))
    for lanes in range(min(_lanes(cols, bits, FOLD_THREADS), 8), 4, -1):
        chunks = max(1, -(-cols // (vector_of(bits) << lanes)))
        # Two CTAs for every multiprocessor, if that leaves each enough to read.
        fair = -(-band * slots * chunks // (2 * SMS))
        height = max(least, TILE_BYTES // (BYTES << lanes), fair)
        parts = max(1, -(-band // height))
        if slots * parts * chunks >= SMS:
            break
    return Fold(f"fold_columns_{bits}", (rows, cols, band, parts, height, chunks, lanes), parts)


def _fold_rows(rows: int, cols: int, width: int, slots: int, bits: int, whole: bool) -> Fold:
    vector, size = vector_of(bits), max(1, width * bits // 8)
    parts = 1 if whole else min(MOST_PARTS, -(-size // ROW_BYTES))
    piece = width if parts == 1 else -(-width // (parts * vector)) * vector
    parts = -(-width // piece)
    several = 1 if parts > 1 else max(1, min(slots, ROW_BYTES // size, ROW_WORDS))
    chunks = slots * parts if parts > 1 else -(-slots // several)
    words = -(-rows // 32)
    wanted = TILE_BYTES // (32 * max(1, min(several * size, -(-cols * bits // 8))))
    high = max(1, min(wanted, ROW_WORDS // several, words * chunks // (2 * SMS)))
    even = int(slots == 1 or width % vector == 0)
    across = min(piece if parts > 1 else several * width, max(cols, 1))
    vectors = -(-across // vector) + 1 - even  # one more if a chunk may begin inside one
    lanes = min((vectors - 1).bit_length(), ROW_THREADS.bit_length() - 1)
    numbers = (rows, cols, width, parts, piece, several, high, chunks, lanes, even)
    return Fold(f"fold_rows_{bits}", numbers, parts)
