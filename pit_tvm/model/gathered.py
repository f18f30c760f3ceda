"""A linear layer on activations: their live columns are gathered where that is faster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..api import Operator
from ..runtime.arrays import as_numpy
from ..structs import Candidate
from .activity import Activity, Turns
from .linear import LinearForm
from .threshold import Threshold

_MOST_CALLS = 64  # between two samples
# Predictions rest on records of 32 rows. Micro-tiles of fewer rows read a weight once for each of
# them; what that costs more was measured on two cores with AVX-512.
_RECORDED_ROWS, _LOW_TILE = 32, 1.5
_MOST_FLOP = 1e9  # of a product that is run only to have its kernel compiled
_MARGIN = 0.9  # share of the dense product's predicted time that gathering must stay below
# Gathered columns come line by line from all over the weight: with more of them live, measured
# times were above the dense product's whatever was predicted, which counts where tiles are untuned.
_MOST_LIVE = 0.5


@dataclass
class _Case:
    """Calls with about equally many rows: how they run, and what is counted of them."""

    choice: Candidate
    turns: Turns
    gathers: bool = False
    dropped: float = 0.0
    total: float = 0.0


class GatheredLayer:
    """``layer(x, out)``: dense, or by the micro-tiles of ``x`` that are not all zero.

    ``dense`` and ``sparse`` are operators of ``form`` whose operand is all live, and told by its
    values; ``constants`` are their other arrays. ``threshold``: what counts as zero. Threads may
    share it; counts are then approximate.
    """

    def __init__(
        self,
        number: int,
        form: LinearForm,
        after: str,
        dense: tuple[Operator, Sequence[Any]],
        sparse: tuple[Operator, Sequence[Any]],
        threshold: Threshold | None,
    ) -> None:
        self._number, self._form, self._after = number, form, after
        self._dense, self._sparse, self._threshold = dense, sparse, threshold
        self._cases: dict[int, _Case] = {}

    def __call__(self, x: Any, out: Any) -> None:
        """``out[:] = activation(x @ weight.T + bias)``."""
        x = as_numpy(x)
        rows = len(x)
        if not rows:
            return
        case = self._cases.get(rows.bit_length())
        kept = x if self._threshold is None else self._threshold(x)
        if case is None or case.turns.is_due:
            case = self._sample(x, kept, case)
        case.turns.called(case.gathers)
        if case.gathers:
            operator, constants = self._sparse
            operator.repeat(case.choice, kept, *constants, out=out)
        else:
            operator, constants = self._dense
            operator(kept, *constants, sparsity=np.array([rows], np.int32), out=out)

    def report(self) -> list[Activity]:
        """What is known of the calls so far, by numbers of rows."""
        return [self._activity(octave, case) for octave, case in sorted(self._cases.items())]

    def prepare(self, rows: Sequence[int]) -> None:
        """Compile what gathering at these numbers of rows may need, by running it: on nothing, and
        where that is quick on all, since little work is done by one thread."""
        form, dtype = self._form, self._dense[1][0].array.dtype
        for number in rows:
            out = np.empty((number, form.n), dtype)
            for live in (0.0, math.inf):
                if not live or 2.0 * number * form.n * form.k <= _MOST_FLOP:
                    self._run_all(np.full((number, form.k), live, dtype), out)

    def _run_all(self, x: np.ndarray, out: np.ndarray) -> None:
        """Everything that a decision on ``x`` weighs."""
        operator, constants = self._sparse
        kept = x if self._threshold is None else self._threshold(x)
        for choice in _gathering(operator.explain(kept, *constants).candidates):
            operator.repeat(choice, kept, *constants, out=out)

    def _sample(self, x: np.ndarray, kept: np.ndarray, case: _Case | None) -> _Case:
        """Decide anew for calls with about as many rows as ``x``."""
        rows, (operator, constants) = len(x), self._sparse
        candidates = _gathering(operator.explain(kept, *constants).candidates)
        choice = min(candidates, key=lambda c: _expected_us(c, rows))
        dense = self._dense[0].explain(sparsity=[rows], sizes={"m": rows}).choice
        if case is None:
            case = self._cases.setdefault(rows.bit_length(), _Case(choice, Turns(_MOST_CALLS)))
        case.choice = choice
        faster = _expected_us(choice, rows) < _MARGIN * dense.cost_us
        case.gathers = faster and choice.covered <= _MOST_LIVE
        case.turns.sampled()
        if self._threshold is not None:
            dropped, total = self._threshold.squares(x)
            case.dropped, case.total = case.dropped + dropped, case.total + total
        return case

    def _activity(self, octave: int, case: _Case) -> Activity:
        dropped = None
        if self._threshold is not None:
            dropped = math.sqrt(case.dropped / case.total) if case.total else 0.0
        return Activity(
            self._number,
            self._form,
            self._after,
            (2 ** (octave - 1), 2**octave - 1),
            str(case.choice.micro_tile),
            case.choice.covered,
            case.gathers,
            (case.turns.gathered, case.turns.calls),
            dropped,
        )


def _gathering(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that gather columns of the operand."""
    return [c for c in candidates if c.micro_tile is not None and c.micro_tile.dim == 1]


def _expected_us(candidate: Candidate, rows: int) -> float:
    extent = candidate.micro_tile.extents[0] if candidate.micro_tile else rows
    low = extent < min(rows, _RECORDED_ROWS)
    return candidate.cost_us * (_LOW_TILE if low else 1.0)
