"""ONNX models as objects or files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ..errors import BackendUnavailable, UnsupportedModel, mismatch


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
