"""Immutable records that the layers share: sparsity specifications, micro-tiles, tiles, plans."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import Any, ClassVar, NamedTuple, TypeVar

from .errors import DatabaseError, ShapeError, mismatch

Record = TypeVar("Record")
MOST_EXTENT = 2**31 - 1  # extents are int32 in kernels


def hashed_once(cls: type[Record]) -> type[Record]:
    """Let objects of a frozen dataclass keep their hash: they are looked up at every call."""
    made: Any = cls
    compute = made.__hash__

    def __hash__(self: Any) -> int:
        kept = self.__dict__.get("_hash")
        if kept is None:
            kept = self.__dict__["_hash"] = compute(self)
        return int(kept)

    def __getstate__(self: Any) -> dict[str, Any]:  # another process hashes text differently
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    made.__hash__, made.__getstate__ = __hash__, __getstate__
    return cls


# --------------------------------------------------------------------------------------------
# What the user says about one operand at compile time


@dataclass(frozen=True)
class SparsitySpec:
    """How the live part of one operand is told at run time.

    ``promises_zero`` is True for patterns that promise zeros outside (masks and values) and
    False for patterns that name the slices which exist (rows, lengths, groups).
    """

    promises_zero: ClassVar[bool] = False


def integer(number: object) -> int | None:
    """An integer of any library as Python's; None for anything else, and for truth values."""
    if isinstance(number, bool):  # numpy's are no integers to Python either
        return None
    try:
        return index(number)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_flags(**flags: object) -> None:
    """ShapeError for what is neither True nor False, of Python or of numpy; it names the flag."""
    for name, value in flags.items():
        if type(value).__name__ not in ("bool", "bool_"):
            raise ShapeError(mismatch(name, "True or False", repr(value)))


def _checked_extents(owner: str, extents: tuple[int, ...]) -> tuple[int, ...]:
    found = [integer(e) for e in extents]
    if any(e is None or e < 1 for e in found):
        raise ShapeError(mismatch(owner, "extents that are integers of at least 1", extents))
    return tuple(e for e in found if e is not None)


def _set_integer(record: SparsitySpec, name: str) -> None:
    """Keep a field of a frozen record as an integer of Python's, if it is one of any library."""
    number = integer(getattr(record, name))
    if number is not None:
        object.__setattr__(record, name, number)


@dataclass(frozen=True, init=False)
class _Granular(SparsitySpec):
    """A zero pattern made of blocks; one extent per operand dimension, or none if unknown.

    Of an output, masks tell what is needed instead.
    """

    promises_zero = True
    extents: tuple[int, ...]

    def __init__(self, *extents: int) -> None:
        object.__setattr__(self, "extents", _checked_extents(type(self).__name__, extents))


class Mask(_Granular):
    """Boolean array of the operand's shape. ``Mask(32, 1)``: zeros come in 32x1 blocks."""


class Grid(Mask):
    """A mask whose zeros fill whole rows and whole columns, as padding and dead features do.

    Rows and columns of a product's operand, which has two dimensions, are gathered at once where
    that is cheapest: on CPUs, and on Hopper in 16 bits, of either operand. Other operators, types
    and GPUs take it as ``Mask(1, 1)``.
    """

    def __init__(self) -> None:
        super().__init__(1, 1)


class BitMask(_Granular):
    """Bits of a boolean mask packed along the last dimension, least significant bit first.

    uint8 array of shape ``[..., ceil(last / 8)]``, as ``numpy.packbits(mask, axis=-1,
    bitorder="little")`` gives it.
    """


class BlockMask(_Granular):
    """Boolean array with one element per block: shape ``ceil(dim / extent)`` in each dimension."""

    def __init__(self, *extents: int) -> None:
        if not extents:
            raise ShapeError(mismatch("BlockMask", "one block extent per dimension", "none"))
        super().__init__(*extents)


class Values(_Granular):
    """No array at the call: the non-zero elements of the operand itself are live."""


@dataclass(frozen=True)
class Rows(SparsitySpec):
    """int32 or int64 ids of the slices that exist along ``dim``; unordered, no repeats."""

    dim: int = 0

    def __post_init__(self) -> None:
        _set_integer(self, "dim")


@dataclass(frozen=True)
class Lengths(SparsitySpec):
    """Lengths of padded sequences laid out one after the other along dimension ``dim``.

    The call passes ``lengths`` of shape ``[batch]``, or with ``cumulative=True`` ``cu_seqlens``
    of shape ``[batch + 1]``. The padded length is the extent of ``dim`` over ``batch``.
    """

    dim: int = 0
    cumulative: bool = False

    def __post_init__(self) -> None:
        check_flags(**{"Lengths.cumulative": self.cumulative})
        _set_integer(self, "dim")


@dataclass(frozen=True)
class Groups(SparsitySpec):
    """A group (expert) id for every slice of dimension ``dim``; -1 marks a slice that is dead."""

    num_groups: int
    dim: int = 0

    def __post_init__(self) -> None:
        number = integer(self.num_groups)
        if number is None or number < 0:
            got = self.num_groups
            raise ShapeError(mismatch("Groups.num_groups", "an integer of at least 0", got))
        _set_integer(self, "num_groups")
        _set_integer(self, "dim")


# --------------------------------------------------------------------------------------------
# Analysis, micro-tiles and tiles


@dataclass(frozen=True)
class AxisReport:
    """Which axes of each block are permutation invariant, and why the others are not.

    ``accepted[block]`` is a set of axis names as the tensor expression spells them;
    ``rejected[block][axis]`` is a reason that names the buffer and the index.
    """

    accepted: dict[str, frozenset[str]]
    rejected: dict[str, dict[str, str]]

    def __str__(self) -> str:
        lines = []
        for block, axes in self.accepted.items():
            lines.append(f"{block}: PIT axes {', '.join(sorted(axes)) or 'none'}")
            lines += [f"  not {axis}: {why}" for axis, why in self.rejected[block].items()]
        return "\n".join(lines)


