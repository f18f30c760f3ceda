"""CUDA libraries: compiled and cached without a GPU, and called where there is one."""

from __future__ import annotations

import gc
import re
import subprocess
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tvm
import tvm_ffi
from tvm import s_tir, te, tirx
from tvm.script import tirx as T

from pit_tvm.errors import BackendUnavailable, UnsupportedTarget
from pit_tvm.runtime import cuda_build
from pit_tvm.runtime.content_keys import content_key
from pit_tvm.runtime.cuda_build import (
    CudaLibrary,
    build_cuda,
    compile_source,
    cuda_source,
    find_nvcc,
    without_binaries,
)
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.schedules.hopper_rows import RowsTile, rows_kernel


def doubling() -> tvm.IRModule:
    """``out[i] = 2 * data[i]`` as a TIRx kernel."""

    @T.prim_func
    def main(p_data: T.handle, p_out: T.handle):
        n = T.int32()
        data = T.match_buffer(p_data, (n,), "float32", align=4)
        out = T.match_buffer(p_out, (n,), "float32", align=4)
        T.device_entry()
        block = T.cta_id([(n + 127) // 128])
        thread = T.thread_id([128])
        if block * 128 + thread < n:
            out[block * 128 + thread] = data[block * 128 + thread] * T.float32(2)

    return tvm.IRModule({"main": main})


@pytest.fixture(scope="module")
def library() -> CudaLibrary:
    try:
        find_nvcc()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return build_cuda(doubling(), tirx=True)


def test_library_holds_machine_code_and_loads_without_a_driver(library, tmp_path):
    library.export_library(str(tmp_path / "kernel.so"))
    assert b".nv_fatbin" in (tmp_path / "kernel.so").read_bytes()
    assert callable(library.mod["main"])
    assert library.mod is library.mod


def test_a_build_leaves_nothing_of_its_callers_alive(monkeypatch):
    monkeypatch.setattr(cuda_build, "compile_source", lambda source, arch: source)

    class Tensor:
        pass

    def first_call():
        tensor = Tensor()
        build_cuda(tvm.IRModule({"main": rows_kernel("float16", RowsTile())}), tirx=True)
        return weakref.ref(tensor)

    gc.disable()
    try:
        assert first_call()() is None
    finally:
        gc.enable()


def test_library_goes_through_a_kernel_cache(library, tmp_path):
    key = content_key("doubling")
    first = KernelCache(tmp_path)
    assert callable(first.get(key, lambda: library))
    assert (first.stats.builds, [path.name for path in tmp_path.iterdir()]) == (1, [f"{key}.so"])
    later = KernelCache(tmp_path)
    assert callable(later.get(key, lambda: pytest.fail("the library should have been found")))
    assert later.stats.disk_hits == 1


def undefined(library: CudaLibrary, folder: Path) -> str:
    """Names that a library leaves to others."""
    library.export_library(str(folder / "kernel.so"))
    command = ["nm", "-D", "--undefined-only", folder / "kernel.so"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_library_leaves_no_driver_function_undefined(library, tmp_path):
    assert "pit_driver_entry" not in library.source
    built = build_cuda(tvm.IRModule({"main": rows_kernel("float16", RowsTile())}), tirx=True)
    assert "pit_driver_entry" in built.source
    assert "cuTensorMapEncodeTiled" in built.source
    assert " cu" not in undefined(built, tmp_path)
    assert callable(built.mod["main"])


def test_tvm_compiles_nothing_for_a_thread_that_wants_sources():
    with without_binaries():
        compile_cuda = tvm_ffi.get_global_func("tvm_callback_cuda_compile")
        assert compile_cuda("nonsense;") == b""
        with ThreadPoolExecutor() as others, pytest.raises(RuntimeError, match="CUDA"):
            others.submit(compile_cuda, "nonsense;").result()
    with pytest.raises(RuntimeError, match="CUDA"):
        compile_cuda("nonsense;")


def test_sources_need_no_header_that_takes_long():
    rows = tvm.IRModule({"main": rows_kernel("float16", RowsTile())})
    for source in (cuda_source(mod, tirx=True) for mod in (doubling(), rows)):
        assert "CUDADeviceGuard" in source and "TVM_FFI_SAFE_CALL_END" in source
        headers = set(re.findall(r"#include <(.*/.*|coop.*)>", source))
        compiled_by_nvrtc = {"cuda/std/cstdint", "cuda/std/type_traits"}
        assert headers == {"tvm/ffi/c_api.h", "tvm/ffi/extra/c_env_api.h"} | compiled_by_nvrtc


def test_source_needs_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TVM_CUDA_COMPILE_MODE", "nvcc")
    assert "main" in cuda_source(doubling(), tirx=True)


@pytest.mark.parametrize("arch", ["90a", "sm_", "sm_90b", "sm_90a; rm"])
def test_arch_of_no_known_form_is_refused(arch):
    with pytest.raises(UnsupportedTarget, match="sm_90a"):
        build_cuda(doubling(), arch)


def test_missing_nvcc_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(cuda_build.Path, "glob", lambda self, pattern: iter(()))
    with pytest.raises(BackendUnavailable, match="CUDA_HOME"):
        find_nvcc()


def test_nvcc_is_taken_from_cuda_home_first(monkeypatch, tmp_path):
    own = tmp_path / "bin" / "nvcc"
    own.parent.mkdir()
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_nvcc() == str(own)


def test_source_that_nvcc_refuses_is_shown(library):
    with pytest.raises(BackendUnavailable, match="nonsense"):
        compile_source("nonsense;")


@pytest.mark.gpu
def test_kernel_runs_on_the_current_stream(library):
    torch = pytest.importorskip("torch")
    data = torch.arange(1000, dtype=torch.float32, device="cuda")
    out = torch.full_like(data, float("nan"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        library.mod["main"](data, out)
    stream.synchronize()
    assert torch.equal(out, 2 * data)


@pytest.mark.parametrize("number", ["inf", "-inf", "nan"])
def test_bfloat16_that_is_no_number_is_written_in_bits(number):
    x = te.placeholder((8,), "bfloat16", name="x")
    what = tirx.const(float(number), "bfloat16")
    func = te.create_prim_func(
        [x, te.compute((8,), lambda i: tirx.Select(x[i] < x[0], what, x[i]))]
    )
    sch = s_tir.Schedule(func)
    (loop,) = sch.get_loops(sch.get_child_blocks(sch.get_sblock("root"))[0])
    sch.bind(loop, "threadIdx.x")
    source = cuda_source(sch.mod)
    bits = "0x7fc00000" if number == "nan" else "0x7f800000"
    sign = "-" if number == "-inf" else ""
    assert f"__float2bfloat16_rn({sign}__int_as_float({bits}))" in source


def test_attributes_are_set_once_for_a_device():
    source = cuda_source(tvm.IRModule({"main": rows_kernel("float16", RowsTile())}), tirx=True)
    launcher = source[source.index("static int tvm_cuda_host_check") :]
    assert "cudaFuncSetAttribute" not in launcher
    asked = set(re.findall(r"pit_attribute<::\w+, (\w+)>\(cuda_device, ", launcher))
    assert asked == {
        "cudaFuncAttributeMaxDynamicSharedMemorySize",
        "cudaFuncAttributeNonPortableClusterSizeAllowed",
    }
    assert source.count("cudaFuncSetAttribute(kernel, attribute, value)") == 1
