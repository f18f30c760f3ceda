"""Random products over live rows for ``check_gpu.py``, and what their results must be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from bench_rows import Array
from check_gpu_problem import SCALE, SHARES, Problem, activation, draw_extent, draw_whole, placed

import pit_tvm
from pit_tvm.structs import SparsitySpec

DTYPES = ("float16", "bfloat16")
EPILOGUES = (
    (False, None),
    (True, None),
    (True, "relu"),
    (True, "gelu"),
    (False, "gelu_tanh"),
    (True, "silu"),
)
PATTERNS = ("lengths", "cu_seqlens", "rows", "mask", "bitmask", "blockmask", "values")
NAMED = ("lengths", "cu_seqlens", "rows", "groups")  # what does not live is not promised to be 0
BLOCKS = ((1, 16), (4, 8), (32, 64))
BANDS = ((32, 1), (64, 16), (128, 64))  # blocks of zeros of an lhs that is stored [k, m]
GROUPS = (1, 2, 3, 8, 64, 130, 256)


@dataclass(frozen=True)
class Variant:
    """What an operator computes, apart from the pattern."""

    family: str
    dtype: str
    bias: bool
    act: str | None

    @property
    def plain(self) -> bool:
        """Without an epilogue."""
        return not self.bias and self.act is None

    @property
    def turned(self) -> bool:
        """Whether lhs is stored [k, m]; its live columns are gathered along k then."""
        return self.family == "turned"

    @property
    def bands(self) -> tuple[tuple[int, int], ...]:
        """Blocks of zeros that are drawn where lhs is turned: all, or one with an epilogue."""
        return BANDS if self.plain else BANDS[EPILOGUES.index((self.bias, self.act)) % 3 :][:1]


@dataclass(frozen=True)
class Shape:
    """One problem without its data; ``groups`` is 0 but for "grouped"."""

    variant: Variant
    pattern: str
    dead: str
    m: int
    n: int
    k: int
    groups: int = 0
    batch: int = 1
    block: tuple[int, int] = (1, 1)
    offset: int = 0  # elements by which operands and output lie off their alignment
    wide: bool = False  # int64 lengths and ids

    def __str__(self) -> str:
        v = self.variant
        parts = [v.family, v.dtype, f"{self.m}x{self.n}x{self.k}", self.pattern]
        parts += [f"{self.groups} groups"] * bool(self.groups) + ["bias"] * v.bias
        parts += [v.act or "", f"dead={self.dead}", f"offset {self.offset}"]
        return " ".join(filter(None, parts))

    @property
    def act(self) -> str | None:
        """The activation."""
        return self.variant.act

    @property
    def spec(self) -> SparsitySpec:
        """The pattern's specification."""
        extents = self.block[::-1] if self.variant.turned else ()
        made: dict[str, SparsitySpec] = {
            "lengths": pit_tvm.Lengths(),
            "cu_seqlens": pit_tvm.Lengths(cumulative=True),
            "rows": pit_tvm.Rows(),
            "mask": pit_tvm.Mask(*extents),
            "bitmask": pit_tvm.BitMask(*extents),
            "blockmask": pit_tvm.BlockMask(*(extents or self.block)),
            "values": pit_tvm.Values(*extents),
            "groups": pit_tvm.Groups(self.groups),
        }
        return made[self.pattern]


def variants(family: str) -> list[Variant]:
    """All that are checked of one family."""
    return [Variant(family, dtype, *epilogue) for epilogue in EPILOGUES for dtype in DTYPES]


