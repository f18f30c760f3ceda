"""A linear layer behind ReLU on a GPU, for a few rows: dense, or by the weights of what lives."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..runtime.cuda_arrays import is_capturing
from ..selection.gpu_few_rows import few_rows_us
from .activity import Activity, Turns
from .linear import LinearForm

Run = Callable[[torch.Tensor, torch.Tensor], None]  # x, out

_MOST_CALLS = 256  # between two samples
_MARGIN = 0.95  # share of the dense product's predicted time that gathering must stay below


class ActiveRows:
    """``layer(x, out)`` for ``rows`` rows, by ``dense`` or by ``gathers``, which reads the weights
    where a row of x is not 0; ``dense_us``: predicted time of the former.

    The decision rests on samples, for which the host waits: of the first call, and then of every
    2nd, 4th, up to every 256th. While a stream is recorded there are none, and what was decided
    last is recorded.
    """

    def __init__(
        self, number: int, form: LinearForm, rows: int, dense: Run, gathers: Run, dense_us: float
    ) -> None:
        self._number, self._form, self._rows = number, form, rows
        self._dense, self._gathers, self._dense_us = dense, gathers, dense_us
        self._live, self._faster, self._turns = 1.0, False, Turns(_MOST_CALLS)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """``out[:] = x @ weight.T + bias``."""
        if self._turns.is_due and not is_capturing(x.get_device()):
            self._sample(x)
        self._turns.called(self._faster)
        run = self._gathers if self._faster else self._dense
        run(x, out)

    def report(self) -> Activity:
        """What is known of the calls so far; replays of a graph are not counted."""
        return Activity(
            self._number,
            self._form,
            "relu",
            (self._rows, self._rows),
            f"lhs {self._rows}x1 on k",
            self._live,
            self._faster,
            (self._turns.gathered, self._turns.calls),
            None,
        )

    def _sample(self, x: torch.Tensor) -> None:
        # Norms of order 0 count what is not zero, and need no wider copy as sums of booleans do.
        live = torch.linalg.vector_norm(torch.linalg.vector_norm(x, 0, 0), 0, dtype=torch.float32)
        self._live = float(live) / self._form.k
        us = few_rows_us(self._rows, self._form.n, self._form.k, self._live)
        self._faster = us < _MARGIN * self._dense_us
        self._turns.sampled()
