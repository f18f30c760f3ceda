"""The package works from a wheel, an sdist, an editable install and a plain source tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import pit_tvm
from pit_tvm import locations
from pit_tvm.errors import DatabaseError

ROOT = Path(__file__).resolve().parent.parent
RECORDS = "test-device/records.json"

# Prints where everything was found, what was imported on the way, and one shipped record.
REPORT = f"""
import json, sys
import pit_tvm
loaded = sorted({{"torch", "tvm"}} & set(sys.modules))
import pit_tvm.schedules
from pit_tvm.locations import tuning_logs_dir
print(json.dumps({{
    "package": pit_tvm.__file__,
    "schedules": pit_tvm.schedules.__file__,
    "record": (tuning_logs_dir() / "{RECORDS}").read_text(),
    "loaded": loaded,
    "version": pit_tvm.__version__,
}}))
"""


@dataclass(frozen=True)
class Form:
    """One way to have the package: an interpreter, PYTHONPATH and where the files must be."""

    python: str
    path: str
    package: Path
    schedules: Path


def run(*command: str | Path, cwd: Path, path: str = "") -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout


def pip(*arguments: str | Path, cwd: Path, python: str = sys.executable) -> None:
    """pip without network: the build backend and all dependencies are installed already."""
    run(python, "-m", "pip", *arguments, "--quiet", "--no-deps", cwd=cwd)


def build_wheel(source: Path, into: Path) -> Path:
    """The wheel that pip builds from a source tree or an sdist."""
    pip("wheel", "--no-build-isolation", "--wheel-dir", into, source, cwd=into.parent)
    (wheel,) = into.glob("*.whl")
    return wheel


def installed(wheel: Path, site: Path) -> Form:
    """The wheel, installed into a folder of its own."""
    pip("install", "--no-compile", "--target", site, wheel, cwd=site.parent)
    return Form(sys.executable, str(site), site / "pit_tvm", site / "pit_tvm" / "schedules")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree, with a record of a device that does not exist."""
    copy = tmp_path_factory.mktemp("source") / "project"
    left = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, copy, ignore=left)
    shutil.copytree(ROOT / ".ci", copy / ".ci")
    record = copy / "tuning_logs" / RECORDS
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps("the record"))
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the source tree."""
    return build_wheel(tree, tmp_path_factory.mktemp("wheel") / "dist")


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of the source tree."""
    into = tmp_path_factory.mktemp("sdist")
    call = "import sys; from setuptools.build_meta import build_sdist as b; b(sys.argv[1])"
    run(sys.executable, "-c", call, into, cwd=tree)
    (archive,) = into.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def editable_python(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Interpreter of an environment that sees this one's packages and the editable project."""
    home = tmp_path_factory.mktemp("editable") / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = str(home / "bin" / "python")
    (site,) = home.glob("lib/python*/site-packages")
    # Only the folder itself: .pth files in it, such as this project's own, are not followed.
    (site / "outer.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip("install", "--no-build-isolation", "--editable", tree, cwd=home, python=python)
    return python


@pytest.fixture(scope="module", params=["wheel", "sdist", "editable", "source tree"])
def form(
    request: pytest.FixtureRequest, tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> Form:
    """Each of the four forms in turn."""
    place = tmp_path_factory.mktemp("form")
    if request.param == "wheel":
        return installed(request.getfixturevalue("wheel"), place / "site")
    if request.param == "sdist":
        archive = request.getfixturevalue("sdist")
        return installed(build_wheel(archive, place / "dist"), place / "site")
    if request.param == "editable":
        python = request.getfixturevalue("editable_python")
        return Form(python, "", tree / "pit_tvm", tree / "schedules")
    return Form(sys.executable, str(tree), tree / "pit_tvm", tree / "schedules")


def report(form: Form, cwd: Path) -> dict[str, str]:
    """What the package says about itself in a fresh process."""
    found = json.loads(run(form.python, "-c", REPORT, cwd=cwd, path=form.path))
    assert isinstance(found, dict)
    return found


def test_schedules_and_records_are_found_from_another_directory(form: Form, tmp_path: Path) -> None:
    found = report(form, tmp_path)
    assert Path(found["package"]) == form.package / "__init__.py"
    assert Path(found["schedules"]) == form.schedules / "__init__.py"
    assert found["record"] == '"the record"'
    assert found["version"] == pit_tvm.__version__


def test_schedules_and_records_are_found_from_the_root(form: Form, tree: Path) -> None:
    # Python puts the working directory first, so that the source tree wins over an install.
    found = report(form, tree)
    assert Path(found["package"]) == tree / "pit_tvm" / "__init__.py"
    assert Path(found["schedules"]) == tree / "schedules" / "__init__.py"
    assert found["record"] == '"the record"'


def test_import_loads_neither_tvm_nor_torch(form: Form, tmp_path: Path) -> None:
    assert report(form, tmp_path)["loaded"] == []


def test_wheel_holds_every_module_and_record_and_nothing_else(tree: Path, wheel: Path) -> None:
    expected = {"pit_tvm/py.typed"}
    expected |= {str(p.relative_to(tree)) for p in (tree / "pit_tvm").rglob("*.py")}
    for folder, pattern in (("schedules", "*.py"), ("tuning_logs", "*.json")):
        expected |= {f"pit_tvm/{p.relative_to(tree)}" for p in (tree / folder).rglob(pattern)}
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
    assert names == expected


def test_wheel_states_command_licence_and_pinned_tvm(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        by_name = {n.rpartition("/")[2]: archive.read(n).decode() for n in archive.namelist()}
    assert "pit-tvm = pit_tvm.cli:main" in by_name["entry_points.txt"]
    assert "Apache License" in by_name["LICENSE"]
    metadata = by_name["METADATA"]
    assert f"Version: {pit_tvm.__version__}\n" in metadata
    assert "Requires-Dist: apache-tvm==0.27.0.post1\n" in metadata
    assert "Requires-Dist: apache-tvm-ffi==0.1.14.post1\n" in metadata
    for extra in ("torch", "transformers", "plot", "rpc", "quickstart", "dev"):
        assert f"Provides-Extra: {extra}\n" in metadata


def test_public_names_resolve_lazily_to_their_definitions() -> None:
    from pit_tvm import structs

    assert dir(pit_tvm) == sorted([*pit_tvm.__all__, "model"])
    for name in (*dir(pit_tvm), "torch"):
        assert getattr(pit_tvm, name) is not None
    assert pit_tvm.Mask is structs.Mask
    assert callable(pit_tvm.compile)


def test_packages_that_are_not_imported_are_found_by_their_names(tmp_path: Path) -> None:
    code = "import pit_tvm; pit_tvm.model.compile, pit_tvm.torch.linear_rows"
    run(sys.executable, "-c", code, cwd=tmp_path, path=str(ROOT))


def test_help_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; import pit_tvm; help(pit_tvm)"
    assert "Lengths" in run(sys.executable, "-c", code, cwd=tmp_path, path=str(ROOT))


def test_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = pit_tvm.no_such_name  # type: ignore[attr-defined]


def test_missing_records_name_the_paths_that_were_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "pit_tvm"
    package.mkdir()
    monkeypatch.setattr(locations, "__file__", str(package / "locations.py"))
    with pytest.raises(DatabaseError, match="tuning_logs: expected a folder at") as caught:
        locations.tuning_logs_dir()
    assert str(package / "tuning_logs") in str(caught.value)


def test_another_projects_setup_beside_the_package_is_no_source_tree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "setup.py").touch()
    monkeypatch.setattr(locations, "__file__", str(tmp_path / "pit_tvm" / "locations.py"))
    assert locations.source_root() is None
