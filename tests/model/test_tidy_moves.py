"""What `tidy` moves: casts and factors behind permutations, so that attention can take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from pit_tvm.model.tidy import tidy
from tests.model.graphs import B, T, graph, names

op = relax.op
TWO = relax.const(np.array(2.0, "float32"))


def after(make: Any, **params: Any) -> list[str]:
    """Operators of a graph when it is tidy."""
    return names(tidy(graph(make, **params), {}))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_elements_are_permuted_while_they_are_small(dtype: str) -> None:
    found = after(lambda x: op.permute_dims(op.astype(x, "float32"), [0, 2, 1]), x=(dtype, B, T, 8))
    assert found == ["permute_dims", "astype"]


def test_a_cast_that_makes_elements_smaller_stays_first() -> None:
    found = after(lambda x: op.permute_dims(op.astype(x, "float16"), [0, 2, 1]), x=(B, T, 8))
    assert found == ["astype", "permute_dims"]


def test_wider_and_back_is_nothing() -> None:
    found = after(
        lambda x: op.negative(op.astype(op.astype(x, "float32"), "float16")), x=("float16", B, 8)
    )
    assert found == ["negative"]


@pytest.mark.parametrize(
    "way", [("float32", "float16", "float32"), ("float16", "float32", "bfloat16")]
)
def test_other_ways_round(way: tuple[str, str, str]) -> None:
    first, second, third = way
    found = after(lambda x: op.negative(op.astype(op.astype(x, second), third)), x=(first, B, 8))
    assert found == ["astype", "astype", "negative"]


def test_factors_go_behind_what_splits_heads() -> None:
    def make(x: Any) -> Any:
        return op.permute_dims(op.reshape(op.multiply(x, TWO), [B, T, 4, 2]), [0, 2, 1, 3])

    assert after(make, x=(B, T, 8)) == ["reshape", "permute_dims", "multiply"]


def test_factors_stay_before_what_merges_dimensions() -> None:
    found = after(lambda x: op.reshape(op.multiply(x, TWO), [B * T, 8]), x=(B, T, 8))
    assert found == ["multiply", "reshape"]


def test_a_tensor_is_no_factor() -> None:
    found = after(
        lambda x, y: op.permute_dims(op.multiply(x, y), [0, 2, 1]), x=(B, T, 8), y=(B, T, 8)
    )
    assert found == ["multiply", "permute_dims"]
