"""How the GPU benchmark times, judges, reports and draws, without a GPU."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_gpu
import bench_gpu_build as build
import bench_gpu_cases as cases
import bench_gpu_grains as grains_of
import bench_gpu_linear as linear
import bench_gpu_measure as measure
import bench_gpu_plot as curves
import bench_gpu_plot as plot
import bench_gpu_report as report
import bench_gpu_search as search
import bench_gpu_suites as suites
import bench_report
import bench_rows as base
import pytest
import torch

from pit_tvm.errors import PitError, ShapeError
from pit_tvm.gates import PLAIN
from pit_tvm.structs import TileTask
from pit_tvm.tile_db.record import Provenance, TileRecord

DRY = measure.GpuSettings(1, 0, quick=True, device="cpu", tiles=2)
LENGTHS = cases.Linear("fc1", 96, 24, 16, "float16", "uniform", 6)
EXPERTS = cases.Moe(5, 2, 24, 16, "zipf", tokens=40)


def stat(us: float) -> base.Stat:
    return base.Stat(us, us, us, 1)


def product_row(label: str, held_out: bool = False, **more: Any) -> base.Row:
    """A row of ``padding`` in which pit takes 100 us, and its third candidate 80."""
    times = {"dense": 200, "gather": 300, "packed": 96, "zero": 110, "index": 5}
    times |= {"pit": 100, "third": 80, "host": 9, "host_pace": 20}
    stats = {name: stat(us) for name, us in times.items()}
    facts = {
        "fill": 0.5,
        "live": 1000,
        "sizes": [8192, 4096, 4096],
        "kernel": "a tile",
        "predicted_us": 110.0,
        "over_dense": 2.0,
        "new_over_dense": 2.0,
        "over_gather": 3.0,
        "of_bound": 0.96,
        "tflops": 600.0,
        **more,
    }
    return base.Row(label, held_out, stats, facts, {"pit": 0.5}, measure.ERROR_LIMIT)


# --------------------------------------------------------------------------------------------
# Timing, with a device that only keeps a record


class FakeCuda:
    """What of torch.cuda the timing needs. A millisecond passes between two events; a replay
    calls what was captured."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = 0.0
        self.captured: list[str] | None = None
        fake = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = fake.now = fake.now + 1.0

            def elapsed_time(self, other: Event) -> float:
                return other.at - self.at

        class Graph:
            def capture_begin(self) -> None:
                self.begun = len(fake.log)

            def capture_end(self) -> None:
                self.calls = fake.log[self.begun :]
                del fake.log[self.begun :]
                if "sync" in self.calls:
                    raise RuntimeError("operation not permitted when stream is capturing")

            def replay(self) -> None:
                fake.log.append("+".join(self.calls))

        class Stream:
            def synchronize(self) -> None:
                return

        self.Event, self.CUDAGraph, self.Stream = Event, Graph, Stream

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        return

    def _sleep(self, cycles: int) -> None:
        self.log.append("sleep")


def test_graphs_are_replayed_in_turn_and_the_rest_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    out = torch.zeros(2)

    def contender(name: str, **more: Any) -> measure.Contender:
        return measure.Contender(lambda: fake.log.append(name) or out, **more)

    made = {
        "a": contender("a", error=lambda got: 0.0 if got.isnan().all() else 1.0),
        "b": contender("b"),
        "syncs": contender("sync"),
        "plain": contender("plain", capture=False),
    }
    found = measure.measure(made, measure.GpuSettings(2, 0))
    assert found.plain == ["syncs", "plain"]
    replays = fake.log[fake.log.index("sleep") :]
    assert replays == [
        *("sleep", "a+a", "b+b", "sleep", "b+b", "a+a"),
        *("sync", "plain", "plain", "sync"),
        "a+a",  # judged once more, on a poisoned result
    ]
    assert {name: s.count for name, s in found.stats.items()} == dict.fromkeys(made, 2)
    assert found.stats["a"].median == 500 and found.stats["plain"].median == 1000
    assert found.errors == {"a": 0.0}


