"""Runs candidates on this machine or over RPC: first checks the result, then measures the time."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tvm
from tvm.s_tir import meta_schedule as ms

from ..errors import BackendUnavailable, mismatch
from .builder import CANDIDATE_ERRORS, error_text
from .pace import host_pace

HANG_SECS = 30


@dataclass(frozen=True)
class Session:
    """A device that is ready: how it loads a library, its TVM device, its worker threads.

    ``correct`` takes what the device's neighbours cost out of the seconds that a run reports.
    """

    load: Callable[[Path], Any]
    device: Any
    threads: int
    correct: Callable[[Callable[[], Sequence[float]]], tuple[float, ...]] = lambda run: tuple(run())


OpenSession = Callable[[], AbstractContextManager[Session]]


class Data(Protocol):
    """What candidates of one task are run on; ``tasks.Example`` is one."""

    def arguments(self, device: Any) -> Sequence[Any]:
        """The inputs and a poisoned output on a TVM device."""

    def check(self, arguments: Sequence[Any]) -> None:
        """TuningError with ``tasks.WRONG`` in its text if the output is wrong."""


@contextmanager
def local_session() -> Iterator[Session]:
    """This process and the CPU that it runs on."""
    threads = tvm.get_global_func("runtime.NumThreads")()
    yield Session(_load, tvm.cpu(), int(threads), host_pace().correct)


@contextmanager
def cuda_session() -> Iterator[Session]:
    """This process and its first GPU.

    A kernel that never ends can be stopped by ending the process alone: after ``HANG_SECS`` it is
    ended, with a traceback. The same job run again goes on behind that candidate.

    Raises
    ------
    BackendUnavailable
        There is none.
    """
    gpu = tvm.cuda(0)
    if not gpu.exist:
        advice = "run it where the driver finds one"
        raise BackendUnavailable(mismatch("target", "a GPU on this machine", "none", advice))
    faulthandler.dump_traceback_later(HANG_SECS, exit=True)
    try:
        yield Session(_load, gpu, int(gpu.multi_processor_count))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _load(path: Path) -> Any:
    return tvm.runtime.load_module(str(path))


@dataclass(frozen=True)
class Repeats:
    """How long to measure: the median of ``repeat`` means, each over ``min_repeat_ms`` or more.

    A candidate whose first run takes ``hopeless`` times the fastest one's median is not repeated.
    ``warm_ms``: milliseconds of load before the first of them, for clocks that fall under load.
    """

    repeat: int = 3
    min_repeat_ms: int = 20
    hopeless: float = 4.0
    warm_ms: int = 0


class Measurer:
    """Runs artifacts on the data of one task, one after the other.

    ``fastest``: median of the fastest so far, in seconds.
    """

    def __init__(self, open_session: OpenSession, data: Data, repeats: Repeats) -> None:
        self.open_session = open_session
        self.data = data
        self.repeats = repeats
        self.fastest = float("inf")

    def run(self, artifact: Path) -> ms.runner.RunnerResult:
        """Times of one artifact, which is deleted; an error that holds ``WRONG`` and no times if
        its result differs from the data's by more than the tolerance.

        Raises
        ------
        BackendUnavailable
            No device could be reached, which says nothing about the candidate.
        """
        try:
            with self.open_session() as session:
                secs = measure(session, artifact, self.data, self.repeats, self.fastest)
        except BackendUnavailable:
            raise
        except CANDIDATE_ERRORS as error:
            return ms.runner.RunnerResult(None, error_text(error))
        finally:
            artifact.unlink(missing_ok=True)
        self.fastest = min(self.fastest, float(np.median(secs)))
        return ms.runner.RunnerResult(list(secs), None)


def measure(
    session: Session, artifact: Path, data: Data, repeats: Repeats, fastest: float
) -> tuple[float, ...]:
    """Run times in seconds of ``main`` on the data, after its result was checked.

    Raises
    ------
    TuningError
        The result is wrong.
    """
    module = session.load(artifact)
    arguments = data.arguments(session.device)
    module["main"](*arguments)
    data.check(arguments)

    def timed(repeat: int, min_repeat_ms: int) -> tuple[float, ...]:
        evaluator = module.time_evaluator(
            "main", session.device, number=1, repeat=repeat, min_repeat_ms=min_repeat_ms
        )
        return tuple(float(secs) for secs in evaluator(*arguments).results)

    once = timed(1, 0)
    if once[0] > repeats.hopeless * fastest:
        return once
    if repeats.warm_ms:
        timed(1, repeats.warm_ms)
    return tuple(
        secs
        for _ in range(repeats.repeat)
        for secs in session.correct(lambda: timed(1, repeats.min_repeat_ms))
    )
