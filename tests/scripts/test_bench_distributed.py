"""The benchmark of spread models: what it refuses, one rank's dry run, and what it compares."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_distributed as bench
import pytest
import torch
from torch import distributed
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from pit_tvm.errors import BackendUnavailable
from pit_tvm.torch import host

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--device", "cpu", "--quick", "--batch", "2", "--tokens", "8", "--rounds", "2"]
SPLIT = {"layers.*.self_attn.k_proj": "colwise", "layers.*.mlp.experts.down_proj": "rowwise"}
OLD = {"tp_size", "fsdp_size", "enable_expert_parallel"}


def started(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    """As torchrun starts a rank."""
    said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    for name, value in {**said, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is all there is; what it begins and registers is gone afterwards."""
    started(monkeypatch, 0, 1)
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()
    ALL_EXPERTS_FUNCTIONS._global_mapping.pop(bench.OURS, None)


def test_one_rank_measures_compares_and_writes(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(bench.tempfile, "tempdir", str(tmp_path))
    file = tmp_path / "rows.json"
    given = ["olmoe-1b-7b", "--how", "experts", "--train", "--layers", "1", "--json", str(file)]
    assert bench.main([*given, *SMALL]) == 0
    written = json.loads(file.read_text())
    (row,) = written["rows"]
    assert (written["world"], written["quick"], written["device"]) == (1, True, "cpu: a dry run")
    assert (row["model"], row["how"], row["world"], row["layers"]) == (given[0], "experts", 1, 1)
    assert row["ratio"] == pytest.approx(row["ms"]["torch"] / row["ms"]["pit-tvm"])
    assert all(len(found) == 2 for found in row["samples"].values())
    assert set(row["errors"]) == {"grouped_mm", "one process"}
    assert 0 < row["error"] == max(row["errors"].values()) < row["error_limit"]
    printed = capsys.readouterr().out
    assert "olmoe-1b-7b, experts of 1 ranks, 1 layers" in printed
    assert "0 wrong results" in printed
    assert list(tmp_path.iterdir()) == [file]  # of the checkpoint nothing is left


def test_wrong_experts_are_seen(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from pit_tvm.torch import experts

    monkeypatch.setattr(experts, "moe_feed_forward", lambda x, *given, **named: x + torch.nan)
    assert bench.main(["mixtral-8x7b", "--how", "sharded", *SMALL]) == 1
    assert "1 wrong results: mixtral-8x7b (sharded)" in capsys.readouterr().out


def test_wrong_gradients_are_seen(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    right = host.outer_groups
    monkeypatch.setattr(host, "outer_groups", lambda *given: 1.1 * right(*given))
    assert bench.main(["mixtral-8x7b", "--how", "tensor", "--train", *SMALL]) == 1


def test_a_checkpoint_is_gone_after_an_error(
    one_rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.tempfile, "tempdir", str(tmp_path))

    def load(path: str, **how: Any) -> Any:
        assert (Path(path) / "config.json").is_file()
        raise MemoryError

    monkeypatch.setattr(bench, "load", load)
    with pytest.raises(MemoryError):
        bench.main(["mixtral-8x7b", "--how", "sharded", *SMALL])
    assert list(tmp_path.iterdir()) == []


def test_two_ranks(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "scripts" / "bench_distributed.py"), "mixtral-8x7b", "--json", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        [sys.executable, *command, *script, *SMALL],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if importlib.util.find_spec("accelerate") is None:
        assert "bench_distributed: expected the package accelerate" in done.stderr
        assert "exitcode  : 2" in done.stderr and not file.exists()
    else:
        assert done.returncode == 0 and done.stdout.count("0 wrong results") == 1, done.stderr
        rows = json.loads(file.read_text())["rows"]
        assert [(row["how"], row["world"]) for row in rows] == [(how, 2) for how in bench.WAYS]


@pytest.mark.parametrize("rank", [0, 1])  # torchrun ends the other when one has failed
def test_without_accelerate(rank: int, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    started(monkeypatch, rank, 2)
    monkeypatch.setenv("TQDM_DISABLE", "")  # which the second rank sets
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "accelerate" else found(name)
    )
    assert bench.main(["mixtral-8x7b", *SMALL]) == 2
    assert "pip install accelerate" in capsys.readouterr().err


def test_without_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert bench.main(["mixtral-8x7b", *SMALL]) == 2
    assert "torchrun --nproc-per-node N" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_without_a_gpu(one_rank: None, capsys: Any) -> None:
    assert bench.main(["mixtral-8x7b", "--quick"]) == 2
    assert "expected a CUDA device" in capsys.readouterr().err


def test_a_plan_without_experts_is_refused(one_rank: None, capsys: Any) -> None:
    assert bench.main(["gpt-oss-20b", "--how", "tensor", *SMALL]) == 2
    assert "the experts of gpt-oss-20b, got tensor; take experts or sharded" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("how", "known", "arguments"),
    [
        ("sharded", OLD, {"fsdp_size": 2}),
        ("tensor", OLD, {"tp_size": 2}),
        ("experts", OLD, {"tp_size": 2, "enable_expert_parallel": True}),
        ("experts", {*OLD, "ep_size"}, {"tp_size": 2, "ep_size": 2}),
    ],
)
def test_configuration_of_releases(how: str, known: set[str], arguments: dict[str, Any]) -> None:
    assert bench.splitting(how, 2, known) == arguments


def test_a_release_that_cannot_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="has fsdp_size, got no fsdp_size"):
        bench.splitting("sharded", 2, {"tp_size"})


def test_ranks_divide_what_is_split() -> None:
    bench.check_model("qwen3-30b-a3b", "tensor", 4, SPLIT)
    bench.check_model("qwen3-30b-a3b", "experts", 8, {"layers.*.mlp.experts": "x"})
    with pytest.raises(BackendUnavailable, match="divide the 4 heads of keys of qwen3.*got 8"):
        bench.check_model("qwen3-30b-a3b", "experts", 8, SPLIT)
    with pytest.raises(BackendUnavailable, match="divide the 8 experts of mixtral.*got 3"):
        bench.check_model("mixtral-8x7b", "experts", 3, SPLIT)
    bench.check_model("mixtral-8x7b", "tensor", 8, SPLIT)


def test_command_line() -> None:
    options = bench.parse(["mixtral-8x7b", "olmoe-1b-7b", "--how", "sharded", "experts"])
    assert options.models == ["olmoe-1b-7b", "mixtral-8x7b"]
    assert options.how == ["experts", "sharded"] and options.layers == 2
    assert bench.parse(["olmoe-1b-7b"]).how == list(bench.WAYS)


@pytest.mark.parametrize("given", [[], ["all"], ["olmoe-1b-7b", "--seed", "-1"]])
def test_bad_arguments(given: list[str]) -> None:
    with pytest.raises(SystemExit):
        bench.parse(given)
