"""The suite ``attention``: self-attention in bfloat16 by a mask that is new at every call.

One mask for all heads, in which every token sees itself:

* window: tokens up to so far away, and a few random tokens that all see;
* global: the same, and these few see all;
* blocks: random blocks of 128 x 128, and those of the diagonal;
* documents: packed ones of log-normal lengths, causal inside each;
* random: single elements;
* picked: of what came before, every token picks its own;
* causal: what came before; full: everything.

Contenders:

* pit: ``pit_tvm.torch.masked_attention``, the mask's lists included;
* sdpa: ``scaled_dot_product_attention`` with that mask, of all elements; heads of keys that
  several share have been repeated for it;
* full: the same without a mask: another result, and what dense attention costs;
* flex: compiled ``flex_attention``, its block mask given;
* flex_mask: compiled ``create_block_mask``, which a new mask adds to that. Both on a GPU, where
  torch can compile them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from bench_gpu_measure import (
    Contender,
    GpuSettings,
    fresh_memory,
    generator,
    measure,
    normal,
    on,
    rounding_error,
)
from bench_rows import (
    NEVER_BELOW,
    Column,
    Row,
    Suite,
    Target,
    block_mask,
    fact,
    fact_column,
    limits,
    time_column,
)
from torch.nn.functional import scaled_dot_product_attention

from pit_tvm.schedules.cuda_listed_rows import KEYS
from pit_tvm.torch import list_mask, masked_attention

BLOCK = 128
MEAN, SPREAD = 500, 0.5  # of lengths of documents
CHUNK = 1024  # queries that float64 computes at once
# Roundings to bfloat16, as `rounding_error` counts them, of rows that have a root mean square of 1.
# The result's own is below one. Weights are rounded as well, each by 0.6 of one in the root mean
# square: their sum with random values is off by 0.6, and by three and a half in the worst of many
# millions. A row that lacks one of a window's 600 keys is off by six or seven in the median.
LIMIT = 5.0
JUDGED = ("pit", "listed", "sdpa", "flex")
SDPA_SPEED_UP, FLEX_SPEED_UP = 1.5, 1.2
OVER_SDPA = ("window", "global", "blocks", "documents", "picked")
OVER_FLEX = ("window", "global", "documents", "picked")

Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Attended:
    """Attention of ``tokens`` to each other. ``reach`` of a window; ``seen``: tokens that all see;
    ``density`` of random blocks or elements; ``share`` heads have the same keys."""

    kind: str
    heads: int
    tokens: int
    dim: int
    reach: int = 0
    seen: int = 0
    density: float = 0.0
    share: int = 1
    held_out: bool = False

    @property
    def kv_heads(self) -> int:
        """Heads of keys."""
        return self.heads // self.share

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        density = f" {100 * self.density:.0f} %" * bool(self.density)
        heads = f"{self.heads}/{self.kv_heads}" if self.share > 1 else f"{self.heads}"
        return f"{self.kind}{density} {heads}x{self.tokens}x{self.dim}"


def list_attention(quick: bool) -> list[Attended]:
    """Cases of the suite, those of one shape in a row: torch compiles for a shape at a time."""
    if quick:
        small = (2, 512, 64)
        return [
            *(Attended(kind, *small, reach=32, seen=8) for kind in ("window", "global")),
            Attended("blocks", *small, density=0.25),
            Attended("random", *small, density=0.01),
            *(Attended(kind, *small) for kind in ("documents", "causal", "full")),
            Attended("picked", 4, 512, 64, density=0.1, share=2),
            Attended("window", 3, 376, 80, reach=20, seen=5, held_out=True),
        ]
    usual, wide, long = (12, 4096, 64), (16, 4096, 128), (32, 16384, 128)
    grouped = (32, 4096, 128)
    return [
        *(Attended(kind, *usual, reach=256, seen=64) for kind in ("window", "global")),
        *(Attended("blocks", *usual, density=density) for density in (0.05, 0.25)),
        Attended("random", *usual, density=0.01),
        *(Attended(kind, *usual) for kind in ("causal", "full")),
        Attended("window", *wide, reach=256, seen=64),
        Attended("full", *wide),
        *(Attended(kind, *long, reach=256, seen=64) for kind in ("window", "global")),
        Attended("documents", 16, 8192, 128),
        *(Attended("picked", *grouped, density=density, share=4) for density in (0.03, 0.12)),
        Attended("causal", *grouped, share=4),
        Attended("picked", 28, 8192, 128, density=0.05, share=7, held_out=True),
        Attended("window", 20, 6000, 80, reach=300, seen=40, held_out=True),
        Attended("blocks", 14, 5120, 128, density=0.1, held_out=True),
    ]


# --------------------------------------------------------------------------------------------
# Data


def make_mask(case: Attended, rng: np.random.Generator, device: str) -> torch.Tensor:
    """bool [tokens, tokens]: whether a query sees a key."""
    tokens = case.tokens
    at = torch.arange(tokens, device=device, dtype=torch.int32)
    if case.kind == "full":
        return at.new_ones((tokens, tokens), dtype=torch.bool)
    if case.kind == "blocks":
        drawn = on(device, block_mask(rng, (tokens, tokens), (BLOCK, BLOCK), 1 - case.density))
        return drawn | (at[:, None] // BLOCK == at // BLOCK)
    if case.kind == "random":
        return on(device, rng.random((tokens, tokens)) < case.density) | (at[:, None] == at)
    if case.kind in ("causal", "documents", "picked"):
        before = at[:, None] >= at
        if case.kind == "picked":
            before &= on(device, rng.random((tokens, tokens)) < case.density) | (at[:, None] == at)
        return before & _alike(rng, at) if case.kind == "documents" else before
    mask = (at[:, None] - at).abs() <= case.reach
    seen = on(device, rng.choice(tokens, case.seen, replace=False))
    mask[:, seen] = True
    if case.kind == "global":
        mask[seen] = True
    return mask


def _alike(rng: np.random.Generator, at: torch.Tensor) -> torch.Tensor:
    """Whether two places are in one document."""
    drawn = rng.lognormal(math.log(MEAN) - SPREAD * SPREAD / 2, SPREAD, len(at))
    lengths = np.maximum(drawn.round(), 1).astype(np.int64)
    documents = on(str(at.device), np.repeat(np.arange(len(at)), lengths)[: len(at)])
    return documents[:, None] == documents


def make_data(case: Attended, settings: GpuSettings) -> tuple[Qkv, torch.Tensor]:
    """q [1, heads, tokens, dim], k and v of as many heads or fewer, and the mask."""
    rng = settings.rng(case.label)
    mask = make_mask(case, rng, settings.device)
    made = generator(rng, settings.device)
    heads = case.heads, case.kv_heads, case.kv_heads
    q, k, v = (normal(made, (1, own, case.tokens, case.dim), "bfloat16") for own in heads)
    return (q, k, v), mask


def wanted(qkv: Qkv, mask: torch.Tensor) -> torch.Tensor:
    """Attention in float64, head by head and some queries at a time."""
    q, k, v = qkv
    want = q.new_empty(q.shape, dtype=torch.float64)
    for head in range(q.shape[1]):
        own = head // (q.shape[1] // k.shape[1])
        keys, values = k[0, own].double(), v[0, own].double()
        for start in range(0, len(mask), CHUNK):
            part = slice(start, start + CHUNK)
            scores = q[0, head, part].double() @ keys.t() / math.sqrt(q.shape[-1])
            scores.masked_fill_(~mask[part], float("-inf"))
            want[0, head, part] = scores.softmax(-1) @ values
    return want


def attention_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest deviation, in the unit of `LIMIT`: queries that see few keys have larger results."""
    if got.shape != want.shape:
        return float("inf")
    scale = want.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
    return rounding_error(got / scale, want / scale, str(got.dtype).removeprefix("torch."))


