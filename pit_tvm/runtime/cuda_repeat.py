"""Calls on a GPU that are like one before, in one step: compiled code compares their tensors with
those calls', and launches what they launched.

What is compared is all that the checks of a call depend on, so that nothing is checked twice; a
call that is like none goes the long way, which checks it, and may be kept. Where its tensors are at
addresses that came before, as those of a loop are, a CUDA graph launches everything at once.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tvm_ffi

from ..structs import Plan
from .cuda_arrays import dtype_name, empty, is_capturing, is_rehearsed
from .cuda_bind import CudaBound
from .cuda_build import compile_source
from .cuda_call import CudaCall
from .cuda_detect_ids import Lists, OneLaunch
from .cuda_modules import Kernel
from .cuda_repeat_code import (
    GRAPHS,
    MEMORY,
    MOST_TENSORS,
    MOST_WORDS,
    NUMBER,
    SOURCE,
    TENSOR,
)
from .cuda_view import CudaView
from .cuda_workspace import listed
from .kernel_cache import KernelCache, content_key

MOST = 64  # calls that one thread knows of one operator


@dataclass(frozen=True)
class Launch:
    """A call of a compiled function (`tvm_ffi.Function`). ``args``: numbers, memory, and
    (i, memory) for memory at the address of the call's tensor number i."""

    kernel: Any
    args: tuple[int | CudaView | tuple[int, CudaView], ...]

    def words(self) -> list[int]:
        """The launch as compiled code reads it."""
        words = [self.kernel.__chandle__(), len(self.args)]
        for arg in self.args:
            if isinstance(arg, int):
                words += (NUMBER, arg)
            else:
                at, view = (None, arg) if isinstance(arg, CudaView) else arg
                words += (MEMORY if at is None else TENSOR + at, view.value or 0)
        return words


@dataclass(frozen=True)
class Repeat:
    """A call that can be repeated, as long as its ``plan`` holds: what it launches, and the lists
    that its launches fill; nothing and None for a dense product, which the dispatcher computes.
    ``like``: a tensor as its outputs are, without elements.
    """

    call: CudaCall
    plan: Plan
    launches: tuple[Launch, ...]
    lists: Lists | None
    like: Any

    def output(self) -> Any:
        """A new one."""
        return empty(self.like, self.call.layout.output)


class _Graph(ctypes.Structure):
    """`Graph` of the compiled code."""

    _fields_ = (
        ("data", ctypes.c_void_p * MOST_TENSORS),
        ("seen", ctypes.c_int64),
        ("made", ctypes.c_void_p),
    )


class _Call(ctypes.Structure):
    """`Call` of the compiled code."""

    _fields_ = (
        ("size", ctypes.c_int64),
        ("launches", ctypes.c_int64),
        ("program", ctypes.c_void_p),
        ("words", ctypes.c_int64 * MOST_WORDS),
        ("data", ctypes.c_void_p * MOST_TENSORS),
        ("graphs", _Graph * GRAPHS),
    )


class _Table(threading.local):
    """Calls that this thread may repeat, and the memory in which compiled code looks for them.

    Threads have calls and indices of their own, so none waits for another. ``guess``: the number of
    the last call that made its output, -1 if there is none.
    """

    def __init__(self) -> None:
        self.guess = -1
        self.numbers: dict[bytes, int] = {}
        self.repeats: list[Repeat] = []
        self.calls: list[tuple[_Call, Any]] = []
        self.memory = (ctypes.c_int64 * (1 + MOST))()
        self.address = ctypes.addressof(self.memory)

    def add(self, words: bytes, repeat: Repeat, look: Kernel) -> None:
        """Know a call by its words; a full table is emptied first. ``look`` drops its graphs."""
        if len(self.repeats) == MOST and words not in self.numbers:
            self.memory[0], self.guess = 0, -1
            self.numbers, self.repeats, self.calls = {}, [], []
        number = self.numbers.setdefault(words, len(self.repeats))
        launches = [word for launch in repeat.launches for word in launch.words()]
        program = (ctypes.c_int64 * len(launches))(*launches)
        call = _Call(len(words), len(repeat.launches), ctypes.addressof(program))
        ctypes.memmove(call.words, words, len(words))
        weakref.finalize(call, look, ctypes.addressof(call), -2)
        self.repeats[number : number + 1] = [repeat]
        self.calls[number : number + 1] = [(call, program)]
        self.memory[1 + number] = ctypes.addressof(call)
        self.memory[0] = len(self.repeats)


