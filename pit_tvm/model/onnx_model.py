"""ONNX models as objects or files, and what in them TVM's importer would misread."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import BackendUnavailable, UnsupportedModel, mismatch

#: Before it, operands were broadcast along an axis that the operator names.
_LEAST_OPSET = 7
# The importer looks at an operator's name only.
_DOMAINS = ("", "ai.onnx", "com.microsoft")
# Of these it makes the first result, and zeros for the others.
_FIRST_ONLY = ("Attention", "LayerNormalization", "SkipLayerNormalization")


def is_onnx(model: Any) -> bool:
    """Whether this is an ``onnx.ModelProto``, or names a file of one."""
    if isinstance(model, str | Path):
        return Path(model).suffix == ".onnx"
    return "onnx" in sys.modules and isinstance(model, sys.modules["onnx"].ModelProto)


def read_onnx(model: Any) -> Any:
    """The model itself, or that in a file, its weights included.

    Raises
    ------
    BackendUnavailable
        The package onnx is not installed.
    UnsupportedModel
        There is no such file, or it is no model.
    """
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as error:
        advice = "pip install onnx"
        raise BackendUnavailable(mismatch("model", "the package onnx", "none", advice)) from error
    if isinstance(model, onnx.ModelProto):
        return model
    try:
        return onnx.load(str(model))
    # ValidationError, ValueError: a file with weights is missing or short.
    except (OSError, DecodeError, onnx.checker.ValidationError, ValueError) as error:
        raise UnsupportedModel(mismatch("model", f"an ONNX model in {model}", error)) from error


def check_graph(graph: Any, opset: int) -> None:
    """Refuse an ``onnx.GraphProto``, whose functions are inlined, that would be misread.

    Raises
    ------
    UnsupportedModel
        Its opset is too old, an operator is none of ONNX's or Microsoft's, outputs share a name or
        are missing, or a result is read that TVM does not compute.
    """
    if opset < _LEAST_OPSET:
        expected, advice = f"opset {_LEAST_OPSET} or later", "see onnx.version_converter"
        raise UnsupportedModel(mismatch("model", expected, f"opset {opset}", advice))
    names = [output.name for output in graph.output]
    if not names or len(set(names)) < len(names):
        raise UnsupportedModel(mismatch("model", "outputs of different names", names))
    nodes = list(_nodes(graph))
    for node in nodes:
        if node.domain not in _DOMAINS:
            expected, got = "operators of ONNX", f"{node.op_type} of the domain {node.domain}"
            raise UnsupportedModel(mismatch("model", expected, got))
    read = {*names, *(name for node in nodes for name in node.input)}
    for node in nodes:
        others = sorted(read & set(node.output[1:]) - {""})
        if others and node.op_type in _FIRST_ONLY:
            expected = f"only the first result of {node.op_type} (node {node.name!r}) to be read"
            raise UnsupportedModel(mismatch("model", expected, ", ".join(others)))


def _nodes(graph: Any) -> Iterator[Any]:
    """The nodes of a graph and of those in its nodes."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)
