"""CUDA kernels as shared libraries, compiled by nvcc on any machine, with a GPU or without.

TVM's ``cuda_host`` target gives one CUDA source with the kernels and their tvm-ffi launchers. The
library made of it needs only apache-tvm-ffi and the driver, and the driver only once a kernel is
called: it loads without one, so a kernel cache can be filled on a machine without a GPU.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi
from tvm import runtime as tvm_runtime
from tvm.backend.cuda.host import export_cuda_host
from tvm.target import Target
from tvm_ffi import libinfo

from ..errors import BackendUnavailable, UnsupportedTarget, mismatch
from ..schedules.dependent import as_dependent, as_plain
from ..target import has_clusters
from ..transform.wrap_narrow import wrap_narrow

# -O is that of launchers on the host: at 3 nvcc takes a quarter longer. Kernels are at 3 anyway.
_FLAGS = ("-shared", "-O1", "-std=c++17", "-Xcompiler=-fPIC")
_QUIET = "-diag-suppress=174,177,550"  # unused names and empty statements of generated code

# Copies to shared memory that the schedule pipelines become asynchronous. Two of TVM's passes do
# not know them: one gives their targets a vector's type, one takes their conditions apart.
_PIPELINED = {
    "tirx.use_async_copy": True,
    "tirx.disable_storage_rewrite": True,
    "tirx.disable_cse_tir": True,
}

# The driver's functions that launchers call, found in the driver when they are called. Linked
# instead, they would have to be loaded, for all to see, before the library.
_DRIVER = {
    "cuTensorMapEncodeTiled": (
        "CUresult",
        "CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,"
        " const cuuint64_t* dim, const cuuint64_t* stride, const cuuint32_t* box,"
        " const cuuint32_t* step, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,"
        " CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill",
        "map, type, rank, data, dim, stride, box, step, interleave, swizzle, promotion, fill",
    ),
    "cuGetErrorString": ("CUresult", "CUresult error, const char** text", "error, text"),
}
_LOOK_UP = """
#include <cuda.h>
#include <cuda_runtime.h>
static void* pit_driver_entry(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found);
  return entry;
}
"""
_ENTRY = """
extern "C" __attribute__((visibility("hidden"))) {result} CUDAAPI {name}({params}) {{
  static auto entry = reinterpret_cast<{result}(CUDAAPI*)({params})>(pit_driver_entry("{name}"));
  return entry ? entry({args}) : CUDA_ERROR_NOT_FOUND;
}}
"""

# What launchers use of tvm-ffi in C++, by the same names, which no other library sees. Its own
# headers have all of it besides, and nvcc reads them three times: 6 s for every library, more than
# most kernels take.
_CXX = "#include <tvm/ffi/extra/cuda/device_guard.h>\n#include <tvm/ffi/function.h>\n"
_OWN_CXX = """#include <exception>
#include <cuda_runtime.h>
namespace tvm {
namespace ffi {
namespace {
struct Fault { const char *kind, *text; };
struct Check {
  const char* kind;
  void operator<<(const char* text) const { throw Fault{kind, text}; }
};
class CUDADeviceGuard {
 public:
  explicit CUDADeviceGuard(int device) : own_(device) {
    check(cudaGetDevice(&other_));
    if (own_ != other_) check(cudaSetDevice(own_));
  }
  ~CUDADeviceGuard() noexcept(false) {
    if (own_ != other_) check(cudaSetDevice(other_));
  }

 private:
  static void check(cudaError_t error) {
    if (error != cudaSuccess) throw Fault{"CUDAError", cudaGetErrorString(error)};
  }
  int own_, other_;
};
}  // namespace
}  // namespace ffi
}  // namespace tvm
#define TVM_FFI_CHECK(condition, kind) if (!(condition)) ::tvm::ffi::Check{#kind}
#define TVM_FFI_SAFE_CALL_BEGIN() try { (void)0
#define TVM_FFI_SAFE_CALL_END() \\
  return 0; \\
  } catch (const ::tvm::ffi::Fault& fault) { \\
    TVMFFIErrorSetRaisedFromCStr(fault.kind, fault.text); \\
    return -1; \\
  } catch (const std::exception& error) { \\
    TVMFFIErrorSetRaisedFromCStr("InternalError", error.what()); \\
    return -1; \\
  } \\
  (void)0