def test_under_steady_load_each_contender_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)

    def contender(name: str) -> measure.Contender:
        return measure.Contender(lambda: fake.log.append(name))

    made = {"a": contender("a"), "b": contender("b")}
    # A replay of two calls takes 2 ms here: two of them, and those that are timed.
    found = measure.measure(made, measure.GpuSettings(3, 0, sustained=4))
    assert fake.log[fake.log.index("a+a") :] == ["a+a"] * 5 + ["b+b"] * 5
    assert "sleep" not in fake.log and found.stats["b"].count == 3


# --------------------------------------------------------------------------------------------
# Goals, held-out shapes, kernels to build


def test_goals_of_padding_are_of_the_rows_that_they_name() -> None:
    rows = [
        product_row("fc1 256x128 uniform fp16", sizes=[32768, 3072, 768], of_bound=0.5),
        product_row("1000 of 8192 rows 4096x4096 fp16"),
        product_row("3500 of 7000 rows 5120x5120 fp16", held_out=True, of_bound=0.9),
    ]
    targets = {(t.name, t.held_out): t for t in linear.linear_targets(rows)}
    share = "padding: of packed cuBLAS, 1000 rows and N, K of 4096 at least"
    assert (targets[share, False].got, targets[share, False].met) == (0.96, True)
    assert (targets[share, True].got, targets[share, True].met) == (0.9, False)
    assert targets["padding: fc1 256x128 half full, over dense", False].met
    assert ("padding: fc1 256x128 half full, over dense", True) not in targets
    assert targets["padding: host us of one call, plan cached", False].got == 9
    quiet = "padding: host us of one call, plan cached, host quiet in 3 of 3 rows"
    assert targets[quiet, False].got == targets[quiet, True].got == 9


@pytest.mark.parametrize(
    ("sizes", "groups", "known"),
    [
        ((3500, 5120, 5120), 1, 1),
        ((100, 8192, 2048), 1, 1),
        ((9216, 1280, 5120), 1, 1),
        ((8192, 3072, 768), 96, 1),
        ((8192, 768, 3072), 96, 1),
        ((8192, 3072, 768), 64, 0),
        ((8192, 4096, 4096), 1, 0),
    ],
)
def test_record_of_a_held_out_shape_is_recognised(sizes: Any, groups: int, known: int) -> None:
    origin = Provenance("h200-sm_90a", "sm_90a", 132, "0.27", "0.1", "2026-01-01", 0)
    task = TileTask("rows-hopper", "sm_90a", "float16", *sizes, groups)
    record = TileRecord("library", origin, task=task, run_secs=(1.0,), note="torch")
    target = search.held_out_target([record])
    assert target.got == known and target.met == (known == 0)


def test_shipped_records_know_no_held_out_shape() -> None:
    assert search.held_out_target(report.database(DRY)).met


