"""Targets: which instruction set a tile may use, how many threads, and what TVM is told.

tvm is imported inside functions only, and only where LLVM or the CUDA driver must be asked.
"""

from __future__ import annotations

import platform
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UnsupportedTarget, mismatch
from .instructions import LLVM_OPTIONS, chosen, is_foreign, plain, unlisted
from .threads import threads_of

if TYPE_CHECKING:
    from tvm.target import Target

# Instruction sets, best first: the features each one needs, the -mcpu that gives exactly them
# (code for it runs on every CPU of the class, unlike code for one CPU's name), vector bits.
_X86_ISAS: tuple[tuple[str, frozenset[str], str, int], ...] = (
    (
        "avx512",
        frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma"}),
        "x86-64-v4",
        512,
    ),
    ("avx2", frozenset({"avx2", "fma", "f16c", "bmi2"}), "x86-64-v3", 256),
)
_GENERIC_BITS = 128

# GPU architectures that kernels are compiled for, with the multiprocessors of a large chip: what a
# target is taken to have where no GPU can be asked. The first is that of a machine without one.
_CUDA_ARCHS = {
    "sm_90a": 132,
    "sm_80": 108,
    "sm_86": 84,
    "sm_89": 142,
    "sm_90": 132,
    "sm_100": 148,
    "sm_120": 188,
}
_CLUSTERS_SINCE = 90  # compute capability, in tenths
_CUDA_REGISTER_BITS = 32
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class TargetInfo:
    """One resolved target.

    ``isa`` is "avx512", "avx2", "generic" or a GPU's architecture ("sm_90a"); ``mcpu`` the CPU
    that code is made for, or the architecture again; ``threads`` the CPU's, or the GPU's
    multiprocessors; ``vector_bits`` the width of its registers; ``tvm_target`` what
    ``tvm.target.Target`` takes; ``model`` a GPU's short name, such as "h200".
    """

    kind: str
    isa: str
    mcpu: str
    threads: int
    vector_bits: int
    tvm_target: dict[str, Any] = field(compare=False)
    model: str = ""

    @property
    def device(self) -> str:
        """Folder of the device's records in a tile database: "xeon-avx512", "h200-sm_90a"."""
        return f"{self.model}-{self.isa}" if self.kind == "cuda" else device_name(self.isa)

    @property
    def clusters(self) -> bool:
        """Whether it is a GPU whose CTAs form clusters, and whose kernels may overlap."""
        return self.kind == "cuda" and has_clusters(self.isa)


def resolve_target(target: str | Mapping[str, Any] | Target = "llvm") -> TargetInfo:
    """Parse, complete and check a target.

    Parameters
    ----------
    target
        ``"llvm"`` (this machine's CPU), ``"llvm -mcpu=x86-64-v3"`` (also ``-mattr``, ``-mtriple``
        and ``-num-cores``), ``"cuda"`` (this machine's GPU, the first one if there are several),
        ``"cuda -arch=sm_90a -model=h200"``, TVM's dictionary form, or a ``tvm.target.Target``.

    Raises
    ------
    UnsupportedTarget
        The kind or architecture has no tile family, or TVM or LLVM does not know an option or
        the CPU.
    """
    options = _options(target)
    kind = str(options.pop("kind", ""))
    if kind == "cuda":
        return _cuda_target(options)
    if kind != "llvm":
        advice = "no other kind has tile families yet"
        raise UnsupportedTarget(mismatch("target", "kind 'llvm' or 'cuda'", repr(kind), advice))
    threads = threads_of(options.pop("num-cores", None))
    if options:
        mcpu, features = _described_cpu(options)
    else:
        features = host_features()
        mcpu = _portable_mcpu(features)
    isa, bits = _isa_of(features)
    tvm_target = {"kind": kind, "mcpu": mcpu, "num-cores": threads, **LLVM_OPTIONS, **options}
    return TargetInfo(kind, isa, mcpu, threads, bits, tvm_target)


def has_clusters(arch: str) -> bool:
    """Whether CTAs of a GPU's architecture, "sm_90a", form clusters. Since then a kernel may also
    begin while the one before it ends (programmatic dependent launch)."""
    return _capability(arch) >= _CLUSTERS_SINCE


