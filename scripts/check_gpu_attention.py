"""Random calls of attention by masks, and of its gradients, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from bench_gpu_build import ARCH, Asked, Wanted
from bench_gpu_measure import synchronize
from check_gpu_kinds import DTYPES
from check_gpu_problem import case_rng
from check_gpu_values import MOST_FAULTS, Checker, Report

from pit_tvm.errors import PitError
from pit_tvm.runtime.cuda_masked_attention import CudaMaskedAttention
from pit_tvm.schedules.cuda_attention_gradients import MOST_WIDE_GRADIENT
from pit_tvm.schedules.cuda_gradient_rows import GradientTile
from pit_tvm.schedules.cuda_listed_products import STEP
from pit_tvm.schedules.cuda_masked_attention import AttentionTile
from pit_tvm.schedules.hopper_knobs import ISA
from pit_tvm.torch import ListedMask, list_mask, masked_attention

WIDTHS = ((64, 64), (128, 128), (80, 40), (7, 5), (192, 128), (256, 256))  # of keys, of values
SHARES = (1, 1, 1, 2, 3, 4, 7, 8, 16, 40, 65)  # heads of queries to one of keys
QUERIES = (1, 2, 5, 17, 64, 65, 130, 300, 700)
PATTERNS = ("random", "window", "causal", "documents", "blocks", "keys")
DENSITIES = (0.0, 0.003, 0.05, 0.5, 1.0)
MOST = 2**23  # scores
LIMITS = {"float16": (4e-3, 1e-2), "bfloat16": (3e-2, 8e-2)}  # of results, and of gradients
_SINKS = (-math.inf, 40.0, -40.0)


@dataclass(frozen=True)
class Attended:
    """A call: sizes, what its mask is like, and how it is made."""

    dtype: str
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    widths: tuple[int, int]
    pattern: str
    planes: tuple[int, int]
    scale: float
    sinks: str
    softcap: float | None
    gradients: bool
    listed: bool

    def __str__(self) -> str:
        sizes = f"{self.batch} x {self.heads} / {self.kv_heads} x {self.queries} x {self.keys}"
        how = (
            "gradients" * self.gradients,
            "listed" * self.listed,
            f"{self.sinks} sinks",
            f"{self.softcap}",
        )
        parts = (self.dtype, sizes, self.widths, self.pattern, self.planes, *how)
        return " ".join(str(part) for part in parts if part)


def draw(rng: np.random.Generator) -> Attended:
    """A random call, of at most `MOST` scores."""
    while True:
        kv_heads, share = int(rng.integers(1, 5)), int(rng.choice(SHARES))
        batch, heads = int(rng.integers(1, 4)), kv_heads * share
        queries, keys = int(rng.choice(QUERIES)), int(2 ** rng.uniform(0, 13))
        if batch * heads * queries * keys <= MOST and heads <= 130:
            break
    dtype, widths = str(rng.choice(DTYPES)), WIDTHS[rng.integers(len(WIDTHS))]
    planes = int(rng.choice([1, batch])), int(rng.choice([1, 1, heads]))
    pattern, scale = str(rng.choice(PATTERNS)), float(rng.choice([0.05, 0.3, -0.2]))
    sinks = str(rng.choice(["", "", dtype, "float32"]))
    softcap = None if sinks or rng.random() < 0.5 else 3.0
    gradients = max(widths) <= MOST_WIDE_GRADIENT and bool(rng.random() < 0.4)
    listed, sizes = bool(rng.random() < 0.5), (batch, heads, kv_heads, queries, keys)
    given: tuple[Any, ...] = widths, pattern, planes, scale, sinks, softcap, gradients, listed
    return Attended(dtype, *sizes, *given)


def mask_of(call: Attended, rng: np.random.Generator) -> np.ndarray:
    """bool [batch or 1, heads or 1, queries or 1, keys], with queries that see none."""
    shape = (*call.planes, call.queries, call.keys)
    rows, columns = np.arange(call.queries)[:, None], np.arange(call.keys)
    behind = rows + call.keys - call.queries - columns
    if call.pattern == "keys":
        mask = rng.random((*call.planes, 1, call.keys)) < rng.choice(DENSITIES)
    elif call.pattern == "window":
        mask = (np.abs(behind) <= rng.integers(1, 80)) | (columns < rng.integers(0, 9))
    elif call.pattern == "causal":
        mask = behind >= 0
    elif call.pattern == "documents":
        ends = np.sort(rng.integers(0, call.keys + 1, 1 + call.keys // 100))
        mask = np.searchsorted(ends, columns) == np.searchsorted(ends, columns[-1] - behind)
    else:
        size = 1 if call.pattern == "random" else int(rng.choice([16, 64, 128]))
        few = (*call.planes, -(-call.queries // size), -(-call.keys // size))
        seen = rng.random(few) < rng.choice(DENSITIES)
        seen = seen.repeat(size, axis=-2).repeat(size, axis=-1)
        mask = seen[..., : call.queries, : call.keys]
    if call.pattern == "keys":
        return mask
    mask = np.broadcast_to(mask, shape).copy()
    mask[rng.random(mask.shape[:3]) < 0.02] = False
    return mask


def check_attention(
    family: str,
    numbers: Sequence[int],
    seed: int,
    checker: Checker,
    tell: Callable[[str], None] = print,
) -> Report:
    """As `check_gpu_values.check_family`; memory that results may get holds NaN before."""
    report = Report()
    for number in numbers:
        rng = case_rng(seed, family, number)
        call = draw(rng)
        report.cases += 1
        failed, fault = False, ""
        try:
            fault = fault_of(call, rng, checker.device)
            synchronize(checker.device)
        except PitError as error:
            fault = f"{type(error).__name__}: {error}"
        except RuntimeError as error:
            failed, fault = True, f"the device has failed: {error}"
        report.calls += 1
        report.tiles.update(map(str, _tiles(call)))
        if fault:
            report.faults.append(f"{family} case {number} of seed {seed}: {call}: {fault}")
            tell(report.faults[-1])
        if failed or len(report.faults) >= MOST_FAULTS:
            break
    return report


def fault_of(call: Attended, rng: np.random.Generator, device: str) -> str:
    """What is wrong with a call's result, or with its gradients; "" if nothing is."""
    mask = torch.from_numpy(mask_of(call, rng)).to(device)
    given, down = _operands(call, mask, rng, device)
    exact = [one.detach().double() for one in given]
    if call.gradients:
        given, exact = ([one.requires_grad_() for one in each] for each in (given, exact))
    exact[1:3] = [one.nan_to_num(0, 0) for one in exact[1:3]]
    shape = call.batch, call.heads, call.queries, call.keys
    seen: torch.Tensor | ListedMask = mask
    if call.listed:
        seen = list_mask(mask, shape, gradients=call.gradients, kv_heads=call.kv_heads)
    torch.full((4 * down.numel() + 2**16,), torch.nan, device=device)  # memory that comes next
    sinks = given[3] if call.sinks else None
    q, k, v, *_ = given
    options = {"scale": call.scale, "softcap": call.softcap}
    found = masked_attention(q, k, v, seen, sinks=sinks, **options)
    wanted = _exact(call, exact, mask)
    limits = LIMITS[call.dtype]
    pairs = [("out", found, wanted, limits[0])]
    if call.gradients:
        mine = torch.autograd.grad(found, given, down)
        theirs = torch.autograd.grad(wanted, exact, down.double())
        for name, got, want in zip(("q", "k", "v", "sinks"), mine, theirs, strict=False):
            pairs.append((f"gradient to {name}", got, want, limits[1]))
    for name, got, want, limit in pairs:
        apart, largest = (got.double() - want).detach().abs().max(), want.detach().abs().max()
        error = float(apart / largest.clamp(min=1.0))
        if not error <= limit:
            return f"{name}: off by {error:.2g}, at most {limit}"
    return ""


