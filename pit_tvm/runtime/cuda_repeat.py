"""Calls on a GPU that are like one before: compiled code compares their tensors with those of that
call, and launches a CUDA graph of what it launched.

What is compared is all that the checks of a call depend on, so that nothing is checked twice. A
call goes the long way until it has a graph, and now and then where to count what lives takes more
than a graph does. Dense products of torch, and zeros that follow them, are no part of a graph: they
only skip the checks.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from .content_keys import content_key
from .cuda_arrays import empty, is_capturing, is_rehearsed
from .cuda_build import compile_source
from .cuda_modules import Kernel
from .cuda_recording import Recording, recording
from .cuda_repeat_code import (
    BEGIN,
    COUNT,
    DROP,
    DUE,
    END,
    HASH,
    MOST_TENSORS,
    MOST_WORDS,
    NONE,
    OTHERS,
    SOURCE,
    WORDS,
)
from .cuda_watch import PERIOD
from .kernel_cache import KernelCache

MOST = 256  # calls that one thread knows of one operator
MOST_BYTES = 1 << 18  # of memory that one graph keeps for itself
# Where fewer than one call in so many is repeated, after so many trials, one in so many is tried:
# shapes may be others every time.
_SHARE, _TRIALS, _SELDOM = 4, 1024, 16


class Planner(Protocol):
    """Says what a call would run now."""

    def plan_of(self, call: Any) -> Any:
        """A plan, the same object as long as nothing changes; its ``way`` tells what it launches,
        "dense" first where that is torch's product."""


@dataclass(frozen=True)
class Repeat:
    """A call that can be repeated, as long as plans take what its last ``plan`` takes. ``call``:
    what all calls like it share, with their ``device`` and ``watch``. ``counts``: how much lives, a
    CUDA tensor that its graph writes, None where it does not. ``like``: a tensor as its outputs of
    this ``shape`` are, without elements. ``dense``: it is computed by the dispatcher."""

    call: Any
    plan: Any
    counts: Any
    like: Any
    shape: tuple[int, ...]
    dense: bool

    def output(self) -> Any:
        """A new one."""
        return empty(self.like, self.shape)


class _Call(ctypes.Structure):
    """`Call` of the compiled code."""

    _fields_ = (
        ("size", ctypes.c_int64),
        ("period", ctypes.c_int64),
        ("left", ctypes.c_int64),
        ("calm", ctypes.c_int64),
        ("dense", ctypes.c_int64),
        ("words", ctypes.c_int64 * MOST_WORDS),
        ("places", ctypes.c_int64 * (2 * MOST_TENSORS)),
        ("seen", ctypes.c_int64),
        ("failures", ctypes.c_int64),
        ("graph", ctypes.c_void_p),
        ("own", ctypes.c_void_p),
        ("mode", ctypes.c_int64),
    )

    def __init__(self, words: bytes, repeat: Repeat) -> None:
        period = PERIOD if repeat.counts is None else 0
        super().__init__(len(words), period, period - 1, 0, repeat.dense)
        ctypes.memmove(self.words, words, len(words))
        self.length = len(words)
        self.recorded: Recording | None = None  # its graph, with the memory of that

    @property
    def address(self) -> int:
        """As compiled code takes it."""
        return ctypes.addressof(self)


