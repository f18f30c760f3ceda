"""Modules import only lower layers, and inside a folder only files listed above them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.import_order import LAYERS, ORDER

ROOT = Path(__file__).resolve().parent.parent

# Libraries that a unit must do without.
FORBIDDEN = {
    **dict.fromkeys(("errors", "structs", "locations", "reference", "selection"), {"tvm"}),
}
TORCH_UNITS = {"torch", "model"}
TORCH_IN_FUNCTIONS = {f"pit_tvm.runtime.{n}" for n in ("arrays", "cuda_arrays", "cuda_recording")}


def module_files() -> dict[str, Path]:
    """Every module of the package by its dotted name; schedules/ is inside the package."""
    files = {}
    for path in sorted([*ROOT.glob("pit_tvm/**/*.py"), *ROOT.glob("schedules/**/*.py")]):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[0] == "schedules":
            parts.insert(0, "pit_tvm")
        if parts[-1] == "__init__":
            parts.pop()
        files[".".join(parts)] = path
    return files


MODULES = module_files()


def unit_of(module: str) -> str:
    """The file or folder right below the package that a module belongs to."""
    return module.split(".")[1]


def layer_of(unit: str) -> int:
    """Number of the layer that holds a unit."""
    return next(number for number, units in enumerate(LAYERS) if unit in units)


def place_of(module: str) -> int:
    """Position of a module inside its folder's order; last if it is the folder or not listed."""
    parts = module.split(".")
    order = ORDER.get(parts[1], ())
    name = ".".join(parts[2:])
    return order.index(name) if name in order else len(order)


def absolute(module: str, is_package: bool, node: ast.ImportFrom) -> str:
    """The module that a ``from`` import names, relative or not."""
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    keep = len(parts) - node.level + (1 if is_package else 0)
    return ".".join(parts[:keep] + ([node.module] if node.module else []))


def imports(module: str, is_package: bool, tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """Imported names, their lines and whether they stand inside a function.

    Names are modules, or a module and what is taken of it. Strings that spell a module of the
    package count too, because they are how a module is imported dynamically.
    """
    local = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute(module, is_package, node)
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if re.fullmatch(r"pit_tvm(\.\w+)+", node.value) else []
            names = [name for name in names if name in MODULES]
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            given = [a.value for a in node.args if isinstance(a, ast.Constant)]
            names = [name for name in given if name == "torch"]
        else:
            continue
        for name in names:
            yield name, getattr(node, "lineno", 0), id(node) in local


def owner(name: str) -> str:
    """The module of the package that an imported name comes from."""
    while name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def internal_fault(module: str, name: str) -> str | None:
    """Why ``module`` may not import ``name`` of the package; None if it may."""
    target = owner(name)
    if target == "pit_tvm":
        return None if name == "pit_tvm.__version__" else "imports the package's facade"
    if unit_of(target) == unit_of(module):
        return None if place_of(target) < place_of(module) else "is not listed above it"
    return None if layer_of(unit_of(target)) < layer_of(unit_of(module)) else "is no lower layer"


def library_fault(module: str, name: str, in_function: bool) -> str | None:
    """Why ``module`` may not import a library; None if it may."""
    library = name.split(".")[0]
    if library in FORBIDDEN.get(unit_of(module), ()):
        return f"is forbidden in {unit_of(module)}"
    if library != "torch" or unit_of(module) in TORCH_UNITS:
        return None
    if module in TORCH_IN_FUNCTIONS:
        return None if in_function else "is imported outside a function"
    return "is imported outside runtime/arrays.py, torch/ and model/"


def faults(module: str, source: str, is_package: bool = False) -> list[str]:
    """Every import of a module that breaks the law."""
    found = []
    for name, line, in_function in imports(module, is_package, ast.parse(source)):
        if name.split(".")[0] == "pit_tvm":
            fault = internal_fault(module, name)
        else:
            fault = library_fault(module, name, in_function)
        if fault is not None:
            found.append(f"{module}, line {line}: {name} {fault}")
    return found


LAWFUL = [name for name in MODULES if name != "pit_tvm"]


@pytest.mark.parametrize("module", LAWFUL)
def test_module_has_a_layer_and_a_place(module: str) -> None:
    unit, *inner = module.split(".")[1:]
    assert unit in {name for units in LAYERS for name in units}, f"{unit} has no layer"
    if inner:
        assert ".".join(inner) in ORDER.get(unit, ()), f"{module} has no place in its folder"


@pytest.mark.parametrize("module", LAWFUL)
def test_module_imports_only_what_is_below_it(module: str) -> None:
    path = MODULES[module]
    source = path.read_text(encoding="utf-8")
    assert faults(module, source, is_package=path.name == "__init__.py") == []


def test_order_lists_no_file_twice_and_none_that_is_gone() -> None:
    for unit, order in ORDER.items():
        assert len(set(order)) == len(order)
        assert [name for name in order if f"pit_tvm.{unit}.{name}" not in MODULES] == []


def test_facade_imports_only_its_locations_when_loaded() -> None:
    tree = ast.parse(MODULES["pit_tvm"].read_text(encoding="utf-8"))
    loaded = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module for node in loaded if isinstance(node, ast.ImportFrom)}
    assert len(names) == len(loaded)
    assert names == {"__future__", "importlib", "typing", "locations"}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pit_tvm.op.matmul", "from ..transform import axis_map"),
        ("pit_tvm.op.matmul", "from ..analysis.access import block_infos"),
        ("pit_tvm.op.matmul", "import pit_tvm.tile_db"),
        ("pit_tvm.op.matmul", "def f():\n    from pit_tvm.transform.pipeline import lower"),
        ("pit_tvm.op.matmul", "if TYPE_CHECKING:\n    from .conv2d import conv2d"),
        ("pit_tvm.op.matmul", "from . import conv2d"),
        ("pit_tvm.op.matmul", "from . import matmul"),
        ("pit_tvm.op.matmul", "from .. import op"),
        ("pit_tvm.op.matmul", "from .. import compile"),
        ("pit_tvm.op.matmul", "import torch"),
        ("pit_tvm.op.matmul", "def f():\n    from torch.nn import Linear"),
        ("pit_tvm.op.matmul", "load = import_module('pit_tvm.transform.pipeline')"),
        ("pit_tvm.op.matmul", "load = import_module('torch')"),
        ("pit_tvm.runtime.arrays", "import torch"),
        ("pit_tvm.schedules.contraction", "from ..tuning import tasks"),
        ("pit_tvm.structs", "from tvm import te"),
        ("pit_tvm.structs", "from .locations import tuning_logs_dir"),
    ],
)
def test_law_refuses(module: str, source: str) -> None:
    assert len(faults(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("pit_tvm.op.matmul", "from ..errors import ShapeError"),
        ("pit_tvm.op.matmul", "from .arguments import Extent"),
        ("pit_tvm.op.matmul", "from .. import __version__, errors"),
        ("pit_tvm.op.matmul", "from tvm import te"),
        ("pit_tvm.schedules.contraction", "from ..transform import axis_map"),
        ("pit_tvm.runtime.arrays", "def f():\n    import torch"),
        ("pit_tvm.torch.autograd", "import torch"),
    ],
)
def test_law_allows(module: str, source: str) -> None:
    assert faults(module, source) == []
