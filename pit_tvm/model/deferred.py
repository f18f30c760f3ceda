"""Conditions on a program's extents that torch.export leaves to be checked at run time."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx
from torch.export import ExportedProgram

from ..errors import UnsupportedModel, mismatch

# torch has functions of its own, of which sympy knows nothing.
_FUNCTIONS = {"Min": sympy.Min, "Max": sympy.Max, "Mod": sympy.Mod, "PythonMod": sympy.Mod}


def unproven(program: ExportedProgram) -> list[Any]:
    """Conditions that need not hold whatever the extents are, or that cannot be proven to."""
    found = map(_condition, _checks(program))
    return [condition for condition in found if not holds(condition)]


def without_conditions(program: ExportedProgram) -> ExportedProgram:
    """The program, changed in place, without conditions, all of which hold.

    Raises
    ------
    UnsupportedModel
        One cannot be proven.
    """
    if open_ones := unproven(program):
        expected, got = "a program for every batch and length", f"one under {open_ones[0]}"
        raise UnsupportedModel(mismatch("model", expected, got, "export it without such a check"))
    checks = _checks(program)
    for node in checks:
        program.graph.erase_node(node)
    if checks:
        program.graph.eliminate_dead_code()
        program.graph_module.recompile()
    return program


def holds(condition: Any) -> bool:
    """Whether a condition, as of sympy, is true of all extents from 2 on: torch traces no other."""
    extents = {
        symbol: 1 + sympy.Symbol(symbol.name, integer=True, positive=True)
        for symbol in condition.free_symbols
    }
    known = condition.xreplace(extents).replace(
        lambda part: type(part).__name__ in _FUNCTIONS,
        lambda part: _FUNCTIONS[type(part).__name__](*part.args),
    )
    return sympy.simplify(known) is sympy.true


def _checks(program: ExportedProgram) -> list[fx.Node]:
    check = torch.ops.aten._assert_scalar.default
    return [node for node in program.graph.nodes if node.target is check]


def _condition(check: fx.Node) -> Any:
    condition = check.args[0]
    value = condition.meta["val"] if isinstance(condition, fx.Node) else condition
    return value.node.expr if isinstance(value, torch.SymBool) else sympy.sympify(bool(value))
