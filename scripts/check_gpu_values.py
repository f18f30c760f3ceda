"""Values of random calls through the public interface, every tile in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from bench_gpu_measure import float32_precision, synchronize
from bench_gpu_pit import internals
from check_gpu_kinds import KINDS
from check_gpu_patterns import Call, draw_call, draw_data
from check_gpu_problem import AMOUNTS, EXACT, Problem, case_rng
from check_gpu_tiles import micro_tiles_for, operator, tiles_for

from pit_tvm import Operator
from pit_tvm.errors import PitError
from pit_tvm.runtime.cuda_decode import FAMILY
from pit_tvm.structs import Candidate, MicroTile, Plan, Tile

ALL_TILES_EVERY = 16  # calls of a kind between two that run all its tiles
TILE_ROUNDINGS, LIBRARY_ROUNDINGS = 3.0, 4.0  # a library rounds before an activation too
MOST_FAULTS = 20


@dataclass(frozen=True)
class Checker:
    """How cases are run: the device, how many tiles of operators with an epilogue, and whether
    calls on a GPU may be the library's products."""

    device: str
    tiles: int = 2
    library: bool = True

    @property
    def target(self) -> str:
        """What operators are compiled for."""
        return "cuda" if self.device == "cuda" else "llvm"

    def operator(self, call: Call) -> Operator:
        """The operator of a call, compiled once."""
        return operator(call.kind, self.target, self.tiles)


@dataclass
class Report:
    """What was run, and what was wrong with it."""

    cases: int = 0
    calls: int = 0
    tiles: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)


def check_family(
    family: str,
    numbers: Sequence[int],
    seed: int,
    checker: Checker,
    tell: Callable[[str], None] = print,
) -> Report:
    """Run the cases of these numbers; every fault is told when it is found.

    Stops after `MOST_FAULTS` faults, or when the device itself has failed. The library's products
    are told to keep their sums in 32 bits.
    """
    library = torch.backends.cuda.matmul
    library.allow_fp16_reduced_precision_reduction = False
    library.allow_bf16_reduced_precision_reduction = False
    report = Report()
    for number in numbers:
        rng = case_rng(seed, family, number)
        call = draw_call(rng, family, number)
        amount = str(rng.choice(AMOUNTS))
        failed = False
        report.cases += 1
        try:
            made = checker.operator(call)
            problem = draw_data(rng, call, amount, checker.device, made)
            faults = check_problem(problem, number, checker, report)
            synchronize(checker.device)  # raises if a kernel has failed
        except RuntimeError as error:
            faults, failed = [f"the device has failed: {error}"], True
        for fault in faults:
            text = f"{family} case {number} of seed {seed}: {call}, {amount} live: {fault}"
            report.faults.append(text)
            tell(text)
        if failed or len(report.faults) >= MOST_FAULTS:
            break
    return report


def check_problem(
    problem: Problem, number: int, checker: Checker, report: Report | None = None
) -> list[str]:
    """Run one problem as a call does, then with a tile whose turn it is, or now and then with all
    of them; returns what was wrong."""
    kept = report or Report()
    with float32_precision(problem.call.kind.tf32):
        return _check_calls(problem, _choices(problem, number, checker), checker, kept)


def _check_calls(
    problem: Problem, choices: Sequence[tuple[str, Any]], checker: Checker, kept: Report
) -> list[str]:
    made, faults = checker.operator(problem.call), []
    for name, choose in choices:
        problem.poison()
        ran: list[Candidate] = []

        def note(plan: Plan, choose: Any = choose, ran: list[Candidate] = ran) -> Candidate:
            ran.append(choose(plan))
            return ran[0]

        try:
            if choose is None:
                made(*problem.arrays, sparsity=problem.value, out=problem.out)
            else:
                internals(made).run(problem.arrays, problem.value, problem.out, choose=note)
            limit = LIBRARY_ROUNDINGS if choose is None else _limit(problem, ran)
            fault = problem.fault(limit)
        except (PitError, RuntimeError, TypeError, ValueError) as error:
            fault = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        kept.calls += 1
        kept.tiles.update(str(candidate) for candidate in ran)
        if fault:
            faults.append(f"{name}{': ' * bool(ran)}{' '.join(map(str, ran))}: {fault}")
    return faults


def _limit(problem: Problem, ran: Sequence[Candidate]) -> float:
    tile = ran[0].tile if ran else None
    if tile is not None and tile.family == FAMILY and problem.call.offset:
        return LIBRARY_ROUNDINGS  # which takes weights that lie so
    if not ran or problem.call.kind.act in EXACT and ran[0].kind == "pit":
        return 0.0
    return TILE_ROUNDINGS if ran[0].kind == "pit" else LIBRARY_ROUNDINGS


def _choices(problem: Problem, number: int, checker: Checker) -> list[tuple[str, Any]]:
    """What to run, by name: None is the call that users make."""
    if checker.device != "cuda":
        return [
            ("call", None),
            ("turn", lambda plan: plan.candidates[number % len(plan.candidates)]),
        ]
    call: Call = problem.call
    made = checker.operator(call)
    tiles, micro_tiles = tiles_for(call.kind, made, call.extents), micro_tiles_for(made)
    turns, place = divmod(number, len(KINDS[call.kind.family]))
    turn, everyone = tiles[(turns + place) % len(tiles)], turns % ALL_TILES_EVERY == 0
    chosen = None if call.whole and checker.library else _chosen(tiles, turn, checker.library)
    rest = [_with(tile, m) for tile in (tiles if everyone else (turn,)) for m in micro_tiles]
    choices = [("call", chosen), *(("tile", choose) for choose in rest)]
    return [*choices, ("dense", _dense(turn))] if everyone and checker.library else choices


def _chosen(tiles: Sequence[Tile], turn: Tile, library: bool = True) -> Callable[[Plan], Candidate]:
    """The plan's own choice where its kernel is among those compiled, or the library's if that may
    be, else another."""

    def choose(plan: Plan) -> Candidate:
        tile = plan.choice.tile
        known = library if tile is None else tile in tiles
        return plan.choice if known else _with(turn)(plan)

    return choose


def _with(tile: Tile | None, micro_tile: MicroTile | None = None) -> Callable[[Plan], Candidate]:
    """A tile for the first candidate that gathers, or for that of one micro-tile."""

    def choose(plan: Plan) -> Candidate:
        gather = (c for c in plan.candidates if c.kind == "pit")
        some = next(c for c in gather if micro_tile in (None, c.micro_tile))
        return some._replace(tile=tile)

    return choose


def gathered(plan: Plan) -> Candidate:
    """The best candidate that gathers."""
    return next(c for c in plan.candidates if c.kind == "pit")


def _dense(turn: Tile) -> Callable[[Plan], Candidate]:
    """The library's product where it is a candidate."""

    def choose(plan: Plan) -> Candidate:
        dense = next((c for c in plan.candidates if c.kind == "dense"), None)
        return dense or _with(turn)(plan)

    return choose
