"""The pit-tvm command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tvm import IRModule

from pit_tvm import __version__
from pit_tvm.cli import main
from pit_tvm.locations import tuning_logs_dir
from pit_tvm.runtime.kernel_cache import KernelCacheWarning
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.record import TileRecord, make_provenance
from pit_tvm.tile_db.store import FILE_NAME, TileStore
from pit_tvm.tuning import task_run, tasks
from pit_tvm.tuning.runner import Repeats
from pit_tvm.tuning.tasks import Space
from tests.tile_db.records import constants_of, example_record, libraries
from tests.tuning.stand_in import SPACE, space_with

HOST = resolve_target("llvm")
SM_90 = ("--target", "cuda -arch=sm_90a")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Space], None]:
    """Makes the registry give a stand-in space, which is measured as briefly as possible."""
    quick = Repeats(repeat=1, min_repeat_ms=0)
    settings = partial(task_run.Settings, repeats=quick, final=quick)
    monkeypatch.setattr("pit_tvm.tuning.task_run.Settings", settings)

    def use(space: Space) -> None:
        monkeypatch.setattr("pit_tvm.tuning.job.load_space", lambda family: space)

    use(SPACE)
    return use


def tune(root: Path, *more: str) -> int:
    fixed = ["tune", "--out", str(root / "db"), "--work-dir", str(root / "work")]
    return main([*fixed, *more])


def test_tune_records_tiles_libraries_and_constants(
    stand_in: Callable[[Space], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = ("--shape", "16,32,32", "--shape", "8x16x16", "--shape", "16,32,32")
    assert tune(tmp_path, *shapes, "--trials", "2", "--seed", "1") == 0
    store = TileStore.open(tmp_path / "db", device=HOST.device)
    assert {(r.task.m, r.task.n, r.task.k) for r in store.records()} == {(16, 32, 32), (8, 16, 16)}
    assert {record.task.family for record in store.records()} == set(tasks.OPERATORS["matmul"][""])
    assert {record.note for record in libraries(store, "float32")} >= {"numpy"}
    assert constants_of(store)["detect_gbps"] > 0
    printed = capsys.readouterr().out
    assert "GFLOP/s" in printed and "12 candidates measured (0 failed" in printed


def test_tune_without_calibration_records_tiles_only(
    stand_in: Callable[[Space], None], tmp_path: Path
) -> None:
    assert tune(tmp_path, "--shape", "8,16,16", "--trials", "1", "--no-calibrate") == 0
    store = TileStore.open(tmp_path / "db", device=HOST.device)
    assert {record.kind for record in store.all()} == {"pit"}


def test_task_without_right_tile_is_named(
    stand_in: Callable[[Space], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse_small(mod: IRModule) -> IRModule:
        if int(mod["main"].params[0].ty.shape[0]) == 8:
            raise ValueError("too small")
        return mod

    stand_in(space_with(lower=refuse_small))
    shapes = ("--shape", "16,16,16", "--shape", "8,16,16")
    assert tune(tmp_path, *shapes, "--trials", "1", "--no-calibrate") == 0
    printed = capsys.readouterr().out
    assert printed.count("no right tile: ") == printed.count("float32 8x16x16") == 3
    assert "most frequent failure: ValueError: too small" in printed


def test_interrupted_tune_is_status_130_and_says_how_to_continue(
    stand_in: Callable[[Space], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(mod: IRModule) -> IRModule:
        os.kill(os.getpid(), signal.SIGINT)
        return mod

    stand_in(space_with(lower=interrupt))
    assert tune(tmp_path, "--shape", "8,16,16", "--trials", "3") == 130
    assert "run the same command again" in capsys.readouterr().out
    assert len(TileStore.open(tmp_path / "db", device=HOST.device).records()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "8,8,8", "--target", "vulkan"), "--target: expected kind 'llvm'"),
        (("--shape", "8,8,8", "--target", "llvm -num-cores=0"), "--target -num-cores: expected"),
        (("--shape", "8,8,8", "--target", "llvm -mcpu=none"), "--target -mcpu: expected"),
        (("--shape", "8,8,8", "--dtype", "float64"), "--dtype: expected one of"),
        (("--shape", "8,8,8", "--family", "none"), "--family: expected tile families"),
        (
            (*SM_90, "--shape", "8,8,8", "--shape", "8,8,8,2", "--family", "rows-hopper"),
            "--family: expected tile families that compute it on the target, got rows-hopper "
            "for 8,8,8,2 in float16; leave the option out",
        ),
        (("--shape", "8,8,8,2", "--op", "matmul"), "--shape, GROUPS: expected 1 for matmul"),
        (("--model", "none"), "--model: expected one of"),
        (("--shape", "8,8,8", "--op", "sort"), "--op: expected one of"),
        (
            ("--shape", "8,8,8", "--rpc-tracker", "127.0.0.1:1", "--rpc-key", "a"),
            "--rpc-tracker: expected an answer at 127.0.0.1:1",
        ),
    ],
)
def test_error_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert tune(tmp_path, *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"pit-tvm: error: {message}")
    assert printed.err.count("\n") == 1
    assert not list(tmp_path.iterdir())  # folders that it needs are not left behind empty


@pytest.mark.parametrize(
    "arguments",
    [
        ("tune",),
        ("tune", "--shape", "8,8"),
        ("tune", "--shape", "8,0,8"),
        ("tune", "--shape", "8,8,8", "--trials", "0"),
        ("tune", "--shape", "8,8,8", "--rpc-key", "a"),
        ("tune", "--shape", "8,8,8", "--mask-input", "mask"),
        ("tune", "--model", "minilm", "--op", "grouped_matmul"),
        ("explain", "--shape", "8,8,8", "--mask-input", "mask"),
        ("cache", "burn"),
        ("nonsense",),
        (),
    ],
)
def test_wrong_usage_is_status_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "error" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--help",), ("tune", "--help"), ("info", "--help")])
def test_help_is_printed_with_examples(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "usage: pit-tvm" in printed
    assert len(arguments) == 1 or "examples:\n  pit-tvm" in printed


def test_help_and_parsing_load_neither_tvm_nor_torch() -> None:
    code = (
        "import sys; from pit_tvm.cli import make_parser\n"
        "make_parser().parse_args(['tune', '--shape', '8,8,8'])\n"
        "assert not {'tvm', 'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_info_names_versions_target_databases_and_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIT_TVM_CACHE", str(tmp_path / "cache"))
    mine = example_record()
    local = make_provenance(HOST.device, HOST.mcpu, 1)
    store = TileStore.create(tmp_path / "db")
    store.append([example_record("other-sve"), mine, example_record("other-sve", tile_m=8)])
    assert main(["info", "--database", str(tmp_path / "db")]) == 0
    printed = capsys.readouterr().out
    for part in (__version__, HOST.mcpu, HOST.isa, local.device, local.tvm, "other-sve: 2 pit"):
        assert part in printed
    assert f"{tmp_path / 'cache'}: 0 files" in printed


def test_info_of_a_gpu_says_nothing_of_cpus_and_whether_there_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for gpu, count, text in (
        (None, "132, assumed", "this machine lacks a GPU that runs code for sm_90a"),
        (("sm_90a", "h200", 114), "114", "the first of this machine"),
    ):
        monkeypatch.setattr("pit_tvm.target._gpu", lambda gpu=gpu: gpu)
        assert main(["info", "--target", "cuda"]) == 0
        printed = capsys.readouterr().out
        rows = dict(line.split(maxsplit=1) for line in printed.splitlines())
        assert rows["target"] == "cuda -arch=sm_90a"
        assert (rows["multiprocessors"], rows["gpu"]) == (count, text)
        assert not {"threads", "isa"} & set(rows) and "mcpu" not in printed


def test_info_marks_the_folder_that_this_machine_uses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TileStore.create(tmp_path / "db").append([example_record(HOST.device)])
    main(["info", "--database", str(tmp_path / "db")])
    assert f"{HOST.device}: 1 pit (used here)" in capsys.readouterr().out


def test_info_marks_the_folders_that_have_what_this_machine_s_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, constants = example_record(HOST.device), (("launch_us", 2.0),)
    others = [example_record(f"{name}-{HOST.isa}") for name in ("a", "b")]
    profile = TileRecord("profile", others[0].provenance, profile=constants)
    TileStore.create(tmp_path / "db").append([own, *others, profile])
    main(["info", "--database", str(tmp_path / "db")])
    printed = capsys.readouterr().out
    assert f"{HOST.device}: 1 pit (used here)" in printed
    assert f"a-{HOST.isa}: 1 pit, 1 profile (used here)\n" in printed
    assert f"b-{HOST.isa}: 1 pit\n" in printed


def test_info_says_untuned_where_no_records_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ("--target", "llvm -mcpu=x86-64")  # of whose instruction set nothing is shipped
    assert main(["info", "--database", str(tmp_path), *target]) == 0
    printed = capsys.readouterr().out
    assert "untuned" in printed and "(used here)" not in printed


def test_info_names_the_shipped_records_beneath_a_database(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TileStore.create(tmp_path / "db").append([example_record("xeon-avx2")])
    of_device = tmp_path / "db" / "xeon-avx2"
    for path, roots in (
        (tmp_path / "db", [tmp_path / "db", tuning_logs_dir()]),
        (of_device, [tmp_path / "db"]),
        (tuning_logs_dir(), [tuning_logs_dir()]),
    ):
        assert main(["info", "--database", str(path)]) == 0
        lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
        named = [(name, text) for name, text in lines if name in ("database", "shipped")]
        assert named == list(zip(("database", "shipped"), map(str, roots), strict=False))


def test_info_refuses_missing_and_corrupt_databases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--database", str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err
    path = tmp_path / "a-avx2" / FILE_NAME
    path.parent.mkdir()
    path.write_text(json.dumps({"kind": "pit"}) + "\n")
    assert main(["info", "--database", str(tmp_path)]) == 2
    assert f"{path}:1: " in capsys.readouterr().err


def test_cache_is_shown_and_emptied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIT_TVM_CACHE", str(tmp_path))
    (tmp_path / f"{'0' * 64}.so").write_bytes(bytes(2**20))
    assert main(["cache", "info"]) == 0
    assert capsys.readouterr().out.strip() == f"{tmp_path}: 1 files, 1.0 MiB"
    assert main(["cache", "clear"]) == 0
    assert "deleted 1 files, 1.0 MiB" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert main(["cache", "clear"]) == 0
    assert "deleted 0 files" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "8,8,8", "--target", "llvm"], "--target: expected a GPU"),
        (["--shape", "8,8,8", "--op", "grouped_matmul"], "expected M,N,K,GROUPS"),
        (["--shape", "8,8,8,2"], "--shape of linear: expected M,N,K"),
        (["--shape", "8,8,8", "--activation", "tan"], "error: --activation: expected"),
        (["--shape", "8,8,8", "--dtype", "float64"], "error: --dtype: expected one of float32"),
    ],
)
def test_build_refuses_what_it_cannot_compile(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_build_fails_where_nothing_can_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: Any) -> None:
        warnings.warn("no folder", KernelCacheWarning, stacklevel=1)

    monkeypatch.setattr("pit_tvm.runtime.cuda_dispatch.CudaDispatcher.build", build)
    assert main(["build", "--shape", "64,16,8", "--out", str(tmp_path)]) == 2
    assert "--out: expected a folder that can be written, got no folder" in capsys.readouterr().err


def test_build_says_what_is_in_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, int]] = []
    monkeypatch.setattr(
        "pit_tvm.runtime.cuda_dispatch.CudaDispatcher.build", lambda _, sizes: asked.append(sizes)
    )
    arguments = ["--op", "grouped_matmul", "--shape", "64,16,8,4", "--out", str(tmp_path)]
    assert main(["build", *arguments]) == 0
    assert asked == [{"m": 64, "n": 16, "k": 8}]
    assert str(tmp_path) in capsys.readouterr().out


def test_the_package_is_the_command_too() -> None:
    run = [sys.executable, "-m", "pit_tvm", "--version"]
    found = subprocess.run(run, capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout == f"pit-tvm {__version__}\n"