@hashed_once
@dataclass(frozen=True)
class MicroTile:
    """The piece of ``operand`` that moves as one: extent 1 on dimension ``dim``, the PIT axis.

    ``extents`` holds one number per dimension of the operand; 0 stands for the whole dimension.
    ``also``: a micro-tile of the same operand on another axis, which is gathered as well; what
    lives is where both do.
    """

    operand: str
    axis: str
    dim: int
    extents: tuple[int, ...]
    also: MicroTile | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.dim < len(self.extents) or self.extents[self.dim] != 1:
            raise ShapeError(
                mismatch("MicroTile.extents", f"extent 1 on dimension {self.dim}", self.extents)
            )
        if any((number := integer(e)) is None or number < 0 for e in self.extents):
            raise ShapeError(mismatch("MicroTile.extents", "integers of at least 0", self.extents))

    def __str__(self) -> str:
        own = "x".join("*" if e == 0 else str(e) for e in self.extents)
        return f"{own} and {self.also}" if self.also else own


@hashed_once
@dataclass(frozen=True)
class Tile:
    """A dense tile: what the inner kernel computes. It never sees an index.

    ``knobs`` are the schedule's own decisions (register blocking, unrolling ...), sorted by name.
    """

    family: str
    isa: str
    dtype: str
    tile_m: int
    tile_n: int
    tile_k: int
    knobs: tuple[tuple[str, int], ...] = ()

    def knob(self, name: str) -> int:
        """Value of one knob; DatabaseError if the tile has no such knob, as its family's have."""
        knobs = dict(self.knobs)
        if name not in knobs:
            expected = f"the knob {name} of a tile of {self.family}"
            raise DatabaseError(mismatch("database", expected, ", ".join(knobs) or "none"))
        return knobs[name]

    def __str__(self) -> str:
        extra = " ".join(f"{k}={v}" for k, v in self.knobs)
        return f"{self.isa} {self.tile_m}x{self.tile_n}x{self.tile_k} {extra}".rstrip()


# --------------------------------------------------------------------------------------------
# Run time


@dataclass(frozen=True)
class Index:
    """Live micro-tiles of one operand, unordered: the result of detection.

    ``ids``: int32 ``[*slots, capacity]``, positions on the PIT axis; in each slot the first
    ``count[slot]`` entries are live and the others are unspecified. ``count``: int32 ``[*slots]``.
    There is one slot dimension per operand dimension whose micro-tile extent is neither 1 on the
    PIT axis nor the whole dimension, in the order of the dimensions; groups give one of their own.
    Without any, the shapes are ``[1, capacity]`` and ``[1]``. ``taken``: the two in the form that
    compiled functions take soonest, if that is another. ``also``: the index of the micro-tile that
    is gathered as well.
    """

    ids: Any
    count: Any
    taken: tuple[Any, Any] | None = None
    also: Index | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The two for a compiled function, and behind them those of ``also``."""
        own = self.taken or (self.ids, self.count)
        return (*own, *self.also.arguments) if self.also else own


class Candidate(NamedTuple):
    """One way to run an operator, with its predicted cost in microseconds, part by part."""

    kind: str  # "pit" or "dense"
    micro_tile: MicroTile | None
    tile: Tile | None
    cost_us: float
    parts: tuple[tuple[str, float], ...] = ()
    covered: float = 1.0  # share of the operand that the live micro-tiles cover
    note: str = ""

    @property
    def way(self) -> tuple[object, ...]:
        """What it launches: the same for candidates that differ in what they cost alone."""
        return self[:3]

    def __str__(self) -> str:
        if self.kind == "dense":
            return f"dense ({self.note})" if self.note else "dense"
        axis = self.micro_tile.axis if self.micro_tile else "-"
        return f"{self.micro_tile} on {axis}, {self.tile or 'generic'}"


@dataclass(frozen=True)
class Plan:
    """The candidate that was chosen, all the others, and why.

    ``tuned``: its tile was measured; of dense, one that it was weighed against.
    """

    choice: Candidate
    candidates: tuple[Candidate, ...] = field(default=())
    reason: str = ""
    tuned: bool = True

    @property
    def way(self) -> tuple[object, ...]:
        """What it launches."""
        return self.choice.way

    def __str__(self) -> str:
        head = f"{'candidate':58} {'covered':>8} {'cost us':>10}  parts"
        rows = [head, "-" * len(head)]
        for c in sorted(self.candidates, key=lambda c: c.cost_us):
            parts = " ".join(f"{name}={us:.1f}" for name, us in c.parts)
            mark = "*" if c is self.choice else " "
            rows.append(f"{mark}{str(c):57} {c.covered:8.3f} {c.cost_us:10.1f}  {parts}")
        rows.append(f"{'tuned' if self.tuned else 'untuned'}: {self.reason}")
        return "\n".join(rows)


@dataclass(frozen=True)
class TileTask:
    """One dense product to tune: ``out[m, n] += lhs[m, k] * rhs[k, n]`` in ``dtype`` storage.

    With several ``groups`` the ``m`` rows are spread over them, each with a ``rhs`` of its own, and
    ``share`` of them are of one row of lhs, as tokens with several experts are.
    """

    family: str  # "contraction"
    isa: str  # "avx512", "avx2", "generic", "sm_90a"
    dtype: str
    m: int
    n: int
    k: int
    groups: int = 1
    share: int = 1

    @cached_property
    def logs(self) -> tuple[float, float, float]:
        """Natural logarithms of the extents, by which shapes are compared."""
        return math.log(self.m), math.log(self.n), math.log(self.k)