def _operands(
    call: Attended, mask: torch.Tensor, rng: np.random.Generator, device: str
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v, and sinks if there are any; and a gradient to the result. On GPUs keys that nobody
    sees are no numbers where there are no gradients, which read the keys of whole steps."""
    dtype, random = getattr(torch, call.dtype), torch.Generator(device)
    random.manual_seed(int(rng.integers(2**31)))

    def normal(heads: int, rows: int, width: int) -> torch.Tensor:
        beside = bool(rng.random() < 0.5)  # heads of a row side by side
        shape = (rows, heads, width) if beside else (heads, rows, width)
        made = torch.randn(call.batch, *shape, device=device, generator=random).to(dtype)
        return made.transpose(1, 2) if beside else made

    q = normal(call.heads, call.queries, call.widths[0])
    k, v = (normal(call.kv_heads, call.keys, width) for width in call.widths)
    if device == "cuda" and not call.gradients:  # torch reads them
        unseen = ~mask.any(dim=-2).any(dim=1).any(dim=0)
        k[..., unseen, :], v[..., unseen, :] = torch.nan, torch.inf
    given = [q, k, v]
    if call.sinks:
        sinks = torch.randn(call.heads, device=device, generator=random) * 3
        for place in range(0, call.heads, 5):
            sinks[place] = _SINKS[place % len(_SINKS)]
        given.append(sinks.to(getattr(torch, call.sinks)))
    return given, normal(call.heads, call.queries, call.widths[1])


def _exact(call: Attended, given: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    q, k, v, *sinks = given
    key, value = (one.repeat_interleave(call.heads // call.kv_heads, 1) for one in (k, v))
    seen = mask.any(dim=-1, keepdim=True)
    scores = q @ key.mT * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~mask & seen, -torch.inf)
    if sinks:
        beside = sinks[0][:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, beside], dim=-1)
    return scores.softmax(dim=-1)[..., : call.keys] * seen @ value


def _tiles(call: Attended) -> Iterator[AttentionTile | GradientTile]:
    """Kernels of a call on Hopper."""
    deep, wide = (-(-width // STEP) * STEP for width in call.widths)
    sizes = call.dtype, deep, wide, ARCH == ISA
    capped = call.softcap is not None
    yield AttentionTile(*sizes, call.sinks, capped=capped)
    if call.gradients:
        yield from (GradientTile(*sizes, of_keys, capped=capped) for of_keys in (False, True))


def attention_kernels() -> list[Wanted]:
    """What `check_attention` runs beside lists."""
    found: dict[Wanted, None] = {}
    for dtype in DTYPES:
        for widths in WIDTHS:
            for sinks, softcap in (("", None), (dtype, None), ("float32", None), ("", 1.0)):
                wide = max(widths) > MOST_WIDE_GRADIENT
                rest: tuple[Any, ...] = ("", (1, 1), 1.0, sinks, softcap, not wide, False)
                for tile in _tiles(Attended(dtype, 1, 1, 1, 1, 1, widths, *rest)):
                    name = "kernel" if isinstance(tile, AttentionTile) else "gradient_kernel"
                    found[Asked(CudaMaskedAttention, name, (tile,))] = None
    return list(found)
