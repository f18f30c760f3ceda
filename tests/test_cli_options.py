"""Numbers and folders that the pit-tvm command refuses, in one line that names the option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pit_tvm.cli import main
from pit_tvm.cli_options import MOST

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
    line = refusal(capsys, "explain", "--shape", f"{MOST},{MOST},8")
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
    assert "rpc tracker: expected HOST:PORT" in refusal(capsys, "tune", *SHAPE, *rpc)


def test_seeds_may_be_large_and_blocks_larger_than_the_matrix(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", *SHAPE, "--seed", HUGE, "--mask", f"{MOST}x1"]) == 0
    assert "candidate" in capsys.readouterr().out
