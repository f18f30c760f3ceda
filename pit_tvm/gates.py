"""Gates: what an activation's result multiplies, as layers of experts are given it."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, fields

from .errors import ShapeError, mismatch


@dataclass(frozen=True)
class Gate:
    """``act(min(gate, limit)) * (clip(other, -limit, limit) + offset)`` of two columns each.

    The first half of the columns are gates, the second what they gate, or with ``interleaved`` they
    alternate, a gate first. ``alpha``, which only silu takes, is what its sigmoid multiplies:
    ``x * sigmoid(alpha * x)``. GPT-OSS has ``Gate(7.0, 1.702, 1.0, interleaved=True)``.

    Raises
    ------
    ShapeError
        A ``limit`` that is not above 0; an ``alpha`` or ``offset`` that is not finite.
    """

    limit: float = math.inf
    alpha: float = 1.0
    offset: float = 0.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self) if each.type == "float"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or sys.float_info.max < abs(value) < math.inf:  # of a whole number
                raise ShapeError(mismatch(f"Gate.{name}", "a number", repr(value)))
            object.__setattr__(self, name, float(value))
        if type(self.interleaved) is not bool:
            raise ShapeError(mismatch("Gate.interleaved", "True or False", repr(self.interleaved)))
        if not self.limit > 0:
            raise ShapeError(mismatch("Gate.limit", "a number above 0", self.limit))
        for name in ("alpha", "offset"):
            if not math.isfinite(getattr(self, name)):
                got = getattr(self, name)
                raise ShapeError(mismatch(f"Gate.{name}", "a finite number", got))

    def fits(self, activation: str) -> bool:
        """Whether an activation takes ``alpha``."""
        return self.alpha == 1.0 or activation == "silu"

    def check(self, activation: str) -> None:
        """ShapeError for an activation that does not take ``alpha``."""
        if not self.fits(activation):
            expected = "1 for activations other than silu"
            raise ShapeError(mismatch("Gate.alpha", expected, f"{self.alpha} with {activation}"))


#: ``act(gate) * other``, all gates first.
PLAIN = Gate()
