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
import check_gpu_attention
import check_gpu_kinds as kinds
import check_gpu_patterns as patterns
import check_gpu_problem as problems
import check_gpu_tiles as chosen
import check_gpu_values as values
import numpy as np
import pytest
import torch
from bench_gpu_measure import float32_precision
from bench_gpu_pit import internals

from pit_tvm import BitMask, BlockMask, Groups, Lengths, Mask, Rows, Values
from pit_tvm.reference.index import dense_mask, index_lists
from pit_tvm.runtime.cuda_decode import FAMILY
from pit_tvm.structs import MicroTile

CPU = values.Checker("cpu")
ONE_PATTERN = {
    "lengths": Lengths(),
    "cu_seqlens": Lengths(cumulative=True),
    "rows": Rows(),
    "mask": Mask(),
    "bitmask": BitMask(),
    "blockmask": BlockMask(4, 8),
    "values": Values(),
    "groups": Groups(5),
}


def call_of(pattern: str, family: str = "linear", spec: Any = None, **more: Any) -> patterns.Call:
    spec = spec or ONE_PATTERN[pattern]
    family = "grouped" if isinstance(spec, Groups) else family
    options = {"dead": more.pop("dead", "skip"), "family": family}
    kind = kinds.Kind(kinds.ROWS[family], "lhs", spec, **options)
    sizes = {"m": more.pop("m", 24), "n": 12, "k": 40} | kind.known
    return patterns.Call(kind, tuple(sizes.items()), 4 if isinstance(spec, Lengths) else 1, **more)


def draw(call: patterns.Call, amount: str = "half", seed: int = 0) -> problems.Problem:
    made = CPU.operator(call)
    return patterns.draw_data(np.random.default_rng(seed), call, amount, "cpu", made)


def solve(problem: problems.Problem) -> None:
    """Write what is wanted, as a right kernel would."""
    problem.poison()
    problem.out[problem.written] = problem.want[problem.written].to(problem.out.dtype)
    if problem.call.kind.dead == "zero":
        problem.out[~problem.written] = 0


# --------------------------------------------------------------------------------------------
# Problems


@pytest.mark.parametrize("amount", problems.AMOUNTS)
@pytest.mark.parametrize("pattern", ONE_PATTERN)
def test_the_pattern_names_the_rows_that_are_wanted(pattern: str, amount: str) -> None:
    problem = draw(call_of(pattern), amount)
    lhs, spec = problem.arrays[0], problem.call.kind.spec
    value = problem.arrays[-1] if pattern == "groups" else problem.value
    told = (lhs if value is None else value).numpy()
    rows = MicroTile("lhs", "m", 0, (1, 0))
    lists = index_lists(spec, told, tuple(lhs.shape), rows)
    live = np.sort(np.concatenate(lists)) if lists else np.zeros(0)
    if spec.promises_zero:
        assert problem.written.all()
        alive = set(np.flatnonzero(lhs.numpy().any(axis=1)))
        assert alive == set(live) if pattern == "values" else alive <= set(live)
    else:
        assert np.array_equal(live, np.flatnonzero(problem.written.numpy().all(axis=1)))
        assert np.array_equal(live, np.flatnonzero(~lhs.isnan().any(axis=1)))
    assert amount != "empty" or not len(live)
    assert amount != "full" or len(live) == len(lhs)
    assert not problem.want[problem.written].isnan().any()


def test_a_case_is_the_same_whichever_others_run_and_differs_with_the_seed() -> None:
    def call(seed: int, number: int) -> patterns.Call:
        return patterns.draw_call(problems.case_rng(seed, "linear", number), "linear", number)

    assert call(3, 7) == call(3, 7)
    assert len({call(seed, number) for seed in (3, 4) for number in range(20)}) == 40


@pytest.mark.parametrize("family", kinds.ROWS)
def test_every_type_and_epilogue_of_live_rows_meets_every_pattern(family: str) -> None:
    listed = kinds.KINDS[family]
    epilogues = {(k.dtype, k.bias, k.act) for k in listed}
    assert epilogues == {(d, *e) for d in kinds.DTYPES for e in kinds.EPILOGUES}
    assert {k.place for k in listed} == set(range(len(epilogues)))
    for place in range(len(epilogues)):
        met = [(k.spec, k.dead) for k in listed if k.place == place]
        assert set(met) == set(kinds._patterns(family, place))
        assert {type(spec) for spec, _ in met} == {type(k.spec) for k in listed}
    for first in range(0, len(listed), len(epilogues)):
        assert len({k.place for k in listed[first : first + len(epilogues)]}) == len(epilogues)


