"""Which dimensions of a tensor run over the batch and over its tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import relax, tirx

from pit_tvm.errors import ShapeError
from pit_tvm.model.plane import BATCH, BOTH, PLAIN, TOKENS, segments
from pit_tvm.model.rebuild import extents_of, same_extents
from tests.model.graphs import PLANE, B, T, tensor


@pytest.mark.parametrize(
    ("extents", "roles"),
    [
        ((B, T, 8), (BATCH, TOKENS, PLAIN)),
        ((B * T, 8), (BOTH, PLAIN)),
        ((T * B,), (BOTH,)),
        ((B, 4, T, 8), (BATCH, PLAIN, TOKENS, PLAIN)),
        ((B, 4, 8, T), (BATCH, PLAIN, PLAIN, TOKENS)),
        ((T, B), (TOKENS, BATCH)),
        ((T, 8), (TOKENS, PLAIN)),
        ((B, 1), (BATCH, PLAIN)),
        ((3, 4), (PLAIN, PLAIN)),
        ((T + B - B,), (TOKENS,)),
        ((), ()),
    ],
)
def test_roles_of_dimensions(extents: tuple[Any, ...], roles: tuple[str, ...]) -> None:
    assert PLANE.roles(tensor("x", ("float32", *extents))) == roles


@pytest.mark.parametrize(
    "extents",
    [(B, 2, T, T), (B * T, T), (B, B), (B, T + 1), (B, T * 2), (B * 4, T), (B + T, 8), (T - 1,)],
)
def test_no_roles_where_an_axis_is_mixed_or_comes_twice(extents: tuple[Any, ...]) -> None:
    var = tensor("x", extents)
    assert PLANE.roles(var) is None
    with pytest.raises(ShapeError, match="batch and tokens as axes"):
        PLANE.known(var)


def test_no_roles_without_a_shape() -> None:
    assert PLANE.roles(relax.Var("x", relax.TensorType(dtype="float32", ndim=2))) is None
    assert PLANE.roles(relax.Var("x", relax.ShapeType([B, T]))) is None


@pytest.mark.parametrize(
    ("roles", "token_wise"),
    [
        ((BATCH, TOKENS, PLAIN), True),
        ((BOTH, PLAIN), True),
        ((TOKENS, BATCH), True),
        ((TOKENS, PLAIN), False),
        ((BATCH,), False),
        ((), False),
        (None, False),
    ],
)
def test_values_of_single_tokens(roles: Any, token_wise: bool) -> None:
    assert PLANE.is_token_wise(roles) is token_wise


def test_packed_extents_are_one_sequence() -> None:
    live = tirx.Var("live", "int64")
    extent = PLANE.packed(live)
    assert same_extents([extent(e) for e in (B, T, B * T)], [tirx.IntImm("int64", 1), live, live])


@pytest.mark.parametrize(
    ("extents", "products"),
    [
        ((B, T, 2, 8), [1, 1, 16]),
        ((B * T, 16), [1, 1, 16]),
        ((B, T, 16), [1, 1, 16]),
        ((3, B, 2, T), [3, 2, 1]),
        ((2, B, 5), [2, 5]),
        ((T, 5), [1, 5]),
        ((4, 5), [20]),
    ],
)
def test_segments_are_what_lies_around_the_axes(extents: Any, products: list[int]) -> None:
    var = tensor("x", extents)
    found = segments(extents_of(var), PLANE.known(var))
    assert found is not None
    assert same_extents(found, extents_of(tensor("y", products)))


@pytest.mark.parametrize("extents", [(T, B, 8), (T, 8, B)])
def test_no_segments_where_tokens_come_first(extents: Any) -> None:
    var = tensor("x", extents)
    assert segments(extents_of(var), PLANE.known(var)) is None
