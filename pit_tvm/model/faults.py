"""What code that does not fit a model raises, as errors of pit-tvm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import PitError, UnsupportedModel, mismatch

LEAVE_OUT = "write it with others, or leave that part out of the model"
LONGEST_MESSAGE = 300
#: What code that does not fit its inputs raises: a module's while torch runs it, and conversions of
#: its operators. Files, memory and interrupts are another matter.
CODE_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    TypeError,
    ValueError,
)


@contextmanager
def faults_as_unsupported(expected: str) -> Iterator[None]:
    """Raise UnsupportedModel, with what was ``expected``, where torch or TVM raises anything of
    `CODE_FAULTS`; errors of pit-tvm are left as they are."""
    try:
        yield
    except PitError:
        raise
    except CODE_FAULTS as error:
        # TVM's errors show the whole module after a first paragraph.
        said = " ".join(str(error).strip().split("\n\n")[0].split())[:LONGEST_MESSAGE]
        got = f"{type(error).__name__}: {said.removeprefix(f'{type(error).__name__}: ')}"
        raise UnsupportedModel(mismatch("model", expected, got, LEAVE_OUT)) from error


def place(node: Any) -> str:
    """The name of an operator of torch, and the line of the model that calls it."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    where = [line.strip() for line in lines if line.strip().startswith("File ")]
    name = operator_name(node)
    return f"{name} ({where[-1]}: {lines[-1].strip()})" if where else name


def operator_name(node: Any) -> str:
    """The name of an operator of torch."""
    return str(getattr(node.target, "__name__", node.target))