def test_random_sizes_of_live_rows_reach_odd_ones() -> None:
    drawn = [patterns.draw_call(problems.case_rng(1, "linear", i), "linear", i) for i in range(600)]
    for extents in ([c.extents["n"] for c in drawn], [c.extents["k"] for c in drawn]):
        assert {0, 1} <= {extent % 2 for extent in extents}
        assert any(extent % 8 == 2 for extent in extents)
        assert any(extent % 8 == 4 for extent in extents)
        assert sum(extent % 8 == 0 for extent in extents) > 200
    assert 0 in [c.extents["m"] for c in drawn] and max(c.extents["m"] for c in drawn) > 1000
    assert any(c.offset for c in drawn) and {c.wide for c in drawn} == {True, False}


def test_offset_arrays_are_contiguous_and_off_their_alignment() -> None:
    problem = draw(call_of("rows", offset=3))
    for array in (problem.arrays[0], problem.out):
        assert array.is_contiguous() and array.storage_offset() == 3


def test_refill_takes_the_other_data_into_the_same_memory() -> None:
    first, second = (draw(call_of("lengths"), seed=seed) for seed in (1, 2))
    place, wanted = first.arrays[0].data_ptr(), second.arrays[0].clone()
    refilled = first.refill(second)
    assert refilled.arrays[0].data_ptr() == place
    assert (
        torch.equal(refilled.arrays[0].nan_to_num(7), wanted.nan_to_num(7))
        and refilled.want is second.want
    )


# --------------------------------------------------------------------------------------------
# Faults are seen


@pytest.mark.parametrize("dead", ["skip", "zero"])
def test_fault_sees_wrong_missing_and_needless_elements(dead: str) -> None:
    problem = draw(call_of("rows", dead=dead))
    live = int(problem.written.all(dim=1).nonzero()[0])
    dead_row = int((~problem.written).nonzero()[0, 0])
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
    problem = draw(call_of("lengths"))
    solve(problem)
    row = int(problem.written.nonzero()[0, 0])
    size = float(problem.want[problem.written].square().mean().sqrt())
    problem.out[row] += 3 * 2.0**-11 * size
    assert problem.fault(0.0) and problem.fault(0.1) and not problem.fault(8.0)


