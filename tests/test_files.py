"""Files that are whole or not there: whatever their names, and what stands there already."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pit_tvm import files
from pit_tvm.files import as_path, check_room, whole_file, write_atomically


@pytest.mark.parametrize(
    "name", ["x" * 255, "é" * 127, "a 'b' \"c\"\n"], ids="long é quotes".split()
)
def test_names_that_the_system_takes(tmp_path: Path, name: str) -> None:
    write_atomically(tmp_path / name, "text")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "text"


@pytest.mark.parametrize("there", [True, False], ids=["file", "dangling"])
def test_links_are_followed(tmp_path: Path, there: bool) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    if there:
        target.write_text("before")
    link.symlink_to("folder/target")
    write_atomically(link, "after")
    assert link.is_symlink() and target.read_text() == "after"
    assert len(list(tmp_path.rglob("*"))) == 3


def test_what_is_no_regular_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for path in ("pipe", "", ".", "/", str(tmp_path)):
        with pytest.raises(OSError, match="which is no regular file"):
            write_atomically(Path(path), "text")
    assert os.listdir() == ["pipe"] and Path("pipe").is_fifo()


def test_what_names_no_path() -> None:
    for value in ("", "a\0b", None, 3):  # the first is the working directory to pathlib
        with pytest.raises(OSError, match="which is no path"):
            as_path(value)
    assert as_path(".") == Path()


def test_nothing_is_left_of_what_failed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")
    with pytest.raises(KeyError), whole_file(tmp_path / "file") as file:
        file.write(b"half")
        raise KeyError
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "before"


def test_room_for_temporary_files_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    check_room()
    monkeypatch.setattr(files, "_ROOM", 2**80)
    with pytest.raises(OSError, match="No space left on device"):
        check_room()
