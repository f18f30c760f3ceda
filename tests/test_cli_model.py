"""What the command says of whole models, and what it tunes for them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pit_tvm.cli import main
from pit_tvm.cli_model import _print_axes, _tasks
from pit_tvm.model.experts import GroupedForm
from pit_tvm.model.layers import Layers
from pit_tvm.model.report import AxisCount
from pit_tvm.structs import Tile, TileTask
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.record import TileRecord, record_from_json
from pit_tvm.tile_db.store import TileStore
from pit_tvm.torch import modules as pit
from pit_tvm.tuning import task_run
from pit_tvm.tuning.runner import Repeats
from tests.tile_db.records import example_record
from tests.tuning.stand_in import SPACE

HOST = resolve_target("llvm")
WIDTH, INNER = 24, 40


class Small(nn.Module):
    """Two layers of one form for every token, and one of another form for every sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, WIDTH), nn.Embedding(16, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, INNER, bias=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """Values ``[batch, tokens, width]``, and of each first token ``[batch, inner]``."""
        x = self.norm(self.words(input_ids) + self.places.weight[: input_ids.shape[1]])
        for layer in self.layers:
            x = layer(x).relu()
        return x, self.head(x[:, 0])


class Experts(nn.Module):
    """A layer of experts, two for each token, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.router = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.experts = pit.MoeFeedForward(4, WIDTH, INNER)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Values ``[batch, tokens, width]``."""
        x = self.words(input_ids)
        weights, ids = self.router(x).softmax(-1).topk(2)
        return self.experts(x, ids, weights)


def written(model: nn.Module, path: Path) -> str:
    """The file of a model with a dynamic batch, and length of at most 16."""
    ones = torch.ones(2, 6, dtype=torch.int64)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", max=16)}
    given = {"input_ids": ones, "attention_mask": ones.clone()}
    program = torch.export.export(
        model.eval(), (), given, dynamic_shapes=dict.fromkeys(given, sizes), strict=False
    )
    torch.export.save(program, path)
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of such a model."""
    return written(Small(), tmp_path_factory.mktemp("models") / "small.pt2")


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PIT_TVM_CACHE", str(tmp_path / "kernels"))
    yield


def columns(text: str, start: str) -> list[str]:
    """The words of the line that begins with ``start``, after it."""
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    return line.removeprefix(start).split()


def test_explain_prints_plan_totals_decisions_and_axes(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--model", model, "--lengths", "3,8,0"]) == 0
    text = capsys.readouterr().out
    assert "3 sequences padded to 8, 11 of 24 tokens live (45.8%)" in text
    two = columns(text, "24 x 24 float32 + bias + relu")
    assert two[:3] == ["2", "11", "45.8%"]
    one = columns(text, "40 x 24 float32 ")
    assert one[:3] == ["1", "3", "100.0%"]
    for each, numbers in zip(columns(text, "predicted, all layers"), (-2, -1), strict=False):
        parts = sum(float(line[numbers]) for line in (two, one))
        assert float(each.rstrip(",")) == pytest.approx(parts, abs=2e-3)
    assert re.search(r"^\d+ operators on live tokens only$", text, re.MULTILINE)
    some = re.search(r"(\d+) of (\d+) operators have PIT axes", text)
    assert some and 0 < int(some[1]) <= int(some[2])
    assert re.search(r"^ +\d+ matmul +i0, i1, .*k$", text, re.MULTILINE)
    # How long positions are is known to be as long as tokens only where the graph is tidied.
    assert re.search(r"^ +1 layer_norm +ax0, ax1, ax2, k2$", text, re.MULTILINE)
    assert "not analysed" not in text


def test_products_of_experts_are_predicted_and_tuned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = written(Experts(), tmp_path / "experts.pt2")
    up, down = "4 x 80 x 24 float32 ", "4 x 24 x 40 float32 "
    assert main(["explain", "--model", model, "--lengths", "3,8,0"]) == 0
    text = capsys.readouterr().out
    lines = [columns(text, start) for start in (up, down)]
    assert [line[:2] for line in lines] == [["1", "22"]] * 2  # every one of 11 tokens twice
    (total,) = columns(text, "predicted, all products of experts")
    assert 0 < float(total) == pytest.approx(sum(float(line[-1]) for line in lines), abs=2e-3)
    folders = ["--out", str(tmp_path / "db"), "--work-dir", str(tmp_path / "work")]
    tune = ["tune", *folders, "--model", model, "--list", "--rows", "512"]
    assert main(tune) == 0
    text = capsys.readouterr().out
    assert [columns(text, start)[0] for start in (up, down)] == ["1", "1"]
    assert "3 products to tune" in text  # with the router


def test_products_of_experts_have_tiles_of_their_own_on_hopper() -> None:
    form = GroupedForm(64, 80, 24, "float16", False, "", 2)
    hopper = resolve_target({"kind": "cuda", "arch": "sm_90a"})
    (task,) = _tasks(form, 512, hopper, None)
    assert (task.family, task.m, task.groups, task.share) == ("groups-hopper", 1024, 64, 2)
    (task,) = _tasks(replace(form, dtype="float32"), 512, hopper, None)
    assert (task.family, task.m, task.groups, task.share) == ("rows-cuda", 16, 1, 1)
    (task,) = _tasks(form, 512, HOST, None)
    assert (task.family, task.m, task.groups) == ("contraction-rows", 16, 1)


def test_axes_that_nobody_looked_for_are_not_none(capsys: pytest.CaptureFixture[str]) -> None:
    _print_axes([AxisCount("add", ("i",), 2), AxisCount("norm", None, 3), AxisCount("sort", (), 4)])
    head, *lines = capsys.readouterr().out.strip().splitlines()
    assert head.startswith("2 of 9 operators have PIT axes, by the analysis of their loops; 3 ")
    assert [line.split(maxsplit=2) for line in lines] == [
        ["2", "add", "i"],
        ["3", "norm", "not analysed"],
        ["4", "sort", "none"],
    ]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--lengths", "0,0"], "2 sequences padded to 0, 0 of 0 tokens live"),
        (["--lengths", "4,2", "--padded", "16"], "6 of 32 tokens live"),
        (["--fill", "0.25", "--batch", "400", "--padded", "16"], r"of 6400 tokens live \(2[3-7]"),
        ([], "32 sequences padded to 16, .* live \\((2[5-9]|3[0-5])"),
        (["--fill", "1", "--batch", "3", "--library", "torch"], "3 sequences padded to 16"),
    ],
)
def test_batches_that_are_drawn_or_told(
    model: str, more: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--model", model, *more]) == 0
    assert re.search(expected, capsys.readouterr().out)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lengths", "17"], "--lengths: expected at most 16 tokens of a sequence"),
        (["--lengths", "9,2", "--padded", "8"], "--padded: expected 9 to 16"),
        (["--lengths", "9", "--fill", "0.2"], "--lengths: expected no --fill"),
        (["--padded", "100000"], "--padded: expected 1 to 16, the model's longest, got 100000"),
        (["--fill", "1.5"], "--fill, --batch: expected a share of 0 to 1"),
        (["--batch", "0"], "--fill, --batch: expected .* at least one sequence"),
        (["--batch", str(10**30)], "--batch, --padded: expected at most 2147483647 tokens"),
        (["--dtype", "float16"], "--dtype: expected none for a file"),
        (["--target", "cuda -arch=sm_90a"], "--target with --model: expected a CPU"),
    ],
)
def test_batches_that_make_no_sense(
    model: str, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", "--model", model, *more]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_batches_that_no_memory_holds(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise MemoryError("1 TiB")

    monkeypatch.setattr("pit_tvm.cli_model.random_lengths", full)
    assert main(["explain", "--model", model]) == 2
    assert "--batch: expected arrays that fit into memory, got 1 TiB" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--padded", "-5"], ["--padded", "0"], ["--seed", "-1"]])
def test_numbers_that_are_too_small(
    model: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["explain", "--model", model, *more])
    assert stopped.value.code == 2
    assert re.search(rf"{more[0]}: expected an integer of at least", capsys.readouterr().err)


@pytest.mark.parametrize("dtype", ["foo", "int8"])
def test_types_that_no_example_has(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", "minilm", "--dtype", dtype]) == 2
    assert "--dtype: expected float32 or float16 or bfloat16" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"", b"no archive"])
def test_a_model_that_is_none(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pt2"
    if content is not None:
        path.write_bytes(content)
    for command in (["explain"], ["tune", "--list"]):
        assert main([*command, "--model", str(path)]) == 2
        assert "one of bert-base, minilm, opt-125m, resnet-18" in capsys.readouterr().err


def test_without_a_mask_only_axes_are_known(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", model, "--mask-input", "nothing"]) == 0
    text = capsys.readouterr().out
    assert "no input 'nothing' to skip padding by; PIT axes only" in text
    assert "operators have PIT axes" in text and "linear layers" not in text


def test_of_a_product_there_is_one_length(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["explain", "--shape", "64,16,16"]
    assert main([*shape, "--lengths", "16"]) == 0
    assert "1x* on m" in capsys.readouterr().out
    assert main([*shape, "--lengths", "16,8"]) == 2
    assert "--lengths: expected one divisor of 64 rows, got 16,8" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*shape, "--lengths", "many"])
    with pytest.raises(SystemExit):
        main([*shape, "--model", "minilm"])


def test_options_of_the_other_kind_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--model", "minilm", "--mask", "4x1"], "--mask with --model"),
        (["--model", "minilm", "--density", "0.3"], "--density with --model"),
        (["--shape", "8,8,8", "--fill", "0.3", "--batch", "2"], "--fill, --batch with --shape"),
    ):
        with pytest.raises(SystemExit):
            main(["explain", *arguments])
        assert message in capsys.readouterr().err


# --------------------------------------------------------------------------------------------
# tune


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> Callable[..., int]:
    """Tunes the model with a stand-in space, measured as briefly as possible."""
    quick = Repeats(repeat=1, min_repeat_ms=0)
    settings = partial(task_run.Settings, repeats=quick, final=quick)
    monkeypatch.setattr("pit_tvm.tuning.task_run.Settings", settings)
    monkeypatch.setattr("pit_tvm.tuning.job.load_space", lambda family: SPACE)

    def run(*more: str) -> int:
        folders = ["--out", str(tmp_path / "db"), "--work-dir", str(tmp_path / "work")]
        fixed = ["tune", *folders, "--model", model, "--trials", "1", "--no-calibrate"]
        return main([*fixed, "--rows", "8", *more])

    return run


def test_list_tunes_nothing(
    tune: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("--rows", "16", "--list") == 0
    text = capsys.readouterr().out
    assert columns(text, "24 x 24 float32 + bias + relu") == ["2", "none;", "8,", "16"]
    assert columns(text, "40 x 24 float32 ") == ["1", "none;", "8,", "16"]
    assert "4 products to tune" in text
    assert not (tmp_path / "db").exists()


def test_tune_records_what_is_missing_and_only_that(
    tune: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune() == 0
    assert "2 products to tune" in capsys.readouterr().out
    store = TileStore.open(tmp_path / "db", device=HOST.device)
    found = {(r.task.family, r.task.m, r.task.n, r.task.k) for r in store.records()}
    assert found == {("contraction-rows", 8, 24, 24), ("contraction-rows", 8, 40, 24)}
    assert tune("--rows", "16", "--list") == 0
    text = capsys.readouterr().out
    assert columns(text, "40 x 24 float32 ") == ["1", "8;", "16"]
    assert "2 products to tune" in text
    assert tune() == 0
    text = capsys.readouterr().out
    assert columns(text, "40 x 24 float32 ") == ["1", "8;", "none"]
    assert "0 products to tune" in text


@pytest.mark.parametrize("device", [HOST.device, f"another-{HOST.isa}"])
def test_what_tune_leaves_out_is_tuned_where_its_database_is_used(
    device: str,
    tune: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Shipped records of this device are beneath the folder; those of another one do not last."""
    monkeypatch.setattr("pit_tvm.tile_db.store.tuning_logs_dir", lambda: tmp_path / "shipped")
    task = TileTask("contraction-rows", HOST.isa, "float32", 8, INNER, WIDTH)
    tile = Tile(task.family, HOST.isa, task.dtype, 8, 16, 24)
    provenance = replace(example_record().provenance, device=device)
    shipped = TileRecord("pit", provenance, tile=tile, task=task, run_secs=(1e-6,))
    TileStore.create(tmp_path / "shipped").append([shipped])
    here = device == HOST.device
    assert tune() == 0
    assert f"{1 if here else 2} products to tune" in capsys.readouterr().out
    used = Layers([], HOST, tmp_path / "db").tiles.splitlines()
    records = [record_from_json(json.loads(line)) for line in used]
    assert {(r.task.m, r.task.n, r.task.k) for r in records if r.task} == {(8, 24, 24), (8, 40, 24)}
    assert (shipped in records) == here
    assert tune() == 0
    assert "0 products to tune" in capsys.readouterr().out


def test_families_that_compute_none_of_a_model_s_layers(
    tune: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune("--list", "--family", "rows-hopper") == 2
    error = capsys.readouterr().err
    assert "--family: expected tile families that compute it on the target, got rows-hop" in error


def test_options_of_models_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--list"], ["--rows", "8"]):
        with pytest.raises(SystemExit):
            main(["tune", "--shape", "8,8,8", *more])
        assert "go with --model" in capsys.readouterr().err
