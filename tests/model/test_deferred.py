"""Conditions on extents that torch leaves to be checked at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod

from pit_tvm.errors import UnsupportedModel
from pit_tvm.model import compile
from pit_tvm.model.deferred import holds, unproven
from pit_tvm.model.exporting import export_program
from pit_tvm.model.importer import import_model

S, T = sympy.symbols("s53 s70", integer=True)


@pytest.mark.parametrize(
    "condition",
    [
        sympy.Eq(Min(8 * S, 16 * S), 8 * S),
        sympy.Eq(Mod(Min(S, 4 * S), S), 0),
        sympy.Eq(Min(S * S, 4 * S * S), S * S),
        sympy.Eq(Max(S * T, 2 * S * T), 2 * S * T),
        sympy.Eq(PythonMod(4 * S, S), 0),
        2 <= S,
        sympy.Ne(S, 1),
        sympy.true,
    ],
    ids=str,
)
def test_conditions_that_hold(condition: Any) -> None:
    assert holds(condition)


@pytest.mark.parametrize(
    "condition",
    [
        S <= 64,
        3 <= S,
        sympy.Eq(S, T),
        sympy.Eq(Min(8 * S, 16 * T), 8 * S),
        sympy.Eq(Mod(S, 8), 0),
        sympy.Eq(FloorDiv(S, 2) * 2, S),
        sympy.Or(sympy.Eq(S, 2), sympy.Eq(S, T)),
        sympy.false,
    ],
    ids=str,
)
def test_conditions_that_need_not_hold(condition: Any) -> None:
    assert not holds(condition)


class Conditioned(torch.nn.Module):
    """Doubles its input, where its length meets a condition."""

    def __init__(self, condition: Callable[[Any], Any]) -> None:
        super().__init__()
        self.condition = condition

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        torch._check(self.condition(x.shape[1]))
        return x * 2 * attention_mask[..., None]


def always(tokens: Any) -> Any:
    """A condition that torch does not prove."""
    return torch.sym_min(tokens * tokens, 2 * tokens) <= 2 * tokens


def never_known(tokens: Any) -> Any:
    """One that holds, and is not proven here either."""
    return tokens * tokens % 3 != 2


GIVEN = {"x": torch.randn(3, 5, 4), "attention_mask": torch.ones(3, 5)}


@pytest.fixture
def _cautious(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch refuses conditions that are not deferred."""
    export = torch.export.export

    def refusing(*args: Any, **how: Any) -> Any:
        if not how.get("prefer_deferred_runtime_asserts_over_guards"):
            kind: Any = torch._dynamo.exc.UserErrorType.CONSTRAINT_VIOLATION
            raise torch._dynamo.exc.UserError(kind, "Constraints violated (tokens)! - Not all of")
        return export(*args, **how)

    monkeypatch.setattr(torch.export, "export", refusing)


@pytest.mark.usefixtures("_cautious")
def test_what_torch_cannot_prove_is_proven_here() -> None:
    model = Conditioned(always)
    program = export_program(model, GIVEN, "attention_mask")
    assert not unproven(program)
    x, mask = torch.randn(2, 7, 4), torch.ones(2, 7)
    assert torch.equal(program.module()(x=x, attention_mask=mask), model(x, mask))
    compiled = compile(model, GIVEN)
    assert torch.equal(compiled(x=x, attention_mask=mask), model(x, mask))


@pytest.mark.usefixtures("_cautious")
def test_what_cannot_be_proven_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="Constraints violated.*only some lengths"):
        export_program(Conditioned(never_known), GIVEN, "attention_mask")


def test_other_faults_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[dict[str, Any]] = []

    def failing(*args: Any, **how: Any) -> Any:
        tried.append(how)
        kind: Any = torch._dynamo.exc.UserErrorType.CONSTRAINT_VIOLATION
        words = "Constraints violated" if len(tried) > 1 else "something else"
        raise torch._dynamo.exc.UserError(kind, words)

    monkeypatch.setattr(torch.export, "export", failing)
    for times in (1, 11):  # with and without conditions, for five least lengths
        with pytest.raises(UnsupportedModel):
            export_program(Conditioned(always), GIVEN, "attention_mask")
        assert len(tried) == times


def test_a_given_program_may_not_check_what_is_unknown() -> None:
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    shapes = dict.fromkeys(GIVEN, sizes)
    for condition in (always, never_known):
        program = torch.export.export(
            Conditioned(condition),
            (),
            GIVEN,
            dynamic_shapes=shapes,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
        if condition is always:
            assert import_model(program, GIVEN, "attention_mask").inputs == tuple(GIVEN)
        else:
            with pytest.raises(UnsupportedModel, match=r"got one under Ne\(Mod\("):
                import_model(program, GIVEN, "attention_mask")
