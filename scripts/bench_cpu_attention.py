"""The suite ``attention``: masks that are new at every call, against torch's own with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from bench_cpu_measure import take_turns, times_faster
from bench_rows import (
    NEVER_BELOW,
    Array,
    Column,
    Row,
    Settings,
    Stat,
    Suite,
    Target,
    block_mask,
    fact,
    fact_column,
    limits,
    time_column,
)
from torch.nn.functional import scaled_dot_product_attention

import pit_tvm.torch as pit
from pit_tvm.reference.attention import masked_attention

TYPES = (torch.float32, torch.bfloat16, torch.float16)
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
HEADS, TOKENS, WIDE = 12, 4096, 64
PADDED = (8, 128, 40)  # sequences, tokens, and how many of these live on average
CHECKED = 64  # queries
FEW = 0.5  # share of keys that are seen up to which gathering is held to more speed
WINDOWS_OVER, FEW_OVER = 4.0, 1.0

Made = Callable[[np.random.Generator, int], Array]


@dataclass(frozen=True)
class Attended:
    """Attention by masks of one kind in one type."""

    kind: str
    dtype: torch.dtype
    tokens: int
    held_out: bool = False

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        return f"{self.kind} {str(self.dtype).removeprefix('torch.')}"


def _window(_: np.random.Generator, tokens: int) -> Array:
    far = np.arange(tokens)[:, None] - np.arange(tokens)
    return (far >= 0) & (far < tokens // 16)


def _packed(_: np.random.Generator, tokens: int) -> Array:
    document = np.arange(tokens) // (tokens * 500 // 4096)
    return np.asarray(document[:, None] == document)


def _blocks(share: float) -> Made:
    def made(rng: np.random.Generator, tokens: int) -> Array:
        grain = tokens // 32
        return block_mask(rng, (tokens, tokens), (grain, grain), 1 - share)

    return made


def _padded(rng: np.random.Generator, tokens: int) -> Array:
    """[sequences, 1, 1, tokens]."""
    sequences, _, mean = PADDED
    lengths = np.clip(rng.normal(mean, mean / 2, sequences), 1, tokens).astype(np.int64)
    return (np.arange(tokens) < lengths[:, None])[:, None, None]


KINDS: dict[str, Made] = {
    "windows of 1/16": _window,
    "packed documents": _packed,
    "5 % of blocks": _blocks(0.05),
    "25 % of blocks": _blocks(0.25),
    "causal": lambda _, tokens: np.tri(tokens, dtype=np.bool_),
    "padded": _padded,
    "all keys": lambda _, tokens: np.ones((tokens, tokens), np.bool_),
}


def list_attended(quick: bool) -> list[Attended]:
    """Cases of the suite."""
    tokens = TOKENS // 16 if quick else TOKENS
    sizes = {kind: PADDED[1] if kind == "padded" else tokens for kind in KINDS}
    return [Attended(kind, dtype, sizes[kind]) for kind in KINDS for dtype in TYPES]


def measure_attended(case: Attended, settings: Settings) -> Row:
    """One mask, for all heads of a sequence, or one of each sequence's padding."""
    rng = settings.rng(case.label)
    mask = torch.from_numpy(KINDS[case.kind](rng, case.tokens))
    sequences = mask.shape[0] if mask.dim() == 4 else 1
    shape = sequences, case.tokens, HEADS, WIDE
    q, k, v = (
        torch.from_numpy(rng.standard_normal(shape, np.float32)).to(case.dtype).transpose(1, 2)
        for _ in range(3)
    )
    if mask.dim() == 2:
        mask = mask[None, None]
    runs = {
        "pit": lambda: pit.masked_attention(q, k, v, mask),
        "torch": lambda: scaled_dot_product_attention(q, k, v, mask),
    }
    rows = np.sort(rng.choice(case.tokens, min(case.tokens, CHECKED), replace=False))
    picked = mask[:, :, rows] if mask.shape[2] > 1 else mask
    left, keys, values = (each.float().numpy() for each in (q[:, :, rows], k, v))
    truth = masked_attention(left, keys, values, picked.numpy(), WIDE**-0.5)
    with torch.no_grad():
        seconds = take_turns(runs, settings.repeats)
        errors = {name: error_of(run()[:, :, rows], truth) for name, run in runs.items()}
    stats = {name: Stat.of(kept) for name, kept in seconds.items()}
    facts = {
        "seen": float(mask.float().mean()),
        "over_torch": times_faster(seconds, "pit", "torch"),
        "type": str(case.dtype),
        "kind": case.kind,
    }
    return Row(case.label, case.held_out, stats, facts, errors, LIMITS[case.dtype])


def error_of(found: torch.Tensor, truth: Array) -> float:
    """Largest deviation over the largest exact value; infinite if an element is not finite."""
    got = found.float().numpy()
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.abs(got - truth).max() / np.abs(truth).max())


def attention_targets(rows: Sequence[Row]) -> list[Target]:
    """The limits on times torch's speed."""
    over, targets = fact("over_torch"), []
    for name, limit, here in (
        ("windows", WINDOWS_OVER, lambda row: row.facts["kind"].startswith("windows")),
        ("at most half of all keys", FEW_OVER, lambda row: row.facts["seen"] <= FEW),
        ("every mask", NEVER_BELOW, lambda row: True),
    ):
        targets += limits(rows, f"attention: over torch, {name}", limit, over, only=here)
    return targets


ATTENTION = Suite(
    name="attention",
    title=f"attention by masks, {HEADS} heads of {WIDE} columns and {TOKENS} tokens (padded: "
    f"{PADDED[0]} x {PADDED[1]}), medians in ms",
    cases=list_attended,
    measure=measure_attended,
    columns=(
        fact_column("keys seen", "seen", ".3f"),
        time_column("pit-tvm", "pit"),
        time_column("torch", "torch"),
        fact_column("times faster", "over_torch", ".2f"),
        Column("rel. err.", lambda row: f"{row.error:.1e}"),
    ),
    targets=attention_targets,
)
