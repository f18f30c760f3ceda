"""An exported program in torch's core operators."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions
from torch.export import ExportedProgram, default_decompositions
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from .decompositions import BY_TORCH, DECOMPOSITIONS
from .faults import faults_as_unsupported
from .fragments import expanded, with_graph
from .places import BY_PLACES


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
        program, table = _on_cpu(program), _table()
        return expanded(program, table) or _without_views(program).run_decompositions(table)


@cache
def _table() -> dict[Any, Callable[..., Any]]:
    return {
        **default_decompositions(),
        **get_decompositions(BY_TORCH),
        **DECOMPOSITIONS,
        **BY_PLACES,
    }


def _on_cpu(program: ExportedProgram) -> ExportedProgram:
    """The program on the CPU, where weights are read and attention is what is known here, wherever
    it was exported."""
    if _is_on_cpu(program):
        return program
    root = copy.deepcopy(program.graph_module)
    return move_to_device_pass(with_graph(program, root, root.graph), "cpu")


def _without_views(program: ExportedProgram) -> ExportedProgram:
    """Views as reshapes: what decomposed operators return may have other strides, as attention
    does, and where all is traced anew a view of those is refused."""
    graph = copy.deepcopy(program.graph)
    for before, node in zip(program.graph.nodes, graph.nodes, strict=True):
        node.name = before.name  # copies give names of Python's functions another
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
    return with_graph(program, program.graph_module, graph)


def _is_on_cpu(program: ExportedProgram) -> bool:
    tensors = [*program.state_dict.values(), *program.constants.values()]
    tensors += pytree.tree_leaves(program.example_inputs)
    return all(one.device.type == "cpu" for one in tensors if isinstance(one, Tensor))