def test_kernels_of_all_timed_candidates_are_built() -> None:
    first = cases.Moe(5, 1, 24, 16, "zipf", tokens=40)
    layer = cases.Layer(5, 2, 16, 24, "silu", True, "hot", tokens=400)
    few, linear = replace(layer, tokens=3), [LENGTHS, replace(LENGTHS, gelu=True)]
    kernels = build.wanted([*linear, EXPERTS, first, layer, few], DRY)
    asked = [k for k in kernels if isinstance(k, build.Asked) and k.name == "choices"]
    assert [k.arguments[0].factors for k in asked] == ["", "float32"]
    kinds = {(k.kind, k.dtype, k.bias, k.act) for k in kernels if isinstance(k, build.Kernel)}
    assert kinds == {
        ("linear", "float16", False, None),
        ("linear", "float16", True, "gelu"),
        ("grouped", "bfloat16", False, None),
    }
    rows = [k for k in kernels if isinstance(k, build.Asked) and k.name != "choices"]
    assert {(k.name, k.options) for k in rows} == {
        ("product", (("act", "none"), ("share", 2))),
        ("product", (("act", "silu"), ("share", 2), ("gate", PLAIN))),
        ("product", ()),
        ("combine_kernel", ()),
    }
    assert {k.arguments[0].dtype for k in rows if k.name == "product"} == {"bfloat16"}
    assert {k.arguments for k in rows if k.name != "product"} == {("bfloat16", build.IDS)}
    found = {name: build.product_cases([name], True) for name in bench_gpu.SUITES}
    kinds_of = {name: {type(case) for case in some} for name, some in found.items()}
    assert kinds_of["search"] == {cases.Linear, cases.Moe}
    assert kinds_of["layer"] == {cases.Layer} and kinds_of["index"] == set()
    assert kinds_of["granularity"] == {grains_of.Grain}
    grains = build.wanted(found["granularity"], DRY)
    families = {kernel.family for kernel in grains if isinstance(kernel, build.Part)}
    assert families >= {"RowsKernels", "ColumnsKernels", "BlocksKernels"}
    moved = {"ColumnsKernels", "PiecesKernels", "GeneralKernels"}
    assert {k.family for k in grains if k.tile is None} == moved
    assert set(build.wanted(found["tensorcore"], DRY)) <= set(grains)  # equal ones are one library
    wanted = build.wanted(found["weights"], DRY)
    pruned = [dict(kernel.options) for kernel in wanted if kernel.family == "BlocksKernels"]
    assert {(o["side"], o["rhs_layout"]) for o in pruned} == {("rhs", "nk"), ("rhs", "kn")}
    live = [kernel for kernel in build.wanted(found["outputs"], DRY) if kernel.tile is not None]
    assert {dict(kernel.options)["slot"] for kernel in live} == {64, 128}
    wide = build.wanted(found["sread"], DRY)
    assert len(set(wide)) == 12 and {dict(k.options)["dense"] for k in wide} == {True, False}


# --------------------------------------------------------------------------------------------
# The command


def made_suite(*rows: base.Row, name: str = "index") -> base.Suite:
    def find(case: base.Row, settings: Any) -> base.Row:
        if case.label == "broken":
            raise PitError("no such\ntile")
        return case

    def targets(kept: Sequence[base.Row]) -> list[base.Target]:
        return base.limits(kept, "time", 50, lambda row: row.us("pit"), at_least=False)

    columns = (base.time_column("pit", "pit", 1),)
    return base.Suite(name, "a title", lambda quick: rows, find, columns, targets)


def main(*options: str) -> int:
    return bench_gpu.main(["--device", "cpu", *options])


def test_a_row_that_fails_says_why_and_the_next_one_follows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_suite(product_row("broken"), product_row("fine"))
    monkeypatch.setattr(suites, "suites", lambda: {"index": made})
    path = tmp_path / "new" / "run.json"
    assert main("index", "--json", str(path)) == 1
    text = capsys.readouterr().out
    assert "broken  failed: PitError: no such tile" in text and "index broken: row" in text
    kept = json.loads(path.read_text())
    assert [row["label"] for row in kept["suites"]["index"]["rows"]] == ["broken", "fine"]
    assert kept["versions"]["torch"] and kept["device"].startswith("none")
    assert [target["name"] for target in kept["targets"]][-1] == "time"


def test_goals_are_the_last_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suites, "suites", lambda: {"index": made_suite(product_row("fine"))})
    assert main("index") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].strip() == "time: 100, wanted <= 50" and "not judged" in lines[-3]
    judged = report.goals(
        base.limits([product_row("x")], "t", 50, lambda r: 60, at_least=False), True
    )
    assert judged.splitlines()[-1] == "MISSED  t: 60, wanted <= 50"


