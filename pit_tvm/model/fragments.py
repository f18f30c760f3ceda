"""A program's graph with its operators replaced by what they consist of, each form traced once.

torch's `ExportedProgram.run_decompositions` traces the whole program anew, every layer of a model
for itself; layers are alike, so that most of that is done again and again.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

Decompositions = Mapping[Any, Callable[..., Any]]
_COMPOSITE = "CompositeImplicitAutograd"

_ATEN = torch.ops.aten
_Shape = list[str] | None  # extents as text, which ties no two of them
_Admits = Callable[[Any, Sequence[Any]], bool]


def expanded(program: ExportedProgram, table: Decompositions) -> ExportedProgram | None:
    """The program with the operators of ``table``, and those that torch has by others only, so
    replaced; ``program`` stays as it is. None where an operator writes to what others may see,
    calls a part of the program, comes to a constant, or has extents that values decide: that takes
    a view of the whole."""
    if not all(_is_plain(node) or _writes_unseen(node) for node in program.graph.nodes):
        return None
    known = _Known(table, detect_fake_mode([node.meta.get("val") for node in program.graph.nodes]))
    replaced = {node: known.fragment_of(node) for node in program.graph.nodes}
    traced = (graph for graph in known.graphs.values() if graph is not None)
    if not all(_is_plain(part) for graph in traced for part in graph.nodes):
        return None
    writer = _Writer()
    for node, fragment in replaced.items():
        writer.write(node, fragment)
    writer.graph.eliminate_dead_code()
    return with_graph(program, program.graph_module, writer.graph)


def _is_plain(node: fx.Node) -> bool:
    """Whether a node computes from its operands alone, and changes none; and its extents from
    theirs, so that equal forms give equal ones."""
    if isinstance(node.target, torch._ops.OpOverload):
        by_values = free_unbacked_symbols(node.meta.get("val", ()))
        return not (node.target._schema.is_mutable or by_values)
    return node.op != "get_attr" and not isinstance(node.target, torch._ops.HigherOrderOperator)


def _writes_unseen(node: fx.Node) -> bool:
    """Whether a node that is not plain writes to its first operand only, which is a result of its
    own memory that nobody reads in another way afterwards: others see what it returns."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return False
    given = node.args[0] if node.args else None
    if not isinstance(given, fx.Node):
        return False
    written = [one.alias_info is not None for one in node.target._schema.arguments]
    others = [user for user in given.users if user is not node]
    return (
        not any(written[1:])
        and (_is_fresh(given) or _writes_unseen(given))
        and all(user < node and _is_fresh(user) for user in others)
    )


def _is_fresh(node: fx.Node) -> bool:
    """Whether what a node gives shares no memory with its operands, nor one of several results with
    another; of operators by others, which may give back an operand as it is, that is not known."""
    if node.target is operator.getitem:
        whole: Any = node.args[0]
        same = [user for user in whole.users if user.args == node.args]
        return len(same) == 1 and _is_fresh(whole)
    if not isinstance(node.target, torch._ops.OpOverload) or _is_composite(node.target):
        return False
    return all(one.alias_info is None for one in node.target._schema.returns)


@dataclass(frozen=True)
class _Fragment:
    """What an operator consists of: a graph, and the nodes that it is applied to, in order."""

    graph: fx.Graph
    operands: Sequence[fx.Node]


class _Known:
    """Fragments by operator, and by types, extents and strides of operands."""

    def __init__(self, table: Decompositions, fake: Any) -> None:
        self.table, self.fake = table, fake
        self.graphs: dict[Any, fx.Graph | None] = {}

    def fragment_of(self, node: fx.Node) -> _Fragment | None:
        """What replaces a node; None if it stays."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return None
        if not (target in self.table or _is_composite(target) or target._schema.is_mutable):
            return None
        if stays(node):
            return None
        given, structure = pytree.tree_flatten((node.args, node.kwargs))
        operands = list(dict.fromkeys(one for one in given if isinstance(one, fx.Node)))
        place = {one: number for number, one in enumerate(operands)}
        key = (
            *(target, structure),
            *(place[one] if isinstance(one, fx.Node) else repr(one) for one in given),
            *(_form(one.meta["val"]) for one in operands),
        )
        if key not in self.graphs:
            self.graphs[key] = self._traced(target, given, structure, operands)
        graph = self.graphs[key]
        return None if graph is None else _Fragment(graph, operands)

    def _traced(
        self, target: Any, given: Sequence[Any], structure: Any, operands: Sequence[fx.Node]
    ) -> fx.Graph | None:
        """The graph of one operator; None where its decomposition declines."""
        declined = False

        def run(*values: Any) -> Any:
            nonlocal declined
            value = dict(zip(operands, values, strict=True))
            flat = [value[one] if isinstance(one, fx.Node) else one for one in given]
            args, kwargs = pytree.tree_unflatten(flat, structure)
            if target._schema.is_mutable:
                args = (args[0].clone(), *args[1:])
            found = self.table.get(target, target)(*args, **kwargs)
            declined |= found is NotImplemented
            if isinstance(found, tuple):
                return tuple(found)  # one with names would be made by a node of its own
            return () if declined else found

        graph = self._graph(run, operands)
        if declined:
            return None
        if not all(map(_is_plain, graph.nodes)):
            graph = self._graph(torch.func.functionalize(run), operands)
        return graph

    def _graph(self, run: Callable[..., Any], operands: Sequence[fx.Node]) -> fx.Graph:
        traced = make_fx(run, decomposition_table=dict(self.table), _allow_non_fake_inputs=True)
        # What is written in Python for extents that are symbols comes before torch's C++.
        with self.fake, enable_python_dispatcher():
            graph = traced(*(one.meta["val"] for one in operands)).graph
        graph.eliminate_dead_code()
        return graph


def _is_composite(target: Any) -> bool:
    """Whether an operator of torch is one by others, for every device."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return target.namespace == "aten" and has_kernel(target.name(), _COMPOSITE)


