"""What an attention mask does to dead keys, read off the expression that computes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import relax

from pit_tvm.model.masks import PARTIAL, Kind, mask_kind, value_if_dead
from pit_tvm.windows import CAUSAL, FULL, Window
from tests.model.graphs import PLANE, B, T, graph, real, values

op = relax.op
LOWEST, LOWEST_HALF = (float(np.finfo(dtype).min) for dtype in ("float32", "float16"))
MASK = ("int64", B, T)


def number(value: float, dtype: str = "float32") -> relax.Constant:
    """A scalar constant."""
    return relax.const(np.array(value, dtype), dtype)


def keys(mask: Any) -> Any:
    """``mask`` as ``[batch, 1, 1, tokens]``, true where a key is live."""
    return op.astype(op.expand_dims(mask, [1, 2]), "bool")


def queries(mask: Any) -> Any:
    """``mask`` as ``[batch, 1, tokens, 1]``, true where a query is live."""
    return op.astype(op.expand_dims(mask, [1, 3]), "bool")


def position(rank: int, dim: int) -> Any:
    """Positions of tokens along one of ``rank`` dimensions."""
    dims = [d for d in range(rank) if d != dim]
    return op.expand_dims(op.arange(0, T, 1, "int64"), dims)


def additive(seen: Any, out: float = LOWEST, dtype: str = "float32") -> Any:
    """What is added to scores: 0 where a key is seen."""
    return op.where(seen, number(0, dtype), number(out, dtype))


def not_after() -> Any:
    """``[1, 1, tokens, tokens]``: whether a key is at the query's position or before it."""
    return op.less_equal(position(4, 3), position(4, 2))


def from_start(ids: Any, dim: int, extent: Any) -> Any:
    """Places along ``dim`` of four, written as if some of them were negative."""
    dims = [d for d in range(4) if d != dim]
    ids = op.expand_dims(op.arange(0, extent, 1, "int64") if ids is None else ids, dims)
    return op.where(op.less(ids, number(0, "int64")), op.add(ids, extent), ids)


def inverted(mask: Any, factor: float) -> Any:
    """``(1 - mask) * factor`` ``[batch, 1, 1, tokens]``, as older models write it."""
    real = op.astype(op.expand_dims(mask, [1, 2]), "float32")
    return op.multiply(op.subtract(number(1), real), number(factor))


def kind(make: Callable[..., Any], **more: Any) -> tuple[Kind, str]:
    """`mask_kind` of a mask computed from ``mask`` and whatever else is named."""
    module = graph(make, mask=MASK, **more)
    main = module["main"]
    return mask_kind(main.body.body, values(module).get, main.params[0])


def table(first: float) -> Any:
    """Constants of heads, of which those of the first one are ``first``."""
    return relax.const(np.array([first, *range(1, 8)], "float32").reshape(1, 8, 1, 1))


