"""The GPU benchmark's training steps: right on the CPU, judged, and what is built for them."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_gpu
import bench_gpu_build as build
import bench_gpu_cases as cases
import bench_gpu_measure as measure
import bench_gpu_plot as plot
import bench_gpu_report as report
import bench_gpu_training as training
import bench_gpu_training_experts as experts
import pytest
import torch
from bench_gpu_pit import internals, operator
from bench_rows import Row, Stat

from pit_tvm.runtime import cuda_between, cuda_experts, cuda_experts_call
from pit_tvm.runtime.cuda_arrays import dtype_name
from pit_tvm.runtime.cuda_watch import CountWatch
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.runtime.torch_arrays import stored_weight
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.store import TileStore
from pit_tvm.torch import custom_ops, gradients, operators

DRY = measure.GpuSettings(1, 0, quick=True, device="cpu", tiles=2)
LINEAR = cases.Linear("fc1", 96, 24, 16, "bfloat16", "uniform", 6)
GATED = cases.Layer(5, 2, 16, 24, "silu", True, "hot", tokens=40)
# More experts than tokens.
SWITCH = cases.Layer(40, 1, 16, 24, "relu", False, "uniform", tokens=30, held_out=True)
MATCH = "fc1 32x128 short bf16"


def row_of(layer: cases.Linear | cases.Layer) -> Row:
    """A dry run of one case, whose line is printed and whose goals are there."""
    row = training.measure_training(cases.TrainingStep(layer), DRY)
    suite = training.TRAINING
    assert report.Printer(suite, [row.label]).row(row).startswith(row.label)
    assert len(suite.targets([row])) == 1 and row.held_out == layer.held_out
    return row


def test_shapes_that_are_held_out_are_nobody_elses() -> None:
    steps = cases.list_training(False)
    assert len({step.label for step in steps}) == len(steps)
    sizes: dict[bool, set[Any]] = {False: set(), True: set()}
    for step in steps:
        layer = step.layer
        experts = () if isinstance(layer, cases.Linear) else (layer.experts,)
        pairs = [(layer.n, layer.k)] if isinstance(layer, cases.Linear) else layer.products
        for n, k in pairs:
            assert n % 8 == k % 8 == 0
            sizes[step.held_out] |= {(*experts, n, k), (*experts, k, n)}
    assert not sizes[True] & sizes[False]
    linear = {(case.n, case.k) for case in cases.list_linear(False)}
    assert not {(5120, 1280), (1280, 5120)} & linear
    small = [step.layer for step in cases.list_training(True)]
    assert all(layer.n % 8 == 0 for layer in small if isinstance(layer, cases.Linear))
    assert all(n % 8 == 0 for s in small if isinstance(s, cases.Layer) for n, _ in s.products)


# --------------------------------------------------------------------------------------------
# Steps are right, and wrong ones are seen


@pytest.mark.parametrize("gelu", [False, True])
def test_linear_contenders_are_right(gelu: bool) -> None:
    row = row_of(replace(LINEAR, gelu=gelu))
    assert row.wrong == [] and set(row.errors) == {"dense", "gathered", "packed", "pit"}
    assert 0 < row.facts["fill"] < 1 and row.limit == measure.ERROR_LIMIT
    for fact, peer in (("over_gathered", "gathered"), ("of_packed", "packed")):
        assert row.facts[fact] == row.us(peer) / row.us("pit")
    assert row.facts["over_dense"] == row.us("dense") / row.us("pit")


@pytest.mark.parametrize("case", [GATED, SWITCH, replace(GATED, top_k=1)])
def test_contenders_with_experts_are_right(case: cases.Layer) -> None:
    row = row_of(case)
    assert row.wrong == [] and set(row.errors) == {"grouped", "loop", "pit"}
    assert row.facts["over_grouped"] == row.us("grouped") / row.us("pit")
    assert row.facts["over_loop"] == row.us("loop") / row.us("pit")
    assert "without_compiled" not in row.facts


def test_errors_of_linear_steps_are_seen() -> None:
    data = training.make_padded(LINEAR, DRY)
    judge, strict = data.judge(zeros=False), data.judge(zeros=True)

    def step() -> list[torch.Tensor]:
        return list(training.linear_steps(data)["pit"].run())

    assert strict(tuple(step())) < measure.ERROR_LIMIT
    for part, place in enumerate((int(data.live[0]), int(data.live[-1]), 3, 5)):
        got = step()
        got[part][place] = 0.0
        assert judge(tuple(got)) > measure.ERROR_LIMIT
        assert judge(tuple(got[:3])) == judge((*got[:3], got[3][:-1])) == math.inf
    row = int(data.dead[0])
    y, dx, *others = step()
    y[row, 0] = 1.0
    assert judge((y, dx, *others)) < measure.ERROR_LIMIT and math.isinf(strict((y, dx, *others)))
    y[row, 0], dx[row, 0] = 0.0, float("nan")
    assert math.isinf(judge((y, dx, *others)))


@pytest.mark.parametrize("name", ["grouped", "loop", "pit"])
def test_errors_of_steps_with_experts_are_seen(name: str) -> None:
    data = experts.make_experts(GATED, DRY)
    want, (runs, missing) = experts.wanted(data), experts.steps(data)
    assert missing == "" and [len(part) for part in want] == [40, 40, 40, 5, 5]
    got = runs[name]()
    assert training.worst_error(got, want) < training.EXPERTS_LIMIT
    for part in range(len(got)):
        last = list(got)
        last[part] = torch.cat([got[part][:-1], got[part][:1]])
        assert training.worst_error(last, want) > training.EXPERTS_LIMIT
    with torch.no_grad():
        data.layer.ids[3] = (data.layer.ids[3] + 1) % GATED.experts
        data.layer.counts[:] = data.layer.ids.flatten().bincount(minlength=5).tolist()
    assert training.worst_error(runs[name](), want) > training.EXPERTS_LIMIT


def test_tokens_close_to_the_bend_of_a_relu_get_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(experts, "SAFE", 0.02)
    data = experts.make_experts(SWITCH, DRY)
    expert = data.layer.ids[:, 0].long()
    inner = (data.layer.up[expert].double() @ data.layer.x[:, :, None].double()).abs()
    close = (inner < 0.02).flatten(1).any(1)
    assert close.any() and not close.all()
    assert torch.equal((data.dy == 0).all(1), close)


def test_what_torch_cannot_compile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    forwards = experts.forwards

    def broken(*leaves: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no\ngraph")

    monkeypatch.setattr(experts, "forwards", lambda data: {**forwards(data), "compiled": broken})
    row = row_of(GATED)
    assert row.wrong == [] and "compiled" not in row.stats
    assert row.facts["without_compiled"] == "RuntimeError: no graph"


def test_every_part_of_a_result_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    parts = (torch.zeros(2), torch.zeros(3, dtype=torch.int32), torch.zeros(2, 2).bfloat16())
    ready: Any = SimpleNamespace(result=parts, launch=lambda: None)
    found = measure._judge(lambda got: float(sum(p.isnan().sum() for p in got)), ready)
    assert found == 6.0


def test_goals_are_of_the_rows_that_they_name() -> None:
    def row(held_out: bool = False, **facts: float) -> Row:
        return Row("x", held_out, {"pit": Stat(1, 1, 1, 1)}, facts)

    rows = [row(over_gathered=1.2), row(over_gathered=0.9), row(True, over_gathered=1.1)]
    targets = training.training_targets([*rows, row(over_grouped=1.3)])
    assert [(t.got, t.held_out, t.met) for t in targets] == [
        (0.9, False, False),
        (1.1, True, True),
        (1.3, False, True),
    ]
    assert {t.limit for t in targets} == {1.0} and all(t.at_least for t in targets)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [LINEAR, GATED, replace(SWITCH, tokens=64)])
def test_steps_are_right_on_a_gpu(layer: cases.Linear | cases.Layer) -> None:
    settings = replace(DRY, device="cuda")
    row = training.measure_training(cases.TrainingStep(layer), settings)
    assert row.wrong == [] and row.facts["without_graph"] == []
    assert "without_compiled" not in row.facts


# --------------------------------------------------------------------------------------------
# Kernels to build


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Keys of the kernels that are asked for, none of which is made or computes anything."""
    keys: set[str] = set()

    def note(self: KernelCache, key: str, make: Callable[[], Any]) -> Any:
        keys.add(key)
        return defaultdict(lambda: lambda *arrays: None)

    kept = (operator, operators._linear, operators._outer)
    monkeypatch.setattr(KernelCache, "module", note)
    compile_operator = operators.compile_operator

    def for_gpu(*given: Any, **more: Any) -> Any:
        return compile_operator(*given, **{**more, "target": build.TARGET})

    monkeypatch.setattr(operators, "compile_operator", for_gpu)
    for made in kept:
        made.cache_clear()
    yield keys
    for made in kept:
        made.cache_clear()


