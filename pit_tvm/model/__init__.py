"""Whole models without their padding: ``pit_tvm.model.compile(module, example_inputs)``.

A PyTorch model is imported into Relax, TVM's graph language (which took the place of Relay), its
token axis is propagated through every operator that the PIT analysis proves to treat tokens by
themselves, and one gather at its entry and one scatter at its exit replace the padding.

Names resolve on first use, so that ``pit_tvm.model.load`` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compiled import CompiledModel
    from .compiler import compile
    from .loading import load
    from .outputs import NamedOutputs
    from .propagate import Decision

__all__ = ["CompiledModel", "Decision", "NamedOutputs", "compile", "load"]

_HOMES = {
    "CompiledModel": "compiled",
    "Decision": "propagate",
    "NamedOutputs": "outputs",
    "compile": "compiler",
    "load": "loading",
}


def _resolve(name: str) -> Any:
    """A public name from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


if not TYPE_CHECKING:  # a type checker would take any name for one of ours
    __getattr__ = _resolve


def __dir__() -> list[str]:
    return sorted(__all__)