SEEN: dict[str, tuple[Callable[..., Any], str]] = {
    "keys that are live": (lambda m: additive(keys(m)), FULL),
    "the least of 16 bits": (lambda m: additive(keys(m), LOWEST_HALF, "float16"), FULL),
    "minus infinity": (lambda m: additive(keys(m), -np.inf), FULL),
    "large finite, by a product": (lambda m: inverted(m, LOWEST), FULL),
    "a row for every query": (
        lambda m: op.broadcast_to(additive(keys(m)), relax.ShapeExpr([B, 1, T, T])),
        FULL,
    ),
    "pairs of live tokens": (
        lambda m: additive(op.logical_and(keys(m), queries(m))),
        FULL,
    ),
    "compared with zero": (
        lambda m: additive(op.not_equal(op.expand_dims(m, [1, 2]), number(0, "int64"))),
        FULL,
    ),
    "numbers that are live": (
        lambda m: additive(
            op.greater_equal(op.astype(op.expand_dims(m, [1, 2]), "float32"), number(1))
        ),
        FULL,
    ),
    "causal": (lambda m: additive(op.logical_and(keys(m), not_after())), CAUSAL),
    "causal, the other way round": (
        lambda m: additive(
            op.logical_and(op.greater_equal(position(4, 2), position(4, 3)), keys(m))
        ),
        CAUSAL,
    ),
    "causal pairs": (
        lambda m: additive(
            op.logical_and(op.logical_and(queries(m), not_after()), keys(m)),
        ),
        CAUSAL,
    ),
    "read by ids that may count from the end": (
        lambda m: additive(
            op.astype(
                op.index_tensor(m, [from_start(op.arange(0, B, 1), 0, B), from_start(None, 3, T)]),
                "bool",
            )
        ),
        FULL,
    ),
    "causal, two terms": (
        lambda m: op.where(not_after(), additive(keys(m)), number(LOWEST)),
        CAUSAL,
    ),
    "a window": (
        lambda m: additive(
            op.logical_and(
                op.logical_and(keys(m), not_after()),
                op.less(op.subtract(position(4, 2), position(4, 3)), number(4, "int64")),
            )
        ),
        Window(3, 0),
    ),
    "a window to either side": (
        lambda m: additive(
            op.logical_and(
                keys(m),
                op.less_equal(
                    op.abs(op.subtract(position(4, 2), position(4, 3))), number(5, "int64")
                ),
            )
        ),
        Window(5, 5),
    ),
    "a window of two limits": (
        lambda m: additive(
            op.logical_and(
                op.logical_and(
                    op.less(op.subtract(position(4, 2), number(8, "int64")), position(4, 3)),
                    op.less_equal(op.subtract(position(4, 3), position(4, 2)), number(2, "int64")),
                ),
                keys(m),
            )
        ),
        Window(7, 2),
    ),
    "a window wider than kernels count": (
        lambda m: additive(
            op.logical_and(
                keys(m),
                op.less(op.subtract(position(4, 2), position(4, 3)), number(2**40, "int64")),
            )
        ),
        FULL,
    ),
    "every other key of a window": (
        lambda m: additive(
            op.logical_and(
                op.logical_and(keys(m), not_after()),
                op.equal(
                    op.floor_mod(op.subtract(position(4, 2), position(4, 3)), number(2, "int64")),
                    number(0, "int64"),
                ),
            )
        ),
        PARTIAL,
    ),
    "distances": (
        lambda m: op.add(
            additive(keys(m)),
            op.astype(op.subtract(position(4, 3), position(4, 2)), "float32"),
        ),
        PARTIAL,
    ),
    "a table": (
        lambda m: op.add(
            additive(keys(m)),
            table(0.0),
        ),
        PARTIAL,
    ),
    "a table of 16 bits where keys are live": (
        lambda m: op.astype(
            op.where(keys(m), op.astype(table(0.0), "bfloat16"), number(LOWEST, "bfloat16")),
            "float32",
        ),
        PARTIAL,
    ),
    "a table where keys are live": (
        lambda m: op.where(keys(m), table(0.0), number(LOWEST)),
        PARTIAL,
    ),
}


@pytest.mark.parametrize("name", SEEN)
def test_masks_that_exclude_dead_keys(name: str) -> None:
    make, expected = SEEN[name]
    assert kind(make) == (expected, "")


