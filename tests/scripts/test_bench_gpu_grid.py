"""The GPU benchmark's suite of live rows and live columns, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bench_gpu
import bench_gpu_build as build
import bench_gpu_cases as cases
import bench_gpu_grid as grid
import bench_gpu_measure as measure
import bench_gpu_plot as plot
import bench_gpu_report as report
import pytest
import torch
from bench_gpu_pit import internals, later, operator

from pit_tvm.runtime.kernel_cache import KernelCache

DRY = measure.GpuSettings(1, 0, quick=True, device="cpu", tiles=2)
SMALL = grid.Cross((128, 192, 96), (0.5, 0.25))
MATCH = "512x96x384 fp16 rows 25 %"


def test_so_many_rows_and_columns_live_as_a_case_says() -> None:
    data = grid.make_data(SMALL, DRY)
    rows, columns = data.mask.any(1), data.mask.any(0)
    assert torch.equal(data.mask, rows.unsqueeze(1) & columns)
    assert (int(rows.sum()), int(columns.sum())) == SMALL.counts(DRY.rng(SMALL.label)) == (64, 24)
    assert not data.lhs[~data.mask].any() and data.lhs[data.mask].all()


@pytest.mark.parametrize(("kind", "side"), grid.TURNED)
def test_operands_are_stored_as_the_operator_takes_them(kind: str, side: str) -> None:
    case = grid.Cross((64, 192, 96), (0.5, 0.25), kind=kind, side=side)
    data, high = grid.make_data(case, DRY), 64 if side == "lhs" else 192
    stored = data.stored[side == "rhs"]
    assert not stored[~data.mask].any() and stored[data.mask].all()
    assert data.mask.shape[data.rows] == high and data.mask.shape[1 - data.rows] == 96
    counts = [int(data.mask.any(1 - axis).sum()) for axis in (data.rows, 1 - data.rows)]
    assert counts == [high // 2, 24] == list(case.counts(DRY.rng(case.label)))
    assert torch.equal((data.lhs.double() @ data.rhs.double()), data.want)


def test_shapes_that_are_held_out_are_nobody_elses_and_a_tenth() -> None:
    shapes: dict[bool, set[Any]] = {False: set(), True: set()}
    for case in grid.list_grid(False):
        shapes[case.held_out].add(case.sizes)
    assert shapes[True] == {shape[1:] for shape in cases.HELD_OUT_LIVE}
    assert not shapes[True] & shapes[False]
    assert 10 * len(shapes[True]) >= len(shapes[True] | shapes[False])


@pytest.mark.parametrize(
    ("live", "dtype", "kind", "side", "bias"),
    [
        ((0.5, 0.25), "bfloat16", "matmul", "lhs", False),
        ((1.0, 0.25), "float16", "turned", "lhs", False),
        ((0.1, 1.0), "float16", "linear", "rhs", True),
        ((1.0, 1.0), "float16", "turned", "rhs", False),
    ],
)
def test_products_of_live_rows_and_columns_are_right(
    live: tuple[float, float], dtype: str, kind: str, side: str, bias: bool
) -> None:
    case = grid.Cross((128, 192, 96), live, dtype, kind=kind, side=side, bias=bias)
    row = grid.measure_grid(case, DRY)
    assert row.wrong == [] and {"dense", "packed", "pit"} <= set(row.errors)
    facts = row.facts
    assert facts["over_dense"] == row.us("dense") / row.us("pit")
    assert facts["over_packed"] == row.us("packed") / row.us("pit")
    assert facts["index_share"] == row.us("index") / row.us("pit")
    assert facts["kernel"].startswith(facts["chosen"])
    assert (facts["live_rows"], facts["live_columns"]) == live
    assert report.Printer(grid.GRID, [row.label]).row(row)
    assert [t.name for t in grid.grid_targets([row])] == ["grid: over dense, every row"]


def test_dead_rows_that_are_not_zero_are_seen() -> None:
    data = grid.make_data(SMALL, DRY)
    out, dead = data.want.half(), int((~data.mask.any(1)).nonzero()[0])
    assert data.judge(out) <= 1.0
    out[dead, 0] = 1.0
    assert data.judge(out) > measure.ERROR_LIMIT


def test_what_is_listed_is_what_the_operator_detects(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(grid, "detection", lambda *args: asked.append(args[-1]))
    made, data = grid.grid_operator(SMALL, build.TARGET), grid.make_data(SMALL, DRY)
    grid._index(made, data.mask, DRY)
    assert tuple(asked) == internals(made)._micro_tiles(None)


# --------------------------------------------------------------------------------------------
# Kernels to build


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Keys of the kernels that are asked for, of which none is made."""
    keys: set[str] = set()

    def note(self: KernelCache, key: str, make: Callable[[], Any]) -> Any:
        keys.add(key)
        return {"main": None, "product": None}

    monkeypatch.setattr(KernelCache, "module", note)
    operator.cache_clear()
    yield keys
    operator.cache_clear()


def test_kernels_that_plans_choose_are_built_and_no_others(asked: set[str]) -> None:
    listed = grid.list_grid(False)
    for kernel in build.wanted(listed, DRY):
        build.build_one(kernel)
    built = _taken(asked)
    for case in listed:
        _ask(case)
    assert _taken(asked) == built
    for case in listed:
        _ask(case, others=False)
    chosen = _taken(asked)
    assert chosen < built
    for case in {(c.dtype, c.sizes, c.kind, c.side, c.bias): c for c in listed}.values():
        made = internals(grid.grid_operator(case, build.TARGET))
        made.build(dict(zip("mnk", case.sizes, strict=True)))  # whatever lives
    assert chosen < asked


def _taken(asked: set[str]) -> set[str]:
    """What was asked for; operators forget it."""
    taken = asked.copy()
    asked.clear()
    operator.cache_clear()
    return taken


def _ask(case: grid.Cross, others: bool = True) -> None:
    """Ask for what calls of a case need, before its counts are known and after, and for ``others``
    that the benchmark times."""
    made = internals(grid.grid_operator(case, build.TARGET))
    layout = made.binder.layout_of(dict(zip("mnk", case.sizes, strict=True)), "torch")
    made.build_moving()
    blind, plan = (
        made.planner.plan(layout, counts, False)
        for counts in (None, case.counts(DRY.rng(case.label)))
    )
    for choice in (blind.choice, plan.choice, *(later(plan, DRY).values() if others else ())):
        if choice.kind != "dense":
            made._kernel(choice)


# --------------------------------------------------------------------------------------------
# The command


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dry run of some rows."""
    path = tmp_path_factory.mktemp("grid") / "run.json"
    options = ("--device", "cpu", "--quick", "--rounds", "1", "--match", MATCH)
    assert bench_gpu.main(["grid", *options, "--json", str(path)]) == 0
    return path


def test_a_dry_run_is_right(saved: Path) -> None:
    document = json.loads(saved.read_text())
    rows = document["suites"]["grid"]["rows"]
    assert [row["label"] for row in rows] == [f"{MATCH} columns {s} %" for s in (25, 100)]
    assert not any("failed" in row["facts"] for row in rows)
    assert {"dense", "packed", "pit", "index", "predicted"} <= set(plot.series(rows))
    assert "grid: over dense, every row" in [target["name"] for target in document["targets"]]


def test_a_picture_is_drawn(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    assert bench_gpu.main(["--plot", str(saved)]) == 0
    picture = saved.parent / "grid.png"
    assert capsys.readouterr().out.split() == [str(picture)]
    assert picture.read_bytes().startswith(b"\x89PNG")
