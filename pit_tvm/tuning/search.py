"""MetaSchedule's search over one task, driven batch by batch from Python."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import IRModule
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule import _ffi_api
from tvm.s_tir.meta_schedule.logging import get_logging_func
from tvm.target import Target

from ..errors import TuningError, mismatch
from ..structs import TileTask
from .features import DecisionFeatures, MutateCategorical
from .tasks import Space

_LOGGER = logging.getLogger(__name__)
# The cost model guesses at random until it has seen this many candidates.
_WARMUP = 16
# One prediction replays the population's traces once per generation: milliseconds each.
_POPULATION = 128
_GENERATIONS = 3


@dataclass(frozen=True)
class Search:
    """One task's search in progress: what to measure next, and what the measuring told."""

    context: ms.TuneContext
    model: ms.CostModel

    def next_batch(self) -> list[ms.MeasureCandidate]:
        """Candidates to measure now; empty when the strategy has no more."""
        return list(self.context.generate_measure_candidates() or ())

    def tell(
        self, candidates: Sequence[ms.MeasureCandidate], results: Sequence[ms.runner.RunnerResult]
    ) -> None:
        """Teach the cost model and the strategy the results of one batch, in order."""
        self.learn(candidates, results)
        self.context.notify_runner_results(list(candidates), list(results))

    def learn(
        self, candidates: Sequence[ms.MeasureCandidate], results: Sequence[ms.runner.RunnerResult]
    ) -> None:
        """Teach the cost model alone, with what an earlier run measured."""
        if candidates:
            self.model.update(self.context, list(candidates), list(results))

    def close(self) -> None:
        """End the strategy's session."""
        self.context.post_tuning()


class _Context(ms.TuneContext):
    """A TuneContext that does not import ``tvm.s_tir.tensor_intrin``.

    The constructor of the parent imports that module for its side effect, the registration of all
    tensor intrinsics, which takes up to 30 s. Spaces that need an intrinsic register it themselves.
    """

    def __init__(
        self,
        mod: IRModule,
        target: Target,
        space: ms.SpaceGenerator,
        strategy: ms.SearchStrategy,
        seed: int,
        threads: int,
    ) -> None:
        log = get_logging_func(_LOGGER)
        self.__init_handle_by_constructor__(
            _ffi_api.TuneContext, mod, target, space, strategy, "main", threads, seed, log
        )
        _ffi_api.TuneContextInitialize(self)


def start_search(
    space: Space,
    task: TileTask,
    mod: IRModule,
    target: Target,
    database: ms.Database,
    *,
    trials: int,
    batch: int,
    seed: int,
) -> Search:
    """Open a search for ``trials`` candidates of ``mod`` in batches of ``batch``.

    Raises
    ------
    TuningError
        The space makes no schedule.
    """

    def schedule(sch: Schedule) -> None:
        space.sample(sch, task)
        _keep_samples(sch)

    generator = ms.space_generator.ScheduleFn(
        schedule, sch_rules=[], postprocs=[], mutator_probs={MutateCategorical(): 1.0}
    )
    strategy = ms.search_strategy.EvolutionarySearch(
        population_size=_POPULATION,
        init_min_unmeasured=batch,
        genetic_num_iters=_GENERATIONS,
    )
    # One thread: the schedule function and the mutator are Python and would wait for each other.
    context = _Context(mod, target, generator, strategy, 1 + seed, threads=1)
    model = ms.cost_model.XGBModel(
        extractor=DecisionFeatures(task, space),
        num_warmup_samples=_WARMUP,
        early_stopping_rounds=10,
        num_tuning_cores=1,
    )
    try:
        spaces = context.generate_design_space()
    except (ValueError, TypeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise TuningError(mismatch(f"space of {task}", "a schedule", reason)) from error
    context.pre_tuning(trials, batch, spaces, database, model)
    return Search(context, model)


def _keep_samples(sch: Schedule) -> None:
    """Annotate the root with every sampled value by itself.

    MetaSchedule drops samples that nothing uses, and does not look for them inside the lists that
    a space annotates.
    """
    root = sch.get_sblock("root")
    samples = [inst for inst in sch.trace.insts if inst.kind.name == "SampleCategorical"]
    for number, inst in enumerate(samples):
        sch.annotate(root, f"pit.sample.{number}", inst.outputs[0])
