"""The suite ``attention-training``: attention by a new mask and its gradients, in bfloat16.

Masks, sizes and contenders are those of the suite ``attention``; each computes the result and the
gradients to q, k and v.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from bench_gpu_attention import (
    FLEX_SPEED_UP,
    OVER_FLEX,
    OVER_SDPA,
    SDPA_SPEED_UP,
    Attended,
    Qkv,
    attention_goals,
    columns,
    list_attention,
    make_data,
    measured,
    runs,
    square_facts,
)
from bench_gpu_measure import GpuSettings, fresh_memory, generator, normal
from bench_rows import Row, Suite, Target

# Of a row's gradient, relative to itself plus the root mean square of all rows: bfloat16 rounds
# weights, results and gradients to scores by 2**-9, and the sums of some rows are small beside what
# is added up. A row of usual size that lacks one of a window's 600 keys is off by 2 %.
LIMIT = 0.015


def list_training(quick: bool) -> list[Attended]:
    """The cases that fit beside what torch keeps for gradients, whose heads have their own keys."""
    cases = list_attention(quick)
    return [case for case in cases if case.tokens <= 8192 and case.share == 1]


def wanted_gradients(qkv: Qkv, mask: torch.Tensor, down: torch.Tensor) -> list[torch.Tensor]:
    """Those to q, k and v in float64, head by head."""
    want = [torch.empty_like(each, dtype=torch.float64) for each in qkv]
    for head in range(down.shape[1]):
        q, k, v = (each[0, head].double().requires_grad_() for each in qkv)
        scores = (q @ k.t() / math.sqrt(q.shape[-1])).masked_fill_(~mask, float("-inf"))
        found = torch.autograd.grad(scores.softmax(-1) @ v, (q, k, v), down[0, head].double())
        for whole, each in zip(want, found, strict=True):
            whole[0, head] = each
    return want


def gradient_error(found: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """The largest deviation of a row, in the unit of `LIMIT`."""
    worst = 0.0
    for mine, exact in zip(found, want, strict=True):
        if mine.shape != exact.shape:
            return float("inf")
        sizes = exact.norm(dim=-1)
        typical = sizes.square().mean().sqrt()
        apart = (mine.double() - exact).norm(dim=-1) / (sizes + typical).clamp(min=1e-30)
        worst = max(worst, float(apart.max().nan_to_num(nan=float("inf"))))
    return worst


def steps(qkv: Qkv, mask: torch.Tensor, device: str, down: torch.Tensor) -> Any:
    """Contenders of `runs` with gradients, and why there is no ``flex``."""
    given = tuple(each.requires_grad_() for each in qkv)
    forward, missing = runs(given, mask, device)  # type: ignore[arg-type]

    def both(run: Callable[[], torch.Tensor]) -> Callable[[], tuple[torch.Tensor, ...]]:
        return lambda: torch.autograd.grad(run(), given, down)

    return {n: run if n == "flex_mask" else both(run) for n, run in forward.items()}, missing


def measure_training(case: Attended, settings: GpuSettings) -> Row:
    """One mask: every contender, correct or not."""
    with fresh_memory(settings.device):
        qkv, mask = make_data(case, settings)
        made = generator(settings.rng(f"{case.label} down"), settings.device)
        down = normal(made, tuple(qkv[0].shape), "bfloat16")
        want = wanted_gradients(qkv, mask, down)
        contenders = steps(qkv, mask, settings.device, down)
        error = partial(gradient_error, want=want)
        facts = square_facts(case, mask)
        return measured(case, settings, mask, contenders, error, LIMIT, facts)


def training_targets(rows: Sequence[Row]) -> list[Target]:
    """As those of attention."""
    peers = ("sdpa", SDPA_SPEED_UP, OVER_SDPA), ("flex", FLEX_SPEED_UP, OVER_FLEX)
    return attention_goals("attention-training", rows, peers)


ATTENTION_TRAINING = Suite(
    name="attention-training",
    title="and its gradients, by a new mask, bf16; us",
    cases=list_training,
    measure=measure_training,
    columns=columns(),
    targets=training_targets,
)
