"""Which picks of a graph need no padded values: those of hidden states alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from pit_tvm.model.kernels import CpuKernels
from pit_tvm.model.propagate import (
    PICKS,
    PICKS_ALL,
    READS_FILLED,
    READS_ZEROS,
    Decision,
    propagate,
)
from pit_tvm.target import resolve_target
from tests.model.graphs import PLANE, B, T, graph, names, real, weight

op = relax.op
KERNELS = CpuKernels(resolve_target("llvm"))
ROWS = relax.ShapeExpr([B, T, 8])
TABLE, SQUARE, TALL = weight(9, 8), weight(8, 8), weight(16, 8)


def number(value: float, dtype: str = "float32") -> relax.Constant:
    return relax.const(value, dtype)


LEAST = number(-1e9)


def first(x: Any) -> Any:
    """The first token of each sequence, ``[batch, ...]``."""
    return op.take(x, number(0, "int64"), 1)


def words(ids: Any) -> Any:
    return op.take(TABLE, ids, 0)


def layer(x: Any) -> Any:
    return op.matmul(x, SQUARE)


def made(make: Callable[..., Any]) -> tuple[tvm.IRModule, list[Decision]]:
    module = graph(make, x=(B, T, 8), ids=("int64", B, T), mask=("int64", B, T), s=(B, 1, 8))
    return propagate(module, PLANE, "mask", KERNELS)


# What is picked from, by the reason that is given.
ORIGINS: dict[str, tuple[Callable[..., Any], str]] = {
    "a layer": (lambda x, i, m, s: layer(x), PICKS),
    "words": (lambda x, i, m, s: words(i), PICKS),
    "words of numbers from ids": (lambda x, i, m, s: words(op.multiply(i, i)), PICKS),
    "words and positions": (lambda x, i, m, s: op.add(words(i), words(op.cumsum(m, 1))), PICKS),
    "a layer of ids": (
        lambda x, i, m, s: layer(
            op.astype(op.broadcast_to(op.expand_dims(i, [2]), ROWS), "float32")
        ),
        PICKS,
    ),
    "a layer with its sequence": (lambda x, i, m, s: op.add(layer(x), s), PICKS),
    "a layer of both": (lambda x, i, m, s: op.matmul(op.concat([x, words(m)], 2), TALL), PICKS),
    "chosen by itself": (
        lambda x, i, m, s: op.where(op.greater(x, number(0)), number(1.0), number(2.0)),
        PICKS,
    ),
    "chosen by the mask": (
        lambda x, i, m, s: op.where(op.equal(op.expand_dims(m, [2]), number(0, "int64")), x, s),
        PICKS,
    ),
    "masked": (lambda x, i, m, s: op.multiply(x, real(m)), READS_ZEROS),
    "masked ids": (lambda x, i, m, s: op.multiply(i, m), READS_ZEROS),
    "zero by the mask": (
        lambda x, i, m, s: op.where(op.astype(op.expand_dims(m, [2]), "bool"), x, number(0.0)),
        READS_ZEROS,
    ),
    "zero by the mask, moved": (
        lambda x, i, m, s: op.squeeze(op.expand_dims(op.multiply(x, real(m)), [3]), [3]),
        READS_ZEROS,
    ),
    "one number by the mask": (
        lambda x, i, m, s: op.where(op.equal(op.expand_dims(m, [2]), number(0, "int64")), LEAST, x),
        READS_FILLED,
    ),
    "the same integer": (
        lambda x, i, m, s: op.where(op.astype(m, "bool"), i, number(7, "int64")),
        READS_FILLED,
    ),
    "one number by two masks": (
        lambda x, i, m, s: op.where(
            op.astype(op.expand_dims(m, [2]), "bool"),
            s,
            op.where(op.equal(op.expand_dims(m, [2]), number(0, "int64")), LEAST, x),
        ),
        READS_FILLED,
    ),
    "numbers by the mask": (
        lambda x, i, m, s: op.where(
            op.astype(op.expand_dims(m, [2]), "bool"), x, relax.const(np.arange(8.0, dtype="f4"))
        ),
        PICKS_ALL,
    ),
    "integers": (lambda x, i, m, s: op.add(i, i), PICKS_ALL),
    "ids as numbers": (lambda x, i, m, s: op.astype(op.add(i, i), "float32"), PICKS_ALL),
    "a comparison": (lambda x, i, m, s: op.greater(layer(x), number(0)), PICKS_ALL),
    "the mask": (lambda x, i, m, s: op.subtract(number(1.0), real(m)), PICKS_ALL),
    "kinds by the mask": (lambda x, i, m, s: words(m), PICKS_ALL),
    "zeros like it": (lambda x, i, m, s: op.add(op.zeros_like(x), s), PICKS_ALL),
    "the sequence's, by the mask": (
        lambda x, i, m, s: op.where(op.equal(op.expand_dims(m, [2]), number(1, "int64")), x, s),
        PICKS_ALL,
    ),
    "a layer of what is masked": (lambda x, i, m, s: layer(op.multiply(x, real(m))), PICKS_ALL),
    "either, by the id": (
        lambda x, i, m, s: op.where(op.greater(op.expand_dims(i, [2]), number(3, "int64")), x, s),
        PICKS_ALL,
    ),
    "beside each other": (lambda x, i, m, s: op.concat([x, words(m)], 2), PICKS_ALL),
}


@pytest.mark.parametrize("name", ORIGINS)
def test_what_a_pick_reads(name: str) -> None:
    make, expected = ORIGINS[name]
    _, decisions = made(lambda x, ids, mask, s: first(make(x, ids, mask, s)))
    assert decisions[-1].reason == expected
    whole = expected == PICKS_ALL
    assert decisions[-1].whole is whole
    assert whole or not any(d.whole for d in decisions if d.operator not in ("cumsum", "take"))


@pytest.mark.parametrize("make", [lambda x: op.flip(x, 1), lambda x: op.cumsum(x, 1)])
def test_what_was_computed_of_all_tokens_is_picked_from_those(make: Callable[..., Any]) -> None:
    graph_, decisions = made(lambda x, ids, mask, s: first(make(x)))
    assert decisions[-1].whole and not any(n.startswith("call_tir") for n in names(graph_))


def test_a_pick_is_zero_in_outputs_and_the_models_own_for_its_tokens() -> None:
    """One picked value, by a layer of its own, for two readers."""

    def make(x: Any, ids: Any, mask: Any, s: Any) -> Any:
        block = relax.BlockBuilder.current()
        pooled = block.emit(layer(block.emit(first(block.emit(layer(x))))))
        return relax.Tuple([pooled, op.add(x, op.expand_dims(pooled, [1]))])

    _, decisions = made(make)
    reasons = [d.reason for d in decisions]
    assert PICKS in reasons and PICKS_ALL in reasons
    assert sum(d.operator == "matmul" for d in decisions) == 4


def test_a_pick_for_outputs_alone_is_made_once() -> None:
    graph_, decisions = made(lambda x, ids, mask, s: op.tanh(layer(first(layer(x)))))
    assert names(graph_).count("matmul") == 2 and not any(d.whole for d in decisions)
    assert [d.operator for d in decisions] == ["matmul", "take", "matmul", "tanh"]
