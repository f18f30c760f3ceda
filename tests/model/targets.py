"""Models compiled for a CPU and for a GPU, in every type of numbers, beside torch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import pit_tvm.model  # noqa: E402

NARROW = (torch.float16, torch.bfloat16)
ON_CPU = [("llvm", dtype) for dtype in (torch.float32, *NARROW)]
ON_GPU = [pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in NARROW]


def both(model: torch.nn.Module, target: str, x: Any, live: Any) -> tuple[Any, Any]:
    """What the model compiled for a target makes of ``x``, and what torch does."""
    mask = torch.ones(3, 7, dtype=torch.int64)
    example = {"input": torch.rand(3, 7, x.shape[-1]).to(x.dtype), "attention_mask": mask}
    compiled = pit_tvm.model.compile(model.eval(), example, target=target)
    device = "cuda" if target == "cuda" else "cpu"
    got = compiled(input=x.to(device), attention_mask=live.to(device)).cpu()
    return got, model(x, live)
