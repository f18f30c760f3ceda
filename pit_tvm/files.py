"""Files that readers see whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_ROOM = 2**24  # bytes: far more than a library's object file takes


def as_path(value: Any) -> Path:
    """The path that an argument names; OSError if it can name none."""
    try:
        path = Path(value)
        if value == "":
            raise ValueError("to pathlib the working directory")
        if b"\0" in os.fsencode(path):
            raise ValueError("a null byte ends a path")
    except (TypeError, ValueError) as error:
        raise OSError(f"{value!r}, which is no path") from error
    return path


def check_room() -> None:
    """OSError where a compiled library might not fit among temporary files: LLVM, which TVM lets
    write there, ends the process on a full disk."""
    folder = tempfile.gettempdir()
    if shutil.disk_usage(folder).free < _ROOM:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Held by one process or thread at a time, by a file that is gone afterwards: whether another
    one had it. Where no file can be there, or the system has no locks for it, nobody waits."""
    try:
        os.makedirs(path.parent, mode=0o700, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield False
        return
    try:
        yield _waited(handle)
    finally:
        with suppress(OSError):
            path.unlink()
        os.close(handle)


def _waited(handle: int) -> bool:
    """Lock an open file: whether another one had it locked."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(handle, fcntl.LOCK_EX)
        return True
    except OSError:
        pass
    return False


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing under a temporary name beside ``path``, or beside what that links to;
    at the end of the context it is renamed, or removed if an error ended it.

    Raises
    ------
    OSError
        The file cannot be written, or ``path`` is a folder, a device or the like.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError(f"{str(path)!r}, which is no regular file")
    name = target.with_name(f".pit-tvm-{secrets.token_hex(8)}.tmp")
    # Not by tempfile, whose files are the owner's alone: here the system applies the umask.
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    finally:
        name.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file under a temporary name beside it, then rename it into place."""
    with whole_file(path) as file:
        file.write(text.encode())
