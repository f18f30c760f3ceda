"""CUDA arrays of one call against the operator's signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir

from ..errors import DTypeError, ShapeError, mismatch
from ..remember import remember
from .bind import Binder, Bound, Layout
from .cuda_arrays import as_cuda, check_tensor, signature
from .program import Program


class CudaBinder(Binder):
    """Checks CUDA tensors; what was checked once is known by shapes, types, strides and device."""

    def __init__(self, program: Program, owner: object) -> None:
        super().__init__(program, owner)
        self._seen: dict[tuple[object, ...], Layout] = {}

    def bind(self, given: Sequence[Any]) -> Bound:
        """Check ``given`` against the inputs, in order; errors as `Binder.bind`, and DTypeError
        for arrays on several devices."""
        inputs = self.program.inputs
        self._check_number(given)
        arrays = [as_cuda(p.name, array) for p, array in zip(inputs, given, strict=True)]
        key = signature(arrays)
        layout = self._seen.get(key)
        if layout is None:
            layout = remember(self._seen, key, self._check(arrays))
        named = {p.name: array for p, array in zip(inputs, arrays, strict=True)}
        return Bound(layout, named, named, {})

    def _check(self, arrays: Sequence[Any]) -> Layout:
        sizes: dict[str, int] = {}
        for param, array in zip(self.program.inputs, arrays, strict=True):
            check_tensor(param.name, array, (param.dtype,))
            if array.device != arrays[0].device:
                first = self.program.inputs[0].name
                expected = f"the device of {first}, {arrays[0].device}"
                raise DTypeError(mismatch(param.name, expected, array.device))
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
        return layout

    def _check_depth(self, layout: Layout) -> None:
        """A kernel's pipeline has a first step: an empty sum would never end."""
        con = self.program.contraction
        if con is not None and layout.operand[con.sparse_axes.index(con.reduce)] == 0:
            what = f"{self.program.operand}: extent {con.reduce}"
            raise ShapeError(mismatch(what, "at least 1 on a GPU", 0))
