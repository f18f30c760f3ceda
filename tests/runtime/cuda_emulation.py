"""CUDA kernels of TensorIR schedules on a CPU: their own source and launchers, compiled by g++.

`cuda_emulation.h` stands in for CUDA: threads of a CTA take turns, asynchronous copies land as late
(those of odd threads as early) as PTX allows, shared memory begins as NaN, and misaligned or wild
accesses, uneven barriers and launches that are too large fail as they do on a GPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tvm_ffi import libinfo

from pit_tvm.errors import BackendUnavailable, mismatch
from pit_tvm.runtime.cuda_build import CudaLibrary
from pit_tvm.runtime.cuda_view import CudaView

OLDEST = 12  # of g++: the first to know 16-bit floats in C++

_HEADER = Path(__file__).with_name("cuda_emulation.h")
_EMPTY = ("cuda.h", "cuda_runtime.h", "cuda_fp16.h", "cuda_bf16.h")
_FLAGS = ("-std=c++17", "-O1", "-w", "-fPIC", "-fno-strict-aliasing")
_CHECKS = ("-fsanitize=alignment,bounds", "-fno-sanitize=vptr")

# Inline PTX that TVM generates, and what it is here.
_COPY = r'__asm__ __volatile__\(\s*"[^;]*?(?:\{\\n"[^;]*;.*?)?cp\.async\.c[ag]\.shared\.global'
_PTX = (
    (r'asm volatile\("cp\.async\.wait_group (\d+);"[^\n]*', r"emulated::wait_group(\1);"),
    (r'asm volatile\("cp\.async\.commit_group;"[^\n]*', "emulated::commit_group();"),
    (
        r"unsigned int dst_addr = __cvta_generic_to_shared\(dst_p\);\s*"
        r'__asm__ __volatile__\([^()]*?(?:\[%0\][^()]*?)*?cp\.async\.c[ag]\.shared\.global'
        r'[^()]*?"r"\(dst_addr\), "l"\(src_p\), "n"\((\d+)\), "r"\(predicate\), "r"\(0\)\s*\);',
        r"emulated::copy(dst_p, src_p, \1, predicate);",
    ),
)


class OnDevice(CudaView):
    """A contiguous numpy array as launchers and dispatchers take a tensor on a GPU."""

    def __init__(self, array: np.ndarray) -> None:
        assert array.flags.c_contiguous
        super().__init__(array.ctypes.data, array.shape, array.dtype.name, 0)
        self.array = array

    def data_ptr(self) -> int:
        """The address of the first element."""
        return int(self.array.ctypes.data)

    def clone(self) -> OnDevice:
        """A copy elsewhere."""
        return OnDevice(self.array.copy())

    def zero_(self) -> None:
        """Set every element to 0."""
        self.array[...] = 0


class Emulator:
    """A compiler of CUDA sources for this CPU, in place of nvcc.

    ``folder`` keeps what all kernels share, compiled once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in _EMPTY:
            (folder / name).touch()
        header = shutil.copy(_HEADER, folder)
        self._compile("-x", "c++-header", str(header), "-o", f"{header}.gch")

    def compile_source(self, source: str, arch: str = "sm_90a") -> CudaLibrary:
        """The library of a source that `cuda_source` gave; ``arch`` is what it was made for.

        Raises
        ------
        BackendUnavailable
            The source holds PTX or functions of CUDA that are not known here.
        """
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            unit, library = Path(scratch) / "kernel.cpp", Path(scratch) / "kernel.so"
            unit.write_text(_for_cpu(source), encoding="utf-8")
            part = f"{unit}.o"
            self._compile("-include", _HEADER.name, "-c", str(unit), "-o", part)
            # Linked apart: the checks' own library is not wanted.
            ffi = Path(libinfo.find_libtvm_ffi()).parent
            _run("g++", "-shared", part, "-o", str(library), f"-L{ffi}", "-ltvm_ffi")
            return CudaLibrary(source, library.read_bytes())

    def _compile(self, *args: str) -> None:
        own = (libinfo.find_include_path(), libinfo.find_dlpack_include_path())
        includes = [f"-I{folder}" for folder in (self.folder, *own)]
        _run("g++", *_FLAGS, *_CHECKS, *includes, *args)


def missing() -> str:
    """Why kernels cannot be emulated on this machine; "" if they can."""
    if shutil.which("g++") is None:
        return "g++ is not on this machine"
    version = _run("g++", "-dumpversion").partition(".")[0]
    return "" if int(version) >= OLDEST else f"g++ {version} is older than {OLDEST}"


def _for_cpu(source: str) -> str:
    """The source with calls in place of its PTX; BackendUnavailable where some is not known."""
    for pattern, call in _PTX:
        source = re.sub(pattern, call, source, flags=re.DOTALL)
    rest = re.search(r"(\basm volatile\(|__asm__ __volatile__\().{,200}", source, re.DOTALL)
    if rest:
        raise BackendUnavailable(mismatch("emulation", "copies and waits in PTX", rest.group()))
    static = re.search(r"^(?!.*extern __shared__ .* buf_dyn_shmem_ptr\[\];).*__shared__.*", source, re.M)
    if static:
        expected = "dynamic shared memory, one array of it"
        raise BackendUnavailable(mismatch("emulation", expected, static.group()))
    return source


def _run(*command: Any) -> str:
    """What a command prints; BackendUnavailable with its errors if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        got = "\n".join(done.stderr.splitlines()[:20])
        raise BackendUnavailable(mismatch("emulation", "CUDA that a CPU can run", got))
    return done.stdout