def host_features() -> frozenset[str]:
    """Features of this machine's CPU, by the names that LLVM and Linux share.

    The kernel's list comes first: a virtual machine may hide features that LLVM would conclude
    from the CPU's model.
    """
    for line in _cpuinfo_lines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    from tvm.target import codegen

    return _llvm_features({"mcpu": str(codegen.llvm_get_system_cpu())})


def runs_here(info: TargetInfo) -> bool:
    """Whether code for a target runs on this machine: on its CPU, or its first GPU."""
    return not lacking(info)


def lacking(info: TargetInfo) -> str:
    """What this machine lacks to run code for a target, "" if nothing."""
    if info.kind == "cuda":
        return "" if _is_of(_gpu(), info.isa) else f"a GPU that runs code for {info.isa}"
    options = _cpu_options(info)
    if is_foreign(str(options.get("mtriple", platform.machine()))):
        return f"the triple {options['mtriple']}"
    if options == {"mcpu": _portable_mcpu(host_features())}:
        return ""
    return ", ".join(missing_features(needed_features(info)))


def needed_features(info: TargetInfo) -> frozenset[str]:
    """Instructions that code for a CPU may use, by plain names; none for GPUs."""
    return frozenset() if info.kind == "cuda" else chosen(_llvm_features(_cpu_options(info)))


def missing_features(needed: frozenset[str]) -> list[str]:
    """Those of a target's `needed_features` that this machine's CPU has not."""
    missing = needed - plain(host_features())
    if hidden := unlisted(missing):
        from tvm.target import codegen

        concluded = _llvm_features({"mcpu": str(codegen.llvm_get_system_cpu())})
        missing -= hidden & plain(concluded)
    return sorted(missing)


def device_name(isa: str) -> str:
    """Short name of this machine's CPU with an instruction set: "xeon-avx512"."""
    model = platform.processor() or platform.machine()
    for line in _cpuinfo_lines():
        if line.startswith("model name"):
            model = line.partition(":")[2]
            break
    return f"{_slug(model)}-{isa}"


# --------------------------------------------------------------------------------------------


def _options(target: str | Mapping[str, Any] | Target) -> dict[str, Any]:
    """Kind and options as one dictionary, without what TVM fills in by itself."""
    if isinstance(target, str):
        return _parse(target)
    if isinstance(target, Mapping):
        options = dict(target)
    elif hasattr(target, "export"):
        options = dict(target.export())
        # An exported Target always names a triple; the host's own says nothing.
        if options.get("mtriple") == _host_triple():
            del options["mtriple"]
    else:
        raise UnsupportedTarget(
            mismatch("target", "a string, a dictionary or a tvm Target", type(target).__name__)
        )
    for name in ("tag", "keys", "host"):
        options.pop(name, None)
    return options


def _parse(text: str) -> dict[str, Any]:
    """``llvm -mcpu=x -mattr=+a,+b`` as a dictionary; TVM itself no longer takes this form."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UnsupportedTarget(mismatch("target", "balanced quotes", repr(text))) from error
    options: dict[str, Any] = {"kind": words[0] if words else ""}
    for word in words[1:]:
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or not equals or not value:
            raise UnsupportedTarget(mismatch("target", "options of the form -name=value", word))
        options[name] = value.split(",") if name == "mattr" else value
    return options


def _cuda_target(options: dict[str, Any]) -> TargetInfo:
    """A GPU: what the user names, else this machine's first one, else a whole Hopper chip."""
    for name in ("max_num_threads", "thread_warp_size", "libs"):  # filled in by TVM
        options.pop(name, None)
    given = options.pop("arch", None)
    model = options.pop("model", None)
    if options:
        raise UnsupportedTarget(
            mismatch("target", "options -arch and -model of kind 'cuda'", sorted(options))
        )
    gpu = _gpu()
    arch = str(given or (gpu[0] if gpu else next(iter(_CUDA_ARCHS))))
    if arch not in _CUDA_ARCHS:
        expected = f"one of {sorted(_CUDA_ARCHS)}, the architectures that have kernels"
        raise UnsupportedTarget(mismatch("target -arch", expected, repr(arch)))
    here = gpu if _is_of(gpu, arch) else None
    name = _slug(str(model)) if model else (here[1] if here else "gpu")
    count = here[2] if here else _CUDA_ARCHS[arch]
    tvm_target = {"kind": "cuda", "arch": arch}
    return TargetInfo("cuda", arch, arch, count, _CUDA_REGISTER_BITS, tvm_target, name)


