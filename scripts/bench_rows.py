"""What every benchmark is made of: cases, random data, rows of results, columns and targets."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

ERROR_LIMIT = 1e-5
NEVER_BELOW = 0.97  # of the speed of a dense product
SEED_KEY = 0xBE7C  # tuning draws from the plain seeds 0, 1, ..; the benchmarks' have this in front

Array = npt.NDArray[Any]
Run = Callable[[], object]


class Case(Protocol):
    """One line of a suite's table."""

    @property
    def label(self) -> str:
        """Its name."""

    @property
    def held_out(self) -> bool:
        """Whether its shape is one that tuning must not see."""


@dataclass(frozen=True)
class Settings:
    """What the command line decides for all suites."""

    repeats: int
    seed: int
    quick: bool = False

    def rng(self, label: str) -> np.random.Generator:
        """Random numbers of one case, the same whichever other cases run."""
        return np.random.default_rng([SEED_KEY, self.seed, zlib.crc32(label.encode())])


@dataclass(frozen=True)
class Stat:
    """Samples of one contender, in microseconds: median and quartiles."""

    median: float
    q1: float
    q3: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Stat:
        """From single measurements in seconds."""
        q1, median, q3 = (1e6 * float(q) for q in np.quantile(seconds, (0.25, 0.5, 0.75)))
        return cls(median, q1, q3, len(seconds))


@dataclass(frozen=True)
class Row:
    """Results of one case.

    ``stats``: times by contender. ``facts``: everything else, as JSON values. ``errors``: by
    contender the error of its result, infinite if that is not even of the right kind; a result is
    right below ``limit``.
    """

    label: str
    held_out: bool
    stats: dict[str, Stat]
    facts: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    limit: float = ERROR_LIMIT

    def us(self, contender: str) -> float:
        """Median microseconds of one run."""
        return self.stats[contender].median

    @property
    def error(self) -> float:
        """The largest error."""
        return max(self.errors.values(), default=0.0)

    @property
    def wrong(self) -> list[str]:
        """Contenders whose results are wrong."""
        return [name for name, error in self.errors.items() if not error < self.limit]


@dataclass(frozen=True)
class Target:
    """A limit and what was measured: the worst of the rows that it is about."""

    name: str
    limit: float
    at_least: bool
    got: float
    held_out: bool = False

    @property
    def met(self) -> bool:
        """Whether the limit is kept; a value that is no number keeps none."""
        return self.got >= self.limit if self.at_least else self.got <= self.limit

    def __str__(self) -> str:
        sign, apart = (">=" if self.at_least else "<="), " (held out)" if self.held_out else ""
        return f"{self.name}{apart}: {self.got:.4g}, wanted {sign} {self.limit:g}"


@dataclass(frozen=True)
class Column:
    """One column of a suite's table."""

    heading: str
    text: Callable[[Row], str]


@dataclass(frozen=True)
class Suite:
    """One table: its cases for full or quick sizes, how to measure one, and its limits."""

    name: str
    title: str
    cases: Callable[[bool], Sequence[Any]]
    measure: Callable[[Any, Any], Row]
    columns: tuple[Column, ...]
    targets: Callable[[Sequence[Row]], list[Target]]


def time_column(heading: str, contender: str, unit: float = 1e3) -> Column:
    """The median of a contender, in milliseconds (``unit`` 1e3) or microseconds (1); "-" where it
    was not timed."""

    def text(row: Row) -> str:
        known = contender in row.stats
        return f"{row.us(contender) / unit:.{3 if unit > 1 else 1}f}" if known else "-"

    return Column(heading, text)


def fact_column(heading: str, name: str, form: str = "") -> Column:
    """A fact, formatted by ``form``; "-" where there is none."""

    def text(row: Row) -> str:
        value = row.facts.get(name)
        return "-" if value is None else format(value, form)

    return Column(heading, text)


#: The largest error, in roundings.
ERRORS = Column("errors", lambda row: f"{row.error:.1f}")


def fact(name: str) -> Callable[[Row], float]:
    """A fact of a row, as `limits` wants it."""
    return lambda row: float(row.facts[name])


def limits(
    rows: Sequence[Row],
    name: str,
    limit: float,
    value: Callable[[Row], float],
    *,
    at_least: bool = True,
    only: Callable[[Row], bool] = lambda row: True,
) -> list[Target]:
    """The target for the worst of the ordinary rows and for the worst of the held-out ones."""
    targets = []
    for held_out in (False, True):
        values = [value(row) for row in rows if row.held_out == held_out and only(row)]
        if values:
            worst = min(values) if at_least else max(values)
            targets.append(Target(name, limit, at_least, worst, held_out))
    return targets


def over_dense(
    rows: Sequence[Row],
    goals: Iterable[tuple[str, float, Callable[[Row], bool]]],
    every: str,
) -> list[Target]:
    """Goals for the fact ``over_dense``: name, limit and rows of each, and `NEVER_BELOW` for all
    rows, by the name ``every``."""
    over, targets = fact("over_dense"), []
    for name, goal, here in goals:
        targets += limits(rows, name, goal, over, only=here)
    return [*targets, *limits(rows, every, NEVER_BELOW, over)]


def in_turn(names: Iterable[str], turn: int) -> list[str]:
    """The order of contenders in a turn: each begins with another one."""
    order = list(names)
    first = turn % len(order)
    return order[first:] + order[:first]


def block_mask(
    rng: np.random.Generator, shape: tuple[int, int], grain: tuple[int, int], zeros: float
) -> Array:
    """bool ``shape``: the share ``zeros`` of its blocks of ``grain`` is False, others are True.

    At least one block is live; blocks at the edges are cut off.
    """
    blocks = [-(-size // extent) for size, extent in zip(shape, grain, strict=True)]
    live = np.zeros(blocks[0] * blocks[1], np.bool_)
    live[: max(1, round((1 - zeros) * live.size))] = True
    mask = rng.permutation(live).reshape(blocks)
    mask = mask.repeat(grain[0], axis=0).repeat(grain[1], axis=1)
    return np.ascontiguousarray(mask[: shape[0], : shape[1]])
