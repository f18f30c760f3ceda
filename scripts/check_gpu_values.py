"""Values of random calls through the public interface, every tile in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from bench_gpu_build import TARGET, Columns, Kernel, Wanted
from bench_gpu_measure import float32_precision, synchronize
from bench_gpu_pit import internals, operator, sizes_for
from check_gpu_cases import BLOCKS, Shape, Variant, draw_problem, draw_shape, variants
from check_gpu_kinds import KINDS, kernels_of_kind, micro_tiles_for, tiles_for
from check_gpu_patterns import Call, draw_call, draw_data
from check_gpu_problem import AMOUNTS, EXACT, Problem, case_rng

from pit_tvm import Operator
from pit_tvm.errors import PitError
from pit_tvm.runtime.cuda_block_form import BlocksForm
from pit_tvm.runtime.cuda_decode import FAMILY, DecodeDispatcher
from pit_tvm.runtime.cuda_form import ColumnsForm
from pit_tvm.schedules.cuda_few_rows_parts import HEIGHTS as FEW
from pit_tvm.schedules.hopper_bands import HEIGHTS, starting_columns
from pit_tvm.schedules.hopper_space import starting_tiles
from pit_tvm.structs import Candidate, MicroTile, Plan, Tile

ALL_TILES_EVERY = 16  # cases between two that run all tiles of their operator
SIZES = ((20_000, 3072, 768), (300, 300, 300), (4096, 4096, 4096))  # m, n, k of plans to look at
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

    def operator(self, shape: Shape | Call) -> Operator:
        """The operator of a shape, compiled once."""
        if isinstance(shape, Call):
            return shape.kind.operator(self.target, self.tiles)
        v = shape.variant
        sizes = sizes_for(self.target, shape.n, shape.k)
        options = (shape.groups, v.bias, v.act, shape.dead)
        return operator(v.family, shape.spec, v.dtype, self.target, sizes, *options)

    def built(self, variant: Variant) -> tuple[Tile, ...]:
        """Tiles of a variant that are checked on a GPU: all that plans choose from and all
        untuned ones; of variants with an epilogue only some, other ones for each."""
        tiles = all_tiles(variant)
        if variant.turned or variant.plain or self.tiles >= len(tiles):
            return tiles
        first = variants(variant.family).index(variant) * self.tiles
        return tuple(tiles[(first + i) % len(tiles)] for i in range(self.tiles))


@dataclass
class Report:
    """What was run, and what was wrong with it."""

    cases: int = 0
    calls: int = 0
    tiles: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)


@cache
def all_tiles(variant: Variant) -> tuple[Tile, ...]:
    """Tiles that plans of a variant's operator can hold, and the untuned ones that it can use."""
    if variant.turned:
        heights = [rows for rows, _ in variant.bands]
        return tuple(tile for high in heights for tile in starting_columns(variant.dtype, high))
    target = "cuda -arch=sm_90a -model=h200" if not torch.cuda.is_available() else "cuda"
    shape = Shape(variant, "groups" if variant.family == "grouped" else "rows", "skip", 8, 8, 8, 8)
    made = operator(
        variant.family,
        shape.spec,
        variant.dtype,
        target,
        (None, None),
        shape.groups if variant.family == "grouped" else 0,
        variant.bias,
        variant.act,
    )
    families = internals(made).planner.rates().families
    names = {tile.family for m, n, k in SIZES for tile in _planned(made, m, n, k)}
    tuned = [tile for name in names for tile in families[name].tiles]
    generic = [t for t in starting_tiles("sm_90a", variant.dtype) if t.family in names]
    usable = tuple(t for t in generic if _usable(t, variant))
    return tuple(dict.fromkeys((*tuned, *usable)))


def _usable(tile: Tile, variant: Variant) -> bool:
    # A weight stored [k, n] comes in boxes of 64 columns.
    return variant.family != "matmul" or tile.tile_n % 64 == 0


def _planned(made: Operator, m: int, n: int, k: int) -> list[Tile]:
    dispatcher = internals(made)
    layout = dispatcher.binder.layout_of({"m": m, "n": n, "k": k}, "torch")
    plan = dispatcher.planner.plan(layout, None)
    return [c.tile for c in plan.candidates if c.tile is not None]


def kernels_of(families: Sequence[str], checker: Checker) -> list[Wanted]:
    """What checking some families compiles."""
    kinds = (kind for family in families for kind in KINDS.get(family, ()))
    found = [kernel for kind in kinds for kernel in kernels_of_kind(kind, checker.tiles)]
    known = [family for family in families if family not in KINDS]
    for variant in (variant for family in known for variant in variants(family)):
        v = variant
        if not v.turned:
            epilogue = (v.dtype, v.bias, v.act)
            for dead in ("skip",) if v.family == "grouped" else ("skip", "zero"):
                found += [Kernel(v.family, *epilogue, t, dead) for t in checker.built(v)]
        tiles = checker.built(v) if v.turned else packed_tiles(v)
        for t in tiles:
            found.append(Columns(v.dtype, t.tile_m, v.turned, t, v.bias, v.act))
        found += [Columns(v.dtype, height) for height in {t.tile_m for t in tiles if not v.turned}]
        found += [Needed(shape) for shape in _apart(v)]
    return found


@dataclass(frozen=True)
class Needed:
    """What calls of a shape need, compiled when this is called."""

    shape: Shape

    def __call__(self) -> None:
        shape = self.shape
        _for_target(shape).build({"m": shape.m, "n": shape.n, "k": shape.k})