class CudaRepeats:
    """Calls of one operator that can be repeated. Threads may share it.

    ``report``: what writes counts to the host's memory, as `CountWatch.report` takes it.
    """

    def __init__(self, cache: KernelCache, report: Callable[[Any, int], None]) -> None:
        self._cache, self._report, self._table = cache, report, _Table()

    @cached_property
    def look(self) -> Kernel:
        """The compiled code, built if it is nowhere."""
        look: Kernel = self.build()["main"]
        return look

    def build(self) -> Any:
        """The module that repeated calls need, compiled ahead; errors as `compile_source`."""
        return self._cache.module(content_key("cuda-repeat"), lambda: compile_source(SOURCE))

    def run(self, given: Sequence[Any], sparsity: Any, out: Any) -> tuple[Any, Repeat | None]:
        """Repeat the call that was like this one: its output, and what it was; None if none was,
        or a CUDA graph is captured, or a dense product should report its counts.

        Most calls are like the last one, so their output is made before they are known.
        """
        table = self._table
        if not table.repeats:
            return out, None
        look, guess = self.look, table.guess
        made = None if out is not None or guess < 0 else table.repeats[guess].output()
        try:
            for array in (sparsity, *given, out):
                if array is not None and array.is_neg():  # DLPack does not say it
                    return out, None
            number = look(table.address, guess, made, sparsity, *given, out)
        except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
            return out, None  # no tensor, or none of DLPack's: the long way says so
        if out is None:
            table.guess = number
        if number < 0:
            return out, None
        repeat = table.repeats[number]
        lists, due = repeat.lists, repeat.call.watch.due()
        if lists is None and due:
            return out, None
        if out is None and number != guess:
            made = repeat.output()
            look(table.address, number, 1 + len(given), made)
        if lists is not None and due:
            repeat.call.watch.report(lists[0].count, self._report)
        return made if out is None else out, repeat

    def keep(self, given: Sequence[Any], sparsity: Any, out: Any, repeat: Repeat | None) -> None:
        """Repeat calls with such tensors from now on, on this thread and the current stream; not
        while a CUDA graph is captured or rehearsed, whose memory is its own."""
        if repeat is None or is_capturing() or is_rehearsed():
            return
        words = (ctypes.c_int64 * MOST_WORDS)()
        size = self.look(0, ctypes.addressof(words), sparsity, *given, out)
        if size > 0:
            self._table.add(bytes(words)[: 8 * size], repeat, self.look)

    def forget(self, repeat: Repeat) -> None:
        """Calls like this one go the long way, until they are kept again."""
        table = self._table
        for (call, _), known in zip(table.calls, table.repeats, strict=True):
            if known is repeat:
                call.size = -1


def repeat_of(
    bound: CudaBound, plan: Plan, found: Lists, sparsity: Any, places: Sequence[int | None]
) -> Repeat | None:
    """How to repeat a call of the m-axis family that two launches computed; None for others.

    ``found``: what is listed, by one launch and for the other. ``sparsity``: as the caller passed
    it; ``places`` among the inputs of the gathered operand, and of what the kernel takes behind the
    lists, None for what is absent.
    """
    call, inputs, value, out, place = bound
    (index, dead), (_, kernel) = found, call.product or (None, None)
    find, lists = call.finds.get(dead is not None), listed(index, dead)
    if not isinstance(find, OneLaunch) or type(kernel) is not tvm_ffi.Function:
        return None
    if not place.aligned or place.rest is None:
        return None
    dtype, device = dtype_name(out), call.device
    made = (CudaView(out.data_ptr(), out.shape, dtype, device),) if call.fresh else ()
    told = next(i for i, t in enumerate((sparsity, *inputs)) if t is value)
    ids = CudaView(value.data_ptr(), (value.numel(),), dtype_name(value), device)
    gathered, *beside = (1 + at for at in places if at is not None)
    own = inputs[gathered - 1]
    rows = CudaView(own.data_ptr(), own.shape, dtype, device)
    rest = zip((*beside, 1 + len(inputs)), (*place.rest, *made), strict=True)
    launches = (
        Launch(find.kernel, ((told, ids), *find.numbers, *lists)),
        Launch(kernel, ((gathered, rows), *lists, *rest)),
    )
    return Repeat(call, plan, launches, found, empty(out, (0,)))


def repeat_of_dense(bound: CudaBound, plan: Plan) -> Repeat:
    """How to repeat a call that a dense product computed, which reads no pattern."""
    call, _, _, out, _ = bound
    return Repeat(call, plan, (), None, empty(out, (0,)))
