"""CUDA arrays of one call against the operator's signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tvm import ir

from ..errors import DTypeError, ShapeError, mismatch
from ..remember import remember
from .bind import Binder, Layout
from .cuda_arrays import as_cuda, check_tensor, signature
from .program import Program

ALIGNMENT = 15  # addresses without these bits are multiples of 16 bytes


class CudaBound(NamedTuple):
    """The checked tensors of one call, by name; ``aligned``: all rows, of the output too, begin at
    multiples of 16 bytes."""

    layout: Layout
    arrays: dict[str, Any]
    aligned: bool


class _Seen(NamedTuple):
    """What one signature means: bytes of every tensor, and whether rows have whole 16 bytes."""

    layout: Layout
    sizes: tuple[int, ...]
    whole: bool


class CudaBinder(Binder):
    """Checks CUDA tensors; what was checked once is known by shapes, types, strides and device."""

    def __init__(self, program: Program, owner: object) -> None:
        super().__init__(program, owner)
        self._names = [p.name for p in program.inputs]
        self._seen: dict[tuple[object, ...], _Seen] = {}

    def bind_cuda(self, given: Sequence[Any], out: Any) -> CudaBound:
        """Check ``given`` against the inputs, in order, and ``out`` unless it is None.

        Raises
        ------
        ShapeError, DTypeError
            As `Binder.bind`; also for tensors on several devices, and an ``out`` that shares
            memory with an input.
        """
        self._check_number(given)
        arrays = [as_cuda(name, array) for name, array in zip(self._names, given, strict=True)]
        tensors = arrays
        if out is not None:
            check_tensor(self.program.output.name, out)
            tensors = [*arrays, out]
        key = signature(tensors)
        seen = self._seen.get(key)
        if seen is None:
            seen = remember(self._seen, key, self._check(arrays, out))
        places = [tensor.data_ptr() for tensor in tensors]
        if out is not None:
            self._check_apart(places, seen.sizes)
        aligned = seen.whole
        for place in places:
            aligned = aligned and not place & ALIGNMENT
        return CudaBound(seen.layout, dict(zip(self._names, arrays, strict=True)), aligned)

    def _check(self, arrays: Sequence[Any], out: Any) -> _Seen:
        sizes: dict[str, int] = {}
        for param, array in zip(self.program.inputs, arrays, strict=True):
            check_tensor(param.name, array, (param.dtype,))
            if array.device != arrays[0].device:
                raise DTypeError(mismatch(param.name, self._device(arrays), array.device))
            if len(array.shape) != len(param.shape):
                expected = f"{len(param.shape)} dimensions"
                raise ShapeError(mismatch(param.name, expected, tuple(array.shape)))
            for extent, actual in zip(param.shape, array.shape, strict=True):
                if isinstance(extent, ir.Var):
                    sizes.setdefault(str(extent.name), int(actual))
        layout = self.layout_of(sizes, "torch")
        self._check_depth(layout)
        for param, array, shape in zip(self.program.inputs, arrays, layout.shapes, strict=True):
            check_tensor(param.name, array, (param.dtype,), shape)
        tensors, rows = list(arrays), [*layout.shapes, layout.output]
        if out is not None:
            param = self.program.output
            check_tensor(param.name, out, (param.dtype,), layout.output)
            if out.device != arrays[0].device:
                raise DTypeError(mismatch(param.name, self._device(arrays), out.device))
            tensors.append(out)
        item = arrays[0].element_size()
        whole = all(shape[-1] * item & ALIGNMENT == 0 for shape in rows)
        return _Seen(layout, tuple(a.numel() * a.element_size() for a in tensors), whole)

    def _device(self, arrays: Sequence[Any]) -> str:
        return f"the device of {self._names[0]}, {arrays[0].device}"

    def _check_depth(self, layout: Layout) -> None:
        """A kernel's pipeline has a first step: an empty sum would never end."""
        con = self.program.contraction
        if con is not None and layout.operand[con.sparse_axes.index(con.reduce)] == 0:
            what = f"{self.program.operand}: extent {con.reduce}"
            raise ShapeError(mismatch(what, "at least 1 on a GPU", 0))

    def _check_apart(self, places: Sequence[int], sizes: Sequence[int]) -> None:
        """The output, which comes last, must not share memory with an input."""
        first, last = places[-1], places[-1] + sizes[-1]
        for name, place, size in zip(self._names, places, sizes, strict=False):
            if place < last and first < place + size:
                expected = f"memory apart from {name}"
                raise ShapeError(mismatch(self.program.output.name, expected, "the same"))
