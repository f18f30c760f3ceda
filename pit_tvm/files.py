"""Files that readers see whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


def as_path(value: Any) -> Path:
    """The path that an argument names; OSError if it can name none."""
    try:
        path = Path(value)
        os.fsencode(path)
    except (TypeError, ValueError) as error:
        raise OSError(f"{value!r}, which is no path") from error
    if "\0" in str(path):
        raise OSError(f"{value!r}, which is no path")
    return path


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing under a temporary name beside ``path``; at the end of the context it
    is renamed, or removed if an error ended it.

    Raises
    ------
    OSError
        The file cannot be written.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a whole file under a temporary name beside it, then rename it into place."""
    with whole_file(path) as file:
        file.write(text.encode())
