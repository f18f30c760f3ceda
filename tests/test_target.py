"""Targets: instruction sets, threads, refusals."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tvm
from tvm.target import Target

from pit_tvm import target as target_module
from pit_tvm.errors import UnsupportedTarget
from pit_tvm.instructions import LLVM_OPTIONS
from pit_tvm.target import device_name, lacking, resolve_target, runs_here
from tests.processes import run_python

CPUINFO = "processor : 0\nmodel name : {name}\nflags : fpu {flags}\n"
SSE = "sse sse2 pni ssse3 sse4_1 sse4_2 popcnt movbe abm"
AVX2 = f"{SSE} avx avx2 fma f16c bmi1 bmi2"
AVX512 = f"{AVX2} avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Pretends that this machine's CPU has a name and flags."""

    def pretend(flags: str, name: str = "Some CPU") -> None:
        (tmp_path / "cpuinfo").write_text(CPUINFO.format(name=name, flags=flags))
        monkeypatch.setattr(target_module, "_CPUINFO", tmp_path / "cpuinfo")

    monkeypatch.delenv("TVM_NUM_THREADS", raising=False)
    monkeypatch.setattr(target_module.platform, "machine", lambda: "x86_64")
    return pretend


@pytest.mark.parametrize(
    ("flags", "isa", "mcpu", "bits"),
    [
        (AVX512, "avx512", "x86-64-v4", 512),
        (AVX512.replace("avx512vl", ""), "avx2", "x86-64-v3", 256),
        (AVX2, "avx2", "x86-64-v3", 256),
        (AVX2.replace("fma", ""), "generic", "x86-64", 128),
        ("sse2", "generic", "x86-64", 128),
    ],
)
def test_host_target_follows_the_cpus_flags(machine, flags, isa, mcpu, bits) -> None:
    machine(flags)
    info = resolve_target("llvm")
    assert (info.kind, info.isa, info.mcpu, info.vector_bits) == ("llvm", isa, mcpu, bits)
    assert info.threads == len(os.sched_getaffinity(0))
    options = {"mcpu": mcpu, "num-cores": info.threads, **LLVM_OPTIONS}
    assert info.tvm_target == {"kind": "llvm", **options}
    assert Target(info.tvm_target).kind.name == "llvm"


@pytest.mark.parametrize(
    ("target", "isa", "mcpu"),
    [
        ("llvm -mcpu=haswell", "avx2", "haswell"),
        ("llvm -mcpu=skylake-avx512", "avx512", "skylake-avx512"),
        ("llvm --mcpu=x86-64-v3", "avx2", "x86-64-v3"),
        ("llvm -mcpu=x86-64 -mattr=+avx2,+fma,+f16c,+bmi2", "avx2", "x86-64"),
        ({"kind": "llvm", "mcpu": "znver4"}, "avx512", "znver4"),
        (Target({"kind": "llvm", "mcpu": "x86-64-v3"}), "avx2", "x86-64-v3"),
        ("llvm -mtriple=aarch64-linux-gnu", "generic", "generic"),
    ],
)
def test_named_cpu_is_kept_and_llvm_tells_its_instruction_set(machine, target, isa, mcpu) -> None:
    machine("sse2")
    info = resolve_target(target)
    assert (info.isa, info.mcpu) == (isa, mcpu)
    assert Target(info.tvm_target).attrs["mcpu"] == mcpu


def test_plain_tvm_target_is_this_machine(machine) -> None:
    machine(AVX2)
    assert resolve_target(Target("llvm")) == resolve_target("llvm")


def test_resolved_dictionary_resolves_to_the_same(machine) -> None:
    machine(AVX512)
    info = resolve_target("llvm -mcpu=haswell -num-cores=3")
    assert resolve_target(info.tvm_target) == info


