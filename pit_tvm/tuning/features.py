"""What the cost model sees of a candidate, and how the search changes one.

MetaSchedule's own PerStoreFeature reads the scheduled program, where an annotation leaves no
mark: candidates that differ in annotations only look alike to it. Here the features are the
sampled decisions themselves, with the values of ``pit.tile`` and the task's extents.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import tvm_ffi
from tvm import IRModule
from tvm.ir.utils import derived_object
from tvm.runtime import Tensor, tensor
from tvm.s_tir import SBlock, Schedule, Trace
from tvm.s_tir import meta_schedule as ms

from ..structs import TileTask
from ..tile_db.meta_json import trace_to_json
from .tasks import Space

# XGBoost wants vectors of one length for all tasks of a job; unused places are -1.
MAX_KNOBS = 24
MAX_TILE = 12
MAX_MORE = 8
TILE_ANNOTATION = "pit.tile"
_UNUSED = -1.0


def knob_values(trace: Trace) -> list[int]:
    """Values (not positions) of all sampled knobs, in the order of the trace."""
    values: list[int] = []
    for inst, decision in trace.decisions.items():
        if inst.kind.name == "SampleCategorical":
            values.append(int(inst.attrs[0][int(decision)]))
        elif hasattr(decision, "__len__"):
            values += [int(part) for part in decision]
        else:
            values.append(int(decision))
    return values


def decision_key(trace: Trace) -> str:
    """Text that two candidates of one task share exactly if all their decisions agree."""
    return json.dumps(json.loads(trace_to_json(trace))[1], separators=(",", ":"))


def tile_annotation(mod: IRModule) -> list[int]:
    """The integers of the first ``pit.tile`` annotation of a block; empty if there is none.

    It walks the module, because the questions that a Schedule answers become part of its trace.
    """
    found: list[list[int]] = []

    def visit(block: SBlock) -> None:
        if TILE_ANNOTATION in block.annotations:
            found.append([int(value) for value in block.annotations[TILE_ANNOTATION]])

    tvm_ffi.structural_walk(mod["main"].body, (SBlock, visit), order="pre")
    return found[0] if found else []


def feature_vector(task: TileTask, sch: Schedule, space: Space | None = None) -> np.ndarray:
    """float64 ``[1, 3 + 2 * MAX_KNOBS + MAX_TILE + MAX_MORE]``: extents, knobs and their logs,
    ``pit.tile``, and what the space adds.

    Logarithms, because sizes act by ratio; the plain values too, because a knob may be a choice.
    """
    knobs = np.full(MAX_KNOBS, _UNUSED)
    values = knob_values(sch.trace)[:MAX_KNOBS]
    knobs[: len(values)] = values
    tile = np.full(MAX_TILE, _UNUSED)
    annotated = tile_annotation(sch.mod)[:MAX_TILE]
    tile[: len(annotated)] = annotated
    more = np.full(MAX_MORE, _UNUSED)
    if space is not None and space.features is not None:
        added = space.features(space.tile_of(sch, task), task)[:MAX_MORE]
        more[: len(added)] = added
    logs = np.log2(np.maximum(knobs, 0) + 1)
    return np.concatenate([np.log2([task.m, task.n, task.k]), knobs, logs, tile, more])[None, :]


@derived_object
class DecisionFeatures(ms.feature_extractor.PyFeatureExtractor):
    """Feature extractor over the decisions; ``task`` is the one being searched in ``space``."""

    def __init__(self, task: TileTask, space: Space) -> None:
        super().__init__()
        self.task = task
        self.space = space

    def extract_from(
        self, context: ms.TuneContext, candidates: list[ms.MeasureCandidate]
    ) -> list[Tensor]:
        return [tensor(feature_vector(self.task, item.sch, self.space)) for item in candidates]


def mutate(trace: Trace, seed: int) -> Trace | None:
    """The trace with one of its categorical knobs moved to another value; None if it has no
    choice."""
    movable = [
        (inst, int(decision))
        for inst, decision in trace.decisions.items()
        if inst.kind.name == "SampleCategorical" and len(inst.attrs[0]) > 1
    ]
    if not movable:
        return None
    rng = np.random.default_rng(abs(seed))
    inst, current = movable[rng.integers(len(movable))]
    other = int(rng.integers(len(inst.attrs[0]) - 1))
    return trace.with_decision(inst, other + (other >= current), remove_postproc=True)


@derived_object
class MutateCategorical(ms.mutator.PyMutator):
    """MetaSchedule's face of `mutate`."""

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        """The mutator needs nothing of the context."""

    def apply(self, trace: Trace, seed: int) -> Trace | None:
        return mutate(trace, int(seed))

    def clone(self) -> Any:
        return MutateCategorical()
