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

from ..errors import AxisError, DTypeError, ShapeError, mismatch
from ..remember import remember
from ..structs import BitMask, BlockMask, Index, Mask, MicroTile, SparsitySpec, Values
from .detect_compact import bit_positions
from .detect_ids import SliceCall
from .detect_plan import Build, MaskPlan, kernel_name, plan_mask
from .detect_sample import SamplePlan, plan_sample
from .detect_view import Elements
from .detect_workspace import Array, Workspace, flat_view, fresh

Kernel = Callable[..., Any]
GetKernel = Callable[[str, Callable[[], tvm.IRModule], Any], Kernel]

INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)
UINT8 = np.dtype(np.uint8)
MAX_PLANS = 1024  # kept by one detector; making one again costs some 50 us

# What makes an element of each type live: everything, or for floating point all but the sign.
INTEGERS = {"bool": 8, **{f"{u}int{bits}": bits for u in ("", "u") for bits in (8, 16, 32, 64)}}
FLOATS = {"float16": 16, "bfloat16": 16, "uint16": 16, "float32": 32, "float64": 64}


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
        self._samples: dict[Any, tuple[SamplePlan, Kernel, np.dtype[Any]]] = {}
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
        flat = _entries(spec, array, mask.plan.entries, mask.element, micro_tile.operand)
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

    def sample(
        self,
        spec: SparsitySpec,
        value: npt.ArrayLike,
        shape: tuple[int, ...],
        *,
        windows: int = 32,
    ) -> npt.NDArray[np.float64]:
        """Covered densities of a few micro-tiles, from windows of 64x64 of the pattern.

        The windows lie in the last two dimensions, on multiples of 64, spread evenly and always
        at the same places; all of them are read if there are at most ``windows``.

        Parameters
        ----------
        spec, value, shape
            As for `detect`; `Mask`, `BitMask`, `BlockMask` or `Values`.

        Returns
        -------
        float64 ``[11]``
            Share of live micro-tiles for each of ``pit_tvm.selection.cover.SAMPLE_EXTENTS``.

        Raises
        ------
        ShapeError, DTypeError
            As for `detect`.
        AxisError
            The specification names slices: their share is known without sampling.
        """
        shape = tuple(shape)
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
        key = (spec, array.dtype, shape, windows)
        plan, kernel, element = self._samples.get(key) or self._sample_call(key)
        flat = _entries(spec, array, plan.entries, element, "operand")
        if not len(plan.where):
            return np.zeros(len(plan.totals))
        live = np.empty(len(plan.totals), INT64)
        kernel(flat, plan.where.reshape(-1), live, len(plan.where), *plan.args)
        return live / plan.totals

    def slices(
        self, spec: SparsitySpec, shape: tuple[int, ...], micro_tile: MicroTile
    ) -> SliceCall:
        """The detection of slices of an operand of ``shape``, for several calls; see `detect`."""
        return SliceCall(spec, shape, micro_tile, self._kernel, self._checked)

    def _mask_call(self, key: tuple[Any, ...]) -> _MaskCall:
        spec, dtype, shape, micro_tile = key
        elements, element = _elements(spec, dtype, shape, micro_tile.operand)
        plan = plan_mask(shape, micro_tile, elements)
        folds = tuple((self._kernel(s.build), s.args, s.size) for s in plan.folds)
        last = None if plan.last is None else self._kernel(plan.last.build)
        tables = (self._positions,) if plan.last is not None and plan.last.needs_table else ()
        operand = micro_tile.operand
        call = _MaskCall(plan, element, folds, last, tables, f"{operand} ids", f"{operand} count")
        return remember(self._calls, key, call, MAX_PLANS)

    def _sample_call(self, key: tuple[Any, ...]) -> tuple[SamplePlan, Kernel, np.dtype[Any]]:
        spec, dtype, shape, windows = key
        if not isinstance(spec, (Mask, Values, BitMask, BlockMask)):
            expected = "Mask, BitMask, BlockMask or Values"
            raise AxisError(mismatch("spec", expected, spec, "slices need no sampling"))
        if windows < 1:
            raise ShapeError(mismatch("windows", "at least 1", windows))
        elements, element = _elements(spec, dtype, shape, "operand")
        plan = plan_sample(shape, elements, windows)
        call = (plan, self._kernel(plan.build), element)
        return remember(self._samples, key, call, MAX_PLANS)

    def _kernel(self, build: Build) -> Kernel:
        """The compiled kernel of a template; compiled once, whichever thread comes first."""
        key = (build.func, build.args)
        kernel = self._kernels.get(key)
        if kernel is None:
            with self._lock:
                kernel = self._kernels.get(key)
                if kernel is None:
                    kernel = self._get_kernel(kernel_name(build), build, self.target)
                    self._kernels[key] = kernel
        return kernel


def compile_kernel(name: str, build: Callable[[], tvm.IRModule], target: Any) -> Kernel:
    """Compile the module that ``build`` makes; its function is ``main``, whatever ``name``."""
    return tvm.compile(build(), target=target).mod.get_function("main")


# --------------------------------------------------------------------------------------------


def _argument(spec: SparsitySpec, operand: str) -> str:
    return f"sparsity of {operand} ({type(spec).__name__})"


def _entries(
    spec: SparsitySpec, array: Array, shape: tuple[int, ...], element: np.dtype[Any], operand: str
) -> Any:
    """The user's array, checked, as a flat vector of ``element``."""
    if array.shape != shape:
        raise ShapeError(mismatch(_argument(spec, operand), f"shape {shape}", array.shape))
    return flat_view(_argument(spec, operand), array, element)


def _elements(
    spec: SparsitySpec, dtype: np.dtype[Any], shape: tuple[int, ...], operand: str
) -> tuple[Elements, np.dtype[Any]]:
    """What an entry of the array is, and the unsigned type under which kernels read it."""
    name = dtype.name if dtype.isnative else f"byte-swapped {dtype.name}"
    if isinstance(spec, Values):
        if name in FLOATS:
            bits = FLOATS[name]
            return Elements(bits, (1 << bits - 1) - 1), np.dtype(f"uint{bits}")
        if name in INTEGERS:
            bits = INTEGERS[name]
            return Elements(bits, (1 << bits) - 1), np.dtype(f"uint{bits}")
        raise DTypeError(mismatch(_argument(spec, operand), "floating point or integers", name))
    allowed = ("uint8",) if isinstance(spec, BitMask) else ("bool", "uint8")
    if name not in allowed:
        advice = "use Values to detect non-zeros" if isinstance(spec, Mask) else ""
        expected = " or ".join(allowed)
        raise DTypeError(mismatch(_argument(spec, operand), expected, name, advice))
    if isinstance(spec, BlockMask):
        if len(spec.extents) != len(shape):
            expected = f"one extent for each of {len(shape)} dimensions"
            raise ShapeError(mismatch("BlockMask", expected, spec.extents))
        grains = spec.extents if max(spec.extents) > 1 else ()
        return Elements(8, 0xFF, grains=grains), UINT8
    return Elements(8, 0xFF, packed=isinstance(spec, BitMask)), UINT8
