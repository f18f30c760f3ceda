"""Which keys the queries of attention see, by how far their positions are apart."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ShapeError, mismatch


@dataclass(frozen=True)
class Window:
    """The keys at most so many positions ``before`` a query's own and ``after`` it; None: any.

    Raises
    ------
    ShapeError
        A distance is below 0, or no integer.
    """

    before: int | None = None
    after: int | None = None

    def __post_init__(self) -> None:
        for name, far in (("before", self.before), ("after", self.after)):
            if far is not None and (type(far) is not int or far < 0):
                raise ShapeError(mismatch(name, "an integer of at least 0, or None", repr(far)))

    @property
    def by_order(self) -> bool:
        """Whether the order of tokens tells which are seen, wherever they stand."""
        return self.before in (None, 0) and self.after in (None, 0)

    @property
    def span(self) -> int | None:
        """Keys that a query sees at most; None: any number."""
        if self.before is None or self.after is None:
            return None
        return self.before + 1 + self.after

    def __str__(self) -> str:
        if self == FULL:
            return "full"
        if self == CAUSAL:
            return "causal"
        if self.after == 0:
            return f"causal within {_positions(self.before)}"
        if self.before == self.after:
            return f"within {_positions(self.before)}"
        return f"within {_positions(self.before)} before and {_positions(self.after)} after"


def _positions(far: int | None) -> str:
    return "any position" if far is None else f"{far} position{'s' if far != 1 else ''}"


FULL, CAUSAL = Window(), Window(after=0)
