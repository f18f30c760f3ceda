"""Operators replaced one by one: as torch does, each form traced once, and writes left to torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from pit_tvm.model import decomposing, fragments
from pit_tvm.model.decomposing import decompose

WIDTH = 8


def exported(model: nn.Module, *like: Tensor) -> ExportedProgram:
    """With a dynamic first dimension, the same of all inputs."""
    rows = Dim("rows")
    return torch.export.export(model.eval(), like, dynamic_shapes=[{0: rows}] * len(like))


def targets(program: ExportedProgram) -> Counter[str]:
    return Counter(str(n.target) for n in program.graph.nodes if n.op == "call_function")


class Steps(nn.Module):
    """A chain of steps, each of one of the values before it."""

    def __init__(self, steps: list[tuple[Callable[[Tensor], Tensor], int]]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        """All values, added."""
        values = [x * 1]
        for step, place in self.steps:
            values.append(step(values[place % len(values)]))
        return sum((value.reshape(-1, WIDTH) for value in values), torch.zeros(()))


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "add in place": lambda x: x.add_(1.5),
    "mul in place": lambda x: x.mul_(x.detach().sign()),
    "tanh": torch.tanh,
    "view": lambda x: x.view(x.shape),
    "turned": lambda x: x.flip(0),
    "part": lambda x: x[:, :4].repeat(1, 2),
    "part in place": lambda x: (x[:, :4].add_(2.0), x)[1],
    "contiguous": lambda x: x.contiguous(),
    "sum": lambda x: x.sum(1, keepdim=True).expand(-1, WIDTH),
    "softmax": lambda x: torch.softmax(x, -1),
}


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 6)), max_size=6))
def test_programs_give_what_the_module_does(chosen: list[tuple[str, int]]) -> None:
    model = Steps([(STEPS[name], place) for name, place in chosen])
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    try:
        want = model(x.clone())
    except RuntimeError:  # torch writes to no expanded memory
        return
    found = decompose(exported(model, x))
    assert not any(n.target._schema.is_mutable for n in operators(found))
    torch.testing.assert_close(found.module()(x), want)


def operators(program: ExportedProgram) -> list[Any]:
    nodes = program.graph.nodes
    return [n for n in nodes if isinstance(n.target, torch._ops.OpOverload)]


class Layers(nn.Module):
    """Layers that are alike."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True) for _ in range(number)
        )

    def forward(self, x: Tensor) -> Tensor:
        """All of them."""
        for layer in self.layers:
            x = nn.functional.layer_norm(x + layer.linear2(layer.linear1(x).relu()), (WIDTH,))
        return x


def traced(monkeypatch: pytest.MonkeyPatch, model: nn.Module, x: Tensor) -> list[int]:
    """How many operators each tracing of a form is of."""
    sizes: list[int] = []
    make = fragments.make_fx

    def counted(*args: Any, **how: Any) -> Any:
        sizes.append(1)
        return make(*args, **how)

    program = exported(model, x)
    with monkeypatch.context() as patch:
        patch.setattr(fragments, "make_fx", counted)
        found = decompose(program)
    torch.testing.assert_close(found.module()(x), model(x))
    return sizes


def test_layers_that_are_alike_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 5, WIDTH)
    few, many = (traced(monkeypatch, Layers(number), x) for number in (2, 5))
    assert 0 < len(few) == len(many) < 8


def test_operators_are_those_of_torch() -> None:
    program = exported(Layers(2), torch.randn(3, 5, WIDTH))
    linear = torch.ops.aten.linear.default  # which stays
    table = {each: how for each, how in decomposing._table().items() if each is not linear}
    theirs = targets(program.run_decompositions(table))
    ours = targets(decompose(program))
    assert set(ours) == set(theirs)
    assert ours["aten.linear.default"] == theirs["aten.linear.default"] == 4


def test_an_extent_is_computed_once() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.linear(x, y[0]).flatten(0, 1) + x.flatten(0, 1)

    program = exported(Model(), torch.randn(3, 5, WIDTH), torch.randn(3, WIDTH, WIDTH))
    found = targets(decompose(program))
    assert found["aten.sym_size.int"] + found["aten.sym_numel.default"] <= 2


IN_PLACE: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "of a result": (lambda x: (x + 1).mul_(2), True),
    "twice": (lambda x: (x + 1).mul_(2).add_(1), True),
    "of one of several results": (lambda x: (y := x.topk(3), y[0].mul_(2))[1] + y[1], True),
    "of one of several parts": (lambda x: (y := x + 1, y.split(4, 1)[0].mul_(2))[0] * 1, False),
    "of a result that was read": (lambda x: (y := x + 1).sum() + y.mul_(2), True),
    "of a result by two names": (lambda x: (y := x + 1).mul_(2) + y, True),
    "of a part": (lambda x: (y := x + 1, y[:, :2].mul_(2))[0] * 1, False),
    "of a result with parts": (lambda x: (z := (y := x + 1)[:, :2], y.mul_(2), z * 1)[2], False),
    "of what may be an operand": (lambda x: (y := x + 1, y.reshape(-1, 4).mul_(2))[0] * 1, False),
}


def test_extents_that_values_decide_are_left_to_torch() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x > 0)[0].float().sum() + torch.where(x < 0)[0].float().sum()

    x = torch.randn(3, WIDTH)
    program = exported(Model(), x)
    assert fragments.expanded(program, decomposing._table()) is None
    torch.testing.assert_close(decompose(program).module()(x), Model()(x))


def test_places_by_numbers_are_no_extents_that_values_decide() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return torch.softmax(x[ids % 2], -1)

    program = exported(Model(), torch.randn(3, WIDTH), torch.arange(3))
    assert fragments.expanded(program, decomposing._table()) is not None


@pytest.mark.parametrize("name", IN_PLACE)
def test_writes_that_others_see_are_left_to_torch(name: str) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return run(x)

    run, alone = IN_PLACE[name]
    x = torch.randn(3, WIDTH)
    program = exported(Model(), x)
    assert (fragments.expanded(program, decomposing._table()) is not None) == alone
    found = decompose(program)
    assert not any(n.target._schema.is_mutable for n in operators(found))
    torch.testing.assert_close(found.module()(x), run(x))
