"""Shortcuts through TVM's script parser: the same results, and the parser as it was afterwards."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from tvm.script.parser.core import doc, evaluator

from pit_tvm.quick_script import _spelled, quick_script
from pit_tvm.quick_stacks import Replaced

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


def test_a_text_is_parsed_once() -> None:
    with quick_script(), quick_script():
        assert doc.parse("x = 1") is doc.parse("x = 1")


def test_what_is_replaced_is_left_as_it_was_whoever_leaves_last() -> None:
    module = SimpleNamespace(value=1)
    turns = iter(range(10, 20))
    other = Replaced(lambda: [(module, "value", next(turns))])
    inside, leave, seen = threading.Event(), threading.Event(), list[int]()

    def work() -> None:
        with other:
            inside.set()
            leave.wait()
            seen.append(module.value)

    with other:
        thread = threading.Thread(target=work)
        thread.start()
        inside.wait()
        with other:
            seen.append(module.value)
    seen.append(module.value)  # the thread is inside
    leave.set()
    thread.join()
    assert seen == [10, 10, 10] and module.value == 1
    with pytest.raises(RuntimeError), other:
        assert module.value == 11
        raise RuntimeError
    assert module.value == 1
