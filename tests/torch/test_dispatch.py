"""Custom operators without torch's dispatcher, and who sees them all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from pit_tvm import torch as pit
from pit_tvm.torch import custom_ops

ROWS = torch.tensor([0, 2])
NAME = "pit_tvm.linear_rows.default"


class Seen(TorchDispatchMode):
    """Notes what operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return pit.linear_rows(x, weight, rows=ROWS)


def arrays(grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 8, requires_grad=grad), torch.randn(6, 8, requires_grad=grad)


@pytest.mark.parametrize("grad", [False, True])
def test_plain_tensors_do_without(grad: bool) -> None:
    x, weight = arrays(grad)
    out = call(x, torch.nn.Parameter(weight) if grad else weight)
    known = type(out.grad_fn).__name__
    assert known == ("DirectBackward" if grad else "NoneType")
    assert out.requires_grad == grad


def test_modes_see_operators() -> None:
    x, weight = arrays(grad=True)
    with Seen() as seen:
        out = call(x, weight)
        torch.autograd.grad(out.sum(), (x, weight))
    assert seen.names.count(NAME) == 2 and "pit_tvm.outer_rows.default" in seen.names
    with Seen() as seen, torch.no_grad():
        torch.testing.assert_close(call(x, weight), out)
    assert seen.names[0] == NAME


def test_profiles_name_operators() -> None:
    x, weight = arrays()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call(x, weight)
    assert "pit_tvm::linear_rows" in {event.key for event in found.key_averages()}


def fake(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        x, weight, rows = map(mode.from_tensor, (x, weight, ROWS))
        return pit.linear_rows(x, weight, rows=rows)


def meta(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return call(x.to("meta"), weight.to("meta"))


@pytest.mark.parametrize("run", [fake, meta])
def test_tensors_without_elements_have_shapes(run: Callable[..., torch.Tensor]) -> None:
    out = run(*arrays())
    assert out.shape == (4, 6) and (out.is_meta or type(out).__name__ == "FakeTensor")


def test_graphs_hold_operators() -> None:
    x, weight = arrays()
    graph = make_fx(call)(x, weight)
    assert NAME in {str(node.target) for node in graph.graph.nodes}
    torch.testing.assert_close(graph(x, weight), call(x, weight))
    exported = torch.export.export(pit.LinearRows(8, 6), (x,), {"rows": ROWS}).module()
    assert NAME in {str(node.target) for node in exported.graph.nodes}


def test_tensors_of_other_classes_are_torchs_to_call() -> None:
    class Named(torch.Tensor):
        pass

    x, weight = arrays()
    with Seen() as seen:
        call(x, weight)
    assert seen.names[0] == NAME
    named = x.as_subclass(Named)
    torch.testing.assert_close(call(named, weight).as_subclass(torch.Tensor), call(x, weight))


def test_operators_without_derivatives_say_so() -> None:
    rows = torch.randn(2, 16, requires_grad=True)
    out = custom_ops.gated_gradient(rows, torch.randn(2, 8), "silu")
    with pytest.raises(RuntimeError, match="no autograd formula"):
        out.sum().backward()


def test_saved_tensors_go_through_hooks() -> None:
    x, weight = arrays(grad=True)
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call(x, weight)
    assert {id(x), id(weight)} <= {id(each) for each in packed}
    direct = torch.autograd.grad(out.sum(), (x, weight))
    torch.testing.assert_close(direct, torch.autograd.grad(call(x, weight).sum(), (x, weight)))


def test_what_is_changed_before_the_way_back_is_seen() -> None:
    x, weight = arrays(grad=True)
    rows = ROWS.clone()
    out = pit.linear_rows(x, weight, rows=rows)
    rows += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("lead", [(4,), (2, 2)])
def test_results_may_be_changed_in_place(lead: tuple[int, ...], grad: bool) -> None:
    x, weight = torch.randn(*lead, 8), torch.randn(6, 8, requires_grad=True)
    weights, ids = torch.randn(3, 8, 8, requires_grad=True), torch.randint(3, (*lead, 2))
    gain, shares = torch.randn(1, requires_grad=True), torch.rand(*lead, 2)
    for run in (
        lambda: pit.linear_rows(x, weight, rows=ROWS),
        lambda: pit.grouped_linear(x, weights, ids),
        lambda: pit.grouped_linear(x, weights, ids[..., 0]),
        lambda: pit.moe_feed_forward(x, ids, shares, weights, weights, gated=False),
    ):
        with torch.set_grad_enabled(grad):
            out, other = run(), run()
        leaves = (weights if run().shape[-1] == 8 else weight, gain) if grad else (gain,)
        got = torch.nn.functional.relu(out.add_(x.sum()).mul_(gain), inplace=True)
        want = torch.nn.functional.relu((other + x.sum()) * gain)
        torch.testing.assert_close(got, want)
        found, right = (torch.autograd.grad(each.square().sum(), leaves) for each in (got, want))
        torch.testing.assert_close(found, right)
