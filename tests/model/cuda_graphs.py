"""A model's graph as a GPU has it, on the CPU with stand-ins for its kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pit_tvm.model import cuda, cuda_kernels
from pit_tvm.model.cuda_attention import ATTENTION, PADDED, WINDOWED, padded_attention
from pit_tvm.model.cuda_kernels import CudaKernels
from pit_tvm.model.experts import GROUPED
from pit_tvm.model.importer import Imported
from pit_tvm.model.linear import LINEAR
from pit_tvm.model.packing import LIVE_TOKENS
from pit_tvm.model.plane import Plane
from pit_tvm.model.rewrite import rewrite
from pit_tvm.model.swrite import PLACED
from pit_tvm.schedules.cuda_norm import norm_rows
from tests.model.cuda_stand_ins import (
    attention,
    grouped_of,
    index_of,
    layers_of,
    norm_of,
    placed_by,
)
from tests.model.test_torch_program import program


def take_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let graphs be as those of 16 bits are, which would hide what is wrong."""
    never_compiled = norm_rows(8, "float16", 1e-5, 1)
    monkeypatch.setattr(CudaKernels, "attends", lambda *_: True)
    monkeypatch.setattr(cuda_kernels, "NARROW", ("float32",))
    monkeypatch.setattr(cuda_kernels, "norm_rows", lambda *_, **__: never_compiled)


def graph_of(imported: Imported, attended: set[str] | None = None) -> Callable[..., Any]:
    """What a GPU would run of a model, with stand-ins for its kernels; ``attended`` gets the names
    of those for attention."""
    kernels = CudaKernels(Plane(imported.batch, imported.tokens))
    rewritten = rewrite(imported, kernels)
    module, layers = cuda._graph(imported, rewritten)
    run = layers_of(layers)
    norms = {name: norm_of(eps, *how) for (_, _, eps, *how), name in kernels._norms.items()}
    packed: dict[str, Any] = {
        LINEAR: run,
        GROUPED: grouped_of(rewritten.grouped),
        PLACED: placed_by(run),
        LIVE_TOKENS: index_of,
        ATTENTION: attention,
        WINDOWED: attention,
        PADDED: padded_attention,
    }
    if attended is not None:
        attended |= {
            name for name in (ATTENTION, WINDOWED, PADDED) if f'"{name}"' in module.script()
        }
    made = program(module, **packed, **norms)
    return lambda **inputs: made(*inputs.values())
