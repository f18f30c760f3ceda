"""CUDA arrays of one call against the operator's signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir

from ..errors import DTypeError, ShapeError, mismatch
from ..remember import remember
from .bind import Binder, Layout, told_pattern
from .cuda_arrays import as_cuda, check_memory, check_tensor, empty, empty_of
from .cuda_call import CudaCall, CudaPlace
from .program import Program
from .promise import asked_for

ALIGNMENT = 15  # addresses without these bits are multiples of 16 bytes


# The call, its inputs in order, what tells the pattern, the output, and where all of them are.
CudaBound = tuple[CudaCall, Sequence[Any], Any, Any, CudaPlace]


class CudaBinder(Binder):
    """Checks CUDA tensors; what was checked once is known by shapes, types, strides and device.

    With ``PIT_TVM_CHECK=1`` calls wait for index operands, to look for indices out of range.
    """

    def __init__(self, program: Program, owner: object) -> None:
        super().__init__(program, owner)
        self._names = [p.name for p in program.inputs]
        # Places of operands and output: group ids are inputs too, and need no alignment.
        dtype = program.output.dtype
        moved = [i for i, p in enumerate(program.inputs) if p.dtype == dtype]
        self._alike = bool(moved)  # an input has the output's type
        self._moved = [*(moved or [0]), len(program.inputs)]
        self._calls: dict[tuple[object, ...], CudaCall] = {}
        self._looks_up = bool(program.lookups) and asked_for()

    def bind_cuda(self, given: Sequence[Any], sparsity: Any, out: Any) -> CudaBound:
        """Check ``given`` against the inputs, in order, what tells the pattern, and ``out``, which
        is made if it is None.

        Raises
        ------
        ShapeError, DTypeError
            As `Binder.bind`; also for tensors on several devices, and an ``out`` that shares
            memory with an input.
        """
        if sparsity is None:
            self._check_number(given)
            named = dict(zip(self._names, given, strict=True))
            sparsity = told_pattern(self.program, named, None)
        call = self._known(given, sparsity, out)
        if call is None:
            given, sparsity, call = self._checked(given, sparsity, out)
        placed = given if out is None else (*given, out)
        try:
            places = tuple([tensor.data_ptr() for tensor in placed])
            told = sparsity.data_ptr()
        except RuntimeError:
            self._check_memory(sparsity, placed)
            raise
        if not told or 0 in places:  # an empty tensor, or one without memory that is like others
            self._check_memory(sparsity, placed)
        if self._looks_up:
            self._check_lookups(call.layout, given)
        place = call.places.get(places)
        if place is None:
            place = remember(call.places, places, self._place(call, placed, places))
        if out is None:
            like, shape = given[self._moved[0]], call.layout.output
            dtype = self.program.output.dtype
            out = empty(like, shape) if self._alike else empty_of(dtype, like, shape)
        return call, given, sparsity, out, place

    def _known(self, given: Sequence[Any], value: Any, out: Any) -> CudaCall | None:
        """The call of tensors like these, if there was one; None also for what is no tensor."""
        tensors = (*given, value) if out is None else (*given, value, out)
        try:
            # Operands and output are known only as contiguous ones: sparse tensors are not.
            return self._calls.get(_key(value, tensors, out is None))
        except (AttributeError, RuntimeError):  # another library's array; a compressed tensor
            return None

    def _checked(
        self, given: Sequence[Any], value: Any, out: Any
    ) -> tuple[Sequence[Any], Any, CudaCall]:
        """The tensors of inputs and pattern, and their call; errors as `bind_cuda`."""
        self._check_number(given)
        *inputs, value = tensors = as_cuda((*self._names, "sparsity"), (*given, value))
        if out is not None:
            check_tensor(self.program.output.name, out)
            tensors.append(out)
        key = _key(value, tensors, out is None)
        call = self._calls.get(key)
        if call is None:
            call = remember(self._calls, key, self._check(inputs, value, out))
        return inputs, value, call

    def _place(self, call: CudaCall, placed: Sequence[Any], places: Sequence[int]) -> CudaPlace:
        """What the addresses of inputs, and of an output that was passed, decide.

        DTypeError if they are on several devices, ShapeError if the output shares memory with an
        input.
        """
        for name, tensor in zip((*self._names, self.program.output.name), placed, strict=False):
            if tensor.get_device() != call.device:
                expected = f"the device of sparsity, cuda:{call.device}"
                raise DTypeError(mismatch(name, expected, tensor.device))
        if not call.fresh:
            self._check_apart(places, places[-1], call.sizes)
        # A new output begins at a multiple of 16 bytes.
        moved = self._moved[:-1] if call.fresh else self._moved
        return CudaPlace(call.whole and not any(places[i] & ALIGNMENT for i in moved))

    def layout_of_inputs(self, given: Sequence[Any]) -> Layout:
        """The layout of checked inputs; errors as `bind_cuda`."""
        self._check_number(given)
        return self._check_inputs(as_cuda(self._names, given))

    def _check(self, inputs: Sequence[Any], value: Any, out: Any) -> CudaCall:
        layout = self._check_inputs(inputs)
        self._check_device("sparsity", value, inputs)
        tensors = list(inputs)
        shapes = (*layout.shapes, layout.output)
        rows = [shapes[i] for i in self._moved]
        if out is not None:
            param = self.program.output
            check_tensor(param.name, out, (param.dtype,), layout.output)
            self._check_device(param.name, out, inputs)
            tensors.append(out)
        item = inputs[self._moved[0]].element_size()
        whole = all(shape[-1] * item & ALIGNMENT == 0 for shape in rows)
        sizes = tuple(a.numel() * a.element_size() for a in tensors)
        return CudaCall(layout, inputs[0].get_device(), sizes, whole, out is None)

    def _check_inputs(self, inputs: Sequence[Any]) -> Layout:
        sizes: dict[str, int] = {}
        for param, array in zip(self.program.inputs, inputs, strict=True):
            check_tensor(param.name, array, (param.dtype,))
            self._check_device(param.name, array, inputs)
            if len(array.shape) != len(param.shape):
                expected = f"{len(param.shape)} dimensions"
                raise ShapeError(mismatch(param.name, expected, tuple(array.shape)))
            for extent, actual in zip(param.shape, array.shape, strict=True):
                if isinstance(extent, ir.Var):
                    sizes.setdefault(str(extent.name), int(actual))
        layout = self.layout_of(sizes, "torch")
        self._check_depth(layout)
        self._check_filled(layout)
        for param, array, shape in zip(self.program.inputs, inputs, layout.shapes, strict=True):
            check_tensor(param.name, array, (param.dtype,), shape)
        return layout

    def _check_device(self, name: str, array: Any, inputs: Sequence[Any]) -> None:
        if array.device != inputs[0].device:
            expected = f"the device of {self._names[0]}, {inputs[0].device}"
            raise DTypeError(mismatch(name, expected, array.device))

    def _check_depth(self, layout: Layout) -> None:
        """A kernel's pipeline has a first step: an empty sum would never end."""
        con = self.program.contraction
        if con is None:
            return
        shape = layout.shapes[self._names.index(con.sparse)]
        if shape[con.sparse_axes.index(con.reduce)] == 0:
            what = f"{con.sparse}: extent {con.reduce}"
            raise ShapeError(mismatch(what, "at least 1 on a GPU", 0))

    def _check_memory(self, value: Any, placed: Sequence[Any]) -> None:
        """Refuse tensors without memory of their own, as `as_cuda` does; errors as `bind_cuda`."""
        names = (*self._names, self.program.output.name)[: len(placed)]
        check_memory(("sparsity", *names), (value, *placed))

    def _check_filled(self, layout: Layout) -> None:
        """Kernels read the nearest element of an index outside: there must be one."""
        shapes = dict(zip(self._names, layout.shapes, strict=True))
        for each in self.program.lookups:
            if shapes[each.operand][each.dim] == 0 and 0 not in shapes[each.ids]:
                what = f"{each.operand}: dimension {each.dim}"
                expected = f"at least 1 element, which {each.ids} names"
                raise ShapeError(mismatch(what, expected, "none"))

    def _check_lookups(self, layout: Layout, inputs: Sequence[Any]) -> None:
        """ShapeError for indices out of range, as on CPUs; waits for them."""
        for lookup in self.program.lookups:
            ids = inputs[self._names.index(lookup.ids)].detach().cpu()
            self._check_lookup(lookup, layout, {lookup.ids: ids})

    def _check_apart(self, places: Sequence[int], first: int, sizes: Sequence[int]) -> None:
        """The output, which begins at ``first``, must not share memory with an input."""
        last = first + sizes[-1]
        for name, place, size in zip(self._names, places, sizes, strict=False):
            if place < last and first < place + size:
                expected = f"memory apart from {name}"
                raise ShapeError(mismatch(self.program.output.name, expected, "the same"))


def aligned(array: Any) -> Any:
    """The array where kernels may move it in vectors: a copy of one that begins elsewhere."""
    return array.clone() if array.data_ptr() & ALIGNMENT else array


def _key(value: Any, tensors: Sequence[Any], fresh: bool) -> tuple[object, ...]:
    """What a `CudaCall` is known by. Of the devices only that of ``value``: memory of another one
    has other addresses, so `CudaBinder._place` sees it."""
    key: list[object] = [value.layout, value.get_device(), fresh]
    for a in tensors:
        key += (a.shape, a.dtype, a.is_contiguous(), a.is_neg())
    return tuple(key)
