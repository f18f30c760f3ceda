"""The checks of a call's arrays in compiled code, for calls like the one before.

Asking one torch tensor for its type, shape, strides and address takes 1 us, and twice that when
other code ran since the last time; a compiled function reads the same of three tensors, from
DLPack's structure, in 1 us.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm.script import tirx as T

from .argument import Argument
from .arrays import itemsize

Look = Callable[..., int]

MOST = 3  # inputs that a gate looks at
RANK = 6  # dimensions of one
ROW = 3 + RANK  # numbers that describe an array: see `row_of`
# Fields of DLPack's DLTensor as TVM numbers them, and its words of 64 bits.
ADDRESS, ENTRIES, SHAPE, STRIDES = 0, 1, 2, 3
DATA, DEVICE, KIND, OFFSET, WORDS = 0, 1, 2, 5, 6
CPU = 1  # the only one, number 0
_WRITABLE = (np.ndarray, tvm.runtime.Tensor)  # unless DLPack says otherwise, as of read-only arrays


class Gate:
    """Whether arrays are as one layout has them, and compiled functions take them as they are.

    Nothing is said of arrays that are not: the long way does that.
    """

    def __init__(self, inputs: Sequence[Argument], result: Argument) -> None:
        rows = [row_of(argument) for argument in (result, *inputs)]
        rows += [[0] * ROW] * (1 + MOST - len(rows))
        self._all = tvm_ffi.from_dlpack(np.array(rows[: 1 + MOST], np.int64))
        self._inputs = tvm_ffi.from_dlpack(np.array([[0] * ROW, *rows[1 : 1 + MOST]], np.int64))
        self._absent = (None,) * (MOST - len(inputs))
        fits = all(a.filled and len(a.shape) <= RANK for a in (*inputs, result))
        self.useful = fits and len(inputs) <= MOST

    def opens(self, look: Look, arrays: Iterable[Any], out: Any) -> bool:
        """Ask ``look``, the kernel of `look_at`, about the inputs, of which the long way took such
        ones as they are, and the result, None for a new one."""
        want = self._all
        if out is None:
            want = self._inputs
        elif type(out) not in _WRITABLE:
            torch = sys.modules.get("torch")
            if torch is None or type(out) is not torch.Tensor or out.requires_grad:
                return False
        if negated(out) or any(map(negated, arrays)):
            return False
        try:
            return look(want, out, *arrays, *self._absent) == 0
        except (BufferError, RuntimeError, TypeError, ValueError):  # DLPack cannot express it
            return False


def negated(array: Any) -> bool:
    """Whether a tensor's memory holds the negatives of its elements, which DLPack does not say."""
    return type(array) is not np.ndarray and hasattr(array, "is_neg") and array.is_neg()


def row_of(argument: Argument) -> list[int]:
    """Rank and type as a word of DLPack, bits of an address that are 0, bytes, extents."""
    kind = tvm_ffi.dtype(argument.dtype)
    rank, shape = len(argument.shape), argument.shape
    word = rank | kind.type_code << 32 | kind.bits << 40 | kind.lanes << 48
    size = itemsize(argument.dtype)
    return [word, size - 1, size * math.prod(shape), *(*shape, *[0] * RANK)[:RANK]]


def field(tensor: Any, kind: int, dtype: str = "int64") -> Any:
    """A pointer to ``dtype`` in the DLTensor ``tensor``, or the one to itself."""
    return T.tvm_struct_get(tensor, 0, kind, T.handle(dtype).ty)


@T.inline
def compare(tensor, want, i, found):
    """found[0]: 0 if ``tensor`` is as row ``i`` of ``want`` says, contiguous and on the CPU;
    found[1]: its address. Uses found[2]."""
    address: T.let[T.handle("int64")] = field(tensor, ADDRESS)
    words = T.decl_buffer((WORDS,), "int64", data=address)
    found[0] = (words[DEVICE] ^ T.int64(CPU)) | words[OFFSET]
    found[1] = words[DATA]
    found[0] = found[0] | (words[KIND] ^ want[i, 0]) | (found[1] & want[i, 1])
    if T.And(found[1] == T.int64(0), want[i, 2] != T.int64(0)):  # elements without memory
        found[0] = T.int64(1)
    if found[0] == T.int64(0):
        shape: T.let[T.handle("int64")] = field(tensor, SHAPE)
        extents = T.decl_buffer((RANK,), "int64", data=shape)
        strides: T.let[T.handle("int64")] = field(tensor, STRIDES)
        steps = T.decl_buffer((RANK,), "int64", data=strides)
        rank: T.let = want[i, 0] & T.int64(0xFF)
        found[2] = T.int64(1)
        for d in range(rank):
            at: T.let = rank - 1 - d
            found[0] = found[0] | (extents[at] ^ want[i, 3 + at])
            if T.And(T.Not(T.isnullptr(strides)), extents[at] != T.int64(1)):
                found[0] = found[0] | (steps[at] ^ found[2])
            found[2] = found[2] * extents[at]


def look_at() -> tvm.IRModule:
    """0 if a result and `MOST` inputs are as ``want`` says, and none shares the result's memory.

    ``want``: int64 ``[1 + MOST, ROW]``, a row of zeros for each one that is absent. They must be
    on the CPU and contiguous.
    """

    @T.inline
    def check(want, i, tensor, found):
        if T.isnullptr(tensor):
            found[3] = found[3] | want[i, 0]
        else:
            compare(tensor, want, i, found)
            found[3] = found[3] | found[0]
            if i == 0:
                found[4] = found[1]
                found[5] = found[1] + want[i, 2]
            else:
                if T.And(found[1] < found[5], found[4] < found[1] + want[i, 2]):
                    found[3] = T.int64(1)

    @T.prim_func(s_tir=True)
    def main(
        p_want: T.handle, result: T.handle, first: T.handle, second: T.handle, third: T.handle
    ) -> T.int64:
        want = T.match_buffer(p_want, (1 + MOST, ROW), "int64", align=8)
        # as `compare` has them; wrong in any; first and last address of the result
        found = T.alloc_buffer((6,), "int64")
        for i in range(6):
            found[i] = T.int64(0)
        check(want, 0, result, found)
        check(want, 1, first, found)
        check(want, 2, second, found)
        check(want, 3, third, found)
        return found[3]

    return tvm.IRModule({"main": main})
