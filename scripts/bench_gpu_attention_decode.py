"""The suite ``attention-decode``: one query for each sequence, of a cache of keys in bfloat16, by a
mask that is new at every call, and the same for all heads.

* ragged: caches of uniform random lengths, padded to the longest;
* picked: an eighth of the keys, random ones, as sparse attention picks them;
* full: all keys;
* drafted: caches as in ragged, and four queries, each of a token more, as speculative decoding has.

Contenders:

* pit: ``pit_tvm.torch.masked_attention``, the mask's lists included;
* listed: the same by lists that are made once for all layers;
* sdpa: ``scaled_dot_product_attention`` with the mask, heads that share keys as queries of one, for
  which the mask is repeated before;
* full: torch's without a mask: another result, and what dense attention costs;
* flex: compiled ``flex_attention``, its block mask given, where torch can compile it;
* flex_mask: compiled ``create_block_mask``, which a new mask adds to that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from bench_gpu_attention import (
    LIMIT,
    Qkv,
    attention_error,
    compiled_flex,
    measured,
    with_flex,
)
from bench_gpu_measure import GpuSettings, fresh_memory, generator, normal, on
from bench_rows import (
    NEVER_BELOW,
    Row,
    Suite,
    Target,
    fact,
    fact_column,
    limits,
    time_column,
)
from torch.nn.functional import scaled_dot_product_attention

from pit_tvm.torch import list_mask, masked_attention

PICKED = 1 / 8
DRAFTED = 4
GOALS = {"ragged": 1.3, "picked": 1.5, "full": NEVER_BELOW, "drafted": 1.3}


@dataclass(frozen=True)
class Decoded:
    """Queries of ``batch`` sequences of at most ``keys`` keys; ``heads`` share those of
    ``kv_heads``."""

    kind: str
    batch: int
    heads: int
    kv_heads: int
    keys: int
    dim: int
    held_out: bool = False

    @property
    def queries(self) -> int:
        """Of each sequence."""
        return DRAFTED if self.kind == "drafted" else 1

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        return f"{self.kind} {self.batch}x{self.heads}/{self.kv_heads}x{self.keys}x{self.dim}"


def list_decoding(quick: bool) -> list[Decoded]:
    """Cases of the suite: those of one shape in a row."""
    if quick:
        small = [Decoded(kind, 3, 4, 2, 300, 64) for kind in GOALS]
        return [*small, Decoded("ragged", 2, 6, 2, 200, 80, held_out=True)]
    usual, lone = ((16, 32, 8, 4096, 128), (32, 32, 8, 4096, 128)), (1, 32, 8, 32768, 128)
    more = (16, 64, 8, 16384, 128), (32, 16, 16, 4096, 64)
    return [
        *(Decoded(kind, *shape) for shape in usual for kind in GOALS),
        *(Decoded(kind, *lone) for kind in ("picked", "full")),
        *(Decoded(kind, *shape) for shape in more for kind in ("ragged", "picked")),
        Decoded("drafted", *lone),
        Decoded("ragged", 24, 28, 4, 6000, 128, held_out=True),
        Decoded("picked", 12, 40, 8, 10000, 80, held_out=True),
        Decoded("drafted", 6, 24, 8, 7000, 128, held_out=True),
    ]


def make_data(case: Decoded, settings: GpuSettings) -> tuple[Qkv, torch.Tensor]:
    """q [batch, heads, queries, dim], k and v [batch, kv_heads, keys, dim], mask [batch, 1,
    queries, keys]."""
    rng = settings.rng(case.label)
    seen = np.ones((case.batch, case.queries, case.keys), bool)
    if case.kind == "picked":
        seen = rng.random(seen.shape) < PICKED
        seen[..., 0] = True
    if case.kind in ("ragged", "drafted"):
        longest = case.keys - case.queries + 1
        lengths = rng.integers(1, longest + 1, (case.batch, 1)) + np.arange(case.queries)
        seen &= np.arange(case.keys) < lengths[..., None]
    mask, made = on(settings.device, seen), generator(rng, settings.device)
    q = normal(made, (case.batch, case.heads, case.queries, case.dim), "bfloat16")
    shape = case.batch, case.kv_heads, case.keys, case.dim
    k, v = (normal(made, shape, "bfloat16") for _ in "kv")
    return (q, k, v), mask[:, None]


def wanted(qkv: Qkv, mask: torch.Tensor) -> torch.Tensor:
    """Attention in float64, one sequence at a time."""
    shared = qkv[0].shape[1] // qkv[1].shape[1]
    found = []
    for q, k, v, seen in zip(*qkv, mask, strict=True):
        keys, values = (each.double().repeat_interleave(shared, 0) for each in (k, v))
        scores = q.double() @ keys.mT / math.sqrt(q.shape[-1])
        found.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values)
    return torch.stack(found)


def runs(qkv: Qkv, mask: torch.Tensor, device: str) -> tuple[dict[str, Callable[[], Any]], str]:
    """Every contender; and why there is no ``flex``, or nothing."""
    q, k, v = qkv
    shape = q.shape
    lists = list_mask(mask, (*shape[:3], k.shape[2]), gradients=False, kv_heads=k.shape[1])
    rows = q.view(shape[0], k.shape[1], -1, shape[3])
    by_row = mask.repeat(1, 1, rows.shape[2] // shape[2], 1)

    found: dict[str, Callable[[], Any]] = {
        "pit": lambda: masked_attention(*qkv, mask),
        "listed": lambda: masked_attention(*qkv, lists),
        "sdpa": lambda: scaled_dot_product_attention(rows, k, v, attn_mask=by_row).view(shape),
        "full": lambda: scaled_dot_product_attention(*qkv, enable_gqa=True),
    }
    return (found, "") if device != "cuda" else with_flex(found, lambda: flex(qkv, mask))


def flex(qkv: Qkv, mask: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """``flex`` and ``flex_mask``."""
    q, k, _ = qkv
    attend, create = compiled_flex(*q.shape, *k.shape)

    def sees(b: Any, h: Any, query: Any, key: Any) -> torch.Tensor:
        return mask[b, 0, query, key]

    def make() -> Any:
        return create(sees, q.shape[0], None, q.shape[2], k.shape[2], device=str(mask.device))

    blocks = make()
    return {"flex": lambda: attend(*qkv, block_mask=blocks, enable_gqa=True), "flex_mask": make}


def measure_decoding(case: Decoded, settings: GpuSettings) -> Row:
    """One mask: every contender, correct or not."""
    with fresh_memory(settings.device):
        qkv, mask = make_data(case, settings)
        want = wanted(qkv, mask)
        contenders = runs(qkv, mask, settings.device)
        error = partial(attention_error, want=want)
        facts = {"live_bytes": 4 * case.kv_heads * case.dim * int(mask.any(2).sum())}
        return measured(case, settings, mask, contenders, error, LIMIT, facts)


def decoding_targets(rows: Sequence[Row]) -> list[Target]:
    """What is gained over torch with the mask, the lists counted."""
    targets = []
    for kind, goal in GOALS.items():
        some = [row for row in rows if row.facts["kind"] == kind]
        name = f"attention-decode: {kind}, over sdpa"
        targets += limits(some, name, goal, fact("over_sdpa"))
    return targets


ATTENTION_DECODE = Suite(
    name="attention-decode",
    title="of a few queries to cached keys by a new mask, bf16; us",
    cases=list_decoding,
    measure=measure_decoding,
    columns=(
        fact_column("live", "density", ".3f"),
        *(time_column(n, n, 1) for n in ("full", "sdpa", "flex", "flex_mask", "listed", "pit")),
        fact_column("/sdpa", "over_sdpa", ".2f"),
        fact_column("/flex", "over_flex", ".2f"),
    ),
    targets=decoding_targets,
)
