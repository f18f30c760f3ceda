"""Sizes, types, docstrings and what a module may do when it is imported."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 400

Function = ast.FunctionDef | ast.AsyncFunctionDef


def files(*folders: str, pattern: str = "*.py") -> list[Path]:
    """Files below the given folders of the project."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob(pattern))


LIBRARY = files("pit_tvm", "schedules")
SCRIPTS = files("scripts")
EVERYTHING = [ROOT / "setup.py", *LIBRARY, *SCRIPTS, *files("tests")]


def title(path: Path) -> str:
    """A file's name in a test's identifier."""
    return str(path.relative_to(ROOT))


def parse(path: Path) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def is_public(path: Path) -> bool:
    """Whether no part of a module's dotted name is private."""
    return not any(part.startswith("_") and part != "__init__.py" for part in path.parts)


def public_functions(body: list[ast.stmt]) -> Iterator[Function]:
    """Public functions, and public methods of public classes."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)
        if isinstance(node, Function) and (not node.name.startswith("_") or is_protocol(node.name)):
            yield node


def is_script(function: Function) -> bool:
    """Whether a function is TVMScript (``@T.inline``, ``@T.jit``), which has no Python types."""
    return any(ast.unparse(d).startswith("T.") for d in function.decorator_list)


def is_protocol(name: str) -> bool:
    """Special methods that users call: their arguments are public too."""
    return name in {"__init__", "__call__"}


def missing_types(function: Function, in_class: bool) -> list[str]:
    """Arguments of a function that carry no annotation, and ``return`` if that has none."""
    a = function.args
    ordinary = [*a.posonlyargs, *a.args]
    if in_class and ordinary and ordinary[0].arg in {"self", "cls"}:
        ordinary = ordinary[1:]
    given = [*ordinary, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    missing = [argument.arg for argument in given if argument.annotation is None]
    return missing + (["return"] if function.returns is None else [])


def untyped(tree: ast.Module) -> list[str]:
    """Public functions of a module that are not fully typed, with what is missing."""
    inside = {id(n) for c in ast.walk(tree) if isinstance(c, ast.ClassDef) for n in c.body}
    return [
        f"{function.name}, line {function.lineno}: {', '.join(missing)}"
        for function in public_functions(tree.body)
        if not is_script(function)
        if (missing := missing_types(function, id(function) in inside))
    ]


def undocumented(tree: ast.Module) -> list[str]:
    """The module, and its public functions and classes, as far as they have no docstring."""
    named = [
        node
        for node in tree.body
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")
    ]
    missing = [f"{n.name}, line {n.lineno}" for n in named if not ast.get_docstring(n)]
    return missing + ([] if ast.get_docstring(tree) else ["module"])


def broad_excepts(tree: ast.Module) -> list[int]:
    """Lines of handlers that catch everything."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {getattr(kind, "id", getattr(kind, "attr", "")) for kind in kinds}
            if node.type is None or names & {"Exception", "BaseException"}:
                lines.append(node.lineno)
    return lines


def is_main_guard(node: ast.stmt) -> bool:
    """``if __name__ == "__main__":``"""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def effects(body: list[ast.stmt]) -> list[str]:
    """Statements run at import that change something outside the module's own names."""
    found = []
    for node in body:
        if isinstance(node, ast.If) and not is_main_guard(node):
            found += effects(node.body) + effects(node.orelse)
            continue
        targets = node.targets if isinstance(node, ast.Assign) else []
        foreign = any(not isinstance(target, ast.Name | ast.Tuple) for target in targets)
        calls = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)
        loops = isinstance(node, ast.For | ast.While | ast.With | ast.Delete | ast.Try)
        if foreign or calls or loops or isinstance(node, ast.AugAssign):
            found.append(f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}")
    return found


def global_statements(tree: ast.Module) -> list[int]:
    """Lines that rebind module-level names from inside a function."""
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Global)]


def open_ends(text: str) -> list[int]:
    """Lines with a marker for work that is left."""
    marks = ("TO" + "DO", "FIX" + "ME", "X" * 3)
    return [n for n, line in enumerate(text.splitlines(), 1) if any(m in line for m in marks)]


@pytest.mark.parametrize("path", EVERYTHING + files("scripts", pattern="*.sh"), ids=title)
def test_file_is_short_and_finished(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert open_ends(text) == []


@pytest.mark.parametrize("path", EVERYTHING, ids=title)
def test_file_catches_no_exception_broadly(path: Path) -> None:
    assert broad_excepts(parse(path)) == []


@pytest.mark.parametrize("path", [p for p in LIBRARY + SCRIPTS if is_public(p)], ids=title)
def test_public_names_are_typed_and_documented(path: Path) -> None:
    tree = parse(path)
    assert untyped(tree) == []
    assert undocumented(tree) == []


@pytest.mark.parametrize("path", LIBRARY + SCRIPTS, ids=title)
def test_module_does_nothing_on_import_and_keeps_no_global_state(path: Path) -> None:
    tree = parse(path)
    # The one exception: the package extends its search path in a source tree.
    allowed = ["__path__.append(str(_root))"] if path == ROOT / "pit_tvm" / "__init__.py" else []
    found = effects(tree.body)
    assert [each.partition(": ")[2] for each in found] == allowed, found
    assert global_statements(tree) == []


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in LIBRARY}
    assert [title(f) for f in sorted(folders) if not (f / "__init__.py").is_file()] == []


def test_records_folder_holds_only_json() -> None:
    kept = [p for p in (ROOT / "tuning_logs").rglob("*") if p.is_file()]
    assert [title(p) for p in kept if p.suffix != ".json"] == []


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (untyped, "def f(a: int): ..."),
        (untyped, "def f(a) -> int: ..."),
        (untyped, "class C:\n    def f(self, *a) -> int: ..."),
        (untyped, "class C:\n    def __init__(self, a) -> None: ..."),
        (undocumented, "def f() -> None: ..."),
        (undocumented, '"""M."""\nclass C: ...'),
        (broad_excepts, "try: ...\nexcept: ..."),
        (broad_excepts, "try: ...\nexcept (ValueError, Exception): ..."),
        (broad_excepts, "try: ...\nexcept builtins.BaseException: ..."),
        (global_statements, "def f() -> None:\n    global a"),
    ],
)
def test_rule_refuses(check: Callable[[ast.Module], list[object]], source: str) -> None:
    assert len(check(ast.parse(source))) >= 1


@pytest.mark.parametrize(
    "source",
    ["print(1)", "os.environ['a'] = '1'", "for a in b: c(a)", "x += 1", "if a:\n    b()", "del a"],
)
def test_effect_on_import_is_seen(source: str) -> None:
    assert len(effects(ast.parse(source).body)) == 1
