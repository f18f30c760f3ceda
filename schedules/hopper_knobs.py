"""What the Hopper rows family can be built with: tuning knobs and the operator's options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from pit_tvm.errors import ScheduleError, TileNotFound, mismatch
from pit_tvm.gates import Gate
from pit_tvm.selection.gpu_fit import HEIGHT_STEP
from pit_tvm.structs import Tile

Knobs = TypeVar("Knobs")

ISA = "sm_90a"
TILE_K = 64  # elements: one 128-byte swizzle row of a 16-bit type
SHARED_LIMIT = 232448  # bytes a CTA may use on sm_90
WIDTHS = (16, 32, 64, 96)  # narrow instructions; those above follow more closely
BAND = 16  # live rows that a flipped tile's producer gathers, and its epilogue stores, at once
TILES_AHEAD = 4  # tiles that the producer announces before the consumers reach them
MOST_GROUPS = 1024  # that a walk tells apart
MOST_RASTER = 2**10  # times the tiles beside each other it is counted in 32 bits
ACTS = ("none", "relu", "relu2", "gelu", "gelu_tanh", "silu")


def require(kernel: str, subject: object, rules: dict[str, bool]) -> None:
    """Raise ScheduleError for the first rule that does not hold."""
    for rule, holds in rules.items():
        if not holds:
            raise ScheduleError(mismatch(kernel, rule, subject))


def knobs_of(tile: Tile, kind: type[Knobs], families: Sequence[str], **extents: int) -> Knobs:
    """The kernel's knobs, a ``kind``, of a tile of one of ``families``; ``extents`` are knobs that
    its extents stand for, the others are knobs of the tile.

    Raises
    ------
    TileNotFound
        The tile is of another family, has an unknown knob, or the template cannot build it.
    """
    own: Any = kind
    if tile.family not in families or set(dict(tile.knobs)) - {field.name for field in fields(own)}:
        raise TileNotFound(mismatch("tile", f"a tile of {families}", f"{tile.family} {tile}"))
    knobs = own(**extents, **dict(tile.knobs))
    try:
        knobs.check()
    except ValueError as error:
        raise TileNotFound(str(error)) from error
    made: Knobs = knobs
    return made


def as_tile(
    knobs: Any, family: str, dtype: str, extents: Sequence[str] = ("tile_m", "tile_n")
) -> Tile:
    """The tile of a set of knobs, as `knobs_of` reads it: ``extents`` names the knobs that its
    extents stand for, with or without tile_k."""
    said = {one.name: one.metadata.get("said", True) for one in fields(knobs)}
    values = {name: int(getattr(knobs, name)) for name in said}
    rest = {name: value for name, value in values.items() if value or said[name]}
    tile_m, tile_n, tile_k = (*map(rest.pop, extents), TILE_K)[:3]
    return Tile(family, ISA, dtype, tile_m, tile_n, tile_k, tuple(sorted(rest.items())))


@dataclass(frozen=True)
class RowsTile:
    """Knobs of the family; every field is a tuning decision.

    ``consumers``: warpgroups that multiply; each takes tile_m / consumers rows in blocks of 64.
    ``cluster``: CTAs that take neighbouring row tiles and share each rhs tile by multicast; the
    last row tile of an odd number is taken with neighbouring column tiles instead.
    ``raster``: bands of rows (tile_m * cluster) walked before the next column tile, to reuse L2.
    ``lag``: k steps between issuing a gather and announcing it; 0: the copies announce themselves.
    A stage more is needed, which the consumers hold on to meanwhile.
    ``store_cols``: columns that a warp stages in shared memory before it stores 16 bytes per lane.
    ``flip``: 1 makes live rows the columns of the tensor cores' tile and weights its rows: tile_n
    output columns in blocks of 64 per consumer, and as many live rows as the count asks for, in
    steps of 8 up to tile_m; ``cluster`` CTAs share a tile's depth then. lag is 0, and
    store_cols has no meaning.
    ``late``: rows of a finished tile that each warp copies to memory in a k step of the next tile,
    which all stay in shared memory until then; 0: threads store them at once, by store_cols.
    ``most_groups``: the most groups the kernel takes; 1 leaves the search for the group out.
    ``sms``: CTAs of the persistent grid, one per multiprocessor.
    """

    tile_m: int = 128
    tile_n: int = 256
    stages: int = 4
    consumers: int = 2
    cluster: int = 1
    raster: int = 8
    lag: int = 0
    store_cols: int = 64
    flip: int = 0
    late: int = field(default=0, metadata={"said": False})  # 0 has no place in older records
    most_groups: int = 1
    sms: int = 132

    @property
    def registers(self) -> tuple[int, int]:
        """(producer, consumer) registers per thread, within 65536 per multiprocessor."""
        if self.flip:  # up to 16 rows for each thread of the producer
            return (128, 240) if self.consumers == 1 else (120, 192)
        return (96, 240) if self.consumers == 1 else (88, 208)

    def with_stages(self, stages: int) -> RowsTile:
        """The same with so many stages, and no more lag than they allow."""
        return replace(self, stages=stages, lag=min(self.lag, max(0, stages - 2)))

    @property
    def widths(self) -> tuple[int, ...]:
        """Live rows that a flipped tile's instructions take, each with a loop of its own: close to
        each other where tiles are bound by arithmetic, and weights still as wide."""
        usual = (*WIDTHS, *range(WIDTHS[-1] + HEIGHT_STEP, 161, HEIGHT_STEP), *range(176, 257, 16))
        return (*(width for width in usual if width < self.tile_m), self.tile_m)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of one CTA."""
        ring = self.stages * (self.tile_m + self.tile_n) * TILE_K * 2
        if self.flip:
            staged = self.consumers * 2 * BAND * (self.tile_n // self.consumers + 8) * 2
            posted = TILES_AHEAD * self.tile_m * 8
            return 1024 + ring + staged + posted + 10 * self.most_groups + 64
        rows, wide = self.consumers * 64, self.store_cols
        if self.late:
            rows, wide = self.tile_m, self.tile_n
        staged = (rows * (wide + 8) + self.consumers * 4 * 256) * 2
        return 1024 + ring + staged + 10 * self.most_groups + 48

    def check(self) -> None:
        """Raise ScheduleError (a ValueError) for a combination that the template cannot build."""
        rules = {
            "2 stages or more": self.stages >= 2,  # consumers hold one while they ask for the next
            f"most_groups from 1 to {MOST_GROUPS}": 1 <= self.most_groups <= MOST_GROUPS,
            f"raster from 1 to {MOST_RASTER}": 1 <= self.raster <= MOST_RASTER,
        }
        require("rows_kernel", self, rules)
        if self.flip:
            self._check_flipped()
            return
        tall = self.tile_m in (64 * self.consumers, 128 * self.consumers)
        wide = self.tile_n % 8 == 0 and 8 <= self.tile_n <= 256
        fits = self.tile_m // max(self.consumers, 1) * self.tile_n <= 128 * 128
        rules = {
            "consumers 1 or 2": self.consumers in (1, 2),
            "tile_m 64 or 128 per consumer": tall,
            "tile_n a multiple of 8 from 8 to 256": wide,
            "at most 128 accumulators per thread": fits,
            "store_cols 32, 64 or 128": self.store_cols in (32, 64, 128),
            "late from 0 to 16": 0 <= self.late <= 16,
            "lag 0, or at most stages - 2": 0 <= self.lag <= max(0, self.stages - 2),
            "cluster 1 or 2, a divisor of sms": self.cluster in (1, 2)
            and self.sms % self.cluster == 0,
            f"at most {SHARED_LIMIT} bytes of shared memory": self.shared_bytes <= SHARED_LIMIT,
        }
        require("rows_kernel", self, rules)

    def _sums_fit(self, blocks: int) -> bool:
        """Whether the sums that CTAs exchange fit the ring: fp32 for bands of one CTA."""
        bands = -(-self.tile_m // (BAND * self.cluster))
        laid = (self.cluster - 1) * bands * blocks * 64 * self.consumers * BAND * 4
        return laid <= self.stages * (self.tile_m + self.tile_n) * TILE_K * 2

    def _check_flipped(self) -> None:
        blocks = self.tile_n // (64 * max(self.consumers, 1))
        rules = {
            "consumers 1 or 2": self.consumers in (1, 2),
            "tile_n 64 or 128 per consumer": self.tile_n == 64 * blocks * self.consumers
            and blocks in (1, 2),
            "tile_m a multiple of 16 from 16 to 256": self.tile_m % BAND == 0
            and 16 <= self.tile_m <= 256,
            "at most 160 accumulators per thread": blocks * self.tile_m <= 320,
            "lag 0 and late 0": self.lag == 0 and self.late == 0,
            "cluster 1, or 2 with tile_n 64 per consumer, a divisor of sms": self.cluster
            in (1, 2 // max(blocks, 1))
            and self.sms % self.cluster == 0,
            "a ring that holds the cluster's sums": self._sums_fit(blocks),
            f"at most {SHARED_LIMIT} bytes of shared memory": self.shared_bytes <= SHARED_LIMIT,
        }
        require("rows_kernel", self, rules)


@dataclass(frozen=True)
class RowsOptions:
    """What the kernel computes, apart from sizes; ``rows_kernel`` explains each field."""

    dtype: str
    bias: bool = False
    act: str = "none"
    share: int = 1
    rhs_layout: str = "nk"
    gate: Gate | None = None
    row_scale: bool = False
    accumulate: int = 0
    live_bits: bool = False
    slot: int = 0
    packed: bool = False
    deep: bool = False
    row_bias: bool = False
    fills: bool = False

    @property
    def out_dtype(self) -> str:
        """Element type of ``out``: sums are fp32."""
        return "float32" if self.accumulate else self.dtype

    @property
    def interleaved(self) -> bool:
        """Whether rhs's columns alternate, a gate first."""
        return self.gate is not None and self.gate.interleaved

    @property
    def halves(self) -> int:
        """rhs columns that make one output column: 2 for gated pairs."""
        return 1 if self.gate is None else 2

    @property
    def per_row(self) -> str:
        """Element type of the number that the epilogue has for each row, a factor or a bias; ""
        where it has none."""
        return "float32" if self.row_scale else self.dtype if self.row_bias else ""

    def matrix(self, of_group: Any, common: int) -> Any:
        """What rhs and bias have for each group, or ``common`` where slots share them."""
        return common if self.slot else of_group

    @property
    def sides(self) -> int:
        """Places that a tile's rhs columns come from: of gates, and of what they gate."""
        return 1 if self.interleaved else self.halves

    def rhs_shape(self, matrices: Any, n: Any, k: Any) -> tuple[Any, ...]:
        """Extents of rhs, of so many ``matrices``."""
        wide = n * self.halves
        return (matrices, k, wide) if self.rhs_layout == "kn" else (matrices, wide, k)

    def shared_bytes(self, knobs: RowsTile) -> int:
        """Bytes of shared memory of one CTA, those of the rows' bits included."""
        octets = knobs.consumers * 4 * 16 * (knobs.tile_n // self.halves // 8)
        return knobs.shared_bytes + octets * self.live_bits

    def pieces(self, knobs: RowsTile) -> int:
        """Boxes that TMA fetches for one rhs tile, all CTAs of the cluster together."""
        if self.rhs_layout == "kn":
            return knobs.tile_n // TILE_K
        even = knobs.tile_n % (8 * knobs.cluster) == 0
        return max(self.sides, knobs.cluster if even else 1)

    def check(self, knobs: RowsTile) -> None:
        """Raise ScheduleError (a ValueError) where the options do not fit together or the knobs."""
        knobs.check()
        if knobs.flip:
            self._check_flipped(knobs)
        piece = max((64 if self.rhs_layout == "kn" else 8) * self.sides, 8 * self.halves)
        rules = {
            "dtype float16 or bfloat16": self.dtype in ("float16", "bfloat16"),
            f"act one of {', '.join(ACTS)}": self.act in ACTS,
            "share 1 or more": self.share >= 1,
            "accumulate 0 or more": self.accumulate >= 0,
            "accumulate 0 for live_bits": not self.live_bits or self.accumulate == 0,
            "accumulate 0 and no live_bits for late": not knobs.late
            or (self.accumulate == 0 and not self.live_bits),
            "rhs_layout nk or kn": self.rhs_layout in ("nk", "kn"),
            "act that takes the gate's alpha": self.gate is None or self.gate.fits(self.act),
            "slot 0 or a multiple of tile_n": self.slot >= 0 and self.slot % knobs.tile_n == 0,
            "gate None and accumulate 0 for slots": not self.slot
            or (self.gate is None and self.accumulate == 0 and not self.live_bits),
            "share 1 and most_groups 1 for packed": not self.packed
            or (self.share == 1 and knobs.most_groups == 1),
            # A warp that stores zeros could lag behind the thread that asks TMA for packed rows.
            "flip for packed with fills": bool(knobs.flip) or not (self.packed and self.fills),
            "gate None and no row_scale for row_bias": not self.row_bias
            or (self.gate is None and not self.row_scale),
            **self._one_list(knobs),
            "accumulate 0 for interleaved pairs": not (self.interleaved and self.accumulate),
            f"tile_n a multiple of {piece} for this rhs": knobs.tile_n % piece == 0,
            f"at most {SHARED_LIMIT} bytes of shared memory": self.shared_bytes(knobs)
            <= SHARED_LIMIT,
        }
        require("rows_kernel", (self, knobs), rules)

    def _one_list(self, knobs: RowsTile) -> dict[str, bool]:
        """Where dead rows are those of one list, and no other sums are added to theirs."""
        one = knobs.most_groups == 1 and not self.accumulate and not self.slot
        return {"most_groups 1, accumulate 0 and no slot for fills": one or not self.fills}

    def _check_flipped(self, knobs: RowsTile) -> None:
        rules = {
            **self._one_list(knobs),
            "accumulate 0 and no live_bits for flip": self.accumulate == 0 and not self.live_bits,
            "tile_n 128 per consumer for gated pairs": self.gate is None
            or knobs.tile_n == 128 * knobs.consumers,
        }
        require("rows_kernel", (self, knobs), rules)