def _form(value: Any) -> Any:
    """What decompositions may depend on; extents as text, which ties no two of them."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, str(tuple(value.shape)), str(value.stride())
    return type(value), str(value)


class _Writer:
    """A graph that grows; extents that are equal are computed once."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.made: dict[fx.Node, Any] = {}
        self.extents: dict[str, fx.Node] = {}

    def write(self, node: fx.Node, fragment: _Fragment | None) -> None:
        """Add a node of a program, or what replaces it."""
        if fragment is None:
            self.made[node] = made = self._copied(node, self.made)
            if node.op == "placeholder":
                made.name = node.name  # copies give names of Python's functions another
            return
        inner: dict[fx.Node, Any] = {}
        operands = iter(fragment.operands)
        for part in fragment.graph.nodes:
            if part.op == "placeholder":
                inner[part] = self.made[next(operands)]
            elif part.op == "output":
                self.made[node] = fx.node.map_arg(part.args[0], inner.__getitem__)
            else:
                inner[part] = self._copied(part, inner)
                if isinstance(inner[part], fx.Node):
                    inner[part].meta = {**node.meta, **inner[part].meta}

    def _copied(self, node: fx.Node, made: Mapping[Any, Any]) -> Any:
        if node.target is operator.getitem and not isinstance(made[node.args[0]], fx.Node):
            return made[node.args[0]][node.args[1]]
        extent = node.meta.get("val") if node.op == "call_function" else None
        if not isinstance(extent, torch.SymInt):
            return self.graph.node_copy(node, made.__getitem__)
        if str(extent) not in self.extents:
            self.extents[str(extent)] = self.graph.node_copy(node, made.__getitem__)
        return self.extents[str(extent)]


def with_graph(program: ExportedProgram, root: torch.nn.Module, graph: fx.Graph) -> ExportedProgram:
    """The program with another graph, whose outputs may have other names, over the parts of
    ``root``."""
    signature = copy.deepcopy(program.graph_signature)
    outputs: Any = graph.output_node().args[0]
    for spec, node in zip(signature.output_specs, outputs, strict=True):
        if isinstance(node, fx.Node):
            spec.arg.name = node.name
    state = {"state_dict": dict(program.state_dict), "constants": dict(program.constants)}
    return program._update(fx.GraphModule(root, graph), signature, **state)


# --------------------------------------------------------------------------------------------
# Operators by others that stay as they are: the importer takes them whole, and torch takes longer
# to trace what one of them consists of than everything after it takes with the whole.


def stays(node: fx.Node) -> bool:
    """Whether an operator is in a form that the importer takes whole."""
    admits = _ADMITTED.get(node.target)
    return admits is not None and admits(node, [_shape(given) for given in node.args])


def _shape(given: Any) -> _Shape:
    """That of a tensor; None of anything else."""
    value = given.meta.get("val") if isinstance(given, fx.Node) else None
    return [str(extent) for extent in value.shape] if isinstance(value, Tensor) else None


def _always(*_: Any) -> bool:
    return True


def _has_axes(_: Any, shapes: Sequence[Any]) -> bool:
    return bool(shapes[0])


def _is_unknown(node: Any, _: Sequence[Any]) -> bool:
    """An extent that is no number."""
    return isinstance(node.meta["val"], torch.SymInt)


def _is_plain_product(_: Any, shapes: Sequence[Any]) -> bool:
    """Of matrices, as many on both sides, or of all rows by one matrix."""
    left, right = shapes[:2]
    return min(len(left), len(right)) > 1 and right[:-2] in ([], left[:-2])


def _is_affine(node: Any, shapes: Sequence[Any]) -> bool:
    """A norm with a scale and a shift."""
    return not node.kwargs and len(shapes) > 3 and None not in (shapes[2], shapes[3])


def _drops_nothing(node: Any, _: Sequence[Any]) -> bool:
    return len(node.args) == 3 and node.args[2] is False


def _is_plain_attention(node: Any, shapes: Sequence[Any]) -> bool:
    """With as many heads of keys and values, and a mask, if any, that says all about keys."""
    query, keys, values = shapes[:3]
    scale = node.kwargs.get("scale")
    return (
        len(query) == len(keys) == len(values) == 4
        and query[:2] == keys[:2] == values[:2]
        and query[3].isdigit()
        and query[3] == keys[3]
        and keys[2] == values[2]
        and not any(node.args[4:])  # dropout, and order
        and not node.kwargs.get("enable_gqa")
        and (scale is None or scale > 0)
    )


_ADMITTED: dict[Any, _Admits] = {
    _ATEN.linear.default: _is_plain_product,
    _ATEN.matmul.default: _is_plain_product,
    _ATEN.scaled_dot_product_attention.default: _is_plain_attention,
    _ATEN.layer_norm.default: _is_affine,
    _ATEN.dropout.default: _drops_nothing,
    _ATEN.transpose.int: _has_axes,
    _ATEN.softmax.int: _has_axes,
    _ATEN.sym_size.int: _is_unknown,
} | dict.fromkeys(
    (
        *(_ATEN.reshape.default, _ATEN.contiguous.default, _ATEN.arange.default),
        *(_ATEN.to.dtype, _ATEN.to.dtype_layout, _ATEN.to.device, _ATEN.type_as.default),
        *(_ATEN.__and__.Tensor, _ATEN.__or__.Tensor, _ATEN.floor_divide.default),
    ),
    _always,
)
