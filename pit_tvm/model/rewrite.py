"""The graph passes of a compiled model, in order."""

from __future__ import annotations

from dataclasses import dataclass

import tvm

from .activations import name_activations
from .dump import Look, unseen
from .embeddings import extract_embeddings
from .experts import GroupedLayer, extract_grouped
from .faults import faults_as_unsupported
from .importer import Imported
from .inputs import Inputs
from .kernels import Kernels
from .linear import LinearLayer, extract_linear
from .lookups import read_inside
from .norms import extract_norms
from .plane import Plane
from .propagate import Decision, propagate
from .tidy import tidy, tidy_reshapes


@dataclass(frozen=True)
class Rewritten:
    """A graph on live tokens: it calls ``layers`` by number under the name `linear.LINEAR`, and
    those of experts, ``grouped``, under `experts.GROUPED`."""

    module: tvm.IRModule
    inputs: Inputs
    decisions: list[Decision]
    layers: list[LinearLayer]
    grouped: list[GroupedLayer]


def rewrite(imported: Imported, kernels: Kernels, look: Look = unseen) -> Rewritten:
    """All graph passes in order, with a backend's kernels; ``look`` is shown every result.

    Raises
    ------
    UnsupportedModel
        An operator is in a form that TVM or a pass does not take.
    """
    with faults_as_unsupported("operators that TVM can rewrite"):
        return _rewritten(imported, kernels, look)


def _rewritten(imported: Imported, kernels: Kernels, look: Look) -> Rewritten:
    bounds = imported.size_bounds
    plane = Plane(imported.batch, imported.tokens)
    module = tidy(look("imported", imported.module), bounds)
    inputs = Inputs.of(imported, module)  # of ids as they come, before they are held
    module = look("tidy", read_inside(module, plane, imported.mask))
    module, decisions = propagate(module, plane, imported.mask, kernels)
    module = look("tidy", tidy_reshapes(tidy(look("propagate", module), bounds)))
    module = look("embeddings", extract_embeddings(module, kernels))
    module = look("norms", extract_norms(module, kernels))
    module, grouped = extract_grouped(module, kernels.shares_rows)
    module, layers = extract_linear(module)
    module = look("linear", tidy_reshapes(module))
    layers = name_activations(module, layers)
    return Rewritten(module, inputs, decisions, layers, grouped)
