"""Compiled kernels by the content they were built from, in memory and on disk.

On disk a kernel is one file ``<key>.so`` in ``$PIT_TVM_CACHE``, else in ``pit-tvm`` under
``$XDG_CACHE_HOME`` or ``~/.cache``. Behind the shared library stand a mark and the library's
SHA-256 (the loader ignores trailing bytes), so that file and checksum are replaced as one. Files
are written under a temporary name and renamed: processes may share the folder. One that wants what
another builds waits for it; where it cannot, both succeed, and the later one's file stays.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tvm import runtime
from tvm.support import cc

from ..errors import BackendUnavailable, ShapeError, mismatch
from ..files import as_path, check_room, held
from ..interrupts import pass_interrupts
from ..quick_script import quick_script

_UNFINISHED = ".tmp.so"  # the loader wants the ending ".so"
_OWN_FILE = re.compile(r"[0-9a-f]{64}((\w*\.tmp)?\.so|\.lock)")
_MARK = b"pit-tvm-sha256:"
_TRAILER = len(_MARK) + hashlib.sha256().digest_size


class KernelCacheWarning(UserWarning):
    """The disk part of a kernel cache cannot be used; kernels are kept in memory only."""


class Exportable(Protocol):
    """What `KernelCache.get` builds: a `tvm.runtime.Executable`, or anything alike."""

    @property
    def mod(self) -> Any:
        """The module, callable where it was built."""

    def export_library(self, file_name: str) -> Any:
        """Write a shared library."""


@dataclass(frozen=True)
class CacheStats:
    """What a cache did so far. Times are seconds."""

    memory_hits: int = 0
    disk_hits: int = 0
    builds: int = 0
    corrupt: int = 0
    load_seconds: float = 0.0
    build_seconds: float = 0.0
    export_seconds: float = 0.0


def default_directory() -> Path:
    """``$PIT_TVM_CACHE``, else ``$XDG_CACHE_HOME/pit-tvm``, else ``~/.cache/pit-tvm``.

    Raises
    ------
    BackendUnavailable
        It is in the home of a user that there is not.
    """
    own = os.environ.get("PIT_TVM_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser()
        return (Path(shared) if shared else Path.home() / ".cache") / "pit-tvm"
    except RuntimeError as error:
        advice = "set PIT_TVM_CACHE to another"
        text = mismatch("kernel cache", "a folder of a user of this machine", error, advice)
        raise BackendUnavailable(text) from error


class KernelCache:
    """Loads or builds kernels, each at most once per process at a time; safe to share by threads.

    ``directory`` None means `default_directory`. If it cannot be used (read-only, a full disk, no
    C compiler to link with) the cache warns once with `KernelCacheWarning` and works in memory.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        pass_interrupts()
        try:
            named = default_directory() if directory is None else as_path(directory)
            self.directory = named.absolute()  # wherever the process works later
        except OSError as error:
            text = mismatch("cache", "a folder or a KernelCache", error)
            raise BackendUnavailable(text) from error
        self._modules: dict[str, Any] = {}
        self._adopted: dict[str, bytes] = {}
        self._lock = threading.Lock()  # guards everything below and the two above
        self._key_locks: dict[str, threading.Lock] = {}
        self._counts: dict[str, Any] = {}
        self._warned = False

    def get(
        self, key: str, build: Callable[[], Exportable], entry: str = "main"
    ) -> Callable[..., Any]:
        """The function ``entry`` of the kernel ``key``, which ``build`` makes if it is nowhere.

        Keep the function: it keeps its module loaded, and asking again costs microseconds.

        Raises
        ------
        ShapeError
            ``key`` is not of the form that `content_key` gives.
        AttributeError
            The kernel has no such function.
        """
        return self.module(key, build)[entry]

    def module(self, key: str, build: Callable[[], Exportable]) -> Any:
        """The loaded module of ``key``, for kernels with several entry points; see `get`."""
        with self._lock:
            module = self._modules.get(key)
            if module is not None:
                self._count(memory_hits=1)
                return module
            _check_key(key)
            key_lock = self._key_locks.setdefault(key, threading.Lock())
        with key_lock:
            with self._lock:
                module = self._modules.get(key)
                if module is not None:
                    self._count(memory_hits=1)
                    return module
            module = self._load(key)
            if module is None:
                with held(self._path(key).with_suffix(".lock")) as waited:
                    module = self._load(key) if waited else None
                    if module is None:
                        module = self._build(key, build)
            with self._lock:
                self._modules[key] = module
            return module

    def libraries(self) -> dict[str, bytes]:
        """The kernels in memory by key, as files that `adopt` takes on another machine.

        Raises
        ------
        BackendUnavailable
            A kernel is in memory only, because the folder cannot be used or was emptied.
        """
        with self._lock:
            found = {key: self._adopted.get(key) for key in self._modules}
        for key, content in found.items():
            try:
                found[key] = content or self._path(key).read_bytes()
            except OSError as error:
                advice = "set PIT_TVM_CACHE to a folder that can be written, and compile again"
                text = mismatch("kernel cache", "all kernels in its folder", error, advice)
                raise BackendUnavailable(text) from error
        return {key: content for key, content in found.items() if content is not None}

    def adopt(self, libraries: Mapping[str, bytes]) -> None:
        """Load kernels that `libraries` of another cache gave; nothing is built or left on disk.

        Raises
        ------
        ShapeError
            A key is not of the form that `content_key` gives.
        BackendUnavailable
            A library is damaged, or cannot be loaded on this machine.
        """
        with tempfile.TemporaryDirectory(prefix="pit-tvm-") as scratch:
            for key, content in libraries.items():
                _check_key(key)
                path = Path(scratch) / f"{key}.so"
                path.write_bytes(content)
                module = _load_sound(path)
                if module is None:
                    text = mismatch(f"kernel {key}", "a sound library for this machine", "another")
                    raise BackendUnavailable(text)
                with self._lock:
                    self._modules[key], self._adopted[key] = module, content

    @property
    def stats(self) -> CacheStats:
        """What this cache did so far; a snapshot."""
        with self._lock:
            return CacheStats(**self._counts)

    def clear(self) -> tuple[int, int]:
        """Forget the kernels in memory and delete the files; returns (files, bytes) deleted.

        Functions that were handed out stay valid.
        """
        files = size = 0
        with self._lock:
            self._modules.clear()
            self._adopted.clear()
        for path in self._files():
            try:
                bytes_here = path.stat().st_size
                path.unlink()
            except FileNotFoundError:  # another process was quicker
                continue
            files, size = files + 1, size + bytes_here
        return files, size

    def disk_usage(self) -> tuple[int, int]:
        """(files, bytes) in the folder."""
        sizes: list[int] = []
        for path in self._files():
            with suppress(FileNotFoundError):  # another process deleted it
                sizes.append(path.stat().st_size)
        return len(sizes), sum(sizes)

    def _files(self) -> list[Path]:
        """Kernels, and what interrupted writers left behind."""
        if not self.directory.is_dir():
            return []
        return [path for path in self.directory.iterdir() if _OWN_FILE.fullmatch(path.name)]

    def _count(self, **more: float) -> None:
        """Add to the statistics; the caller holds the lock."""
        for name, value in more.items():
            self._counts[name] = self._counts.get(name, 0) + value

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.so"

    def _load(self, key: str) -> Any:
        """The module on disk; None if there is none, or only a damaged one."""
        start = time.perf_counter()
        try:
            module = _load_sound(self._path(key))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(error)
            return None
        with self._lock:
            if module is None:
                self._count(corrupt=1)
            else:
                self._count(disk_hits=1, load_seconds=time.perf_counter() - start)
        return module

    def _build(self, key: str, build: Callable[[], Exportable]) -> Any:
        start = time.perf_counter()
        with quick_script():
            executable = build()
        built = time.perf_counter()
        module = executable.mod
        try:
            module = _store(executable, self._path(key))
        except (OSError, RuntimeError) as error:
            self._warn(error)
        with self._lock:
            done = time.perf_counter()
            self._count(builds=1, build_seconds=built - start, export_seconds=done - built)
        return module

    def _warn(self, error: Exception) -> None:
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            advice = "kernels stay in memory; set PIT_TVM_CACHE to another folder"
            text = mismatch("kernel cache", f"to use the folder {self.directory}", error, advice)
            warnings.warn(text, KernelCacheWarning, stacklevel=4)


