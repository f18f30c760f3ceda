"""What the subcommands of ``pit-tvm`` share: numbers, sizes, databases, folders to write to."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

from .errors import DatabaseError, ShapeError, mismatch

MOST = 2**31 - 1  # extents are int32 in kernels
_MOST_ELEMENTS = 2**40  # of a matrix: far above any memory, and far below where numpy overflows
_MOST_DIGITS = 100  # Python refuses to read integers of thousands


def at_least(least: int, most: int = MOST) -> Callable[[str], int]:
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
        The text has none of the forms, or an integer is above `MOST`.
    """
    for form in forms:
        separator = "," if "," in form else "x"
        found = [_whole(part) for part in text.split(separator)]
        if len(found) == len(form.split(separator)) and min(found) > 0:
            if max(found) > MOST:
                raise argparse.ArgumentTypeError(f"expected at most {MOST} each, got {text!r}")
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


def add_database(parser: argparse.ArgumentParser) -> None:
    """The argument that names tuned tiles, as `TileStore.over_shipped` takes it."""
    parser.add_argument(
        "--database",
        type=Path,
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
        path.mkdir(mode=mode, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise DatabaseError(mismatch(option, "a folder that can be written", error)) from error


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


def _whole(text: str) -> int:
    """The number that digits spell; -1 for any other text."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else -1