class _Table:
    """Calls that a thread may repeat, and the memory in which compiled code looks for them.

    ``guess``: the number of the last call that made its output, if there is one. ``ways``: of each
    call what it was when it ran in other ways, with its graph: counts that vary often want one of a
    few tiles. ``tries``: whether this call is looked for.
    """

    def __init__(self) -> None:
        self.memory = (ctypes.c_int64 * (1 + 2 * MOST))()
        self.address = ctypes.addressof(self.memory)
        self.tries = True
        self._repeated = self._missed = self._left = 0
        self._clear()

    def begin(self) -> bool:
        """Whether to look for a call, one more."""
        self.tries = self._missed < _TRIALS or _SHARE * self._repeated >= self._missed
        if not self.tries:
            self._left = (self._left or _SELDOM) - 1
            self.tries = not self._left
        return self.tries

    def note(self, repeated: bool) -> None:
        """Whether a call that was looked for is repeated; what was long ago counts less."""
        self._repeated, self._missed = self._repeated + repeated, self._missed + (not repeated)
        if self._missed >= 2 * _TRIALS:
            self._repeated, self._missed = self._repeated // 2, self._missed // 2

    def _clear(self) -> None:
        self.memory[0], self.guess = 0, NONE
        self.numbers: dict[bytes, int] = {}
        self.repeats: list[Repeat] = []
        self.calls: list[_Call] = []
        self.ways: list[dict[object, tuple[Repeat, _Call]]] = []

    def add(self, words: bytes, repeat: Repeat, look: Kernel) -> None:
        """Know a call by its words; a full table is emptied first. ``look`` drops its graph."""
        number = self.numbers.get(words)
        if number is None:
            if len(self.repeats) == MOST:
                self._clear()
            number = self.numbers[words] = len(self.repeats)
            self.ways.append({})
        elif self.turn(number, repeat.call, repeat.plan):
            return
        call = _Call(words, repeat)
        weakref.finalize(call, look, call.address, DROP)
        self._put(number, repeat, call)

    def turn(self, number: int, call: Any, plan: Any) -> bool:
        """Know a call as what it was when it last ran as this plan does: whether it ever did."""
        repeat, known = self.repeats[number], self.calls[number]
        ways = self.ways[number]
        ways[repeat.plan.way] = repeat, known
        known.size = -1  # until then none is like it
        found = ways.pop(plan.way, None)
        if found is not None:
            found[1].size, found[1].calm = found[1].length, 0
            self._put(number, replace(found[0], call=call, plan=plan), found[1])
        return found is not None

    def _put(self, number: int, repeat: Repeat, call: _Call) -> None:
        self.repeats[number : number + 1] = [repeat]
        self.calls[number : number + 1] = [call]
        self.memory[1 + 2 * number : 3 + 2 * number] = [call.words[HASH], call.address]
        self.memory[0] = len(self.repeats)


class _Threads(threading.local):
    """The table of each thread: they have calls and indices of their own, so none waits for
    another."""

    def __init__(self) -> None:
        self.table = _Table()