def draw_shape(rng: np.random.Generator, variant: Variant) -> Shape:
    """Random sizes and a random pattern."""
    patterns = PATTERNS[3:] if variant.turned else PATTERNS
    blocks = variant.bands if variant.turned else BLOCKS
    pattern = "groups" if variant.family == "grouped" else str(rng.choice(patterns))
    most = 1500 if rng.random() < 0.05 else 300
    batch = int(rng.integers(1, 9)) if pattern in ("lengths", "cu_seqlens") else 1
    m = int(rng.integers(0, 40 if rng.random() < 0.3 else most) // batch) * batch
    named = pattern in NAMED
    groups = int(rng.choice(GROUPS)) if pattern == "groups" else 0
    most = 96 if groups > 8 else most
    return Shape(
        variant,
        pattern,
        str(rng.choice(["skip", "zero"])) if named else "skip",
        m,
        draw_extent(rng, most),
        draw_extent(rng, most),
        groups,
        batch,
        blocks[rng.integers(len(blocks))],
        int(rng.integers(1, 8)) if rng.random() < 0.1 else 0,
        bool(rng.random() < 0.3),
    )


def draw_problem(
    rng: np.random.Generator, shape: Shape, amount: str, device: str, share: float = -1.0
) -> Problem:
    """Data of a shape; ``amount`` of its rows live, or a ``share`` of them."""
    live = draw_live(rng, shape, amount, share)
    value, live, mask = _draw_pattern(rng, shape, live)
    lhs = draw_whole(rng, (shape.m, shape.k))
    if mask is not None:
        lhs = np.where(mask, np.where(lhs == 0, 1, lhs), 0)
    turned = shape.variant.turned
    lhs = lhs.T if turned else lhs
    stored = shape.variant.family in ("linear", "grouped")  # rhs as weights are
    sizes = (shape.n, shape.k) if stored else (shape.k, shape.n)
    rhs = draw_whole(rng, (*[shape.groups] * bool(shape.groups), *sizes)) * SCALE
    bias = draw_whole(rng, (*[shape.groups] * bool(shape.groups), shape.n))

    def put(array: Array) -> torch.Tensor:
        return placed(array, shape.variant.dtype, device, shape.offset)

    arrays = [put(lhs), put(rhs), *([put(bias)] if shape.variant.bias else [])]
    given = None if value is None else torch.from_numpy(value).to(device)
    want = _truth(shape, arrays, given)
    if shape.variant.family == "grouped":
        arrays.append(given)  # type: ignore[arg-type]
        given = None
    out = put(np.full((shape.m, shape.n), np.nan))
    promised = mask is not None
    written = torch.from_numpy(np.ones(shape.m, bool) if promised else live).to(device)
    return Problem(shape, tuple(arrays), given, out, written, want)


def draw_live(rng: np.random.Generator, shape: Shape, amount: str, share: float) -> Array:
    """bool ``[m]``: which rows live; runs of them from each sequence's start for lengths."""
    if share >= 0:  # as many in every draw, so that a captured call sees the same shapes
        return rng.permutation(shape.m) < round(share * shape.m)
    if amount == "one":
        live = np.zeros(shape.m, bool)
        live[: min(shape.m, 1)] = True
        return live if shape.batch > 1 else rng.permutation(live)
    live = rng.random(shape.m) < SHARES[amount]
    if not shape.pattern.startswith(("lengths", "cu")) or not shape.m:
        return live
    padded = shape.m // shape.batch
    lengths = np.array([part.sum() for part in live.reshape(shape.batch, padded)])
    return (np.arange(padded) < lengths[:, None]).reshape(-1)


def _draw_pattern(
    rng: np.random.Generator, shape: Shape, live: Array
) -> tuple[Array | None, Array, Array | None]:
    """What a call passes, the rows that really live, and the mask where zeros are promised."""
    whole = np.int64 if shape.wide else np.int32
    if shape.pattern in ("lengths", "cu_seqlens"):
        padded = shape.m // shape.batch
        lengths = live.reshape(shape.batch, padded).sum(axis=1)
        rows = (np.arange(padded) < lengths[:, None]).reshape(-1)
        sums = np.concatenate([[0], np.cumsum(lengths)])
        return (lengths if shape.pattern == "lengths" else sums).astype(whole), rows, None
    if shape.pattern == "rows":
        return rng.permutation(np.flatnonzero(live)).astype(whole), live, None
    if shape.pattern == "groups":
        skewed = rng.random() < 0.3
        ids = rng.integers(0, max(1, shape.groups // 8) if skewed else shape.groups, shape.m)
        return np.where(live, ids, -1).astype(np.int32), live, None
    return _draw_mask(rng, shape, live)


def _draw_mask(
    rng: np.random.Generator, shape: Shape, live: Array
) -> tuple[Array | None, Array, Array]:
    turned = shape.variant.turned
    rows, columns = shape.block if turned or shape.pattern == "blockmask" else (1, 1)
    height, width = -(-shape.m // rows), -(-shape.k // columns)
    blocks = rng.random((height, width)) < rng.choice([0.02, 0.5, 1.0])
    alive = np.add.reduceat(live, np.arange(0, shape.m, rows)) > 0 if shape.m else live[:0]
    blocks &= alive[:, None]
    blocks[alive, rng.integers(0, width, int(alive.sum()))] = True
    mask = blocks.repeat(rows, axis=0).repeat(columns, axis=1)[: shape.m, : shape.k]
    told, blocks = (mask.T, blocks.T) if turned else (mask, blocks)
    value: Array | None = {"mask": told, "blockmask": blocks}.get(shape.pattern)
    if shape.pattern == "bitmask":
        value = np.packbits(told, axis=-1, bitorder="little")
    return None if value is None else np.ascontiguousarray(value), mask.any(axis=1), mask


def _truth(shape: Shape, arrays: list[torch.Tensor], ids: torch.Tensor | None) -> torch.Tensor:
    """float64 ``[m, n]``; rows of no group are NaN."""
    lhs, rhs, *rest = (array.double() for array in arrays)
    if shape.variant.family == "grouped":
        out = torch.full((shape.m, shape.n), float("nan"), dtype=torch.float64, device=lhs.device)
        for group in torch.unique(ids).tolist() if ids is not None else ():
            rows = (ids == group).nonzero().flatten()
            if group >= 0:
                out[rows] = lhs[rows] @ rhs[group].t() + (rest[0][group] if rest else 0.0)
    else:
        out = lhs.t() @ rhs if shape.variant.turned else lhs @ _right(shape, rhs)
        out = out + rest[0] if rest else out
    return activation(shape.variant.act)(out)


def _right(shape: Shape, rhs: torch.Tensor) -> torch.Tensor:
    return rhs.t() if shape.variant.family == "linear" else rhs
