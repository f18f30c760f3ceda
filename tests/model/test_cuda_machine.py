"""Kernels of a graph that nvcc refuses, told from an nvcc that does not work."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import tvm  # noqa: E402
from tvm import relax  # noqa: E402

from pit_tvm.errors import BackendUnavailable, PitError, UnsupportedModel  # noqa: E402
from pit_tvm.model import cuda_machine  # noqa: E402
from pit_tvm.model.cuda_machine import compile_graph  # noqa: E402
from pit_tvm.runtime import cuda_build  # noqa: E402
from pit_tvm.runtime.kernel_cache import KernelCache  # noqa: E402
from pit_tvm.target import resolve_target  # noqa: E402
from tests.model.graphs import B, T, graph  # noqa: E402

# An nvcc that refuses some sources, or all.
STUB = """#!/bin/sh
for source; do :; done
if {refused}; then echo "error: no such thing" >&2; exit 1; fi
while [ "$1" != -o ]; do shift; done
: > "$2"
"""


@pytest.mark.parametrize(
    ("refused", "error"),
    [('grep -q expf "$source"', UnsupportedModel), ("true", BackendUnavailable)],
)
def test_what_nvcc_refuses_is_the_models_fault_if_it_works(
    refused: str, error: type[PitError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(STUB.format(refused=refused), encoding="utf-8")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    target = resolve_target({"kind": "cuda", "arch": "sm_90a"})
    module = graph(relax.op.exp, x=(B, T, 8))
    with pytest.raises(error, match="no such thing"):
        compile_graph(module, tvm.IRModule(), target, KernelCache(tmp_path / "kernels"))


def test_sums_of_narrow_integers_are_cast_back_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[str] = []

    def refuse(source: str, arch: str) -> None:
        sources.append(source)
        raise BackendUnavailable("nvcc is not asked")

    for home in (cuda_build, cuda_machine):
        monkeypatch.setattr(home, "compile_source", refuse)
    module = graph(lambda x: relax.op.maximum(relax.op.add(x, x), x), x=("int8", B, T, 7))
    target = resolve_target({"kind": "cuda", "arch": "sm_90a"})
    with pytest.raises(BackendUnavailable, match="not asked"):
        compile_graph(module, tvm.IRModule(), target, KernelCache(tmp_path / "kernels"))
    assert "(signed char)(((int)" in sources[0]
