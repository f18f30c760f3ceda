"""What is known about a model without running it: decisions, linear layers, and PIT axes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx

from ..analysis.pit_axis import pit_axes
from ..api import Operator
from ..errors import AxisError
from ..runtime.bind import resolve
from ..structs import Plan
from .experts import GroupedLayer
from .legalize import legalize
from .linear import LinearForm, LinearLayer, called_layer
from .propagate import BY_TOKEN, Decision
from .rebuild import bindings_of, describe, extents_of, is_op


def summary(decisions: Sequence[Decision]) -> str:
    """How many operators run on live tokens only; which do not, and what keeps each from it."""
    live = [d.reason for d in decisions if d.live]
    whole = [d for d in decisions if d.whole]
    stops = [d for d in whole if d.reason != BY_TOKEN]
    lines = [f"{len(live)} operators on live tokens only"]
    kinds = sorted({reason for reason in live if reason != BY_TOKEN})
    lines += [f"  {live.count(kind)} of them {kind}" for kind in kinds]
    lines += [f"{len(whole)} operators on all tokens, dead ones included"]
    lines += [f"  {d.operator} -> {d.result}: {d.reason}" for d in stops]
    if len(whole) > len(stops):
        lines += [f"  {len(whole) - len(stops)} whose results these read"]
    others = len(decisions) - len(live) - len(whole)
    lines.append(f"{others} operators on weights, positions, masks, pooled values")
    return "\n".join(lines)


@dataclass(frozen=True)
class LinearUse:
    """``layers`` linear layers, or products of experts, of one form (`LinearForm`, `GroupedForm`)
    on equally many rows: ``rows`` over symbolic sizes."""

    form: Any
    rows: Any
    layers: int

    def count(self, sizes: Mapping[str, int]) -> int:
        """The number of rows at these sizes by name."""
        return resolve((self.rows,), sizes)[0]


def linear_forms(layers: Sequence[LinearLayer]) -> dict[LinearForm, int]:
    """The distinct forms, and how many layers have each."""
    return dict(Counter(map(LinearForm.of, layers)))


def linear_uses(
    module: tvm.IRModule, layers: Sequence[LinearLayer | GroupedLayer], call: str
) -> list[LinearUse]:
    """The layers that ``main`` calls by the name ``call``, those that are alike together."""
    found: dict[tuple[Any, str], list[Any]] = {}
    for binding in bindings_of(module["main"]):
        called = called_layer(binding.value, call)
        if called is not None:
            rows = _number(extents_of(called[1])[0])
            layer = layers[called[0]]
            form = layer.form if isinstance(layer, GroupedLayer) else LinearForm.of(layer)
            found.setdefault((form, str(rows)), []).append(rows)
    return [LinearUse(form, rows[0], len(rows)) for (form, _), rows in found.items()]


def _number(extent: Any) -> Any:
    return int(extent) if isinstance(extent, tirx.IntImm) else extent


def linear_plan(operator: Operator, rows: int, library: str = "numpy") -> Plan:
    """How such an operator computes so many live rows, its weight packed."""
    return operator.explain(sparsity=[rows], sizes={"m": rows}, library=library)


# --------------------------------------------------------------------------------------------
# PIT axes


@dataclass(frozen=True)
class AxisCount:
    """``number`` calls of an operator whose permutation-invariant axes are ``axes``, None where
    nobody looked for them."""

    operator: str
    axes: tuple[str, ...] | None
    number: int


def count_axes(module: tvm.IRModule) -> list[AxisCount]:
    """How many operators of ``main`` have which PIT axes, by the analysis of each one's loops.

    An axis counts if it is permutation invariant in every block of the loops that has it. Loops
    without blocks have none. What TVM does not lower to loops, as where a shape is not known, is
    not analysed; after `tidy` it knows more of them.
    """
    lowered = legalize()(module)
    axes = {
        var: _axes(func)
        for var, func in lowered.functions_items()
        if isinstance(func, tirx.PrimFunc)
    }
    counts = Counter((name, axes.get(var)) for name, var in _operators(lowered))
    found = (AxisCount(name, its, number) for (name, its), number in counts.items())
    return sorted(found, key=lambda count: (count.operator, count.axes or ()))


def _operators(module: tvm.IRModule) -> Iterator[tuple[str, Any]]:
    """Name and function of every operator; those that are not lowered to loops have none."""
    for binding in bindings_of(module["main"]):
        value = binding.value
        if is_op(value, "call_tir"):
            yield re.sub(r"\d+$", "", value.args[0].name_hint), value.args[0]
        elif isinstance(value, relax.Call):
            yield describe(value), None


def _axes(func: tirx.PrimFunc) -> tuple[str, ...]:
    try:
        report = pit_axes(func)
    except AxisError:  # no block: nothing to permute
        return ()
    accepted = {axis for axes in report.accepted.values() for axis in axes}
    rejected = {axis for axes in report.rejected.values() for axis in axes}
    return () if "*" in rejected else tuple(sorted(accepted - rejected))
