"""The GPU checks' own parts, and the checks themselves on the CPU's operators."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_gpu_build as build
import check_gpu
import check_gpu_cases as cases
import check_gpu_kinds as kinds
import check_gpu_patterns as patterns
import check_gpu_problem as problems
import check_gpu_values as values
import numpy as np
import pytest
import torch
from bench_gpu_measure import float32_precision
from bench_gpu_pit import internals, operator

from pit_tvm.reference.index import dense_mask, index_lists
from pit_tvm.runtime.cuda_decode import FAMILY
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.structs import MicroTile

CPU = values.Checker("cpu")
PLAIN = cases.Variant("linear", "float16", False, None)


def shape_of(pattern: str, **more: Any) -> cases.Shape:
    groups = 5 if pattern == "groups" else 0
    variant = cases.Variant("grouped" if groups else "linear", "float16", False, None)
    sizes = {"m": 24, "n": 12, "k": 40, "groups": groups, "batch": 4, "block": (4, 8), **more}
    return cases.Shape(variant, pattern, "skip", **sizes)


def draw(shape: cases.Shape, amount: str = "half", seed: int = 0) -> problems.Problem:
    return cases.draw_problem(np.random.default_rng(seed), shape, amount, "cpu")


def solve(problem: problems.Problem) -> None:
    """Write what is wanted, as a right kernel would."""
    problem.poison()
    problem.out[problem.written] = problem.want[problem.written].to(problem.out.dtype)
    if problem.shape.dead == "zero":
        problem.out[~problem.written] = 0


# --------------------------------------------------------------------------------------------
# Problems


@pytest.mark.parametrize("amount", problems.AMOUNTS)
@pytest.mark.parametrize("pattern", [*cases.PATTERNS, "groups"])
def test_the_pattern_names_the_rows_that_are_wanted(pattern: str, amount: str) -> None:
    problem = draw(shape_of(pattern), amount)
    lhs = problem.arrays[0]
    value = problem.arrays[-1] if pattern == "groups" else problem.value
    told = (lhs if value is None else value).numpy()
    rows = MicroTile("lhs", "m", 0, (1, 0))
    lists = index_lists(problem.shape.spec, told, tuple(lhs.shape), rows)
    live = np.sort(np.concatenate(lists)) if lists else np.zeros(0)
    if problem.shape.spec.promises_zero:
        assert problem.written.all()
        assert np.array_equal(live, np.flatnonzero(lhs.numpy().any(axis=1)))
    else:
        assert np.array_equal(live, np.flatnonzero(problem.written.numpy()))
    assert amount != "empty" or not len(live)
    assert amount != "full" or len(live) == len(lhs)
    assert not problem.want[problem.written].isnan().any()


def test_a_case_is_the_same_whichever_others_run_and_differs_with_the_seed() -> None:
    def shape(seed: int, number: int) -> cases.Shape:
        return cases.draw_shape(problems.case_rng(seed, "linear", number), PLAIN)

    assert shape(3, 7) == shape(3, 7)
    assert len({shape(seed, number) for seed in (3, 4) for number in range(20)}) == 40


def test_random_shapes_reach_odd_ones_and_every_pattern() -> None:
    drawn = [cases.draw_shape(problems.case_rng(1, "linear", i), PLAIN) for i in range(600)]
    assert {s.pattern for s in drawn} == set(cases.PATTERNS)
    for extents in ([s.n for s in drawn], [s.k for s in drawn]):
        assert {0, 1} <= {extent % 2 for extent in extents}
        assert any(extent % 8 == 2 for extent in extents)
        assert any(extent % 8 == 4 for extent in extents)
        assert sum(extent % 8 == 0 for extent in extents) > 200
    assert 0 in [s.m for s in drawn] and {s.dead for s in drawn} == {"skip", "zero"}
    assert any(s.offset for s in drawn) and {s.wide for s in drawn} == {True, False}


def test_offset_arrays_are_contiguous_and_off_their_alignment() -> None:
    problem = draw(shape_of("rows", offset=3))
    for array in (problem.arrays[0], problem.out):
        assert array.is_contiguous() and array.storage_offset() == 3


def test_refill_takes_the_other_data_into_the_same_memory() -> None:
    first, second = (draw(shape_of("lengths"), seed=seed) for seed in (1, 2))
    place, wanted = first.arrays[0].data_ptr(), second.arrays[0].clone()
    refilled = first.refill(second)
    assert refilled.arrays[0].data_ptr() == place
    assert torch.equal(refilled.arrays[0], wanted) and refilled.want is second.want


# --------------------------------------------------------------------------------------------
# Faults are seen


@pytest.mark.parametrize("dead", ["skip", "zero"])
def test_fault_sees_wrong_missing_and_needless_elements(dead: str) -> None:
    problem = draw(shape_of("rows"))
    problem = replace(problem, shape=replace(problem.shape, dead=dead))
    live = int(problem.written.nonzero()[0])
    dead_row = int((~problem.written).nonzero()[0])
    solve(problem)
    assert problem.fault(0.0) == ""
    problem.out[live, 3] += 1
    assert re.search(rf"1 wrong elements, first \[{live}, 3\]", problem.fault(0.0))
    solve(problem)
    problem.out[live, 2] = float("nan")
    assert "1 wrong" in problem.fault(4.0)
    solve(problem)
    problem.out[dead_row, 5] = 7.0
    assert "dead element" in problem.fault(0.0)


def test_tolerance_is_in_roundings_of_the_type() -> None:
    problem = draw(shape_of("lengths"))
    solve(problem)
    row = int(problem.written.nonzero()[0])
    size = float(problem.want[problem.written].square().mean().sqrt())
    problem.out[row] += 3 * 2.0**-11 * size
    assert problem.fault(0.0) and problem.fault(0.1) and not problem.fault(8.0)


def test_check_problem_names_what_ran_and_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = draw(shape_of("rows"))
    wrong = replace(problem, want=problem.want + 1)
    call, turn = values.check_problem(wrong, 0, CPU)
    assert call.startswith("call: ") and "wrong elements" in call
    assert "1x* on m" in turn
    broken = replace(problem, out=problem.out[:, 1:])
    assert all("ShapeError" in fault for fault in values.check_problem(broken, 0, CPU))


def test_a_device_that_fails_ends_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: str) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(values, "synchronize", fail)
    report = values.check_family("linear", range(5), 1, CPU, lambda text: None)
    assert report.cases == 1 and "illegal memory access" in report.faults[0]
    assert "linear case 0 of seed 1: linear float16" in report.faults[0]


# --------------------------------------------------------------------------------------------
# Operators of other families


@pytest.mark.parametrize("family", kinds.KINDS)
def test_calls_of_every_kind_have_a_pattern_and_a_right_result(family: str) -> None:
    class Packs:
        def pack(self, rhs: torch.Tensor) -> torch.Tensor:
            return rhs

    for number, kind in enumerate(kinds.KINDS[family]):
        rng = problems.case_rng(1, family, number)
        call = patterns.draw_call(rng, family, number)
        amount = problems.AMOUNTS[number % len(problems.AMOUNTS)]
        problem = patterns.draw_data(rng, call, amount, "cpu", Packs())  # type: ignore[arg-type]
        problem.poison()
        part = problem.written.expand_as(problem.out)
        problem.out[part] = problem.want[part].to(problem.out.dtype)
        if kind.dead == "zero":
            problem.out[~part] = 0
        assert problem.fault(0.0) == "" and str(kind) in str(call)
        if part.any():
            problem.out[tuple(part.nonzero()[-1].tolist())] += 16
            assert "1 wrong" in problem.fault(4.0)
        if not part.all():
            problem.out[tuple((~part).nonzero()[-1].tolist())] = 5
            assert "dead element" in problem.fault(4.0)


@pytest.mark.parametrize("family", kinds.KINDS)
def test_what_calls_of_a_kind_choose_from_is_compiled(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = values.Checker("cuda", tiles=1)
    monkeypatch.setattr(values.Checker, "target", build.TARGET)
    number = len(kinds.KINDS[family]) // 2
    call = patterns.draw_call(problems.case_rng(2, family, number), family, number)
    asked = kinds.Listed()
    chooser = internals(kinds.compiled(call.kind, build.TARGET, 1, asked))
    chooser = chooser._turned if call.kind.packed else chooser
    problem = problems.Problem(call, (), None, *[torch.zeros(0)] * 3)
    with float32_precision(call.kind.tf32):
        plan = chooser.planner.plan(chooser.binder.layout_of(call.extents, "torch"), None)
        choices = values._choices(problem, number, checker)
        names = [name for name, _ in choices]
        assert names[0] == "call" and "tile" in names and names[-1] == "dense"
        for _, choose in choices:
            candidate = plan.choice if choose is None else choose(plan)
            if candidate.kind == "pit" and not (candidate.tile and candidate.tile.family == FAMILY):
                chooser._kernel(candidate)
    listed = {kernel.key for kernel in kinds.kernels_of_kind(call.kind, checker.tiles)}
    assert listed and asked.asked <= listed


@pytest.mark.parametrize("family", ["linear", "matmul", "turned"])
def test_what_calls_over_rows_and_bands_choose_from_is_compiled(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of kernels, of which none is made."""
    asked: set[str] = set()

    def note(self: KernelCache, key: str, make: Callable[[], Any]) -> Any:
        asked.add(key)
        return {"main": None, "product": None}

    checker = values.Checker("cuda", tiles=1)
    monkeypatch.setattr(values.Checker, "target", build.TARGET)
    monkeypatch.setattr(KernelCache, "module", note)
    operator.cache_clear()
    for kernel in values.kernels_of([family], checker):
        build.build_one(kernel)
    built = asked.copy()
    asked.clear()
    operator.cache_clear()
    known = cases.variants(family)
    for number in range(60):
        rng = problems.case_rng(5, family, number)
        shape = cases.draw_shape(rng, known[number % len(known)])
        chooser = internals(checker.operator(shape))
        for tile in values.tiles_of(shape, checker):
            if tile.family == FAMILY:
                chooser.build({"m": shape.m, "n": shape.n, "k": shape.k})
            else:
                chooser.kernels.product(tile, 0, **chooser.options)
    assert asked and not asked - built - kinds._detection()
    operator.cache_clear()


