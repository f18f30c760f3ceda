"""Runs candidates on this machine or over RPC: first checks the result, then measures the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from ..errors import BackendUnavailable, TuningError, mismatch
from .builder import CANDIDATE_ERRORS, error_text
from .tasks import Example, numpy_dtype

WRONG = "wrong result"


@dataclass(frozen=True)
class Session:
    """A device that is ready: how it loads a library, its TVM device, its worker threads."""

    load: Callable[[Path], Any]
    device: Any
    threads: int


OpenSession = Callable[[], AbstractContextManager[Session]]


@contextmanager
def local_session() -> Iterator[Session]:
    """This process and the CPU that it runs on."""
    threads = tvm.get_global_func("runtime.NumThreads")()
    yield Session(lambda path: tvm.runtime.load_module(str(path)), tvm.cpu(), int(threads))


@dataclass(frozen=True)
class Repeats:
    """How long to measure: the median of ``repeat`` means, each over ``min_repeat_ms`` or more.

    A candidate whose first run takes ``hopeless`` times the fastest one's median is not repeated.
    """

    repeat: int = 3
    min_repeat_ms: int = 20
    hopeless: float = 4.0


@derived_object
class _Done(ms.runner.PyRunnerFuture):
    """A result that is already there: candidates run one after the other."""

    def __init__(self, outcome: ms.runner.RunnerResult) -> None:
        super().__init__()
        self.outcome = outcome

    def done(self) -> bool:
        return True

    def result(self) -> ms.runner.RunnerResult:
        return self.outcome


class Measurer:
    """Runs artifacts on the data of one example, one after the other.

    ``fastest``: median of the fastest so far, in seconds. ``lost``: why no device could be
    reached, which says nothing about the candidate; errors do not cross MetaSchedule with their
    types, so it is kept here.
    """

    def __init__(self, open_session: OpenSession, example: Example, repeats: Repeats) -> None:
        self.open_session = open_session
        self.example = example
        self.repeats = repeats
        self.fastest = float("inf")
        self.lost: BackendUnavailable | None = None

    def run(self, artifact: Path) -> ms.runner.RunnerResult:
        """Times of one artifact, which is deleted; an error that holds ``WRONG`` and no times if
        its result differs from the example's by more than the tolerance."""
        try:
            with self.open_session() as session:
                secs = measure(session, artifact, self.example, self.repeats, self.fastest)
        except BackendUnavailable as error:
            self.lost = error
            return ms.runner.RunnerResult(None, str(error))
        except CANDIDATE_ERRORS as error:
            return ms.runner.RunnerResult(None, error_text(error))
        finally:
            artifact.unlink(missing_ok=True)
        self.fastest = min(self.fastest, float(np.median(secs)))
        return ms.runner.RunnerResult(list(secs), None)


@derived_object
class TileRunner(ms.runner.PyRunner):
    """MetaSchedule's face of a Measurer."""

    def __init__(self, measurer: Measurer) -> None:
        super().__init__()
        self.measurer = measurer

    def run(self, runner_inputs: list[ms.runner.RunnerInput]) -> list[ms.runner.PyRunnerFuture]:
        return [_Done(self.measurer.run(Path(str(i.artifact_path)))) for i in runner_inputs]


def measure(
    session: Session, artifact: Path, example: Example, repeats: Repeats, fastest: float
) -> tuple[float, ...]:
    """Run times in seconds of ``main`` on the example, after its result was checked.

    Raises
    ------
    TuningError
        The result is wrong.
    """
    module = session.load(artifact)
    inputs = [_to_device(array, session.device) for array in example.inputs]
    start = 0 if example.accumulates else _poison(example.dtype)
    before = np.full(example.expected.shape, start, numpy_dtype(example.dtype))
    out = _to_device(before, session.device)
    module["main"](*inputs, out)
    _check(out.numpy(), example)

    def timed(repeat: int, min_repeat_ms: int) -> tuple[float, ...]:
        evaluator = module.time_evaluator(
            "main", session.device, number=1, repeat=repeat, min_repeat_ms=min_repeat_ms
        )
        return tuple(float(secs) for secs in evaluator(*inputs, out).results)

    once = timed(1, 0)
    if once[0] > repeats.hopeless * fastest:
        return once
    return timed(repeats.repeat, repeats.min_repeat_ms)


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest deviation over the largest expected element; infinite if ``got`` is not finite."""
    actual = got.astype(np.float64)
    if not np.isfinite(actual).all():
        return float("inf")
    scale = float(np.abs(expected).max(initial=0.0)) or 1.0
    return float(np.abs(actual - expected).max(initial=0.0)) / scale


def _check(got: np.ndarray, example: Example) -> None:
    error = relative_error(got, example.expected)
    if error > example.tolerance:
        expected = f"a relative error of at most {example.tolerance:g}"
        raise TuningError(mismatch(WRONG, expected, f"{error:.3g}"))


def _poison(dtype: str) -> float:
    """A value that shows where nothing was written."""
    return 77 if "int" in dtype else float("nan")


def _to_device(array: np.ndarray, device: Any) -> Any:
    return tvm.runtime.tensor(np.ascontiguousarray(array), device)
