"""Models that torch traces again because tables bound their tokens, and such that are wrapped."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from pit_tvm.model.exporting import export_program

WIDTH, PLACES = 8, 12


class Table(nn.Module):
    """Rows for so many places."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(places, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With those of its places added."""
        return x + self.rows[: x.shape[1]]


class Counted(nn.Linear):
    """Notes its calls, and has another thread run a layer at each."""

    def __init__(self, calls: list[int], number: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.note = lambda: calls.append(number)  # torch puts attributes back after a trace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As `nn.Linear`."""
        self.note()
        other = threading.Thread(target=nn.Linear(2, 2), args=(torch.ones(2),))
        other.start()
        other.join()
        return super().forward(x)


class Placed(nn.Module):
    """Tables, and a layer after each."""

    def __init__(self, places: tuple[int, ...], calls: list[int]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(map(Table, places))
        self.layers = nn.ModuleList(Counted(calls, number) for number in range(len(places)))

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """All of them."""
        x = input * attention_mask[..., None]
        for table, layer in zip(self.tables, self.layers, strict=True):
            x = layer(table(x))
        return x


@pytest.mark.parametrize(
    ("places", "traced"),
    [((), []), ((PLACES,), [0]), ((PLACES, PLACES), [0, 1]), ((PLACES + 9, PLACES), [0, 1, 0, 1])],
)
def test_a_trace_ends_where_a_bound_is_met(places: tuple[int, ...], traced: list[int]) -> None:
    calls: list[int] = []
    model = Placed(places, calls)
    given = {"input": torch.randn(2, 5, WIDTH), "attention_mask": torch.ones(2, 5)}
    program = export_program(model, given, "attention_mask")
    assert calls == traced
    _, tokens = program.range_constraints.values()
    assert str(tokens.upper) == (str(min(places)) if places else "int_oo")
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert not torch.nn.modules.module._global_forward_hooks


def test_what_wraps_a_module_is_left_out() -> None:
    model = Placed((PLACES,), [])
    given = {"input": torch.randn(2, 5, WIDTH), "attention_mask": torch.ones(2, 5)}
    own = export_program(model, given, "attention_mask")
    for wrapped in (torch.compile(model), torch.compile(nn.DataParallel(model))):
        program = export_program(wrapped, given, "attention_mask")
        assert set(program.state_dict) == set(own.state_dict)
        got, expected = (each.module()(**given) for each in (program, own))
        assert torch.equal(got, expected)
