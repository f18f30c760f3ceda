"""Tangents and gradients of torch.func on the torch surface: refused, never lost without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from pit_tvm import torch as pit
from pit_tvm.errors import DTypeError

X, UP, DOWN = torch.randn(5, 16), torch.randn(3, 48, 16), torch.randn(3, 16, 24)
IDS, WEIGHTS = torch.randint(0, 3, (5, 2)), torch.rand(5, 2)

CALLS: dict[str, tuple[Callable[..., torch.Tensor], dict[str, torch.Tensor]]] = {
    "linear_rows": (
        lambda x, weight, bias: pit.linear_rows(x, weight, bias, rows=torch.arange(3)),
        {"x": X, "weight": UP[0], "bias": torch.randn(48)},
    ),
    "grouped_linear": (
        lambda x, weight, bias: pit.grouped_linear(x, weight, IDS[:, 0], bias),
        {"x": X, "weight": UP, "bias": torch.randn(3, 48)},
    ),
    "moe_feed_forward": (
        lambda x, expert_weights, up, down, **biases: pit.moe_feed_forward(
            x, IDS, expert_weights, up, down, **biases
        ),
        {
            **{"x": X, "expert_weights": WEIGHTS, "up": UP, "down": DOWN},
            **{"up_bias": torch.randn(3, 48), "down_bias": torch.randn(3, 16)},
        },
    ),
}
CASES = [(call, name) for call, (_, given) in CALLS.items() for name in given]


def one(call: str, name: str) -> tuple[Callable[[Any], torch.Tensor], torch.Tensor]:
    """A call as a function of one of its tensors, and that tensor."""
    run, given = CALLS[call]
    return lambda each: run(**(given | {name: each})), given[name]


@pytest.mark.parametrize(("call", "name"), CASES)
def test_tangents_are_refused(call: str, name: str) -> None:
    run, given = one(call, name)
    says = f"^{name}: expected a tensor without a tangent, .*backward only"
    with pytest.raises(DTypeError, match=says):
        torch.func.jvp(run, (given,), (given,))
    with pytest.raises(DTypeError, match=says):
        torch.func.jvp(lambda each: torch.vmap(run)(each[None]), (given,), (given,))
    with pytest.raises(DTypeError, match=says):
        torch.func.jacfwd(run)(given)
    with forward_ad.dual_level(), pytest.raises(DTypeError, match=says):
        run(forward_ad.make_dual(given, given))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("call", "name"), CASES)
def test_constants_pass_beside_tangents(call: str, name: str) -> None:
    run, given = one(call, name)
    plain = run(given)
    for constant in (run, torch.vmap(lambda each: run(each.clone()))):
        batched = constant is not run

        def beside(each: Any, constant: Any = constant, batched: bool = batched) -> Any:
            fixed = each.detach()
            made = constant(fixed[None])[0] if batched else constant(fixed)
            return made + each.sum()

        value, tangent = torch.func.jvp(beside, (given,), (given,))
        torch.testing.assert_close(value, plain + given.sum())
        torch.testing.assert_close(tangent, given.sum().expand_as(plain))


@pytest.mark.parametrize(("call", "name"), CASES)
def test_gradients_of_functions_are_refused(call: str, name: str) -> None:
    run, given = one(call, name)
    says = f"^{name}: expected a tensor without gradients of torch.func, .*torch.autograd.grad"
    with pytest.raises(DTypeError, match=says):
        torch.func.grad(lambda each: run(each).sum())(given)
    with pytest.raises(DTypeError, match=says):
        torch.func.grad(lambda each: torch.vmap(run)(each[None]).sum())(given)
    with pytest.raises(DTypeError, match=says):
        torch.func.jacrev(run)(given)

    def constant(each: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out = run(each)
        return (out + run(each.detach()) + run(given)).sum() * each.sum()

    found, plain = torch.func.grad(constant)(given), run(given)
    # In the order in which they are added there: sums of float32 differ otherwise.
    torch.testing.assert_close(found, (plain + plain + plain).sum().expand_as(given))


def test_modules_refuse_tangents() -> None:
    module = pit.LinearRows(16, 8)
    with pytest.raises(DTypeError, match="^x: expected a tensor without a tangent"):
        torch.func.jvp(lambda x: module(x, rows=torch.arange(3)), (X,), (X,))
