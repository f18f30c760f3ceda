"""Names of instruction sets and systems, as LLVM and Linux have them."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable

# Beginnings of the names, without . _ and -, of instructions that kernels may use; LLVM's other
# features tell what is fast on a CPU, or what only an operating system asks for.
_CHOSEN = (
    *("sse", "ssse", "avx", "amx", "fma", "f16c", "bmi", "gfni", "vaes", "vpclmul", "xop"),
    *("popcnt", "lzcnt", "movbe", "adx", "apx", "sve", "sme"),
)
# Of all code for CPUs. A short loop of fixed length (9 columns, say) would end in a store under a
# mask, of which LLVM 22 writes a lone 16-bit element for AVX-512 as 32 bits, past the array's end.
LLVM_OPTIONS = {"cl-opt": ["-vectorizer-min-trip-count:uint=0"]}
_APX = ("egpr", "ndd", "ccmp", "ppx", "push2pop2", "nf", "zu")
_LINUX = {
    **dict.fromkeys(_APX, "apx"),
    "bmi": "bmi1",
    "lzcnt": "abm",
    "sse3": "pni",
    "sseunalignedmem": "misalignsse",
}
# Linux's list has not these: whether they are there follows from the CPU's model.
_UNLISTED = ("avx10", "avxvnniint", "avxneconvert")
_SYSTEMS = {"linux": "linux", "windows": "win32", "win32": "win32"} | dict.fromkeys(
    ("darwin", "macos", "ios"), "darwin"
)
_OTHER_SYSTEMS = ("freebsd", "netbsd", "openbsd", "wasi", "uefi", "solaris", "aix", "fuchsia")
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def plain(names: Iterable[str]) -> frozenset[str]:
    """Names of features as both have them: avx512_bf16, sse4.2, amx-tile and bmi differ."""
    short = (name.translate(str.maketrans("", "", "._-")) for name in names)
    return frozenset(_LINUX.get(name, name) for name in short)


def chosen(names: Iterable[str]) -> frozenset[str]:
    """Those of a target's features that its code may use, by plain names."""
    found = plain(names)
    return frozenset(n for n in found if n in ("pni", "abm") or n.startswith(_CHOSEN))


def unlisted(names: Iterable[str]) -> frozenset[str]:
    """Those of plain names that Linux does not list on CPUs that have them."""
    return frozenset(name for name in names if name.startswith(_UNLISTED))


def is_foreign(triple: str) -> bool:
    """Whether an LLVM triple is for another architecture or system than this one."""
    machine, *rest = triple.lower().split("-")
    here = platform.machine().lower()
    if _MACHINES.get(machine, machine) != _MACHINES.get(here, here):
        return True
    for word in rest:
        if word.startswith(_OTHER_SYSTEMS):
            return not sys.platform.startswith(word[:4])
        for name, system in _SYSTEMS.items():
            if word.startswith(name):
                return system != sys.platform
    return False
