"""Keys of compiled kernels: digests of what they are built from, and of what builds them."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from tvm.target import Target

from .. import __version__
from ..errors import BackendUnavailable, DTypeError, mismatch
from ..locations import source_root

# The folders whose code decides what a kernel looks like; runtime holds the detection kernels.
_GENERATORS = ("op", "analysis", "primitive", "transform", "schedules", "runtime")


def content_key(*parts: object) -> str:
    """SHA-256, as 64 hexadecimal digits, of ``parts`` and of what generates code.

    That is the versions of tvm, tvm-ffi and pit_tvm, the machine's architecture and pit_tvm's own
    source. A part is None, a bool, int, float, str or bytes; a list or tuple, a mapping (in any
    order) or a dataclass of parts; a TVM target; or a TVM object that prints as TVMScript.

    Raises
    ------
    DTypeError
        A part is anything else, which could differ in ways that its text does not show.
    """
    return hashlib.sha256(_canonical((_fingerprint(), *parts)).encode()).hexdigest()


@cache
def _fingerprint() -> str:
    """Digest of the versions, and of the source files that decide what a kernel looks like."""
    digest = hashlib.sha256()
    for package in ("apache-tvm", "apache-tvm-ffi"):
        digest.update(f"{package}={metadata.version(package)};".encode())
    digest.update(f"pit_tvm={__version__};{platform.machine()};".encode())
    for folder in map(_generator_folder, _GENERATORS):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(folder.parent).as_posix()}:".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _generator_folder(name: str) -> Path:
    package, root = Path(__file__).resolve().parent.parent, source_root()
    for parent in (package, *([root] if root else [])):
        if (parent / name).is_dir():
            return parent / name
    advice = "install the package again"
    raise BackendUnavailable(mismatch(f"pit_tvm/{name}", "a folder of source", "none", advice))


def _canonical(part: object) -> str:
    """Text that two parts share only if they are equal and of one type."""
    if part is None or isinstance(part, (bool, int, float, str, bytes)):
        return f"{type(part).__name__}:{part!r}"
    if isinstance(part, (list, tuple)):
        return f"[{','.join(map(_canonical, part))}]"
    if isinstance(part, Mapping):
        items = sorted(f"{_canonical(k)}={_canonical(v)}" for k, v in part.items())
        return f"{{{','.join(items)}}}"
    if is_dataclass(part) and not isinstance(part, type):
        values = {field.name: getattr(part, field.name) for field in fields(part)}
        return f"{type(part).__qualname__}{_canonical(values)}"
    if isinstance(part, Target):
        return f"target:{str(part)!r}"
    script = getattr(part, "script", None)
    if callable(script):
        return f"script:{script(show_meta=True)!r}"
    expected = "plain values, containers, dataclasses, targets and TVM objects with a script"
    raise DTypeError(mismatch("content_key", expected, type(part).__name__))