# --------------------------------------------------------------------------------------------
# Contenders


@lru_cache(maxsize=1)
def compiled_flex(*shape: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``flex_attention`` and ``create_block_mask``, compiled for one shape: what torch has compiled
    for others counts against the number after which it stops."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return attend, torch.compile(create_block_mask, dynamic=False, fullgraph=True)


def flex(qkv: Qkv, mask: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """``flex`` and ``flex_mask``."""
    attend, create = compiled_flex(*qkv[0].shape)

    def sees(b: Any, h: Any, query: Any, key: Any) -> torch.Tensor:
        return mask[query, key]

    def make() -> Any:
        return create(sees, None, None, *mask.shape, device=str(mask.device))

    blocks, fewer = make(), qkv[1].shape[1] < qkv[0].shape[1]
    run = partial(attend, *qkv, block_mask=blocks, enable_gqa=fewer)
    return {"flex": run, "flex_mask": make}


def runs(qkv: Qkv, mask: torch.Tensor, device: str) -> tuple[dict[str, Callable[[], Any]], str]:
    """Every contender; and why there is no ``flex``, or nothing."""
    q, k, v = qkv
    if k.shape[1] < q.shape[1]:
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    found: dict[str, Callable[[], Any]] = {
        "pit": lambda: masked_attention(*qkv, mask),
        "sdpa": lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask),
        "full": lambda: scaled_dot_product_attention(q, k, v),
    }
    return (found, "") if device != "cuda" else with_flex(found, lambda: flex(qkv, mask))


def with_flex(
    found: dict[str, Callable[[], Any]], make: Callable[[], dict[str, Callable[[], Any]]]
) -> tuple[dict[str, Callable[[], Any]], str]:
    """Contenders and those of FlexAttention, where torch can compile it; and why it cannot."""
    try:
        more = make()
        more["flex"]()
    except (RuntimeError, TypeError, ValueError) as error:
        return found, " ".join(f"{type(error).__name__}: {error}".split())[:400]
    return {**found, **more}, ""


def gathered(case: Attended, mask: torch.Tensor) -> float:
    """Share of all steps of keys that tiles of queries take, on a GPU."""
    shape = 1, case.heads, *mask.shape
    listed = list_mask(mask, shape, gradients=False, kv_heads=case.kv_heads)
    assert listed.queries is not None
    most = math.ceil(len(mask) / KEYS)
    return listed.queries.steps() / (listed.queries.ids.shape[1] * most)


def measure_attention(case: Attended, settings: GpuSettings) -> Row:
    """One mask: every contender, correct or not."""
    with fresh_memory(settings.device):
        qkv, mask = make_data(case, settings)
        want = wanted(qkv, mask)
        contenders = runs(qkv, mask, settings.device)
        error = partial(attention_error, want=want)
        facts = square_facts(case, mask)
        facts["operations"] = 4.0 * case.heads * case.dim * int(mask.sum())
        return measured(case, settings, mask, contenders, error, LIMIT, facts)


def square_facts(case: Attended, mask: torch.Tensor) -> dict[str, Any]:
    """Sizes, and how much of a mask tiles take."""
    live = {"live": gathered(case, mask)} if mask.is_cuda else {}
    return {"sizes": [case.heads, case.kv_heads, case.tokens, case.dim], **live}


def measured(
    case: Any,
    settings: GpuSettings,
    mask: torch.Tensor,
    contenders: tuple[dict[str, Callable[[], Any]], str],
    error: Callable[[Any], float],
    limit: float,
    facts: dict[str, Any],
) -> Row:
    """The row of one mask, by what `runs` gives: how long contenders take, how far they are off and
    how far they may be, and how many times longer than pit every peer takes, flex with its mask;
    ``facts``: others of the row."""
    some, missing = contenders
    judged = {n: Contender(run, error if n in JUDGED else None) for n, run in some.items()}
    found = measure(judged, settings)
    facts = {
        "kind": case.kind,
        "density": int(mask.sum()) / mask.numel(),
        "without_graph": found.plain,
        **({"without_flex": missing} if missing else {}),
        **facts,
    }
    row = Row(case.label, case.held_out, found.stats, facts, found.errors, limit)
    peers = {"sdpa": ("sdpa",), "full": ("full",), "flex": ("flex", "flex_mask")}
    for name, parts in peers.items():
        if name in row.stats:
            row.facts[f"over_{name}"] = sum(map(row.us, parts)) / row.us("pit")
    return row


def attention_targets(rows: Sequence[Row]) -> list[Target]:
    """Masks with structure gain over sdpa, and over flex and its mask; no other mask loses."""
    peers = ("sdpa", SDPA_SPEED_UP, OVER_SDPA), ("flex", FLEX_SPEED_UP, OVER_FLEX)
    return attention_goals("attention", rows, peers)


def attention_goals(
    suite: str, rows: Sequence[Row], peers: Sequence[tuple[str, float, Sequence[str]]]
) -> list[Target]:
    """Of every peer its goal for some kinds of masks; the others lose nothing to sdpa."""
    targets = []
    for peer, goal, kinds in peers:
        over = f"over_{peer}"
        for kind in kinds:
            some = [row for row in rows if row.facts["kind"] == kind and over in row.facts]
            name = f"{suite}: {kind}, over {peer}"
            targets += limits(some, name, goal, fact(over))
    others = [row for row in rows if row.facts["kind"] not in OVER_SDPA]
    name = f"{suite}: other masks, over sdpa"
    return [*targets, *limits(others, name, NEVER_BELOW, fact("over_sdpa"))]


def columns() -> tuple[Column, ...]:
    """What a row shows: all contenders, and two ratios."""
    return (
        fact_column("live", "live", ".3f"),
        *(time_column(name, name, 1) for name in ("full", "sdpa", "flex", "flex_mask", "pit")),
        fact_column("/sdpa", "over_sdpa", ".2f"),
        fact_column("/flex", "over_flex", ".2f"),
    )


ATTENTION = Suite(
    name="attention",
    title="of tokens to each other by a new mask, bf16; us",
    cases=list_attention,
    measure=measure_attention,
    columns=columns(),
    targets=attention_targets,
)
