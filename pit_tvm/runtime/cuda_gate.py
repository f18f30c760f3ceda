"""Gated activations of rows on a GPU, and their gradients: one pass over memory each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ShapeError, mismatch
from ..schedules.hopper_combine import CHUNK
from ..schedules.hopper_gate import MOST_CHUNKS, gate_rows
from ..schedules.hopper_space import DTYPES
from .cuda_arrays import check_tensor, dtype_name, empty
from .cuda_bind import aligned
from .cuda_rows import FamilyKernels


class CudaGate(FamilyKernels):
    """``act(gate) * other`` of rows ``[gate | other]``. Threads may share it."""

    def run(self, rows: Any, activation: str) -> Any:
        """[number, width] of ``rows`` [number, 2 * width], float16 or bfloat16; the width is a
        multiple of 8.

        Raises
        ------
        ShapeError, DTypeError, ScheduleError
            An argument does not fit.
        """
        number, width = _halves(rows)
        out = empty(rows, (number, width))
        if out.numel():
            kernel = self.kernel(dtype_name(rows), activation, backward=False)
            kernel(aligned(rows).view(number, 2, width), out)
        return out

    def gradient(self, rows: Any, down: Any, activation: str) -> Any:
        """The gradient to ``rows``, of which ``down`` [number, width] is that to the result; errors
        as `run`."""
        number, width = _halves(rows)
        check_tensor("down", down, (dtype_name(rows),), (number, width))
        out = empty(rows, rows.shape)
        if out.numel():
            kernel = self.kernel(dtype_name(rows), activation, backward=True)
            halves = number, 2, width
            kernel(aligned(rows).view(halves), aligned(down), out.view(halves))
        return out

    def kernel(self, dtype: str, activation: str, *, backward: bool) -> Callable[..., Any]:
        """rows, [gradient,] out; see `gate_rows`."""
        key = ("hopper-gate", dtype, activation, backward)
        return self._get(key, lambda: gate_rows(dtype, activation, backward=backward))


def _halves(rows: Any) -> tuple[int, int]:
    """How many rows, and how wide their halves are."""
    check_tensor("rows", rows, DTYPES, tuple(rows.shape))
    number, wide = rows.shape
    if wide % (2 * CHUNK):
        raise ShapeError(mismatch("rows", f"two times a multiple of {CHUNK} columns", wide))
    if rows.numel() // (2 * CHUNK) > MOST_CHUNKS:
        expected = f"at most {MOST_CHUNKS} pieces of {CHUNK} columns"
        raise ShapeError(mismatch("rows", expected, f"shape {list(rows.shape)}"))
    return number, wide // 2
