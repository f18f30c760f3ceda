"""What the subcommands of ``pit-tvm`` share: numbers, and sizes of products."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations

from .errors import ShapeError, mismatch

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


def _whole(text: str) -> int:
    """The number that digits spell; -1 for any other text."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else -1