UNSEEN: dict[str, tuple[Callable[..., Any], str]] = {
    "only later keys": (
        lambda m: additive(op.logical_and(keys(m), op.less(position(4, 2), position(4, 3)))),
        "neither full, nor causal, nor a window",
    ),
    "strictly earlier keys": (
        lambda m: additive(op.logical_and(keys(m), op.less(position(4, 3), position(4, 2)))),
        "neither full, nor causal, nor a window",
    ),
    "without the mask": (lambda m: additive(not_after()), "lets live queries see dead keys"),
    "queries only": (lambda m: additive(queries(m)), "lets live queries see dead keys"),
    "either of the two": (
        lambda m: additive(op.logical_or(keys(m), not_after())),
        "lets live queries see dead keys",
    ),
    "inverted": (
        lambda m: additive(op.logical_not(keys(m))),
        "lets live queries see dead keys",
    ),
    "inverted by a product": (
        lambda m: op.multiply(op.astype(op.expand_dims(m, [1, 2]), "float32"), number(LOWEST)),
        "lets live queries see dead keys",
    ),
    "too small a number": (lambda m: inverted(m, -10000.0), "lets live queries see dead keys"),
    "too small a number of 16 bits": (
        lambda m: additive(keys(m), -10000.0, "float16"),
        "lets live queries see dead keys",
    ),
    "the least of 16 bits beside scores of 32": (
        lambda m: op.astype(additive(keys(m), LOWEST_HALF, "float16"), "float32"),
        "lets live queries see dead keys",
    ),
    "live keys with a bonus": (
        lambda m: op.where(keys(m), number(1), number(LOWEST)),
        "neither full, nor causal, nor a window",
    ),
    "the mask of another sequence": (
        lambda m: additive(keys(op.flip(m, 0))),
        r"depends on mask\[",
    ),
    "the mask of another token": (lambda m: additive(keys(op.flip(m, 1))), r"depends on mask\["),
    "sums along tokens": (
        lambda m: additive(keys(op.cumsum(m, 1))),
        "cumsum is not lowered to one loop nest",
    ),
    "counts of tokens": (
        lambda m: additive(op.less(position(4, 3), op.expand_dims(op.sum(m, [1]), [1, 2, 3]))),
        "no plain element-wise store",
    ),
    "a table that excludes keys": (
        lambda m: op.add(additive(keys(m)), table(LOWEST)),
        "reads a table of constants",
    ),
    "a table that excludes live keys": (
        lambda m: op.where(keys(m), table(LOWEST), number(LOWEST)),
        "reads a table of constants",
    ),
    "a table of dead keys": (
        lambda m: op.where(keys(m), number(0), table(0.0)),
        "reads a table of constants",
    ),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_other_masks_and_what_is_said_of_them(name: str) -> None:
    make, reason = UNSEEN[name]
    found, why = kind(make)
    assert found == ""
    assert re.search(reason, why)


@pytest.mark.parametrize(
    "make",
    [
        lambda m, other: additive(keys(other)),
        lambda m, other: additive(op.logical_and(keys(other), keys(m))),
        lambda m, other: additive(op.logical_and(queries(other), keys(m))),
    ],
)
def test_another_input_is_not_the_mask(make: Callable[..., Any]) -> None:
    found, why = kind(make, other=MASK)
    assert found == ""
    assert "the mask depends on other[" in why


def test_what_another_input_may_exclude_is_not_known() -> None:
    biases = (1, 8, T, T)
    found, why = kind(lambda m, other: op.add(additive(keys(m)), other), other=biases)
    assert found == ""
    assert "the mask depends on other[" in why


def dead(make: Callable[..., Any], **more: Any) -> float | None:
    """`value_if_dead` of what ``make`` computes from ``x``, ``mask`` and others."""
    module = graph(make, x=(B, T, 8), mask=MASK, **more)
    main = module["main"]
    return value_if_dead(main.body.body, values(module).get, main.params[1], PLANE)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x, m: m, 0.0),
        (lambda x, m: real(m), 0.0),
        (lambda x, m: op.broadcast_to(real(m), relax.ShapeExpr([B, T, 8])), 0.0),
        (lambda x, m: op.astype(op.astype(real(m), "bool"), "float32"), 0.0),
        (lambda x, m: op.permute_dims(real(m), [0, 2, 1]), 0.0),
        (lambda x, m: op.subtract(number(1), real(m)), 1.0),
        (lambda x, m: op.add(number(1), real(m)), 1.0),
        (lambda x, m: op.equal(m, number(0, "int64")), 1.0),
        (lambda x, m: op.not_equal(m, number(0, "int64")), 0.0),
        (lambda x, m: op.not_equal(op.subtract(number(1), real(m)), number(0)), 1.0),
        (lambda x, m: op.equal(op.multiply(real(m), number(2)), number(2)), 0.0),
        (lambda x, m: op.not_equal(op.divide(real(m), number(2)), number(0)), 0.0),
        (lambda x, m: op.flip(real(m), 1), None),
        (lambda x, m: op.cumsum(real(m), 1), None),
        (lambda x, m: op.reshape(m, [B * T]), None),
        (lambda x, m: op.sum(real(m), [1]), None),
        (lambda x, m: op.multiply(x, real(m)), None),
        (lambda x, m: x, None),
        (lambda x, m: number(0), None),
    ],
)
def test_the_value_of_dead_tokens(make: Callable[..., Any], expected: float | None) -> None:
    assert dead(make) == expected


def test_another_input_says_nothing_of_dead_tokens() -> None:
    assert dead(lambda x, m, other: real(other), other=MASK) is None