"""
# Of two more, which take half as long again, kernels on Hopper know their thread's place in a CTA.
_GROUPS = "#include <cuda/barrier>\n#include <cooperative_groups.h>\n"
_RANK = "namespace cg = cooperative_groups;\n    return cg::this_thread_block().thread_rank();"
_OWN_RANK = "return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);"

# Launchers set the attributes of a kernel at every launch, 0.7 us of the host each. Here an
# attribute is set again only for a device that has not had it, or not as high.
_ONCE = """#include <atomic>
#include <mutex>
#include <cuda_runtime.h>
template <auto kernel, cudaFuncAttribute attribute>
static cudaError_t pit_attribute(int device, int value) {
  static std::atomic<int> highest[64];
  static std::mutex setting;
  std::atomic<int>& known = highest[device % 64];
  const bool kept = device < 64;
  if (kept && known.load(std::memory_order_acquire) >= value) return cudaSuccess;
  std::lock_guard<std::mutex> alone(setting);
  if (kept && known.load(std::memory_order_relaxed) >= value) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, attribute, value);
  if (kept && error == cudaSuccess) known.store(value, std::memory_order_release);
  return error;
}
"""
# TVM branches around a guarded copy; the instruction itself can write zeros where it reads nothing.
_GUARDED = re.compile(
    r"@p (cp\.async\.\w+\.shared\.global) \[%0\], \[%1\], %2;(\\n\"\s*\") @!p st\.shared[^;]*;"
)
# What TVM writes for these numbers of bfloat16 is no C++; bits that are.
_NO_NUMBER = re.compile(r"__float2bfloat16_rn\((-?)(inf|nan)f(?:/\*[^*]*\*/)?\)")
_BITS = {"inf": "0x7f800000", "nan": "0x7fc00000"}
# A condition that is alike for a vector gets the type of what it selects.
_CONDITION = re.compile(r"\b\w+ (\w+ = make_ushort([234])\()")
_ATTRIBUTE = re.compile(r"\bcudaFuncSetAttribute\(([\w:]+), (\w+), (\w+)\)")


class CudaLibrary:
    """A compiled library of CUDA kernels; what `KernelCache.get` takes from its ``build``."""

    def __init__(self, source: str, library: bytes) -> None:
        self.source = source
        self._library = library
        self._lock = threading.Lock()
        self._mod: Any = None

    @property
    def mod(self) -> Any:
        """The loaded module: ``mod["main"]`` is the function. Loaded when first asked for."""
        with self._lock:
            if self._mod is None:
                with tempfile.TemporaryDirectory(prefix="pit-tvm-") as scratch:
                    self.export_library(path := os.path.join(scratch, "kernel.so"))
                    self._mod = tvm_runtime.load_module(path)
            return self._mod

    def export_library(self, file_name: str) -> None:
        """Write the shared library; OSError if the file cannot be written."""
        Path(file_name).write_bytes(self._library)


def build_cuda(
    mod: tvm.IRModule, arch: str = "sm_90a", tirx: bool = False, pipelined: bool = False
) -> CudaLibrary:
    """Compile the functions of ``mod`` to machine code of ``arch``; no GPU is needed.

    ``tirx`` lowers TIRx kernels, False scheduled TensorIR, in which copies to shared memory may be
    ``pipelined``. Takes about 3 to 10 seconds, nearly all of it in nvcc.

    Raises
    ------
    UnsupportedTarget
        ``arch`` is not of the form ``sm_<number>`` with an optional ``a`` or ``f``.
    BackendUnavailable
        nvcc is not on this machine, or refuses the source.
    """
    library = compile_source(cuda_source(mod, arch, tirx, pipelined), arch)
    # TVM's parser leaves the frames of all callers in cycles, and so the tensors of a first call.
    gc.collect()
    return library


def cuda_source(
    mod: tvm.IRModule, arch: str = "sm_90a", tirx: bool = False, pipelined: bool = False
) -> str:
    """The CUDA source of `build_cuda`: kernels, launchers, and what they need of the driver."""
    _check_arch(arch)
    target = Target({"kind": "cuda", "arch": arch}, host="cuda_host")
    config = _PIPELINED if pipelined else {}
    with target, tvm.transform.PassContext(config=config), without_binaries():
        pipeline = {"tir_pipeline": "tirx"} if tirx else {}
        if tirx:
            mod = as_dependent(mod) if has_clusters(arch) else as_plain(mod)
        else:
            mod = wrap_narrow(mod)
        built = tvm.compile(mod, target=target, **pipeline)
    attributes = r"pit_attribute<\1, \2>(cuda_device, \3)"
    source, number = _ATTRIBUTE.subn(attributes, _lean(export_cuda_host(built.mod)))
    source = _ONCE + source if number else source
    source = _GUARDED.sub(r".reg .u32 n;\2 selp.u32 n, %2, 0, p;\2 \1 [%0], [%1], %2, n;", source)
    source = _CONDITION.sub(r"ushort\2 \1", _NO_NUMBER.sub(_as_bits, source))
    used = [name for name in _DRIVER if re.search(rf"\b{name}\b", source)]
    entries = [_entry(name) for name in used]
    return "".join([source, _LOOK_UP, *entries] if used else [source])


@contextmanager
def without_binaries() -> Iterator[None]:
    """What this thread has TVM build for CUDA is left as source. With a GPU's driver at hand TVM
    compiles it as it is, before what it gets wrong is mended, and everything would be compiled
    twice."""
    thread = _thread_of_sources()
    thread.compiles = False
    try:
        yield
    finally:
        thread.compiles = True


@cache
def _thread_of_sources() -> threading.local:
    """Whether a thread ``compiles``, which TVM's compiler of CUDA sources heeds from now on."""
    thread, name = threading.local(), "tvm_callback_cuda_compile"
    compile_cuda = tvm_ffi.get_global_func(name)

    def compile_unless(code: str) -> bytes:
        return compile_cuda(code) if getattr(thread, "compiles", True) else b""

    tvm_ffi.register_global_func(name, compile_unless, override=True)
    return thread