@pytest.mark.parametrize(
    "target",
    [
        "cuda -arch=sm_75",
        "cuda -arch=sm_90a -maxrregcount=64",
        "vulkan",
        "",
        "nonsense",
        "llvm -mcpu=nonsense",
        "llvm -mcpu",
        "llvm mcpu=haswell",
        "llvm -frobnicate=1",
        "llvm -num-cores=0",
        "llvm -num-cores=1025",
        "llvm -mattr=avx2",
        'llvm "',
        "llvm -num-cores=many",
        {"kind": "llvm", "num-cores": True},
        {"kind": "llvm", "num-cores": 2.5},
        {"kind": "cuda", "arch": "sm_91"},
        {},
        7,
    ],
)
def test_unknown_target_is_refused(target) -> None:
    with pytest.raises(UnsupportedTarget):
        resolve_target(target)


def test_threads_follow_the_target_then_the_environment(
    machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(AVX2)
    monkeypatch.setenv("TVM_NUM_THREADS", "5")
    assert resolve_target("llvm").threads == 5
    assert resolve_target("llvm -num-cores=3").threads == 3
    assert resolve_target("llvm -num-cores=1024").threads == 1024
    monkeypatch.setenv("TVM_NUM_THREADS", "100000")
    with pytest.raises(UnsupportedTarget, match="^TVM_NUM_THREADS: expected an integer of 1 to 1"):
        resolve_target("llvm")
    with pytest.raises(UnsupportedTarget, match="-num-cores: expected an integer of 1 to 1024"):
        resolve_target("llvm -num-cores=0")


def test_code_for_more_than_the_cpu_has_does_not_run_here(machine) -> None:
    machine(AVX2)
    assert runs_here(resolve_target("llvm"))
    assert runs_here(resolve_target("llvm -mcpu=haswell"))
    assert not runs_here(resolve_target("llvm -mcpu=x86-64-v4"))
    assert not runs_here(resolve_target("llvm -mtriple=aarch64-linux-gnu"))


@pytest.mark.parametrize(
    ("target", "lacks"),
    [
        ("llvm -mcpu=x86-64-v3 -mattr=+avxvnni", "avxvnni"),
        ("llvm -mcpu=x86-64 -mattr=+gfni,+vaes", "gfni, vaes"),
        ("llvm -mcpu=x86-64-v4 -mattr=-avx512f,-evex512", ""),
        ("llvm -mcpu=x86-64-v3 -mtriple=x86_64-linux-gnu", ""),
        ("llvm -mtriple=x86_64-pc-windows-msvc", "the triple x86_64-pc-windows-msvc"),
        ("llvm -mtriple=x86_64-apple-darwin", "the triple x86_64-apple-darwin"),
        ("llvm -mtriple=aarch64-linux-gnu", "the triple aarch64-linux-gnu"),
    ],
)
def test_what_this_machine_lacks_is_named(machine, target: str, lacks: str) -> None:
    machine(AVX2)
    assert lacking(resolve_target(target)) == lacks


def test_every_instruction_of_a_cpu_is_looked_for(machine) -> None:
    machine(AVX512)
    assert {"avx512fp16", "amxtile", "apx"} <= set(
        lacking(resolve_target("llvm -mcpu=diamondrapids")).split(", ")
    )


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("Intel(R) Xeon(R) Processor", "xeon-avx2"),
        ("Intel(R) Xeon(R) Platinum 8480+ @ 2.00GHz", "xeon-platinum-8480-avx2"),
        ("AMD EPYC 9654 96-Core Processor", "epyc-9654-avx2"),
        ("Intel(R) Core(TM) i7-1185G7 @ 3.00GHz", "i7-1185g7-avx2"),
        ("../../etc", "etc-avx2"),
        ("(R)", "cpu-avx2"),
    ],
)
def test_device_is_a_folder_name(machine, name: str, device: str) -> None:
    machine(AVX2, name)
    assert device_name("avx2") == resolve_target("llvm").device == device


