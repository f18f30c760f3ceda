"""Plans: the facts that selection gets, the rules for dense, and decisions that are remembered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pit_tvm import op
from pit_tvm.errors import DatabaseError
from pit_tvm.runtime import planner as planner_module
from pit_tvm.runtime.bind import Binder, Layout
from pit_tvm.runtime.pattern import Pattern
from pit_tvm.runtime.planner import Planner
from pit_tvm.runtime.program import Program, analyse
from pit_tvm.schedules.contraction_space import BLOCKS, DEPTH, ROWS
from pit_tvm.structs import (
    BitMask,
    BlockMask,
    Groups,
    Lengths,
    Mask,
    Plan,
    Rows,
    SparsitySpec,
    Tile,
    TileTask,
    Values,
)
from pit_tvm.target import TargetInfo, resolve_target
from pit_tvm.tile_db.record import Provenance, TileRecord

M, N, K = 2048, 768, 3072


class Store:
    """Some records, as `TileStore.all` gives them."""

    def __init__(self, *records: TileRecord) -> None:
        self.records = records

    def all(self) -> tuple[TileRecord, ...]:
        return self.records


@pytest.fixture(scope="module")
def target() -> TargetInfo:
    return resolve_target({"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 2})


def matmul(spec: SparsitySpec, **options: Any) -> Program:
    return analyse(op.matmul(None, None, None, **options), {"lhs": spec})


def layout(program: Program, library: str = "numpy", /, **sizes: int) -> Layout:
    return Binder(program, "me").layout_of({"m": M, "n": N, "k": K, **sizes}, library)


def pattern(program: Program, *covered: float) -> Pattern:
    return Pattern(covered or (1.0,) * len(program.routes), tuple(int(100 * c) for c in covered))


def tuned(family: str, reg_m: int, secs: float, m: int = 512) -> TileRecord:
    tile = Tile(family, "avx512", "float32", 8 * reg_m, 4096, 256, (("reg_m", reg_m),))
    task = TileTask("contraction", "avx512", "float32", m, N, K)
    return TileRecord("pit", PROVENANCE, tile=tile, task=task, run_secs=(secs,))


PROVENANCE = Provenance("xeon-avx512", "x86-64-v4", 2, "0.27", "0.1.0", "2025-01-02", 8)


def decide(program: Program, target: TargetInfo, *covered: float, **sizes: int) -> Plan:
    planner = Planner(program, target, Store())  # type: ignore[arg-type]
    return planner.decide(pattern(program, *covered), layout(program, **sizes), packed=True)


# --------------------------------------------------------------------------------------------
# Choices


def test_sparser_patterns_are_cheaper_and_dense_wins_when_full(target: TargetInfo) -> None:
    program = matmul(Mask())
    costs, kinds = [], []
    for share in (0.0, 0.02, 0.2, 0.6, 1.0):
        plan = decide(program, target, share, share, share)
        costs.append([c.cost_us for c in plan.candidates])
        kinds.append(plan.choice.kind)
    assert (np.diff(np.array(costs)[:, :-1], axis=0) >= 0).all()
    assert kinds == ["pit", "pit", "pit", "pit", "dense"]


@pytest.mark.parametrize(
    ("covered", "family"),
    [((0.05, 1, 1), ROWS), ((1, 0.05, 1), BLOCKS), ((1, 1, 0.05), DEPTH)],
)
def test_the_route_that_covers_least_is_chosen(
    target: TargetInfo, covered: tuple[float, ...], family: str
) -> None:
    choice = decide(matmul(Mask()), target, *covered).choice
    assert choice.tile is not None and choice.tile.family == family


def test_dense_needs_every_named_row(target: TargetInfo) -> None:
    for spec in (Rows(), Lengths()):
        program = matmul(spec)
        assert {c.kind for c in decide(program, target, 0.999).candidates} == {"pit"}
        assert {c.kind for c in decide(program, target, 1.0).candidates} == {"pit", "dense"}


def test_library_is_no_candidate_where_it_is_not_wanted(target: TargetInfo) -> None:
    program = matmul(Lengths())
    planner = Planner(program, target, Store(), library=False)  # type: ignore[arg-type]
    plan = planner.decide(pattern(program, 1.0), layout(program), packed=True)
    assert {c.kind for c in plan.candidates} == {"pit"}
    chain = analyse(op.elementwise((M, N), ["relu"]), {"data": Mask(32, 64)})
    planner = Planner(chain, target, Store(), library=False)  # type: ignore[arg-type]
    whole = Binder(chain, "me").layout_of({}, "numpy")
    plan = planner.decide(pattern(chain, *[1.0] * len(chain.routes)), whole, packed=False)
    assert "dense" in {c.kind for c in plan.candidates}  # by a loop nest of ours


def test_groups_have_no_dense_candidate(target: TargetInfo) -> None:
    tensors = op.grouped_matmul(None, N, K, 8)
    program = analyse(tensors, {"lhs": Groups(8)})
    planner = Planner(program, target, Store())  # type: ignore[arg-type]
    known = Binder(program, "me").layout_of({"m": M}, "numpy")
    plan = planner.decide(Pattern((1.0,), (0,)), known, packed=True)
    assert [c.kind for c in plan.candidates] == ["pit"]


def test_index_costs_what_the_pattern_s_array_takes_to_read(target: TargetInfo) -> None:
    costs = []
    for spec in (BlockMask(32, 64), BlockMask(32, 1), BitMask(), Mask(), Values()):
        plan = decide(matmul(spec), target, 0.5, 0.5, 0.5)
        costs.append({dict(c.parts)["index"] for c in plan.candidates if c.kind == "pit"})
    found = [cost for (cost,) in costs]
    size = found[3]  # one byte per element
    wanted = [size / (32 * 64), size / 32, size / 8, size, size * 4]
    assert found == pytest.approx(wanted)


def test_applied_mask_is_paid_for_where_it_is_read(target: TargetInfo) -> None:
    tensors = op.matmul(None, None, None)
    plans = []
    for apply in (False, True):
        program = analyse(tensors, {"lhs": BlockMask(32, 64)}, apply_mask=apply)
        plans.append(decide(program, target, 0.5, 0.5, 0.5))
    pairs = zip(*(plan.candidates for plan in plans), strict=True)
    assert [masked.cost_us > plain.cost_us for plain, masked in pairs] == [
        True,  # whole rows
        False,  # 1x64 and 32x1 lie in blocks
        False,
        True,  # dense, by a masked copy
    ]


def test_packing_at_the_call_is_paid_for(target: TargetInfo) -> None:
    program = matmul(Rows())
    planner = Planner(program, target, Store())  # type: ignore[arg-type]
    known, half = layout(program), Pattern((0.5,), (6, 0))
    packed, plain = (planner.decide(half, known, packed=p).choice.cost_us for p in (True, False))
    assert plain > packed


@pytest.mark.parametrize("sizes", [{"k": 0}, {"n": 0}, {"m": 1, "n": 1, "k": 1}, {"m": 1}])
def test_extents_of_zero_and_one_have_a_plan(target: TargetInfo, sizes: dict[str, int]) -> None:
    for spec in (Mask(), Rows()):
        program = matmul(spec)
        for share in (0.0, 1.0):
            plan = decide(program, target, *(share,) * len(program.routes), **sizes)
            assert all(np.isfinite(c.cost_us) for c in plan.candidates)


def test_expressions_without_a_product_have_generic_candidates(target: TargetInfo) -> None:
    program = analyse(op.reduce_sum(None, None), {"data": Mask()})
    planner = Planner(program, target, Store())  # type: ignore[arg-type]
    known = Binder(program, "me").layout_of({"p": 512, "l": 512}, "numpy")
    plan = planner.decide(Pattern((0.1, 0.1), (1, 1)), known, packed=False)
    assert [(c.tile, c.note) for c in plan.candidates] == [
        (None, ""),
        (None, ""),
        (None, "generic"),
    ]


# --------------------------------------------------------------------------------------------
# Records


def test_records_of_the_store_decide_and_make_the_plan_tuned(target: TargetInfo) -> None:
    program = matmul(Rows())
    store = Store(tuned(ROWS, 12, 3e-2), tuned(ROWS, 14, 1e-2), tuned(ROWS, 4, 9e-2))
    planner = Planner(program, target, store)  # type: ignore[arg-type]
    plan = planner.decide(Pattern((0.5,), (6, 0)), layout(program), packed=True)
    assert plan.tuned and plan.choice.tile is not None
    assert plan.choice.tile.knob("reg_m") == 14


def test_a_fast_library_makes_dense_the_choice(target: TargetInfo) -> None:
    program = matmul(Mask())
    task = TileTask("contraction", "avx512", "float32", M, N, K)
    kinds = []
    for secs in (1e-6, 10.0):
        record = TileRecord("library", PROVENANCE, task=task, run_secs=(secs,), note="torch")
        planner = Planner(program, target, Store(record))  # type: ignore[arg-type]
        known = layout(program, "torch")
        kinds.append(planner.decide(pattern(program, 0.5, 0.5, 0.5), known, packed=True))
    assert [plan.choice.kind for plan in kinds] == ["dense", "pit"]
    assert kinds[0].choice.note == "torch"


def test_few_tiles_of_a_family_are_weighed_the_fastest_ones(target: TargetInfo) -> None:
    program = matmul(Rows())
    records = [tuned(ROWS, reg_m, reg_m * 1e-3) for reg_m in range(1, 15)]
    planner = Planner(program, target, Store(*records))  # type: ignore[arg-type]
    plan = planner.decide(Pattern((0.5,), (6, 0)), layout(program), packed=True)
    weighed = [c.tile.knob("reg_m") for c in plan.candidates if c.tile]
    assert len(weighed) < 8 and weighed == list(range(1, 1 + len(weighed)))


def test_another_type_s_records_do_not_count(target: TargetInfo) -> None:
    program = matmul(Rows(), dtype="int8")
    planner = Planner(program, target, Store(tuned(ROWS, 14, 1e-9)))  # type: ignore[arg-type]
    plan = planner.decide(Pattern((0.5,), (6, 0)), layout(program), packed=True)
    assert not plan.tuned
    assert plan.choice.tile is not None and plan.choice.tile.dtype == "int8"


def test_errors_of_the_store_come_through(target: TargetInfo) -> None:
    class Corrupt(Store):
        def all(self) -> tuple[TileRecord, ...]:
            raise DatabaseError("tiles.json:1: expected JSON, got noise")

    program = matmul(Rows())
    planner = Planner(program, target, Corrupt())  # type: ignore[arg-type]
    with pytest.raises(DatabaseError, match="tiles.json:1"):
        planner.plan(Pattern((0.5,), (6, 0)), layout(program), packed=True)


# --------------------------------------------------------------------------------------------
# Decisions that are remembered


def test_equal_questions_get_the_remembered_plan(target: TargetInfo) -> None:
    program = matmul(Rows())
    planner = Planner(program, target, Store())  # type: ignore[arg-type]
    known, other = layout(program), layout(program, m=M + 1)
    torch = layout(program, "torch")
    half, third = Pattern((0.5,), (6, 0)), Pattern((0.33,), (10, 0))
    first = planner.plan(half, known, True)
    assert planner.plan(Pattern((0.51,), (6, 0)), layout(program), True) is first
    others = [
        planner.plan(third, known, True),
        planner.plan(half, other, True),
        planner.plan(half, torch, True),
        planner.plan(half, known, False),
    ]
    assert all(plan is not first for plan in others)
    assert planner.plan(half, known, True) is first


def test_full_cache_starts_again(target: TargetInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_module, "_MAX_PLANS", 3)
    program = matmul(Rows())
    planner = Planner(program, target, Store())  # type: ignore[arg-type]
    known = layout(program)
    plans = [planner.plan(Pattern((0.5,), (key, 0)), known, True) for key in range(4)]
    assert planner.plan(Pattern((0.5,), (3, 0)), known, True) is plans[3]
    assert planner.plan(Pattern((0.5,), (0, 0)), known, True) is not plans[0]


def test_micro_tiles_cost_about_the_rows_that_there_are(target: TargetInfo) -> None:
    def by_depth(m: int) -> float:
        plan = decide(matmul(Values()), target, m=m)
        return min(c.cost_us for c in plan.candidates if c.micro_tile and c.micro_tile.axis == "k")

    assert by_depth(4) < 1.05 * by_depth(1) < by_depth(9) < by_depth(32) < by_depth(64)
