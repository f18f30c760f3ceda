"""The graph after every pass, as text in a folder, for who asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tvm

from ..errors import BackendUnavailable, mismatch
from ..files import as_path, write_atomically

#: ``look(name, module)`` gives ``module`` back, and shows it under a name.
Look = Callable[[str, tvm.IRModule], tvm.IRModule]


def unseen(_: str, module: tvm.IRModule) -> tvm.IRModule:
    """Show nothing."""
    return module


def into(folder: str | Path | None) -> Look:
    """Writes ``00_<name>.py``, ``01_<name>.py`` and so on as TVMScript, large constants left out;
    nothing without a folder, which is made if it is missing.

    Raises
    ------
    BackendUnavailable
        The folder cannot be made; and, from the result, a file cannot be written.
    """
    if folder is None:
        return unseen
    written = list[str]()
    try:
        path = as_path(folder)
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(error) from error

    def look(name: str, module: tvm.IRModule) -> tvm.IRModule:
        text = module.script(show_meta=False)
        try:
            write_atomically(path / f"{len(written):02}_{name}.py", text)
        except OSError as error:
            raise _unwritable(error) from error
        written.append(name)
        return module

    return look


def _unwritable(error: OSError) -> BackendUnavailable:
    return BackendUnavailable(mismatch("dump", "a folder that can be written", error))
