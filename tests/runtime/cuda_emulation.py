"""CUDA kernels of TensorIR schedules on a CPU: their own source and launchers, compiled by g++.

`cuda_emulation.h` stands in for CUDA: threads of a CTA take turns, asynchronous copies land as late
(those of odd threads as early) as PTX allows, and shared memory begins as NaN. Misaligned and wild
accesses, uneven barriers and launches that are too large fail as they do on a GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy.typing as npt
from tvm_ffi import libinfo

from pit_tvm.errors import BackendUnavailable, mismatch
from pit_tvm.runtime.cuda_build import CudaLibrary
from pit_tvm.runtime.cuda_view import CudaView

OLDEST = 12  # of g++: the first to know 16-bit floats in C++

_HEADER = Path(__file__).with_name("cuda_emulation.h")
_COMMON = _HEADER.with_suffix(".cpp")  # of all kernels
# Headers that sources include, and that ours replaces.
_EMPTY = ("cuda.h", "cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h", "math_constants.h")
# Threads jump from stack to stack, which fortified jumps (the default of some systems) refuse.
_FLAGS = ("-std=c++17", "-O0", "-w", "-fPIC", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")
_CHECKS = "-fsanitize=alignment,bounds"

# Inline PTX that TVM generates, and the function that does the same: it takes the operands.
_PTX = {
    r"cp\.async\.wait_group (\d+);": "wait_group",
    r"cp\.async\.commit_group;": "commit_group",
    r"griddepcontrol\.wait;": "await_predecessor",
    r"griddepcontrol\.launch_dependents;": "let_successor_in",
    r"cp\.async\.cg\.shared\.global \[%0\], \[%1\], 16, %2;": "copy16_or_zero",
    r"cp\.async\.cg\.shared\.global \[%0\], \[%1\], 16, dead;": "copy16_from",
    r"mov\.b64 %0, %1;": "move",
    r"cp\.async\.ca\.shared\.global \[%0\], \[%1\], 4;": "copy4",
    r"cp\.async\.c[ag]\.shared\.global ": "copy",
    r"ld\.shared\.b32 ": "load_shared",
    r"@p ld\.global\.L1::no_allocate\.v4\.b32 ": "load4_if",
    r"ld\.global\.v4\.b32 ": "load4",
    r"st\.global\.v4\.b32 ": "store4",
    r"cvt\.rn\.f16x2\.f32 ": "pack<half>",
    r"cvt\.rn\.bf16x2\.f32 ": "pack<nv_bfloat16>",
    r"red\.global\.add\.v4\.f32 ": "add4",
    r"cvt\.rna\.tf32\.f32 ": "round_to_tf32",
    r"ex2\.approx\.ftz\.f32 ": "exp2",
    r"lg2\.approx\.ftz\.f32 ": "log2",
    r"rcp\.approx\.ftz\.f32 ": "reciprocal",
    r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared\.b16 ": "ldmatrix<false>",
    r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans\.shared\.b16 ": "ldmatrix<true>",
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32 ": "mma<half>",
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32 ": "mma<nv_bfloat16>",
    r"mma\.sync\.aligned\.m16n8k8\.row\.col\.f32\.tf32\.tf32\.f32 ": "mma<float>",
    r"fence\.proxy\.async\.shared::cta;": "fence",
    r"wgmma\.fence\.sync\.aligned;": "fence",
    r"wgmma\.commit_group\.sync\.aligned;": "commit_products",
    r"wgmma\.wait_group\.sync\.aligned 0;": "settle_products",
}
for _type, _name in (("f16", "half"), ("bf16", "nv_bfloat16")):
    _of = rf"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.{_type}\.{_type} \{{[^}}]*\}}, "
    _PTX[_of + r"%\d+, %\d+, ps0, 1, 1, ([01]), ([01]);"] = f"wgmma<{_name}>"
    _PTX[_of + r"\{[^}]*\}, %\d+, ps0, 1, 1, ([01]);"] = f"wgmma_held<{_name}>"
_ASM = re.compile(r"(?:asm volatile|asm|__asm__ __volatile__)\((.*?)\);\n", re.DOTALL)
_OPERAND = re.compile(r'"[=+]?&?\w"\(([^()]*)\)')
_DYNAMIC = re.compile(r"extern __shared__ __align__\(\d+\) uchar (\w+)\[\];")


class OnDevice(CudaView):
    """A contiguous numpy array as launchers and dispatchers take a tensor on a GPU."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        assert array.flags.c_contiguous
        super().__init__(array.ctypes.data, array.shape, array.dtype.name, 0)
        self.array = array

    def data_ptr(self) -> int:
        """The address of the first element."""
        return int(self.array.ctypes.data)

    def clone(self) -> OnDevice:
        """A copy elsewhere."""
        return OnDevice(self.array.copy())

    def copy_(self, other: OnDevice) -> None:
        """Take the elements of another array."""
        self.array[...] = other.array

    def zero_(self) -> None:
        """Set every element to 0."""
        self.array[...] = 0


