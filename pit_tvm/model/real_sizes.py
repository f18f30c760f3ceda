"""Real numbers that a program makes of its extents, as tensors without dimensions.

TVM's scalar expressions are extents, which are whole; what torch divides, or takes the root of, is
a number as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from tvm import relax
from tvm.relax.frontend.torch.base_fx_graph_translator import BaseFXGraphImporter

_REAL = "float64"  # as Python's
_OPERATORS: dict[str, Callable[..., relax.Expr]] = {
    "sym_float": lambda x: x,
    "_sym_sqrt": relax.op.sqrt,
    "truediv": relax.op.divide,
    "mul": relax.op.multiply,
    "add": relax.op.add,
    "sub": relax.op.subtract,
    "pow": relax.op.power,
    "neg": relax.op.negative,
}

_Converter = Callable[[fx.Node], Any]


def real_sizes(
    known: Mapping[str, _Converter], importer: BaseFXGraphImporter
) -> dict[str, _Converter]:
    """Conversions by name, those that are ``known`` where a result is whole."""
    return {name: _either(name, known.get(name), importer) for name in _OPERATORS}


def _either(name: str, known: _Converter | None, importer: BaseFXGraphImporter) -> _Converter:
    def number(given: Any) -> relax.Expr:
        if not isinstance(given, relax.Expr):
            return relax.const(float(given), _REAL)
        if isinstance(given.ty, relax.TensorType):
            return given
        return importer._prim_value_to_scalar_tensor(given, _REAL)

    def convert(node: fx.Node) -> Any:
        if known is not None and not isinstance(node.meta.get("val"), torch.SymFloat):
            return known(node)
        made = _OPERATORS[name](*map(number, importer.retrieve_args(node)))
        return made if isinstance(made, relax.Var) else importer.block_builder.emit(made)

    return convert