def _for_target(shape: Shape) -> Any:
    v = shape.variant
    options = (v.dtype, TARGET, (None, None), shape.groups, v.bias, v.act, shape.dead)
    return internals(operator(v.family, shape.spec, *options))


def _apart(variant: Variant) -> Iterator[Shape]:
    """Shapes that need kernels of other families than rows and columns: blocks, and a few rows."""
    shape = Shape(variant, "blockmask", "skip", 64, 64, 64)
    grains = () if variant.family == "grouped" else variant.bands if variant.turned else BLOCKS
    for block in grains:
        if isinstance(_for_target(replace(shape, block=block)).form, BlocksForm):
            yield replace(shape, block=block)
    if variant.family == "matmul":
        yield from (replace(shape, pattern="values", m=rows) for rows in FEW)


def packed_tiles(variant: Variant) -> list[Tile]:
    """Tiles of a product whose zeros come in blocks of rows, for which lhs is packed."""
    heights = set() if variant.family == "grouped" else {rows for rows, _ in BLOCKS} & set(HEIGHTS)
    return [tile for high in sorted(heights) for tile in starting_columns(variant.dtype, high)]


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
        shape = _drawn(rng, family, number)
        amount = str(rng.choice(AMOUNTS))
        failed = False
        report.cases += 1
        try:
            if isinstance(shape, Call):
                made = checker.operator(shape)
                problem = draw_data(rng, shape, amount, checker.device, made)
            else:
                problem = draw_problem(rng, shape, amount, checker.device)
            faults = check_problem(problem, number, checker, report)
            synchronize(checker.device)  # raises if a kernel has failed
        except RuntimeError as error:
            faults, failed = [f"the device has failed: {error}"], True
        for fault in faults:
            text = f"{family} case {number} of seed {seed}: {shape}, {amount} live: {fault}"
            report.faults.append(text)
            tell(text)
        if failed or len(report.faults) >= MOST_FAULTS:
            break
    return report


def _drawn(rng: np.random.Generator, family: str, number: int) -> Shape | Call:
    if family in KINDS:
        return draw_call(rng, family, number)
    known = variants(family)
    return draw_shape(rng, known[number % len(known)])


def check_problem(
    problem: Problem, number: int, checker: Checker, report: Report | None = None
) -> list[str]:
    """Run one problem as a call does, then with a tile whose turn it is, or now and then with all
    of them; returns what was wrong."""
    kept = report or Report()
    tf32 = isinstance(problem.shape, Call) and problem.shape.kind.tf32
    with float32_precision(tf32):
        return _check_calls(problem, _choices(problem, number, checker), checker, kept)


def _check_calls(
    problem: Problem, choices: Sequence[tuple[str, Any]], checker: Checker, kept: Report
) -> list[str]:
    made, faults = checker.operator(problem.shape), []
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
    if tile is not None and tile.family == FAMILY and problem.shape.offset:
        return LIBRARY_ROUNDINGS  # which takes weights that lie so
    if not ran or problem.shape.act in EXACT and ran[0].kind == "pit":
        return 0.0
    return TILE_ROUNDINGS if ran[0].kind == "pit" else LIBRARY_ROUNDINGS


def _choices(problem: Problem, number: int, checker: Checker) -> list[tuple[str, Any]]:
    """What to run, by name: None is the call that users make."""
    if checker.device != "cuda":
        return [
            ("call", None),
            ("turn", lambda plan: plan.candidates[number % len(plan.candidates)]),
        ]
    shape = problem.shape
    tiles: Sequence[Any]
    micro_tiles: Sequence[MicroTile | None] = (None,)
    if isinstance(shape, Call):
        made = checker.operator(shape)
        tiles, micro_tiles = tiles_for(shape.kind, made, shape.extents), micro_tiles_for(made)
        turns, whole = number // len(KINDS[shape.kind.family]), shape.whole
        everyone = turns % ALL_TILES_EVERY == 0
    else:
        tiles = tuple(t for t in tiles_of(shape, checker) if _takes(t, shape.groups))
        turns, whole = number // ALL_TILES_EVERY, shape.variant.plain
        everyone = number % ALL_TILES_EVERY == 0
    turn = tiles[turns % len(tiles)]
    chosen = None if whole and checker.library else _chosen(tiles, turn, checker.library)
    rest = [_with(tile, m) for tile in (tiles if everyone else (turn,)) for m in micro_tiles]
    choices = [("call", chosen), *(("tile", choose) for choose in rest)]
    return [*choices, ("dense", _dense(turn))] if everyone and checker.library else choices


def tiles_of(shape: Shape, checker: Checker) -> Sequence[Tile]:
    """The tiles that are checked with a shape."""
    variant = shape.variant
    if variant.family != "grouped":
        made = internals(checker.operator(shape))
        if isinstance(made.form, (ColumnsForm, BlocksForm)):
            return tuple(made.planner.tiles)
        if isinstance(made, DecodeDispatcher):
            sizes = {"m": shape.m, "n": shape.n, "k": shape.k}
            if made.planner.few(made.binder.layout_of(sizes, "torch")):
                return (made.planner.tile(shape.m, shape.n),)
    return checker.built(variant)


def _takes(tile: Tile, groups: int) -> bool:
    """Whether a kernel of this tile takes so many groups."""
    return dict(tile.knobs).get("most_groups", 1) >= groups


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