def _lean(source: str) -> str:
    """The source without headers of which it needs little."""
    source = source.replace(_CXX, _OWN_CXX).replace(_RANK, _OWN_RANK)
    return source if "cg::" in source else source.replace(_GROUPS, "")


def _as_bits(number: re.Match[str]) -> str:
    """An infinite bfloat16, or one that is not a number."""
    return f"__float2bfloat16_rn({number[1]}__int_as_float({_BITS[number[2]]}))"


def kernel_source(mod: tvm.IRModule, arch: str = "sm_90a") -> str:
    """`cuda_source` of kernels of either kind: TIRx, or scheduled TensorIR, pipelined."""
    scheduled = all("s_tir" in (func.attrs or {}) for func in mod.functions.values())
    return cuda_source(mod, arch, tirx=not scheduled, pipelined=scheduled)


def compile_source(source: str, arch: str = "sm_90a") -> CudaLibrary:
    """The library of a source that `cuda_source` gave; errors as in `build_cuda`."""
    _check_arch(arch)
    ffi = Path(libinfo.find_libtvm_ffi()).parent
    includes = (libinfo.find_include_path(), libinfo.find_dlpack_include_path())
    with tempfile.TemporaryDirectory(prefix="pit-tvm-") as scratch:
        unit, library = Path(scratch) / "kernel.cu", Path(scratch) / "kernel.so"
        unit.write_text(source, encoding="utf-8")
        command = [find_nvcc(), *_FLAGS, _QUIET, *(f"-I{folder}" for folder in includes)]
        command += [f"-gencode=arch=compute_{arch[3:]},code={arch}", f"-L{ffi}", "-ltvm_ffi"]
        done = subprocess.run(
            [*command, "-o", str(library), str(unit)], capture_output=True, text=True
        )
        if done.returncode:
            got = "\n".join((done.stderr + done.stdout).splitlines()[-20:])
            advice = f"nvcc must know {arch} and find a C++ compiler"
            raise BackendUnavailable(mismatch("nvcc", "to compile a kernel", got, advice))
        return CudaLibrary(source, library.read_bytes())


def find_nvcc() -> str:
    """Path of nvcc: in $CUDA_HOME, else on PATH, else the newest in /usr/local/cuda*.

    Raises
    ------
    BackendUnavailable
        It is in none of them.
    """
    home = os.environ.get("CUDA_HOME")
    folders = [Path(home) / "bin"] if home else []
    folders += [Path(part) for part in os.get_exec_path()]
    folders += sorted(Path("/usr/local").glob("cuda*/bin"), key=_version, reverse=True)
    for folder in folders:
        found = shutil.which("nvcc", path=str(folder))
        if found:
            return found
    advice = "install the CUDA toolkit, or set CUDA_HOME to its folder"
    raise BackendUnavailable(mismatch("nvcc", "a CUDA compiler on PATH", "none", advice))


def _version(folder: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", folder.parent.name))


def _check_arch(arch: str) -> None:
    if not re.fullmatch(r"sm_\d+[af]?", arch):
        raise UnsupportedTarget(mismatch("arch", "a name such as sm_90a", repr(arch)))


def _entry(name: str) -> str:
    result, params, args = _DRIVER[name]
    return _ENTRY.format(name=name, result=result, params=params, args=args)
