"""Random numbers, which no compiled model draws: TVM's importers take dropout for nothing."""

from __future__ import annotations

import torch
from torch import fx
from torch.export import ExportedProgram

from ..errors import UnsupportedModel, mismatch
from .faults import place

_ADVICE = "switch dropout off (training=self.training), and take such numbers as inputs"


def check_program(program: ExportedProgram) -> None:
    """Refuse a program that draws, as dropout does unless it is off or leaves out nothing.

    Raises
    ------
    UnsupportedModel
        One of its operators does.
    """
    graphs = [p.graph for p in program.graph_module.modules() if isinstance(p, fx.GraphModule)]
    found = next((node for graph in graphs for node in graph.nodes if _draws(node)), None)
    if found is not None:
        raise drawing(place(found))


def drawing(operator: str) -> UnsupportedModel:
    """The error for an operator that draws."""
    expected = "operators that draw no random numbers"
    return UnsupportedModel(mismatch("model", expected, operator, _ADVICE))


def _draws(node: fx.Node) -> bool:
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    schema = operator._schema.arguments
    given = {one.name: one.default_value for one in schema if one.has_default_value()}
    given |= dict(zip((one.name for one in schema), node.args, strict=False)) | node.kwargs
    modes = [given[name] for name in ("train", "training") if name in given]
    shares = [given[name] for name in ("dropout", "dropout_p") if name in given]
    if modes and "p" in given:
        shares.append(given["p"])  # elsewhere that of ones
    return False not in modes and 0 not in shares