def _gpu() -> tuple[str, str, int] | None:
    """Architecture, short name and multiprocessors of this machine's first GPU; None without."""
    import tvm

    device = tvm.cuda(0)
    if not device.exist:
        return None
    sm = "sm_" + str(device.compute_version).replace(".", "")
    arch = f"{sm}a" if f"{sm}a" in _CUDA_ARCHS else sm
    return arch, _slug(str(device.device_name)), int(device.multi_processor_count)


def _is_of(gpu: tuple[str, str, int] | None, arch: str) -> bool:
    """Whether a GPU runs code of an architecture: that of its own capability."""
    return gpu is not None and _capability(gpu[0]) == _capability(arch)


def _capability(arch: str) -> int:
    return int("".join(filter(str.isdigit, arch)))


def _cpu_options(info: TargetInfo) -> dict[str, Any]:
    return {k: v for k, v in info.tvm_target.items() if k not in ("kind", "num-cores", "cl-opt")}


def _described_cpu(options: dict[str, Any]) -> tuple[str, frozenset[str]]:
    """Take -mcpu out of ``options``; its name, and the features that LLVM gives the target."""
    for feature in options.get("mattr", ()):
        if not str(feature).startswith(("+", "-")):
            raise UnsupportedTarget(mismatch("target -mattr", "+name or -name", repr(feature)))
    given = options.pop("mcpu", None)
    triple = str(options.get("mtriple") or _host_triple())
    mcpu = str(given) if given else _default_mcpu(triple)
    from tvm.target import codegen

    if not codegen.llvm_is_valid_cpu(mcpu, triple):
        raise UnsupportedTarget(
            mismatch("target -mcpu", f"a CPU that LLVM knows for {triple}", repr(mcpu))
        )
    return mcpu, _llvm_features({"mcpu": mcpu, **options})


def _default_mcpu(triple: str) -> str:
    if triple.split("-")[0] != platform.machine():
        return "generic"
    return _portable_mcpu(host_features())


def _portable_mcpu(features: frozenset[str]) -> str:
    for _, needed, mcpu, _ in _X86_ISAS:
        if needed <= features:
            return mcpu
    return "x86-64" if platform.machine() in ("x86_64", "AMD64") else "generic"


def _isa_of(features: frozenset[str]) -> tuple[str, int]:
    for isa, needed, _, bits in _X86_ISAS:
        if needed <= features:
            return isa, bits
    return "generic", _GENERIC_BITS


def _llvm_features(options: dict[str, Any]) -> frozenset[str]:
    from tvm.target import Target, codegen

    try:
        described = Target({"kind": "llvm", **options})
    except (ValueError, TypeError, RuntimeError) as error:
        last_line = str(error).strip().splitlines()[-1]
        raise UnsupportedTarget(mismatch("target", "options that TVM knows", last_line)) from error
    return frozenset(str(name) for name in codegen.llvm_get_cpu_features(described))


def _host_triple() -> str:
    from tvm.target import codegen

    return str(codegen.llvm_get_system_triple())


def _cpuinfo_lines() -> list[str]:
    return _CPUINFO.read_text(encoding="utf-8").splitlines() if _CPUINFO.is_file() else []


def _slug(model: str) -> str:
    """A chip's marketing name as a folder name: vendor, frequency and filler words dropped."""
    text = re.sub(r"\((r|tm)\)|@.*$|\b\d+-core\b", " ", model.lower())
    words = re.findall(r"[a-z0-9]+", text)
    filler = {"intel", "amd", "nvidia", "cpu", "gpu", "processor", "core", "with", "virtual"}
    return "-".join(word for word in words if word not in filler) or "cpu"
