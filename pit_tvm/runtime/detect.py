"""Online detection: lists of live micro-tiles from what the user passes at the call.

Masks of every kind are read once, in parallel, by the kernels of `detect_kernels` and
`detect_compact`; row ids, lengths and group ids by those of `detect_slices`. Every list but that
of row ids comes out ascending, since one list is one task, so ``deterministic`` costs nothing
there; row ids keep the user's order and are sorted on demand. (The paper's index, PIT, SOSP'23,
section 3, is unordered; a CPU would gain nothing from that.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm

from ..pools import pooled
from ..remember import remember
from ..structs import BitMask, BlockMask, Index, Mask, MicroTile, SparsitySpec, Values
from .argument import pattern_array
from .detect_compact import bit_positions
from .detect_ids import SliceCall
from .detect_plan import Build, Kernel, MaskPlan, is_parallel, kernel_name, plan_mask
from .detect_sample import Lines, SampleCall
from .detect_view import UINT8, elements_of, entries_of
from .detect_workspace import Array, Workspace, fresh

GetKernel = Callable[[str, Callable[[], tvm.IRModule], Any], Kernel]

INT32 = np.dtype(np.int32)
MAX_PLANS = 1024  # kept by one detector; making one again costs some 50 us


@dataclass(frozen=True)
class _MaskCall:
    """A plan with its kernels, and the names under which it takes memory."""

    plan: MaskPlan
    element: np.dtype[Any]
    folds: tuple[tuple[Kernel, tuple[int, ...], int], ...]
    last: Kernel | None
    tables: tuple[Array, ...]
    ids: str
    count: str


class Detector:
    """Builds indices with kernels compiled for one CPU target. Threads may share it.

    Parameters
    ----------
    target
        What ``tvm.compile`` takes, such as ``{"kind": "llvm", "mcpu": "x86-64-v4"}``.
    get_kernel
        ``get_kernel(name, build, target)`` returns the compiled function of the module that
        ``build()`` makes: a kernel cache. Without it, kernels are compiled here. Either way they
        are kept in this object.
    checked
        Look for row ids that are repeated.
    """

    def __init__(
        self,
        target: str | Mapping[str, Any],
        get_kernel: GetKernel | None = None,
        *,
        checked: bool = False,
    ) -> None:
        self.target, self._checked = target, checked
        self._get_kernel = get_kernel or compile_kernel
        self._kernels: dict[Any, Kernel] = {}
        self._calls: dict[Any, _MaskCall] = {}
        self._lock = threading.Lock()
        self._positions = bit_positions()

    def detect(
        self,
        spec: SparsitySpec,
        value: npt.ArrayLike,
        shape: tuple[int, ...],
        micro_tile: MicroTile,
        *,
        deterministic: bool = False,
        workspace: Workspace | None = None,
    ) -> Index:
        """Lists of the live micro-tiles of one operand.

        Parameters
        ----------
        spec, value
            The operand's specification and the array passed for it: for `Mask` bool or uint8 of
            ``shape``; for `BitMask` and `BlockMask` of the shapes that they state, padding bits
            0; for `Values` the operand itself (NaN is live, -0.0 is not; uint16 stands for the
            bits of bfloat16 or float16). These must be C-contiguous. For `Rows`, `Lengths` and
            `Groups` a vector of int32 or int64.
        shape
            The operand's shape.
        micro_tile
            One extent per dimension; for `Rows`, `Lengths` and `Groups` all 0 but the PIT one,
            which is the specification's ``dim``.
        deterministic
            Ascending lists, whatever the input (row ids are sorted; all others always are).
        workspace
            Memory of the calling thread for the result, which holds until the same workspace is
            used again for the same operand. Without it, every call allocates.

        Returns
        -------
        Index
            ``capacity`` is the size of the PIT dimension rounded up to a multiple of 64, at
            least 64; the 64 entries after ``count`` hold 0, as far as there is room.

        Raises
        ------
        ShapeError, DTypeError, AxisError
            The message names the argument. Ids and lengths are checked completely.
        """
        shape = tuple(shape)
        if not isinstance(spec, (Mask, Values, BitMask, BlockMask)):
            slices = self.slices(spec, shape, micro_tile)
            return slices.index(value, workspace, deterministic=deterministic)
        take = fresh if workspace is None else workspace.take
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
        key = (spec, array.dtype, shape, micro_tile)
        mask = self._calls.get(key) or self._mask_call(key)
        flat = entries_of(spec, array, mask.plan.entries, mask.element, micro_tile.operand)
        ids = take(mask.ids, (*mask.plan.slots, mask.plan.capacity), INT32)
        count = take(mask.count, mask.plan.slots, INT32)
        if mask.plan.last is None or mask.last is None:
            ids.fill(0)
            count.fill(0)
            return Index(ids, count)
        for number, (kernel, args, size) in enumerate(mask.folds):
            flags = take(f"flags {number & 1}", (size,), UINT8)
            kernel(flat, flags, *args)
            flat = flags
        mask.last(flat, *mask.tables, ids.reshape(-1), count.reshape(-1), *mask.plan.last.args)
        return Index(ids, count)

    def read(
        self, spec: SparsitySpec, value: Any, shape: tuple[int, ...], micro_tile: MicroTile
    ) -> Array:
        """``value`` as an array of any strides, checked as `detect` does, without a kernel; errors
        are those of `detect`."""
        array = pattern_array(value)
        if not isinstance(spec, (Mask, Values, BitMask, BlockMask)):
            # Of what is empty the type says nothing.
            return self.slices(spec, shape, micro_tile).read(array if array.size else [])
        array = np.ascontiguousarray(array)
        elements, element = elements_of(spec, array.dtype, shape, micro_tile.operand)
        entries_of(spec, array, elements.entries(shape), element, micro_tile.operand)
        return array

    def sampling(
        self,
        spec: SparsitySpec,
        shape: tuple[int, ...],
        lines: Lines | None = None,
        *,
        operand: str = "operand",
    ) -> SampleCall:
        """The sampling of covered densities of an operand of ``shape``, for several calls.

        Windows of 64x64 lie in the last two dimensions, on multiples of 64, spread evenly and
        always at the same places; all of them are read if there are fewer than
        `detect_sample.WINDOWS`.

        Parameters
        ----------
        spec, shape
            As for `detect`; `Mask`, `BitMask`, `BlockMask` or `Values`.
        lines
            Whole lines that are read as well.
        operand
            The operand's name, for messages.

        Raises
        ------
        ShapeError
            No dimension; from the call, as for `detect`.
        DTypeError
            From the call, as for `detect`.
        AxisError
            The specification names slices: their share is known without sampling.
        """
        return SampleCall(spec, shape, self._kernel, lines, operand)

    def slices(
        self, spec: SparsitySpec, shape: tuple[int, ...], micro_tile: MicroTile
    ) -> SliceCall:
        """The detection of slices of an operand of ``shape``, for several calls; see `detect`."""
        return SliceCall(spec, shape, micro_tile, self._kernel, self._checked)

    def _mask_call(self, key: tuple[Any, ...]) -> _MaskCall:
        spec, dtype, shape, micro_tile = key
        elements, element = elements_of(spec, dtype, shape, micro_tile.operand)
        plan = plan_mask(shape, micro_tile, elements)
        folds = tuple((self._kernel(s.build), s.args, s.size) for s in plan.folds)
        last = None if plan.last is None else self._kernel(plan.last.build)
        tables = (self._positions,) if plan.last is not None and plan.last.needs_table else ()
        operand = micro_tile.operand
        call = _MaskCall(plan, element, folds, last, tables, f"{operand} ids", f"{operand} count")
        return remember(self._calls, key, call, MAX_PLANS)

    def _kernel(self, build: Build) -> Kernel:
        """The compiled kernel of a template; compiled once, whichever thread comes first."""
        key = (build.func, build.args)
        kernel = self._kernels.get(key)
        if kernel is None:
            with self._lock:
                kernel = self._kernels.get(key)
                if kernel is None:
                    kernel = self._get_kernel(kernel_name(build), build, self.target)
                    kernel = pooled(kernel) if is_parallel(build) else kernel
                    self._kernels[key] = kernel
        return kernel


def compile_kernel(name: str, build: Callable[[], tvm.IRModule], target: Any) -> Kernel:
    """Compile the module that ``build`` makes; its function is ``main``, whatever ``name``."""
    return tvm.compile(build(), target=target).mod.get_function("main")
