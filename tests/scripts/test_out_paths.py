"""Files that scripts write at their end are refused before they begin."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import bench_cpu
import bench_gpu
import bench_models
import check_gpu
import pytest
import quickstart

# Each script, what it needs besides, and whether it makes missing folders.
SCRIPTS = {
    "quickstart": (quickstart, [], False),
    "bench_cpu": (bench_cpu, [], True),
    "bench_gpu": (bench_gpu, ["index"], True),
    "bench_models": (bench_models, ["bert-base"], True),
    "check_gpu": (check_gpu, [], True),
}
PLOTS = {"quickstart": quickstart, "bench_models": bench_models}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Paths of every kind."""
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    return {
        "folder": str(tmp_path / "folder"),
        "below a file": str(tmp_path / "file" / "out.png"),
        "long": str(tmp_path / ("n" * 300)),
        "missing": str(tmp_path / "missing" / "out.png"),
        "file": str(tmp_path / "file"),
        "new": str(tmp_path / "folder" / "out.png"),
    }


@pytest.mark.parametrize("name", SCRIPTS)
def test_json_that_cannot_be_written_is_refused_at_once(
    name: str, places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    script, needed, makes = SCRIPTS[name]
    wrong = ["folder", "below a file", "long", *([] if makes else ["missing"])]
    for kind in wrong:
        with pytest.raises(SystemExit) as ended:
            script.parse([*needed, "--json", places[kind]])
        assert ended.value.code == 2
        assert "argument --json: expected" in capsys.readouterr().err, kind
    for kind in ["file", "new", *(["missing"] if makes else [])]:
        assert script.parse([*needed, "--json", places[kind]]).json == Path(places[kind])
    assert not Path(places["missing"]).parent.exists()


@pytest.mark.parametrize("name", PLOTS)
def test_pictures_that_cannot_be_written_are_refused_at_once(
    name: str, places: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script, needed, _ = SCRIPTS[name]
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    wrong = [places[kind] for kind in ("folder", "below a file", "long", "missing")]
    for path in (*wrong, str(tmp_path / "out.txt")):
        with pytest.raises(SystemExit):
            script.parse([*needed, "--plot", path])
        assert "argument --plot: expected" in capsys.readouterr().err, path
    assert script.parse([*needed, "--plot", places["new"]]).plot == Path(places["new"])


def test_a_folder_of_pictures_is_no_file(
    places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    for kind in ("file", "below a file", "long"):
        with pytest.raises(SystemExit):
            bench_cpu.parse(["--plot", places[kind]])
        assert "argument --plot: expected" in capsys.readouterr().err
    assert bench_cpu.parse(["--plot", places["missing"]]).plot == Path(places["missing"])


@pytest.mark.parametrize("name", [*PLOTS, "bench_cpu"])
def test_pictures_need_matplotlib_at_once(
    name: str,
    places: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script, needed, _ = SCRIPTS[name]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        script.parse([*needed, "--plot", places["new"]])
    text = capsys.readouterr().err
    assert "argument --plot: expected the package matplotlib" in text and "pit-tvm[plot]" in text
