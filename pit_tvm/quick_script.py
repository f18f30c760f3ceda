"""Shortcuts through TVM's script parser, for processes that parse many kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from types import CodeType
from typing import Any

from tvm.script.parser.core import doc, evaluator

from .quick_stacks import Change, Replaced, quick_stacks

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
    with quick_stacks(), _quick_parser():
        yield


@cache
def _quick_parser() -> Replaced:
    def changes() -> list[Change]:
        parse = lru_cache(maxsize=512)(doc.parse)
        return [
            (doc, "parse", parse),
            (evaluator, "_eval_expr", _value_beside(evaluator._eval_expr)),
        ]

    return Replaced(changes)


def _value_beside(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    """As ``evaluate``, TVM's own, which has expressions that are rare."""

    def value_of(node: Any, names: dict[str, Any] | None) -> Any:
        try:
            text = _spelled(node)
        except KeyError:
            return evaluate(node, names)
        return eval(_compiled(text), {} if names is None else names)

    return value_of


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