@pytest.mark.parametrize("step", cases.list_training(True), ids=lambda step: step.label)
def test_what_a_step_asks_for_is_built_before_and_nothing_else(
    step: cases.TrainingStep, asked: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kernel in build.wanted([step], DRY):
        build.build_one(kernel)
    built = asked.copy()
    asked.clear()
    counts = step.counts(DRY.rng(step.label))
    for known in (counts, None):
        _as_on_a_gpu(monkeypatch, known)
        if isinstance(step.layer, cases.Linear):
            training.linear_steps(training.make_padded(step.layer, DRY))["pit"].run()
        else:
            data = experts.make_experts(step.layer, DRY)
            experts.steps(data)[0]["pit"]()
    assert asked == built and built


def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...] | None) -> None:
    """Let the custom operators choose kernels as on a GPU, where these counts are known."""

    def ask(made: Any, *sizes: int) -> None:
        layout = made.binder.layout_of(dict(zip("mnk", sizes, strict=True)), "torch")
        choice = made.planner.plan(layout, counts).choice
        if choice.kind != "dense":
            made._kernel(choice)

    def linear(x: Any, weight: Any, bias: Any, pattern: Any, kind: str, act: Any) -> Any:
        given = (kind, None, None, stored_weight(weight)[1], bias is not None, act)
        made = operators._linear("cuda", dtype_name(x), *given)
        ask(internals(made), len(x), *weight.shape)
        return x.new_zeros(len(x), weight.shape[0])

    def outer(left: Any, right: Any, pattern: Any, kind: str) -> Any:
        made = operators._outer(dtype_name(left), kind)
        ask(internals(made), left.shape[1], right.shape[1], len(left))
        return left.new_zeros(left.shape[1], right.shape[1])

    def activated(rows: Any, pattern: Any, kind: str, act: str) -> Any:
        return between.activate(rows, operators.spec_of(kind), pattern, act)

    def slopes(rows: Any, down: Any, pattern: Any, kind: str, act: str) -> Any:
        return between.activate_gradient(rows, down, operators.spec_of(kind), pattern, act)

    target = resolve_target(build.TARGET)
    store = TileStore.open(None, device=target.device, isa=target.isa)
    made = cuda_experts.CudaExperts(target, store, KernelCache())
    lists = SimpleNamespace(ids=None, count=None)
    detect = SimpleNamespace(
        detect=lambda *a, **k: lists, detect_split=lambda *a, **k: (lists, lists)
    )
    patch = monkeypatch.setattr
    patch(made, "_find", lambda *given: lambda ids, take: (lists, None))
    patch(made, "_repeats", None)
    patch(made, "fill", SimpleNamespace(clear_ungrouped=lambda *given: None))
    patch(CountWatch, "counts", lambda self: counts)
    patch(CountWatch, "due", lambda self: False)
    between = cuda_between.CudaBetween(KernelCache(), target.isa)
    patch(between, "_detector", detect)
    for module in (cuda_experts_call, cuda_between):
        patch(module, "check_tensor", lambda *given: None)
    patch(custom_ops, "linear_of_rows", linear)
    patch(custom_ops, "outer_of_rows", outer)
    patch(gradients, "reads_live", lambda rows: True)
    patch(custom_ops, "activated_of_rows", activated)
    patch(custom_ops, "gradient_of_activated", slopes)
    patch(custom_ops, "outer_of_groups", made.outer)
    patch(custom_ops, "combined_choices", between.combine)
    patch(custom_ops, "spread_sums", between.spread)
    patch(custom_ops, "summed_choices", between.total)
    patch(custom_ops, "gated_rows", between.gate)
    patch(custom_ops, "gradient_of_gated", between.gate_gradient)
    patch(
        custom_ops,
        "grouped_choices",
        lambda x, ids, weight, bias, act: made.grouped(x, ids, weight, bias, act or "none"),
    )


# --------------------------------------------------------------------------------------------
# The command


def test_a_dry_run_is_right(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    options = ("--device", "cpu", "--quick", "--rounds", "1", "--match", MATCH)
    assert bench_gpu.main(["training", *options, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    (row,) = document["suites"]["training"]["rows"]
    assert row["label"] == MATCH and "failed" not in row["facts"]
    assert {"dense", "gathered", "packed", "pit"} <= set(plot.series([row]))
    names = [target["name"] for target in document["targets"]]
    assert names[-1] == "training: linear layers, over gathered rows"
