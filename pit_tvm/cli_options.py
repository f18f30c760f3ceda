"""What the subcommands of ``pit-tvm`` share: numbers, sizes, databases and folders."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import BackendUnavailable, DatabaseError, ShapeError, mismatch
from .structs import MOST_EXTENT

if TYPE_CHECKING:
    from .runtime.kernel_cache import KernelCache

_MOST_ELEMENTS = 2**40  # of a matrix: far above any memory, and far below where numpy overflows
_MOST_DIGITS = 100  # Python refuses to read integers of thousands
# The argument that an error of the library names first, and the options that give it: the error
# then names the first of these that the subcommand has.
GIVEN_BY = {
    "activation": ("--activation",),
    "database": ("--database", "--out"),
    "dtype": ("--dtype",),
    "groups": ("--shape, GROUPS",),
    "mask": ("--mask-input",),
    "model": ("--model",),
    "op": ("--op",),
    "rpc key": ("--rpc-key",),
    "rpc tracker": ("--rpc-tracker",),
    "target": ("--target",),
    "work_dir": ("--work-dir",),
}


def at_least(least: int, most: int = MOST_EXTENT) -> Callable[[str], int]:
    """What reads an integer of ``least`` to ``most``, for argparse."""

    def integer(text: str) -> int:
        value = _whole(text)
        if value < least:
            expected = f"expected an integer of at least {least}, got {text!r}"
            raise argparse.ArgumentTypeError(expected)
        if value > most:
            raise argparse.ArgumentTypeError(f"expected at most {most}, got {text!r}")
        return value

    return integer


def any_seed(text: str) -> int:
    """An integer that is not negative, however large, for argparse."""
    return at_least(0, 10**_MOST_DIGITS)(text)


def numbers(text: str, *forms: str) -> tuple[int, ...]:
    """Integers of at least 1, as many as a form such as "M,N,K" or "AxB" has, separated alike.

    Raises
    ------
    argparse.ArgumentTypeError
        The text has none of the forms, or an integer is above `MOST_EXTENT`.
    """
    for form in forms:
        separator = "," if "," in form else "x"
        found = [_whole(part) for part in text.split(separator)]
        if len(found) == len(form.split(separator)) and min(found) > 0:
            if max(found) > MOST_EXTENT:
                expected = f"expected at most {MOST_EXTENT} each"
                raise argparse.ArgumentTypeError(f"{expected}, got {text!r}")
            return tuple(found)
    expected = " or ".join(forms)
    raise argparse.ArgumentTypeError(f"expected {expected}, integers of at least 1, got {text!r}")


def sizes(text: str, *forms: str) -> tuple[int, ...]:
    """The `numbers` of a product, whose first three are the extents of its matrices."""
    found = numbers(text, *forms)
    if any(a * b > _MOST_ELEMENTS for a, b in combinations(found[:3], 2)):
        expected = f"expected matrices of at most {_MOST_ELEMENTS} elements"
        raise argparse.ArgumentTypeError(f"{expected}, got {text!r}")
    return found


def folder(text: str) -> Path:
    """The path of a folder, for argparse; an empty text would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("expected a folder, got ''")
    return Path(text)


def add_database(parser: argparse.ArgumentParser) -> None:
    """The argument that names tuned tiles, as `TileStore.over_shipped` takes it."""
    parser.add_argument(
        "--database",
        type=folder,
        metavar="DIR",
        help="tile database over the shipped one, such as tune --out makes; DIR/DEVICE is used "
        "alone (default: the shipped one)",
    )


@contextmanager
def in_memory(option: str) -> Iterator[None]:
    """Where arrays are made whose sizes an option decides.

    Raises
    ------
    ShapeError
        They do not fit into memory.
    """
    try:
        yield
    except MemoryError as error:
        raise ShapeError(mismatch(option, "arrays that fit into memory", error)) from error


def writable_folder(option: str, path: Path, mode: int = 0o777) -> None:
    """Make the folder that an option names, if it is missing, and try whether files can be made.

    Raises
    ------
    DatabaseError
        They cannot; the message names the option.
    """
    try:
        _write_in(path, mode)
    except OSError as error:
        raise DatabaseError(mismatch(option, "a folder that can be written", error)) from error


@contextmanager
def made_folder(option: str, path: Path) -> Iterator[None]:
    """A `writable_folder`; what was made for it and is empty at the end is removed again."""
    made = [each for each in (path, *path.parents) if not os.path.exists(each)]
    try:
        writable_folder(option, path)
        yield
    finally:
        for each in made:
            with suppress(OSError):  # not empty, or never made
                each.rmdir()


def _write_in(path: Path, mode: int) -> None:
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
        pass


def kernel_cache() -> KernelCache:
    """The user's kernel cache, whose folder can be read or is not there yet.

    Raises
    ------
    BackendUnavailable
        The path is of something else, or cannot be read.
    """
    from .runtime.kernel_cache import KernelCache

    cache = KernelCache()
    # Where kernels are called the cache warns, and works in memory; a command's user can mend it.
    with cache_faults(), suppress(FileNotFoundError), os.scandir(cache.directory):
        pass
    return cache


def writable_cache(option: str, path: Path | None) -> KernelCache:
    """A kernel cache in the folder that an option names, or the user's; see `writable_folder`.

    Raises
    ------
    DatabaseError, BackendUnavailable
        No files can be made in that folder; in the user's.
    """
    from .runtime.kernel_cache import KernelCache

    cache, mode = KernelCache(path), 0o700  # who may write there may run code
    if path is not None:
        writable_folder(option, path, mode)
    else:
        with cache_faults("written"):
            _write_in(cache.directory, mode)
    return cache


@contextmanager
def cache_faults(done: str = "read") -> Iterator[None]:
    """Where the user's kernel cache is used: that it cannot be is an error of the user's.

    Raises
    ------
    BackendUnavailable
        For any OSError.
    """
    try:
        yield
    except OSError as error:
        expected, advice = f"a folder that can be {done}", "set PIT_TVM_CACHE to another"
        text = mismatch("kernel cache", expected, error, advice)
        raise BackendUnavailable(text) from error


def is_there(option: str, path: Path) -> bool:
    """Whether there is anything at the path that an option names.

    Raises
    ------
    DatabaseError
        That cannot be found out; the message names the option.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise DatabaseError(mismatch(option, "a path that can be read", error)) from error
    return True


def as_typed(text: str, args: argparse.Namespace) -> str:
    """An error's text, with the option that was typed for the argument of the library that it
    begins with, if the subcommand of ``args`` has it."""
    for name, options in GIVEN_BY.items():
        if text.startswith((f"{name}:", f"{name} ")):
            for option in options:
                if hasattr(args, option.partition(",")[0].strip("-").replace("-", "_")):
                    return option + text.removeprefix(name)
    return text


def _whole(text: str) -> int:
    """The number that digits spell; -1 for any other text."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else -1
