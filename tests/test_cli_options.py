"""Numbers and folders that the pit-tvm command refuses, in one line that names the option."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pit_tvm.cli import main, make_parser
from pit_tvm.cli_build import _counting
from pit_tvm.cli_options import GIVEN_BY, as_typed
from pit_tvm.runtime.kernel_cache import CacheStats
from pit_tvm.structs import MOST_EXTENT
from pit_tvm.target import resolve_target

HUGE, DIGITS = str(10**30), "9" * 5000
SHAPE = ("--shape", "8,8,8")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not refused must not tune into the project's own folders."""
    monkeypatch.chdir(tmp_path)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line that the command prints when it refuses ``arguments``."""
    try:
        status: Any = main(arguments)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", ["explain", "tune", "build"])
@pytest.mark.parametrize("size", [HUGE, DIGITS, "²", "0", "-8"], ids="huge digits ² 0 -8".split())
@pytest.mark.parametrize("place", range(3))
def test_sizes_that_no_product_has(
    command: str, size: str, place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ["8", "8", "8"]
    shape[place] = size
    line = refusal(capsys, command, f"--shape={','.join(shape)}")
    assert "error: argument --shape: expected" in line


def test_matrices_that_no_memory_holds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, "explain", "--shape", f"{MOST_EXTENT},{MOST_EXTENT},8")
    assert "argument --shape: expected matrices of at most" in line

    def full(args: Any) -> None:
        raise MemoryError("1 TiB")

    monkeypatch.setattr("pit_tvm.cli_explain._pattern", full)
    line = refusal(capsys, "explain", *SHAPE)
    assert line == "pit-tvm: error: --shape: expected arrays that fit into memory, got 1 TiB"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--mask", f"{HUGE}x1"),
        ("--mask", "1x²"),
        ("--lengths", "²"),
        ("--lengths", HUGE),
        ("--seed", "²"),
        ("--padded", HUGE),
    ],
)
def test_numbers_that_explain_refuses(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, "explain", *SHAPE, option, value)
    assert f"argument {option}: expected" in line


@pytest.mark.parametrize("option", ["--rows", "--trials", "--workers"])
@pytest.mark.parametrize("value", [HUGE, "²", "-1", "1 "])
def test_numbers_that_tune_refuses(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"argument {option}: expected" in refusal(capsys, "tune", *SHAPE, f"{option}={value}")


@pytest.mark.parametrize("port", ["²", "70000", "0", DIGITS], ids="² 70000 0 digits".split())
def test_ports_that_no_tracker_has(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    rpc = ("--rpc-tracker", f"127.0.0.1:{port}", "--rpc-key", "a")
    assert "error: --rpc-tracker: expected HOST:PORT" in refusal(capsys, "tune", *SHAPE, *rpc)


def test_seeds_may_be_large_and_blocks_larger_than_the_matrix(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", *SHAPE, "--seed", HUGE, "--mask", f"{MOST_EXTENT}x1"]) == 0
    assert "candidate" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------
# Paths

ODD = ("file", "below", "long")


def odd_path(kind: str, root: Path) -> str:
    """A file, a path below a file, or a name that no file system takes."""
    (root / "file").write_text("no database")
    return str(
        {"file": root / "file", "below": root / "file" / "b", "long": root / ("n" * 300)}[kind]
    )


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("info", "--database"), "--database: expected "),
        (("explain", *SHAPE, "--database"), "--database: expected "),
        (("build", *SHAPE, "--database"), "--database: expected "),
        (("explain", "--model"), "--model"),
        (("tune", "--list", "--model"), "--model"),
        (("build", *SHAPE, "--out"), "--out: expected a folder that can be written, got [Errno"),
        (("tune", *SHAPE, "--out"), "--out: expected a folder that can be written, got [Errno"),
        (("tune", *SHAPE, "--work-dir"), "--work-dir: expected a folder that can be written, got"),
    ],
    ids=lambda value: "-".join(value).replace("--", "") if isinstance(value, tuple) else "",
)
def test_paths_that_are_no_folders(
    kind: str,
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*arguments, odd_path(kind, tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"pit-tvm: error: {message}")
    assert printed.count("\n") == 1


def test_no_traceback_is_logged_for_a_file_that_is_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch.export")
    logger.addHandler(handler)
    try:
        with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
            archive.writestr("readme", "no model")
        line = refusal(capsys, "explain", "--model", str(tmp_path / "other.pt2"))
    finally:
        logger.removeHandler(handler)
    assert not logged and not logger.disabled
    assert "a file of torch.export.save" in line and "warnings above" not in line


def test_a_list_of_what_is_missing_reads_its_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pit_tvm.model.examples.find_model", lambda *_: None)
    monkeypatch.setattr("pit_tvm.cli_model._forms", lambda _: {})
    for kind in ODD:
        line = refusal(capsys, "tune", "--list", "--model", "m", "--out", odd_path(kind, tmp_path))
        assert line.startswith("pit-tvm: error: --out: expected a ")


def refuse(*_: Any, **__: Any) -> bool:
    """Stands for what the system does not allow."""
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    ("command", "option"),
    [(c, "--database") for c in ("info", "explain", "build")]
    + [("build", "--out"), ("tune", "--out"), ("tune", "--work-dir")],
)
def test_an_empty_text_is_no_folder(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = () if command == "info" else SHAPE
    line = refusal(capsys, command, *shape, option, "")
    assert f"error: argument {option}: expected a folder, got ''" in line


@pytest.mark.parametrize("command", ["info", "explain"])
def test_a_database_with_a_folder_in_place_of_records(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = tmp_path / "db" / resolve_target("llvm").device
    (device / "tiles.json").mkdir(parents=True)
    shape = () if command == "info" else SHAPE
    for path in (device.parent, device):
        line = refusal(capsys, command, *shape, "--database", str(path))
        assert "error: --database: expected" in line and "tiles.json that is a file" in line


def test_a_database_that_may_not_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.scandir", refuse)
    line = refusal(capsys, "info", "--database", str(tmp_path))
    assert (
        "error: --database: expected a path that can be read, got [Errno 13] Permission denied"
        in line
    )


@pytest.mark.parametrize("option", ["--out", "--work-dir"])
def test_folders_that_may_not_be_written(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tempfile.TemporaryFile

    def temporary(dir: Path) -> Any:
        return refuse() if dir.name == option else own(dir=dir)

    monkeypatch.setattr("tempfile.TemporaryFile", temporary)
    given = [str(part) for name in ("--out", "--work-dir") for part in (name, tmp_path / name)]
    line = refusal(capsys, "tune", *SHAPE, *given)
    assert f"{option}: expected a folder that can be written, got [Errno 13]" in line


def test_a_database_of_folders_that_may_not_be_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = resolve_target("llvm").device
    own = Path.is_file

    def is_file(path: Path) -> bool:
        return refuse() if device in path.parts else own(path)

    monkeypatch.setattr(Path, "is_file", is_file)
    line = refusal(capsys, "info", "--database", str(tmp_path))
    assert "error: --database: expected folders that can be read, got [Errno 13]" in line


def test_a_work_folder_with_a_file_in_the_place_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "contraction-rows").write_text("no folder")
    folders = ("--out", str(tmp_path / "db"), "--work-dir", str(tmp_path / "work"))
    line = refusal(capsys, "tune", *SHAPE, "--family", "contraction-rows", *folders)
    assert "error: --work-dir: expected folders and files that can be written" in line


OF_CACHES = pytest.mark.parametrize(
    ("arguments", "done"),
    [
        (("info",), "read"),
        (("cache", "info"), "read"),
        (("cache", "clear"), "read"),
        (("explain", *SHAPE), "read"),
        (("explain", "--model", "minilm"), "read"),
        (("build", *SHAPE), "written"),
    ],
    ids=lambda value: "-".join(value).replace("--", "") if isinstance(value, tuple) else "",
)


@OF_CACHES
@pytest.mark.parametrize("kind", ODD)
def test_a_kernel_cache_that_is_no_folder(
    arguments: tuple[str, ...],
    done: str,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PIT_TVM_CACHE", odd_path(kind, tmp_path))
    assert main(list(arguments)) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert not printed.out
    assert f"error: kernel cache: expected a folder that can be {done}, got [Errno" in line
    assert line.endswith("set PIT_TVM_CACHE to another")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "no database"


@OF_CACHES
def test_a_kernel_cache_without_permission(
    arguments: tuple[str, ...],
    done: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PIT_TVM_CACHE", str(tmp_path))
    own = os.scandir
    monkeypatch.setattr(
        "os.scandir", lambda path: refuse() if path == tmp_path else own(path)
    )  # a real one does not stop the superuser
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    line = refusal(capsys, *arguments)
    assert f"kernel cache: expected a folder that can be {done}, got [Errno 13]" in line
    assert line.endswith("set PIT_TVM_CACHE to another")
    assert not os.listdir(tmp_path)


def test_a_folder_of_kernels_replaces_a_cache_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIT_TVM_CACHE", odd_path("file", tmp_path))
    monkeypatch.setattr("pit_tvm.runtime.cuda_dispatch.CudaDispatcher.build", lambda *_: None)
    assert main(["build", *SHAPE, "--out", str(tmp_path / "kernels")]) == 0
    assert f"all are in {tmp_path / 'kernels'}" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------
# Names


def test_an_argument_of_the_library_is_named_as_it_was_typed() -> None:
    tune, info = (make_parser().parse_args(text.split()) for text in ("tune --shape 8,8,8", "info"))
    for text, of_tune, of_info in (
        ("database: expected a", "--out: expected a", "--database: expected a"),
        ("target -mcpu: expected", "--target -mcpu: expected", "--target -mcpu: expected"),
        ("rpc key: expected", "--rpc-key: expected", "rpc key: expected"),
        ("targets: expected", "targets: expected", "targets: expected"),
        ("/database: not", "/database: not", "/database: not"),
        ("database", "database", "database"),
    ):
        assert (as_typed(text, tune), as_typed(text, info)) == (of_tune, of_info)


def test_the_options_that_arguments_are_named_by_are_there() -> None:
    (commands,) = (a.choices for a in make_parser()._actions if isinstance(a.choices, dict))
    there = {option for parser in commands.values() for option in parser._option_string_actions}
    options = {option.partition(",")[0] for names in GIVEN_BY.values() for option in names}
    assert options <= there


# --------------------------------------------------------------------------------------------
# Output


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [("info", ""), ("explain --shape 8,8,8", "-u")],
    ids=["buffered", "unbuffered"],
)
def test_output_that_nobody_reads_ends_quietly(arguments: str, flag: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    python = [sys.executable, *flag.split(), "-m", "pit_tvm.cli"]
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path), "PYTHONUNBUFFERED": ""}
    try:
        ended = subprocess.run(
            [*python, *arguments.split()], stdout=writer, stderr=subprocess.PIPE, env=env
        )
    finally:
        os.close(writer)
    assert ended.returncode == 141
    assert ended.stderr == b""


def test_output_that_cannot_be_written_is_an_error() -> None:
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path), "PYTHONUNBUFFERED": ""}
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "pit_tvm.cli", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            env=env,
        )
    assert ended.returncode == 2
    assert ended.stderr == b"pit-tvm: error: [Errno 28] No space left on device\n"


def test_a_build_shows_how_many_libraries_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    asked = threading.Event()

    class Operator:
        @property
        def stats(self) -> CacheStats:
            asked.set()
            return CacheStats(builds=3, disk_hits=2)

    for hidden in (True, False):
        asked.clear()
        with _counting(Operator(), hidden):
            assert asked.wait(60)
        assert ("5 libraries" in capsys.readouterr().err) is not hidden
