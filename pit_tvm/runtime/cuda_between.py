"""What training steps of experts do between products on a GPU, each in one pass over memory."""

from __future__ import annotations

from typing import Any

from ..errors import ShapeError, mismatch
from ..gates import PLAIN, Gate
from ..schedules.hopper_activate import MOST_PIECES, activate_rows
from ..schedules.hopper_combine import CHUNK, MOST_CHUNKS, combine_rows
from ..schedules.hopper_gate import gate_rows
from ..schedules.hopper_space import DTYPES
from ..schedules.hopper_spread import MOST_ROWS, spread_rows
from ..structs import MicroTile, SparsitySpec
from .cuda_arrays import check_devices, check_tensor, dtype_name, empty, empty_of
from .cuda_bind import aligned
from .cuda_detect import CudaDetector
from .cuda_modules import Kernel, cached_modules
from .cuda_rows import FamilyKernels
from .cuda_workspace import CudaWorkspace
from .kernel_cache import KernelCache
from .promise import asked_for

_MICRO_TILE = MicroTile("rows", "m", 0, (1, 0))


class CudaBetween(FamilyKernels):
    """Activations of rows that exist, gated ones, sums of a token's choices, and their gradients.
    Threads may share it.

    Rows are float16 or bfloat16, as wide as a multiple of 8; what does not fit is a ShapeError or
    DTypeError, an activation that is none a ScheduleError.
    """

    def __init__(self, cache: KernelCache, arch: str) -> None:
        super().__init__(cache, arch)
        self._detector = CudaDetector(cached_modules(cache, arch), checked=asked_for())
        self._memory = CudaWorkspace()

    def gate(self, rows: Any, activation: str, gate: Gate = PLAIN) -> Any:
        """[number, n]: ``act(gate) * other`` of ``rows`` [number, 2 * n], as ``gate`` says."""
        number, width = _halves(rows)
        out = empty(rows, (number, width))
        if out.numel():
            self.gate_kernel(dtype_name(rows), activation, gate)(aligned(rows), out)
        return out

    def gate_gradient(self, rows: Any, down: Any, activation: str, gate: Gate = PLAIN) -> Any:
        """The gradient to ``rows``, ``down`` [number, n] being that to the result of `gate`."""
        number, width = _halves(rows)
        check_tensor("down", down, (dtype_name(rows),), (number, width))
        out = empty(rows, rows.shape)
        if out.numel():
            kernel = self.gate_kernel(dtype_name(rows), activation, gate, backward=True)
            kernel(aligned(rows), aligned(down), out)
        return out

    def total(self, rows: Any) -> Any:
        """[tokens, n]: the sums of ``rows`` [tokens, choices, n] of a token."""
        tokens, _, n = _check_rows(rows)
        out = empty(rows, (tokens, n))
        if not rows.numel():
            return out.zero_()
        self.total_kernel(dtype_name(rows))(aligned(rows), 0, out)
        return out

    def combine(self, rows: Any, weights: Any, ids: Any) -> Any:
        """The same, each row by its weight, float32 [tokens, choices]; where the id is below 0 it
        adds nothing."""
        tokens, _, n = _check_rows(rows, weights, ids)
        out = empty(rows, (tokens, n))
        if not rows.numel():
            return out.zero_()
        kernel = self.combine_kernel(dtype_name(rows), dtype_name(ids))
        kernel(aligned(rows), weights, ids, 2**31 - 1, out)  # every other id is a group's
        return out

    def spread(self, rows: Any, weights: Any, ids: Any, down: Any) -> tuple[Any, Any]:
        """The gradients to ``rows`` and ``weights``, of which ``down`` [tokens, n] is that to the
        result of `combine`; 0 where the id is below 0."""
        tokens, choices, n = _check_rows(rows, weights, ids)
        check_tensor("down", down, (dtype_name(rows),), (tokens, n))
        if tokens * choices > MOST_ROWS:
            raise ShapeError(mismatch("rows", f"at most {MOST_ROWS} rows", tokens * choices))
        drows, dweights = empty(rows, rows.shape), empty_of("float32", rows, (tokens, choices))
        if not rows.numel():
            return drows, dweights.zero_()
        kernel = self.spread_kernel(dtype_name(rows), dtype_name(ids))
        kernel(aligned(rows), weights, ids, aligned(down), drows, dweights)
        return drows, dweights

    def activate(self, rows: Any, spec: SparsitySpec, pattern: Any, activation: str) -> Any:
        """[number, n]: the activation of ``rows`` [number, n] that exist, zeros elsewhere."""
        shape = _check_plane(rows)
        out = empty(rows, shape)
        if out.numel():
            take = self._memory.take
            live, dead = self._detector.detect_split(spec, pattern, shape, _MICRO_TILE, take=take)
            lists = (live.ids, live.count, dead.ids, dead.count)
            self.activate_kernel(dtype_name(rows), activation)(aligned(rows), *lists, out)
        return out

    def activate_gradient(
        self, rows: Any, down: Any, spec: SparsitySpec, pattern: Any, activation: str
    ) -> Any:
        """The gradient to ``rows``, ``down`` [number, n] being that to the result of `activate`;
        those that do not exist hold anything."""
        shape = _check_plane(rows)
        check_tensor("down", down, (dtype_name(rows),), shape)
        check_devices("rows", rows, {"down": down})
        out = empty(rows, shape)
        if out.numel():
            take = self._memory.take
            live = self._detector.detect(spec, pattern, shape, _MICRO_TILE, take=take)
            kernel = self.activate_kernel(dtype_name(rows), activation, backward=True)
            kernel(aligned(rows), aligned(down), live.ids, live.count, out)
        return out

    def gate_kernel(
        self, dtype: str, activation: str, gate: Gate = PLAIN, *, backward: bool = False
    ) -> Kernel:
        """See `gate_rows`."""
        key = ("hopper-gate", dtype, activation, gate, backward)
        return self._get(key, lambda: gate_rows(dtype, activation, gate, backward=backward))

    def total_kernel(self, dtype: str) -> Kernel:
        """See `combine_rows`, without weights and ids."""
        return self._get(("hopper-combine", dtype), lambda: combine_rows(dtype))

    def activate_kernel(self, dtype: str, activation: str, *, backward: bool = False) -> Kernel:
        """See `activate_rows`."""
        key = ("hopper-activate", dtype, activation, backward)
        return self._get(key, lambda: activate_rows(dtype, activation, backward=backward))

    def spread_kernel(self, dtype: str, ids: str) -> Kernel:
        """See `spread_rows`."""
        return self._get(("hopper-spread", dtype, ids), lambda: spread_rows(dtype, ids))