# --------------------------------------------------------------------------------------------
# Files


def _check_key(key: str) -> None:
    if not re.fullmatch("[0-9a-f]{64}", key):
        expected = "64 hexadecimal digits"
        raise ShapeError(mismatch("key", expected, repr(key), "make it with content_key"))


def _store(executable: Exportable, path: Path) -> Any:
    """Link, add the checksum, load, and move to ``path`` in one step; returns the loaded module.

    That is what later processes run. It is loaded under its temporary name, because the loader
    takes a name that it knows for the library it knows by that name; and a library that cannot be
    loaded is not left for others. Raises OSError if the folder cannot be written,
    BackendUnavailable without a C compiler, RuntimeError if linking or loading fails.
    """
    if cc.get_cc() is None:
        raise BackendUnavailable(mismatch("kernel cache", "a C compiler on PATH", "none"))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_room()
    with tempfile.TemporaryDirectory(prefix="pit-tvm-") as scratch:
        library = Path(scratch) / "kernel.so"
        executable.export_library(str(library))
        content = library.read_bytes()
    # In the same folder: a rename across file systems is a copy.
    handle, name = tempfile.mkstemp(prefix=path.stem, suffix=_UNFINISHED, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content + _MARK + hashlib.sha256(content).digest())
        os.chmod(name, 0o700)
        module = runtime.load_module(name)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
    return module


def _load_sound(path: Path) -> Any:
    """The module in a file that `_store` wrote; None if it is damaged or cannot run here."""
    content = path.read_bytes()
    library, trailer = content[:-_TRAILER], content[-_TRAILER:]
    if trailer != _MARK + hashlib.sha256(library).digest():
        return None
    try:
        return runtime.load_module(str(path))
    except (RuntimeError, ValueError):  # not loadable; deleted since it was read
        return None
