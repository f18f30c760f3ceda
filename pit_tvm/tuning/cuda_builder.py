"""Builds CUDA candidates: a batch at a time, on all cores, each different kernel once.

A library is kept under the SHA-256 of its CUDA source, so a job that goes on, other tasks of the
job and other jobs with the same folder do not compile a kernel again.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tvm

from ..errors import BackendUnavailable, mismatch
from .builder import CANDIDATE_ERRORS, Lower, error_text


class Library(Protocol):
    """A compiled library."""

    def export_library(self, file_name: str) -> Any:
        """Write a shared library."""


@dataclass(frozen=True)
class Toolchain:
    """How CUDA code is made, by functions of a module: they travel to worker processes by name.

    ``source(mod, arch)``: CUDA text of a module. ``compile(text, arch)``: its library.
    ``kernels``: folder of the compiled libraries. ``workers``: processes; 1 is this one.
    """

    source: Callable[[tvm.IRModule, str], str]
    compile: Callable[[str, str], Library]
    arch: str
    kernels: Path
    workers: int = 1

    def built(self, mod: tvm.IRModule) -> Path:
        """Path of the library of a module, compiled if it is not there."""
        text = self.source(mod, self.arch)
        name = hashlib.sha256(f"{self.arch}\n{text}".encode()).hexdigest()
        path = self.kernels / f"{name}.so"
        if not path.is_file():
            self.kernels.mkdir(parents=True, exist_ok=True)
            library = self.compile(text, self.arch)
            handle, scratch = tempfile.mkstemp(prefix=name, suffix=".tmp", dir=self.kernels)
            os.close(handle)
            library.export_library(scratch)
            os.replace(scratch, path)
        return path


@contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor | None]:
    """Processes that compile; None for 1 worker. Started anew, not forked: CUDA and TVM's threads
    do not survive a fork."""
    if workers <= 1:
        yield None
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield pool


class CudaBuilder:
    """Lowers with ``lower``, compiles by the toolchain, and leaves a copy of each library in a new
    folder inside ``folder``. Whoever runs the artifact deletes the copy."""

    def __init__(
        self, lower: Lower, folder: Path, toolchain: Toolchain, pool: ProcessPoolExecutor | None
    ) -> None:
        self.lower = lower
        self.folder = folder
        self.toolchain = toolchain
        self.pool = pool
        self.found: dict[str, Path | str] = {}

    def warm(self, mods: Sequence[tvm.IRModule]) -> None:
        """Compile what ``build`` will be asked for next, side by side.

        Raises
        ------
        BackendUnavailable
            There is no compiler, or a worker process was ended from outside.
        """
        wanted = {_key(mod): mod for mod in mods}
        wanted = {key: mod for key, mod in wanted.items() if key not in self.found}
        if self.pool is None:
            self.found |= {k: _attempt(self.lower, self.toolchain, m) for k, m in wanted.items()}
            return
        jobs: dict[str, Future[Path | str]] = {
            key: self.pool.submit(_attempt_pickled, pickle.dumps((self.lower, self.toolchain, mod)))
            for key, mod in wanted.items()
        }
        try:
            self.found |= {key: job.result() for key, job in jobs.items()}
        except BrokenProcessPool as error:
            advice = "memory may be short: use fewer workers"
            text = mismatch("compiler process", "an answer", error, advice)
            raise BackendUnavailable(text) from error

    def build(self, mod: tvm.IRModule) -> Path | str:
        """The library, or what is wrong with the candidate. Raises as `warm` does."""
        self.warm([mod])
        built = self.found[_key(mod)]
        if isinstance(built, str):
            return built
        scratch = tempfile.mkdtemp(prefix="candidate-", dir=self.folder)
        return shutil.copyfile(built, Path(scratch) / built.name)


def _key(mod: tvm.IRModule) -> str:
    return hashlib.sha256(mod.script().encode()).hexdigest()


def _attempt(lower: Lower, toolchain: Toolchain, mod: tvm.IRModule) -> Path | str:
    """The library's path, or what went wrong with this candidate."""
    try:
        return toolchain.built(lower(mod))
    except BackendUnavailable:
        raise
    except OSError as error:  # a full disk, no memory for nvcc
        text = mismatch("work_dir", "kernels compiled and written there", error_text(error))
        raise BackendUnavailable(text) from error
    except CANDIDATE_ERRORS as error:
        return error_text(error)


def _attempt_pickled(work: bytes) -> Path | str:
    """`_attempt` in another process."""
    lower, toolchain, mod = pickle.loads(work)
    return _attempt(lower, toolchain, mod)