# --------------------------------------------------------------------------------------------
# Tiles, and the command


@pytest.mark.parametrize("family", check_gpu.ROWS)
def test_plain_operators_are_checked_with_all_tiles_and_others_with_some(family: str) -> None:
    checker = values.Checker("cuda", tiles=2)
    found = {v: checker.built(v) for v in cases.variants(family)}
    for variant, tiles in found.items():
        every = values.all_tiles(variant)
        assert set(tiles) <= set(every) and len(set(tiles)) == len(tiles)
        assert len(tiles) == (len(every) if variant.plain else min(2, len(every)))
        assert family != "matmul" or all(tile.tile_n % 64 == 0 for tile in tiles)
    kernels = values.kernels_of([family], checker)
    built = build.Columns if family == "turned" else build.Kernel
    both = 2 if family in ("linear", "matmul") else 1  # with dead rows as they are, and zeros
    assert [type(k) for k in kernels].count(built) == both * sum(map(len, found.values()))
    zeros = [k for k in kernels if isinstance(k, build.Kernel) and k.dead == "zero"]
    assert {replace(k, dead="skip") for k in zeros} <= set(kernels) and (both == 2) == bool(zeros)
    stored = [k for k in kernels if isinstance(k, build.Columns) and not k.turned]
    assert bool(stored) == (family in ("linear", "matmul"))


