"""Whole models without their padding: ``pit_tvm.model.compile(module, example_inputs)``.

A PyTorch model is imported into Relax, TVM's graph language (which took the place of Relay), its
token axis is propagated through every operator that the PIT analysis proves to treat tokens by
themselves, and one gather at its entry and one scatter at its exit replace the padding.
"""

from .compiled import CompiledModel, compile
from .propagate import Decision

__all__ = ["CompiledModel", "Decision", "compile"]