class Emulator:
    """A compiler of CUDA sources for this CPU, in place of nvcc; ``folder`` is its own, and keeps
    what all kernels share. Every source is compiled once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._libraries: dict[str, bytes] = {}
        for name in _EMPTY:
            (folder / name).touch()
        header = shutil.copy(_HEADER, folder)
        self._compile("-x", "c++-header", str(header), "-o", f"{header}.gch")
        self._common = folder / "common.o"
        self._compile("-O2", "-c", str(_COMMON), "-o", str(self._common))

    def compile_source(self, source: str, arch: str = "sm_90a") -> CudaLibrary:
        """The library of a source that `cuda_source` gave for ``arch``.

        Raises
        ------
        BackendUnavailable
            The source holds PTX or functions of CUDA that are not known here.
        """
        if source not in self._libraries:
            self._libraries[source] = self._built(source)
        return CudaLibrary(source, self._libraries[source])

    def _built(self, source: str) -> bytes:
        ffi = Path(libinfo.find_libtvm_ffi()).parent
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            unit, part, library = (Path(scratch) / f"kernel.{end}" for end in ("cpp", "o", "so"))
            unit.write_text(_for_cpu(source), encoding="utf-8")
            self._compile("-include", _HEADER.name, "-c", str(unit), "-o", str(part))
            # Linked apart: what the checks call is among what is common, not in a library.
            parts = (str(part), str(self._common))
            _run("g++", "-shared", *parts, "-o", str(library), f"-L{ffi}", "-ltvm_ffi")
            return library.read_bytes()

    def _compile(self, *args: str) -> None:
        own = (libinfo.find_include_path(), libinfo.find_dlpack_include_path())
        _run("g++", *_FLAGS, _CHECKS, *(f"-I{path}" for path in (self.folder, *own)), *args)


def missing() -> str:
    """Why kernels cannot be emulated on this machine; "" if they can."""
    if shutil.which("g++") is None:
        return "g++ is not on this machine"
    version = _run("g++", "-dumpversion").strip()
    new = int(version.partition(".")[0]) >= OLDEST
    return "" if new else f"g++ {version} is older than {OLDEST}"


def _for_cpu(source: str) -> str:
    """The source with calls in place of its PTX; BackendUnavailable where some is not known."""
    source = _DYNAMIC.sub(_shared, _ASM.sub(_call, source))
    rest = re.search(r"\b__shared__\b.*", source)
    if rest:
        expected = "one array of dynamic shared memory"
        raise BackendUnavailable(mismatch("emulation", expected, rest.group()))
    return source


def _shared(declared: re.Match[str]) -> str:
    """The one array of dynamic shared memory by the name that the source gives it."""
    known, name = "buf_dyn_shmem_ptr", declared[1]
    return "" if name == known else f"uchar* {name} = {known};"


def _call(statement: re.Match[str]) -> str:
    """What an ``asm`` statement is here."""
    text = statement[1]
    for pattern, name in _PTX.items():
        found = re.search(pattern, text)
        if found:
            operands = [*found.groups(), *_OPERAND.findall(text)]
            return f"emulated::{name}({', '.join(operands)});\n"
    raise BackendUnavailable(mismatch("emulation", "PTX that is known here", text))


def _run(*command: str) -> str:
    """What a command prints; BackendUnavailable with its errors if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        got = "\n".join(done.stderr.splitlines()[:20])
        raise BackendUnavailable(mismatch("emulation", "CUDA that a CPU can run", got))
    return done.stdout
