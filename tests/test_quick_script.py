"""Shortcuts through TVM's script parser: the same results, and the parser as it was afterwards."""

from __future__ import annotations

import pytest
from tvm.script.parser.core import doc, evaluator

from pit_tvm.quick_script import _spelled, quick_script

NAMES = {"f": lambda *args, **kwargs: (args, kwargs), "d": {1: "one", (1, 2): "two"}, "x": 3}


@pytest.mark.parametrize(
    "text",
    [
        *("x", "7", "'a\"b\\n'", "None", "True", "(1).real", "d[1]", "d[1, 2]", "()", "(x,)"),
        *("[x, (2, x)]", "f()", "f(x, 'y', a=x)", "f(1, **f(z=2)[1])", "f(f(x), d[1]).__len__()"),
        *("len(d)", "-x", "2.5", "f(*d)", "[n for n in d]", "(lambda n: n + x)(4)"),
    ],
)
def test_expressions_are_what_python_says(text: str) -> None:
    expected = eval(text, dict(NAMES))
    with quick_script():
        for _ in range(2):
            node = doc.parse(text, mode="eval").body
            assert evaluator._eval_expr(node, dict(NAMES)) == expected


def test_rare_expressions_are_left_to_the_parser() -> None:
    for text in ("2.5", "f(*d)", "-x", "x + 1", "[n for n in d]"):
        with pytest.raises(KeyError):
            _spelled(doc.parse(text, mode="eval").body)


def test_a_text_is_parsed_once_and_the_parser_is_left_as_it_was() -> None:
    before = doc.parse, evaluator._eval_expr
    with quick_script():
        assert doc.parse("x = 1") is doc.parse("x = 1")
    assert (doc.parse, evaluator._eval_expr) == before
