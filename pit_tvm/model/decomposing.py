"""An exported program in torch's core operators."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import fx
from torch.export import ExportedProgram

from .faults import faults_as_unsupported


def decompose(program: ExportedProgram) -> ExportedProgram:
    """The program in core operators; ``program`` stays as it is.

    Raises
    ------
    UnsupportedModel
        torch cannot decompose an operator.
    """
    with faults_as_unsupported("operators that torch can decompose"), warnings.catch_warnings():
        # torch warns of what it does itself when it copies a program.
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        return _without_views(program).run_decompositions()


def _without_views(program: ExportedProgram) -> ExportedProgram:
    """Views as reshapes: what decomposed operators return may have other strides, as attention
    does, and a view of those is refused."""
    graph = copy.deepcopy(program.graph)
    for before, node in zip(program.graph.nodes, graph.nodes, strict=True):
        node.name = before.name  # copies give names of Python's functions another
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    return program._update(fx.GraphModule(program.graph_module, graph), program.graph_signature)
