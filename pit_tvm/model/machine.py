"""A compiled graph as a library that Relax's machine runs."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from .. import pools
from ..errors import BackendUnavailable, ShapeError, mismatch
from ..files import check_room
from ..forks import Threads
from ..threads import refuse_fork

_LIBRARY = "machine.so"
_LOADING = threading.Lock()


class Machine:
    """Runs ``main`` of the library that ``export`` writes to a file, on the CPU.

    ``functions`` are what the graph calls by name: the machine takes them when it is made, so that
    no name of them is left behind, and models with other functions may follow.
    BackendUnavailable if no temporary file can be written.
    """

    def __init__(
        self,
        export: Callable[[str], Any],
        functions: Mapping[str, Callable[..., Any]],
    ) -> None:
        try:
            check_room()
            # Kept, because a model is saved with its library; removed with the last reference.
            self._folder = tempfile.TemporaryDirectory(prefix="pit-tvm-")
            export(str(self._path))
        except OSError as error:
            expected, advice = "a folder with room for a library", "set TMPDIR to another"
            text = mismatch("temporary files", expected, error, advice)
            raise BackendUnavailable(text) from error
        self._running = threading.Lock()
        # Lest it come out of the machine as another: functions refuse ids of no expert.
        tvm_ffi.register_error("pit_tvm.ShapeError", ShapeError)
        loaded = tvm.runtime.load_module(str(self._path))
        with _LOADING:
            for name, function in functions.items():
                tvm.register_global_func(name, function, override=True)
            try:
                self._machine = relax.VirtualMachine(loaded, tvm.cpu())
            finally:
                for name in functions:
                    tvm_ffi.registry.remove_global_func(name)

    def __call__(self, *arguments: Any) -> Any:
        """The results of ``main``, as TVM tensors."""
        if Threads.lost:
            refuse_fork()
        with self._running:
            return pools.run(self._machine["main"], *arguments)

    @property
    def graph(self) -> bytes:
        """The library's file."""
        return self._path.read_bytes()

    @property
    def _path(self) -> Path:
        return Path(self._folder.name) / _LIBRARY
