"""Which calls of functions may be repeated before anything is checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import pit_tvm.torch as pit
from pit_tvm.errors import PitError
from pit_tvm.gates import PLAIN, Gate

torch = pytest.importorskip("torch")
functional: Any = pytest.importorskip("pit_tvm.torch.functional")
operators: Any = pytest.importorskip("pit_tvm.torch.operators")
FakeTensorMode: Any = pytest.importorskip("torch._subclasses").FakeTensorMode
forward_ad: Any = pytest.importorskip("torch.autograd.forward_ad")

TOKENS, HIDDEN, INTER, EXPERTS, TOP_K = 3, 16, 24, 4, 2


class Own(torch.Tensor):  # type: ignore[misc, name-defined]
    """A tensor that torch has to ask what it does."""


def arguments() -> list[Any]:
    """x, ids, weights, up and down."""
    weights, ids = torch.rand(TOKENS, EXPERTS).topk(TOP_K)
    shapes = (TOKENS, HIDDEN), (EXPERTS, 2 * INTER, HIDDEN), (EXPERTS, HIDDEN, INTER)
    x, up, down = (torch.randn(shape) for shape in shapes)
    return [x, ids, weights, up, down]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is looked for, as if on a GPU, where nothing is found unless something is put here."""
    calls: list[Any] = []
    found: Callable[..., Any] = lambda *given: calls.append(given)  # noqa: E731
    monkeypatch.setattr(functional, "repeated_layer", found)
    monkeypatch.setattr(functional, "repeated_rows", found)
    monkeypatch.setattr(functional, "_on_gpu", lambda x: True)
    return calls


@contextlib.contextmanager
def cast() -> Any:
    """``torch.autocast`` of a GPU that is not there."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_plain_calls_are_looked_for_and_then_computed(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments()
    frozen = [*given[:3], *map(torch.nn.Parameter, given[3:])]
    bias, gate = torch.randn(EXPERTS, HIDDEN), Gate(7.0, 1.7, 1.0, True)
    with torch.no_grad():
        first = pit.moe_feed_forward(*given)
        torch.testing.assert_close(pit.moe_feed_forward(*frozen), first)
        pit.moe_feed_forward(*given, down_bias=bias, activation="silu", gated=gate)
    assert [(act, gate) for _, act, gate in asked] == [("silu", PLAIN)] * 2 + [("silu", gate)]
    assert all(a is b for a, b in zip(asked[1][0], (*frozen, None, None), strict=True))
    assert asked[2][0][5:] == (None, bias)
    monkeypatch.setattr(functional, "repeated_layer", lambda *given: bias)
    assert pit.moe_feed_forward(*given) is bias


@pytest.mark.parametrize(
    "around", [cast, forward_ad.dual_level, FakeTensorMode, torch.profiler.profile]
)
def test_calls_that_others_look_at_are_not_looked_for(asked: list[Any], around: Any) -> None:
    given = arguments()
    with torch.no_grad(), around():
        if around is FakeTensorMode:
            given = arguments()
        pit.moe_feed_forward(*given)
        pit.linear_rows(given[0], given[0], rows=given[1][:1, 0].clamp(max=TOKENS - 1))
    assert not asked


def test_calls_of_other_tensors_are_not_looked_for(asked: list[Any]) -> None:
    given = arguments()
    for place in (0, 2, 3):
        other = [*given]
        other[place] = torch.nn.Parameter(given[place])
        pit.moe_feed_forward(*other)  # with gradients
    with torch.no_grad():
        own = [*given[:4], given[4].as_subclass(Own)]
        pit.moe_feed_forward(*own)
        pit.moe_feed_forward(given[0][None], given[1][None], given[2][None], *given[3:])
        compiled = torch.compile(pit.moe_feed_forward, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*given), pit.moe_feed_forward(*given))
    assert len(asked) == 1  # the last one


def test_rows_are_looked_for_where_sequences_fit(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = torch.randn(2, 4, 8), torch.randn(5, 8), torch.randn(5)
    lengths, sums = torch.tensor([1, 4]), torch.tensor([0, 1, 5])
    with torch.no_grad():
        want = pit.linear_rows(x, weight, bias, lengths=lengths, activation="relu")
        pit.linear_rows(x, weight, cu_seqlens=sums)
        assert asked[0] == (x, weight, bias, lengths, "lengths", "relu")
        assert asked[1] == (x, weight, None, sums, "cu_seqlens", None)
        monkeypatch.setattr(functional, "repeated_rows", lambda *given: bias)
        assert pit.linear_rows(x, weight, bias, lengths=lengths, activation="relu") is bias
        for pattern in ({"lengths": sums}, {"cu_seqlens": lengths}, {"rows": [1]}):
            with pytest.raises(PitError):
                pit.linear_rows(x, weight, bias, **pattern)
    left = torch.nn.functional.linear(x, weight, bias).relu()
    live = torch.arange(4) < lengths[:, None]
    torch.testing.assert_close(want, left * live[..., None])


def test_rows_are_repeated_by_the_operator_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def repeated(*given: Any, sparsity: Any) -> Any:
        calls.append((*given, sparsity))
        return None if len(calls) > 1 else torch.arange(40.0).view(8, 5)

    known = {(torch.float32, "lengths", True, None): SimpleNamespace(repeated=repeated)}
    monkeypatch.setattr(operators, "_rows_operators", lambda: known)
    x, weight, bias = torch.randn(2, 4, 8), torch.randn(5, 8), torch.randn(5)
    lengths = torch.tensor([1, 4])
    made = operators.repeated_rows(x, weight, bias, lengths, "lengths", None)
    assert made.shape == (2, 4, 5) and torch.equal(made.flatten(), torch.arange(40.0))
    assert not made._is_view()
    rows, *others = calls[0]
    assert rows.shape == (8, 8) and rows.data_ptr() == x.data_ptr()
    assert all(a is b for a, b in zip(others, (weight, bias, lengths), strict=True))
    for given in (
        (x, weight, bias, lengths, "lengths", None),  # nothing is found
        (x.transpose(0, 1), weight, bias, lengths, "lengths", None),
        (x, weight, None, lengths, "lengths", None),
        (x.half(), weight, bias, lengths, "lengths", None),
        (x, weight, bias, lengths, "rows", None),
        (x[..., :0], weight, bias, lengths, "lengths", None),  # nothing is found of these either
        (x[0, 0, 0], weight, bias, lengths, "lengths", None),
    ):
        assert operators.repeated_rows(*given) is None
    assert len(calls) == 4


def test_what_is_no_rows_is_refused_as_before(asked: list[Any]) -> None:
    x, weight, lengths = torch.randn(2, 4, 8), torch.randn(5, 8), torch.tensor([1, 4])
    layers = arguments()
    nested = torch.nested.nested_tensor([x[0], x[1, :2]])
    with torch.no_grad():
        for other in (x.to_sparse(), nested):
            with pytest.raises(PitError):
                pit.linear_rows(other, weight, lengths=lengths)
            with pytest.raises(PitError):
                pit.moe_feed_forward(other, *layers[1:])
        for call in (
            lambda act: pit.linear_rows(x, weight, lengths=lengths, activation=act),
            lambda act: pit.moe_feed_forward(*layers, activation=act),
        ):
            with pytest.raises(PitError):
                call(["relu"])
    assert not asked


@pytest.mark.parametrize("place", range(5))
def test_what_is_no_tensor_is_refused_as_before(asked: list[Any], place: int) -> None:
    given = arguments()
    given[place] = given[place].tolist()
    with pytest.raises(PitError), torch.no_grad():
        pit.moe_feed_forward(*given)