def test_thread_pool_gets_every_cpu_shrinks_and_comes_back() -> None:
    cpus = len(os.sched_getaffinity(0))
    code = (
        "from pit_tvm.threads import start_thread_pool as start\n"
        f"print(start({cpus}), start(1), start({cpus}))"
    )
    assert run_python(code, {}) == [str(cpus), "1", str(cpus)]


def test_thread_pool_keeps_the_limit_that_the_user_set() -> None:
    code = "from pit_tvm.threads import start_thread_pool\nprint(start_thread_pool(2))"
    assert run_python(code, {"TVM_NUM_THREADS": "1"}) == ["1"]


def test_threads_of_one_operator_are_not_those_of_the_next() -> None:
    cpus = len(os.sched_getaffinity(0))
    code = (
        "from pit_tvm.target import resolve_target\n"
        "from pit_tvm.threads import start_thread_pool as start\n"
        "one = start(resolve_target('llvm -num-cores=1').threads)\n"
        "print(one, resolve_target().threads, start(resolve_target().threads))"
    )
    assert run_python(code, {}) == ["1", str(cpus), str(cpus)]
    assert run_python(code, {"TVM_NUM_THREADS": "1"}) == ["1", "1", "1"]


def test_host_target_is_resolved_without_tvm() -> None:
    code = (
        "import sys; from pit_tvm.target import resolve_target; resolve_target()\n"
        "print('tvm' in sys.modules)"
    )
    assert run_python(code, {}) == ["False"]


class _NoGpu:
    exist = False


class _H200:
    exist = True
    compute_version = "9.0"
    device_name = "NVIDIA H200"
    multi_processor_count = 114


class _A100(_H200):
    compute_version = "8.0"
    device_name = "NVIDIA A100-SXM4-80GB"


class _T4(_H200):
    compute_version = "7.5"
    device_name = "Tesla T4"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Pretends that this machine has a GPU, or none."""
    return lambda device: monkeypatch.setattr(tvm, "cuda", lambda number: device)


def test_cuda_without_a_gpu_is_a_whole_hopper_chip(gpu) -> None:
    gpu(_NoGpu)
    info = resolve_target("cuda")
    assert (info.kind, info.isa, info.mcpu, info.threads) == ("cuda", "sm_90a", "sm_90a", 132)
    assert (info.device, info.tvm_target) == ("gpu-sm_90a", {"kind": "cuda", "arch": "sm_90a"})
    assert not runs_here(info)


@pytest.mark.parametrize(
    "target",
    [
        "cuda -arch=sm_90a -model=h200",
        {"kind": "cuda", "arch": "sm_90a", "model": "NVIDIA H200"},
        Target({"kind": "cuda", "arch": "sm_90a", "model": "h200"}),
    ],
)
def test_cuda_target_that_names_its_model(gpu, target) -> None:
    gpu(_NoGpu)
    assert resolve_target(target).device == "h200-sm_90a"


def test_cuda_target_follows_the_gpu_of_this_machine(gpu) -> None:
    gpu(_H200)
    info = resolve_target("cuda")
    assert (info.device, info.threads, runs_here(info)) == ("h200-sm_90a", 114, True)


def test_code_of_an_architecture_runs_on_its_own_capability(gpu) -> None:
    gpu(_H200)
    info = resolve_target("cuda -arch=sm_90")
    assert (info.device, info.threads, runs_here(info)) == ("h200-sm_90", 114, True)
    assert not runs_here(resolve_target("cuda -arch=sm_80"))
    gpu(_A100)
    info = resolve_target("cuda")
    assert (info.device, info.clusters, runs_here(info)) == ("a100-sxm4-80gb-sm_80", False, True)
    assert not runs_here(resolve_target("cuda -arch=sm_90a"))


def test_gpu_without_kernels_is_refused(gpu) -> None:
    gpu(_T4)
    with pytest.raises(UnsupportedTarget, match=r"target -arch: expected one of \['sm_100'.*sm_75"):
        resolve_target("cuda")
    assert not runs_here(resolve_target("cuda -arch=sm_80"))