def test_search_judges_plans_of_products_that_are_not_asked_for() -> None:
    assert [s.name for s in suites.to_run(["search"])] == ["padding plans", "moe plans", "search"]
    every = suites.to_run(bench_gpu.SUITES, every=True)
    assert [s.name for s in every] == [f"{name} plans" for name in suites.PLANNED]
    with pytest.raises(ShapeError, match="a suite with plans"):
        suites.to_run(["index"], every=True)
    names = [s.name for s in suites.to_run(["padding", "search", "index"])]
    assert names == ["padding", "index", "moe plans", "search"]
    products, index = "padding moe layer training", "index conversion"
    sparse = "granularity tensorcore weights outputs grid decode sread"
    attention = "attention attention-training attention-decode"
    names = f"{products} {index} {sparse} {attention} search".split()
    assert [s.name for s in suites.to_run(bench_gpu.SUITES)] == names


def test_pictures_are_drawn_from_a_saved_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    failed = base.Row("broken", False, {}, {"failed": "it"}, {"row": float("inf")})
    result = bench_report.Result(
        made_suite(name="padding"), (product_row("a"), failed, product_row("b", held_out=True))
    )
    empty = bench_report.Result(made_suite(name="moe"), (failed,))
    swept = bench_report.Result(
        made_suite(name="tensorcore"), (product_row("cube 50 %", zeros=0.5, rows_over_dense=1.1),)
    )
    path = tmp_path / "run.json"
    where = {"device": "NVIDIA H200", "date": "2026-01-01T00:00:00", "quick": False}
    bench_report.write(path, bench_report.to_json(where, [result, empty, swept], []))
    assert bench_gpu.main(["--plot", str(path)]) == 0
    names = ("padding", "tensorcore", "tensorcore_lines")
    assert capsys.readouterr().out.split() == [str(tmp_path / f"{name}.png") for name in names]
    for name in names:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_series_have_a_place_for_every_row() -> None:
    rows = [
        {"stats_us": {"pit": {"median": 3.0}}, "facts": {"predicted_us": 4.0}},
        {"stats_us": {"csr": {"median": 9.0}}, "facts": {}},
    ]
    wanted = {"csr": [None, 9.0], "pit": [3.0, None], "predicted": [4.0, None]}
    assert plot.series(rows) == wanted


def test_lines_are_of_patterns_over_what_varies() -> None:
    def row(label: str, x: float, **us: float) -> dict[str, Any]:
        stats = {name: {"median": value} for name, value in us.items()}
        return {"label": label, "facts": {"zeros": x, "over_dense": 8 * x}, "stats_us": stats}

    rows = [row("a 32x1 90 %", 0.9, pit=2.0), row("a 32x1 50 %", 0.5, pit=3.0, csr=9.0)]
    made = curves.Curves("zeros", ("over_dense", "absent"), ("pit", "csr"))
    assert curves.lines(rows, made) == {
        "a 32x1, over_dense": [(0.5, 4.0), (0.9, 7.2)],
        "a 32x1, pit": [(0.5, 3.0), (0.9, 2.0)],
        "a 32x1, csr": [(0.5, 9.0)],
    }


def test_every_suite_with_lines_exists() -> None:
    assert set(curves.CURVES) < set(suites.suites())


@pytest.mark.parametrize("text", ["", "[]", '{"suites": 1'])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ShapeError, match="bench_gpu.py --json"):
        plot.plot_file(path)
    assert bench_gpu.main(["--plot", str(tmp_path / "none.json")]) == 2


@pytest.mark.parametrize("options", [[], ["other"], ["index", "--rounds", "0"], ["--seed", "-1"]])
def test_bad_option_is_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench_gpu.parse(options)


def test_suites_run_in_their_own_order() -> None:
    assert bench_gpu.parse(["all"]).suites == list(bench_gpu.SUITES)
    chosen = bench_gpu.parse(["search", "moe", "--quick"])
    assert (chosen.suites, chosen.rounds) == (["moe", "search"], bench_gpu.QUICK_ROUNDS)


def test_what_matches_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("index", "--quick", "--match", "no such label") == 2
    assert "--match" in capsys.readouterr().err


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert bench_gpu.main(["index"]) == 2
    assert "--device cpu" in capsys.readouterr().err