class CudaRepeats:
    """Calls of one operator that can be repeated. Threads may share it.

    ``report``: what writes counts to the host's memory, as `CountWatch.report` takes it;
    ``planner`` tells what a call would run now.
    """

    def __init__(
        self, cache: KernelCache, report: Callable[[Any, int], None], planner: Planner
    ) -> None:
        self._cache, self._report, self._planner = cache, report, planner
        self._threads = _Threads()

    @cached_property
    def look(self) -> Kernel:
        """The compiled code, built if it is nowhere."""
        look: Kernel = self.build()["main"]
        return look

    def build(self) -> Any:
        """The module that repeated calls need, compiled ahead; errors as `compile_source`."""
        return self._cache.module(content_key("cuda-repeat"), lambda: compile_source(SOURCE))

    def run(self, given: Sequence[Any], sparsity: Any, out: Any) -> tuple[Any, Repeat | None]:
        """Repeat the call that was like this one: its output, and what it was; None if it has to
        go the long way. A dense one is left to the caller, who makes its output too.

        Most calls are like the last one, so their output is made before they are known.
        """
        table = self._threads.table
        if not table.begin():
            return out, None
        made, repeat = self._find(table, given, sparsity, out)
        table.note(repeat is not None)
        return made, repeat

    def _find(
        self, table: _Table, given: Sequence[Any], sparsity: Any, out: Any
    ) -> tuple[Any, Repeat | None]:
        if not table.repeats:
            return out, None
        look, guess = self.look, table.guess
        try:
            made = None if out is not None or guess < 0 else table.repeats[guess].output()
            for array in given:
                if array.is_neg():  # DLPack does not say it
                    return out, None
            if sparsity is not None and sparsity.is_neg() or out is not None and out.is_neg():
                return out, None
            number = look(table.address, guess, sparsity, *given, out, made)
            if -DUE < number <= OTHERS and not table.repeats[OTHERS - number].dense:
                guess = table.guess = OTHERS - number
                made = table.repeats[guess].output()
                number = look(table.address, guess, 1 + len(given), made)
        except (AttributeError, BufferError, RuntimeError, TypeError, ValueError):
            # No tensor, or none of DLPack's: the long way says so. Or no memory for the guess.
            return out, None
        place = number if number >= 0 else OTHERS - number
        if place < 0:  # NONE
            return out, None
        if place >= DUE:
            place -= DUE
            repeat = table.repeats[place]
            self._attend(table, place)
        else:
            repeat = table.repeats[place]
        if repeat.counts is None:
            repeat.call.watch.pass_by()
        return made if out is None and not repeat.dense else out, repeat

    def _attend(self, table: _Table, place: int) -> None:
        """Report what lives, now and then; look at the plan then, and as long as a report is away:
        the next call runs as it says."""
        repeat = table.repeats[place]
        watch = repeat.call.watch
        waited, plan = watch.waits, self._planner.plan_of(repeat.call)
        if plan.way != repeat.plan.way:
            table.turn(place, repeat.call, plan)
        elif plan is not repeat.plan:
            table.repeats[place] = replace(repeat, plan=plan)
        elif repeat.counts is not None and not waited:
            watch.report(repeat.counts, self._report)
        table.calls[place].calm = 0 if watch.waits else PERIOD - 1

    def keep(
        self,
        given: Sequence[Any],
        sparsity: Any,
        outs: tuple[Any, Any],
        planned: tuple[Any, Any, Any],
        again: Callable[[], None],
    ) -> None:
        """Repeat calls with such tensors from now on, on this thread and the current stream, as
        long as plans take what this one takes; not while a CUDA graph is captured or rehearsed,
        whose memory is its own.

        ``outs``: the output that the caller passed, and that of the call; ``planned``: call, plan,
        and counts, as of `Repeat`; ``again`` launches what the call launched.
        """
        table, (call, plan, counts) = self._threads.table, planned
        if not table.tries:
            return
        number = self.look(table.address, COUNT, sparsity, *given, *outs)
        place = number if number >= 0 else OTHERS - number
        same = place >= 0 and table.repeats[place].plan.way == plan.way
        if same and number < 0 or is_capturing(call.device) or is_rehearsed():
            return
        if same:
            if self._record(table.calls[place], again):
                table.repeats[place] = replace(table.repeats[place], plan=plan, counts=counts)
            return
        words = (ctypes.c_int64 * MOST_WORDS)()
        size = self.look(ctypes.addressof(words), WORDS, sparsity, *given, outs[0])
        if size > 0:
            like, shape = empty(outs[1], (0,)), tuple(outs[1].shape)
            repeat = Repeat(call, plan, counts, like, shape, plan.way[0] == "dense")
            table.add(bytes(words)[: 8 * size], repeat, self.look)

    def _record(self, call: _Call, again: Callable[[], None]) -> bool:
        """Make the graph of a call, or learn which of its tensors may lie elsewhere; whether it was
        made. What cannot be is no error: what is launched waits for the host, or needs much memory
        of its own."""
        look, kept = self.look, None
        stream = look(call.address, BEGIN)
        if not stream:
            return False
        try:
            with recording(stream, call.recorded) as found:
                again()
            kept = found if found.is_complete(MOST_BYTES) else None
        except RuntimeError:
            pass
        finally:
            made = bool(look(call.address, END, kept is not None))
        if made:
            call.recorded = kept
        return made
