"""Shortcuts through TVM's script parser, for processes that parse many kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any

from tvm.script.parser.core import doc, evaluator

from .quick_stacks import quick_stacks

_PLAIN = (int, str, bool, type(None))  # constants that are as they are written
_SPELLED: dict[type, Callable[[Any], str]] = {
    doc.Name: lambda node: node.id,
    doc.Attribute: lambda node: f"{_spelled(node.value)}.{node.attr}",
    doc.Subscript: lambda node: f"{_spelled(node.value)}[{_spelled(node.slice)}]",
    doc.keyword: lambda node: (f"{node.arg}=" if node.arg else "**") + _spelled(node.value),
    doc.Call: lambda node: f"{_spelled(node.func)}({_listed([*node.args, *node.keywords])})",
    doc.Tuple: lambda node: f"({_listed(node.elts)})",
    doc.List: lambda node: f"[{_listed(node.elts)}]",
}


@contextlib.contextmanager
def quick_script() -> Iterator[None]:
    """Within this context texts are parsed once, which TVM does at every call of a macro, and so
    are expressions, each of which TVM turns back into what Python compiles. The kernels are the
    same. Stacks are as in `quick_stacks`."""
    parse, evaluate = doc.parse, evaluator._eval_expr

    def value_of(node: Any, names: dict[str, Any] | None) -> Any:
        try:
            text = _spelled(node)
        except KeyError:
            return evaluate(node, names)
        return eval(_compiled(text), {} if names is None else names)

    doc.parse, evaluator._eval_expr = lru_cache(maxsize=512)(parse), value_of
    try:
        with quick_stacks():
            yield
    finally:
        doc.parse, evaluator._eval_expr = parse, evaluate


@lru_cache(maxsize=4096)
def _compiled(text: str) -> CodeType:
    return compile(text, "<ast>", "eval")


def _spelled(node: Any) -> str:
    """An expression as Python has it; KeyError if it is of a kind that is rare."""
    if isinstance(node, doc.Constant) and type(node.value) in _PLAIN:
        return f"({node.value!r})"
    return _SPELLED[type(node)](node)


def _listed(nodes: list[Any]) -> str:
    return "".join(f"{_spelled(node)}, " for node in nodes)