def _halves(rows: Any) -> tuple[int, int]:
    """How many rows, and how wide their halves are."""
    check_tensor("rows", rows, DTYPES, tuple(rows.shape))
    number, wide = rows.shape
    if wide % (2 * CHUNK):
        raise ShapeError(mismatch("rows", f"two times a multiple of {CHUNK} columns", wide))
    _check_size(number, wide // 2)
    return number, wide // 2


def _check_rows(rows: Any, weights: Any = None, ids: Any = None) -> tuple[int, int, int]:
    _check_width(rows)
    tokens, choices, n = rows.shape
    _check_size(tokens, n)
    if weights is not None:
        check_tensor("weights", weights, ("float32",), (tokens, choices))
        check_tensor("ids", ids, ("int32", "int64"), (tokens, choices))
        check_devices("rows", rows, {"weights": weights, "ids": ids})
    return tokens, choices, n


def _check_plane(rows: Any) -> tuple[int, int]:
    _check_width(rows)
    number, n = rows.shape
    _check_size(number, n, MOST_PIECES)
    return number, n


def _check_width(rows: Any) -> None:
    check_tensor("rows", rows, DTYPES, tuple(rows.shape))
    if rows.shape[-1] % CHUNK:
        raise ShapeError(mismatch("rows", f"a multiple of {CHUNK} columns", rows.shape[-1]))


def _check_size(rows: int, columns: int, most: int = MOST_CHUNKS) -> None:
    if rows * columns // CHUNK > most:
        expected = f"at most {most} pieces of {CHUNK} columns"
        raise ShapeError(mismatch("rows", expected, f"{rows} of {columns}"))