@pytest.mark.parametrize(
    ("family", "block"), [("turned", (64, 16)), ("matmul", (32, 64)), ("linear", (32, 64))]
)
def test_blocks_of_rows_are_checked_with_tiles_of_their_height(
    family: str, block: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = values.Checker("cuda")
    monkeypatch.setattr(values.Checker, "target", "cuda -arch=sm_90a -model=h200")
    variant = cases.Variant(family, "float16", False, None)
    shape = cases.Shape(variant, "blockmask", "skip", 96, 24, 40, block=block)
    assert {tile.tile_m for tile in values.tiles_of(shape, checker)} == {block[0]}
    if family != "turned":
        listed = replace(shape, pattern="rows")
        assert values.tiles_of(listed, checker) == checker.built(variant)


@pytest.mark.parametrize("pattern", cases.PATTERNS[3:])
def test_a_turned_operand_is_zero_where_its_pattern_says_so(pattern: str) -> None:
    variant = cases.Variant("turned", "bfloat16", False, None)
    shape = cases.Shape(variant, pattern, "skip", 100, 12, 40, block=(32, 8))
    problem = draw(shape)
    lhs = problem.arrays[0]
    assert lhs.shape == (40, 100) and problem.written.all()
    told = lhs.float().numpy() if problem.value is None else problem.value.numpy()
    assert np.array_equal(dense_mask(shape.spec, told, (40, 100)), lhs.float().numpy() != 0)
    assert values.check_problem(problem, 1, CPU) == []


def test_choices_on_a_gpu_take_tiles_in_turn_and_all_of_them_now_and_then() -> None:
    checker, problem = values.Checker("cuda"), draw(shape_of("mask"))
    tiles = checker.built(problem.shape.variant)
    plan = CPU.operator(problem.shape).explain(*problem.arrays, sparsity=problem.value)
    seen = set()
    for number in range(values.ALL_TILES_EVERY * len(tiles)):
        choices = values._choices(problem, number, checker)
        names = [name for name, _ in choices]
        if number % values.ALL_TILES_EVERY:
            assert names == ["call", "tile"]
            seen.add(choices[1][1](plan).tile)
        else:
            assert names == ["call", *["tile"] * len(tiles), "dense"]
            assert choices[-1][1](plan).kind == "dense"
    assert seen == set(tiles)
    alone = replace(checker, library=False)
    for number in (0, 1):
        choices = values._choices(problem, number, alone)
        assert {choose(plan).kind for _, choose in choices} == {"pit"}


@pytest.mark.parametrize("family", ["linear", "grid", "ranges"])
def test_main_runs_one_case_again_and_prints_its_seed(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--device", "cpu", "--seed", "5", "--case", "3", "--family", family)
    assert check_gpu.main([*options, "--json", str(tmp_path / "run.json")]) == 0
    saved = json.loads((tmp_path / "run.json").read_text())
    report = saved["families"][family]
    assert (saved["seed"], report["cases"], report["faults"]) == (5, 1, [])
    assert report["tiles"] and saved["versions"]
    text = capsys.readouterr().out
    assert "seed 5" in text and f"{family}: 1 cases, 2 calls" in text and "0 faults" in text


def test_main_fails_where_a_check_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import check_gpu_runtime

    fine: Callable[[Any], list[str]] = lambda checker: []  # noqa: E731
    monkeypatch.setattr(check_gpu_runtime, "check_threads", fine)
    assert check_gpu.main(["--device", "cpu", "--only", "runtime"]) == 0
    monkeypatch.setattr(check_gpu_runtime, "check_threads", lambda checker: ["it is wrong"])
    assert check_gpu.main(["--device", "cpu", "--only", "runtime"]) == 1
    assert "threads: it is wrong" in capsys.readouterr().out


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert check_gpu.main([]) == 2
    assert "--device cpu" in capsys.readouterr().err


def test_the_reduced_set_has_every_variant_and_every_tile_of_float16() -> None:
    assert check_gpu.FAMILIES == (*check_gpu.ROWS, *kinds.KINDS)
    for known in kinds.KINDS.values():
        assert len(known) <= len(check_gpu.REDUCED)
        assert check_gpu.REDUCED[: len(known)] == tuple(range(len(known)))
    for family in check_gpu.ROWS:
        known = cases.variants(family)
        assert {known[number % len(known)] for number in check_gpu.REDUCED} == set(known)
        everyone = [n for n in check_gpu.REDUCED if n % values.ALL_TILES_EVERY == 0]
        assert len(everyone) > 2 and {known[n % len(known)] for n in everyone} == {known[0]}
        assert known[0] == replace(PLAIN, family=family)


def test_the_reduced_set_is_what_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, tuple[int, ...], int, bool]] = []

    def note(family: str, numbers: Any, seed: int, checker: values.Checker) -> values.Report:
        ran.append((family, tuple(numbers), checker.tiles, checker.library))
        return values.Report()

    monkeypatch.setattr(values, "check_family", note)
    assert check_gpu.main(["--device", "cpu", "--reduced"]) == 0
    assert ran == [(family, check_gpu.REDUCED, 1, False) for family in check_gpu.FAMILIES]
    assert "threads" not in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--case", "1"], ["--seed", "-1"], ["--family", "conv2d"]])
def test_bad_option_is_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        check_gpu.parse(options)


def test_what_calls_promise_needs_kernels_of_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(values, "kernels_of", lambda families, checker: asked.append(families))
    monkeypatch.setattr(build, "build_all", lambda kernels, jobs: 0)
    assert check_gpu.main(["--only", "runtime", "--build-only"]) == 0
    assert asked == [[*check_gpu.ROWS]]