def test_check_problem_names_what_ran_and_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = draw(call_of("rows"))
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
    assert "linear case 0 of seed 1: mk,nk float16" in report.faults[0]


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
    number = len(kinds.KINDS[family])
    every = range(0, number, 7) if family in kinds.ROWS else [number // 2]
    for number in every:
        call = patterns.draw_call(problems.case_rng(2, family, number), family, number)
        asked = chosen.Listed()
        chooser = internals(chosen.compiled(call.kind, build.TARGET, 1, asked))
        chooser = chooser._turned if call.kind.packed else chooser
        problem = problems.Problem(call, (), None, *[torch.zeros(0)] * 3)
        with float32_precision(call.kind.tf32):
            plan = chooser.planner.plan(chooser.binder.layout_of(call.extents, "torch"), None)
            choices = values._choices(problem, number, checker)
            names = [name for name, _ in choices]
            assert names[0] == "call" and "tile" in names and names[-1] == "dense"
            for _, choose in choices:
                found = plan.choice if choose is None else choose(plan)
                if found.kind == "pit" and not (found.tile and found.tile.family == FAMILY):
                    chooser._kernel(found)
        listed = {kernel.key for kernel in chosen.kernels_of_kind(call.kind, checker.tiles)}
        assert listed and asked.asked <= listed


# --------------------------------------------------------------------------------------------
# Tiles, and the command


def tiles_of(kind: kinds.Kind, tiles: int = 2) -> tuple[Any, ...]:
    made = chosen.operator(kind, build.TARGET, tiles)
    return tuple(chosen.tiles_for(kind, made, chosen.usual(kind)))


@pytest.mark.parametrize("family", ["linear", "matmul", "grouped"])
def test_plain_operators_are_checked_with_all_tiles_and_others_with_some(family: str) -> None:
    spec = Groups(8) if family == "grouped" else Rows()
    listed = dict.fromkeys(replace(k, spec=spec, dead="skip") for k in kinds.KINDS[family])
    plain = {k.dtype: set(tiles_of(k)) for k in listed if k.plain}
    assert min(map(len, plain.values())) > 4
    for kind in listed:
        tiles = tiles_of(kind)
        assert set(tiles) <= plain[kind.dtype] and len(set(tiles)) == len(tiles)
        assert kind.plain or len(tiles) == 2
        assert family != "matmul" or all(tile.tile_n % 64 == 0 for tile in tiles)


@pytest.mark.parametrize(
    ("family", "block"), [("turned", (16, 64)), ("matmul", (32, 64)), ("linear", (32, 64))]
)
def test_blocks_of_rows_are_checked_with_tiles_of_their_height(
    family: str, block: tuple[int, int]
) -> None:
    call = call_of("", family, BlockMask(*block))
    assert {tile.tile_m for tile in tiles_of(call.kind)} == {block[call.kind.axes.index("m")]}


@pytest.mark.parametrize("make", [Mask, BitMask, BlockMask, Values])
def test_a_turned_operand_is_zero_where_its_pattern_says_so(make: Any) -> None:
    problem = draw(call_of("", "turned", make(8, 32), m=100))
    lhs = problem.arrays[0]
    assert lhs.shape == (40, 100) and problem.written.all() and lhs.any()
    told = lhs.float().numpy() if problem.value is None else problem.value.numpy()
    live = dense_mask(problem.call.kind.spec, told, (40, 100))
    assert not lhs[torch.from_numpy(~live)].any() and not live.all()
    assert values.check_problem(problem, 1, CPU) == []


def test_choices_on_a_gpu_take_tiles_in_turn_and_all_of_them_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checker, problem = values.Checker("cuda"), draw(call_of("mask"))
    plan = CPU.operator(problem.call).explain(*problem.arrays, sparsity=problem.value)
    monkeypatch.setattr(values.Checker, "target", build.TARGET)
    tiles, each = tiles_of(problem.call.kind), len(kinds.KINDS["linear"])
    seen = set()
    for turn in range(values.ALL_TILES_EVERY * len(tiles)):
        choices = values._choices(problem, each * turn, checker)
        names = [name for name, _ in choices]
        if turn % values.ALL_TILES_EVERY:
            assert names == ["call", "tile"]
            seen.add(choices[1][1](plan).tile)
        else:
            assert names == ["call", *["tile"] * len(tiles), "dense"]
            assert choices[-1][1](plan).kind == "dense"
    assert seen == set(tiles)
    alone = replace(checker, library=False)
    for turn in (0, 1):
        choices = values._choices(problem, each * turn, alone)
        assert {choose(plan).kind for _, choose in choices} == {"pit"}


@pytest.mark.parametrize("family", ["linear", "grid", "ranges", "attention"])
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
    assert "seed 5" in text and f"{family}: 1 cases, {report['calls']} calls" in text
    assert report["calls"] == 2 - (family == "attention") and "0 faults" in text


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


def test_the_reduced_set_has_every_kind_and_every_tile_of_live_rows() -> None:
    assert check_gpu.FAMILIES == (*kinds.KINDS, check_gpu.ATTENTION)
    assert check_gpu.ROWS == tuple(kinds.ROWS)
    for family, known in kinds.KINDS.items():
        found = [known[number % len(known)] for number in check_gpu.REDUCED]
        assert family in kinds.ROWS or set(found) == set(known)
        assert {k.place for k in found} == {k.place for k in known}
        plain = {(k.dtype, k.spec, k.dead) for k in found[:16] if k.plain}
        assert family not in kinds.ROWS or len(plain) == 4


def test_the_reduced_set_is_what_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, tuple[int, ...], int, bool]] = []

    def note(family: str, numbers: Any, seed: int, checker: values.Checker) -> values.Report:
        ran.append((family, tuple(numbers), checker.tiles, checker.library))
        return values.Report()

    monkeypatch.setattr(values, "check_family", note)
    monkeypatch.setattr(check_gpu_attention, "check_attention", note)
    assert check_gpu.main(["--device", "cpu", "--reduced"]) == 0
    assert ran == [(family, check_gpu.REDUCED, 1, False) for family in check_gpu.FAMILIES]
    assert "threads" not in capsys.readouterr().out


@pytest.mark.parametrize("options", [["--case", "1"], ["--seed", "-1"], ["--family", "conv2d"]])
def test_bad_option_is_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        check_gpu.parse(options)


def test_what_calls_promise_needs_kernels_of_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(chosen, "kernels_of", lambda families, _: asked.append(families) or [])
    monkeypatch.setattr(build, "build_all", lambda kernels, jobs: 0)
    assert check_gpu.main(["--only", "runtime", "--build-only"]) == 0
    assert asked == [[*check_gpu.ROWS]]
