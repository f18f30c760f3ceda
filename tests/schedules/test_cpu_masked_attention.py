"""Attention over listed keys on CPUs: any mask, any strides, on every instruction set of x86."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tvm.target import Target

from pit_tvm.errors import DTypeError, ShapeError, TileNotFound
from pit_tvm.reference import attention as reference
from pit_tvm.runtime.arrays import as_tensor
from pit_tvm.schedules.cpu_attention_parts import KEYS
from pit_tvm.schedules.cpu_mask_lists import tile_of
from pit_tvm.schedules.cpu_masked_attention import GROUP, masked_attention
from pit_tvm.target import resolve_target
from tests.schedules import sparse

NOBODY = 2**30  # an id far beyond every array


@dataclass(frozen=True)
class Form:
    """What one kernel is built for."""

    dim: int
    value_dim: int
    dtype: str
    sinks: bool = False
    target: str = "llvm"
    threads: int = 3

    @functools.cached_property
    def kernel(self) -> tuple[Callable[..., None], int]:
        """Compiled, and queries of a tile."""
        info = resolve_target(f"{self.target} -num-cores={self.threads}")
        func = masked_attention(self.dim, self.value_dim, self.dtype, self.sinks, target=info)
        mod = tvm.IRModule({"main": func})
        return tvm.compile(mod, target=Target(info.tvm_target)).mod["main"], tile_of(info)


PLAIN = Form(32, 32, "float32")
SUNK = Form(19, 24, "float16", sinks=True)
FORMS = [
    PLAIN,
    SUNK,
    Form(40, 16, "bfloat16", target="llvm -mcpu=x86-64-v3", threads=2),
    Form(5, 37, "float32", sinks=True, target="llvm -mcpu=x86-64", threads=1),
]


@dataclass(frozen=True)
class Sizes:
    """Of one call."""

    batch: int
    kv_heads: int
    share: int
    queries: int
    keys: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.share


def random_mask(rng: np.random.Generator, kind: str, planes: tuple[int, ...]) -> np.ndarray:
    """A mask of one kind, [batch or 1, heads or 1, queries or 1, keys]."""
    queries, keys = np.arange(planes[2])[:, None], np.arange(planes[3])
    share = {"empty": 0.0, "full": 1.0, "few": 0.03}.get(kind, 0.5)
    mask = rng.random(planes) < share
    if kind == "window":
        mask[:] = (queries - keys >= 0) & (queries - keys < 20)
    if kind == "blind":
        mask[:, :, ::3] = False
    return mask


def lists_of(mask: np.ndarray, tile: int, shared: int) -> tuple[np.ndarray, ...]:
    """Lists in random order, with what nobody may read behind them; ``shared`` rows of a query."""
    queries, keys = mask.shape[2:]
    at = np.minimum(np.arange(-(-queries * shared // tile) * tile) // shared, queries - 1)
    seen = mask[:, :, at].reshape(-1, tile, keys)
    words = (seen * (1 << np.arange(tile, dtype=np.uint64))[:, None]).sum(axis=1)
    rng = np.random.default_rng(len(words))
    ids = np.full((len(words), keys), NOBODY, np.int32)
    bits, counts = np.full_like(ids, -1), np.zeros(len(words), np.int32)
    for number, word in enumerate(words.astype(np.uint32).view(np.int32)):
        listed = rng.permutation(np.flatnonzero(word))
        counts[number] = len(listed)
        ids[number, : len(listed)], bits[number, : len(listed)] = listed, word[listed]
    return ids, bits, counts


def operands(form: Form, sizes: Sizes, seed: int) -> tuple[np.ndarray, ...]:
    """q, k and v, and sinks."""
    rng = np.random.default_rng(seed)
    rows = (sizes.heads, sizes.queries), (sizes.kv_heads, sizes.keys), (sizes.kv_heads, sizes.keys)
    widths = form.dim, form.dim, form.value_dim
    arrays = [
        sparse.random(rng, (sizes.batch, *two, width), form.dtype)
        for two, width in zip(rows, widths, strict=True)
    ]
    return *arrays, rng.standard_normal(sizes.heads if form.sinks else 0).astype(np.float32)


def laid(array: np.ndarray, beside: bool) -> np.ndarray:
    """A copy before a forbidden page; heads of a row lie side by side, or rows of a head."""
    if not beside:
        return sparse.fenced(array)
    return sparse.fenced(np.ascontiguousarray(array.swapaxes(1, 2))).swapaxes(1, 2)


def as_strided(array: np.ndarray) -> Any:
    """The array as compiled functions take it, of any strides."""
    if array.dtype.name != "bfloat16":
        return array if array.size else tvm.runtime.empty(array.shape, array.dtype.name)
    torch = pytest.importorskip("torch", reason="numpy's bfloat16 has no strides for tvm")
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def run(form: Form, arrays: tuple[np.ndarray, ...], mask: np.ndarray, **how: Any) -> np.ndarray:
    """The kernel's result, in poisoned memory between forbidden pages."""
    main, tile = form.kernel
    q, k, v, sinks = arrays
    out = laid(sparse.poisoned((*q.shape[:3], v.shape[3]), form.dtype), how.get("beside", False))
    share, fold = q.shape[1] // k.shape[1], how.get("fold", 0)
    if mask.shape[1] > 1 or share % (1 << fold) or 1 << fold > tile:
        fold = 0
    lists = [sparse.fenced(one) for one in lists_of(mask, tile, 1 << fold)]
    given = [laid(one, how.get("beside", False)) for one in (q, k, v)]
    tiles = -(-(mask.shape[2] << fold) // tile)
    steps = tiles * mask.shape[1] * (mask.shape[0] > 1), tiles * (mask.shape[1] > 1)
    together = min(GROUP, share >> fold) if mask.shape[1] == 1 else 1
    main(
        *map(as_strided, given),
        *lists,
        as_tensor("sinks", sinks, dtype="float32", shape=sinks.shape),
        as_strided(out),
        how.get("scale", 0.2),
        *steps,
        int(mask.shape[2] > 1),
        together,
        fold,
    )
    return out


def check(form: Form, sizes: Sizes, mask: np.ndarray, seed: int, **how: Any) -> None:
    q, k, v, sinks = arrays = operands(form, sizes, seed)
    truth = reference.masked_attention(q, k, v, mask, 0.2, sinks if form.sinks else None)
    sparse.assert_promise(run(form, arrays, mask, **how), truth)


@pytest.mark.parametrize("form", FORMS, ids=str)
@settings(max_examples=15, deadline=None)
@example(Sizes(2, 1, GROUP + 1, 40, 2 * KEYS + 3), "half", (1, 0, 1), 0, 0)
@example(Sizes(2, 2, 8, 19, KEYS + 3), "half", (1, 0, 1), 2, 1)
@example(Sizes(2, 1, 16, 3, KEYS + 3), "half", (1, 0, 1), 3, 0)
@given(
    sizes=st.builds(
        Sizes,
        st.integers(1, 3),
        st.integers(1, 2),
        st.integers(1, 2 * GROUP),
        st.integers(1, 70),
        st.integers(1, KEYS + 40),
    ),
    kind=st.sampled_from(["empty", "full", "few", "half", "window", "blind"]),
    own=st.tuples(*[st.integers(0, 1)] * 3),
    fold=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_masks(
    form: Form, sizes: Sizes, kind: str, own: tuple[int, ...], fold: int, seed: int
) -> None:
    whole = sizes.batch, sizes.heads, sizes.queries
    planes = *(extent if has else 1 for has, extent in zip(own, whole, strict=True)), sizes.keys
    mask = random_mask(np.random.default_rng(seed), kind, planes)
    check(form, sizes, mask, seed, beside=seed % 2 == 1, fold=fold)


def test_threads_share_long_lists() -> None:
    sizes = Sizes(1, 3, 1, 5 * KEYS + 3, 5 * KEYS)
    mask = np.tri(sizes.queries, sizes.keys, dtype=bool)[None, None]
    check(PLAIN, sizes, mask, 1)
    check(SUNK, sizes, mask, 2)


def test_large_scores_overflow_nothing() -> None:
    sizes = Sizes(1, 2, 1, 40, 2 * KEYS + 9)
    q, k, v, sinks = operands(PLAIN, sizes, 2)
    q *= 100
    q[:, :, :20] *= -1  # also maxima far below zero
    k[..., 0], q[..., 0] = np.abs(k[..., 0]) + 50, q[..., 0] - 500
    mask = random_mask(np.random.default_rng(3), "half", (1, 1, sizes.queries, sizes.keys))
    truth = reference.masked_attention(q, k, v, mask, 0.2)
    # a score of 1e4 is rounded to 1e-3 in float32
    assert np.abs(run(PLAIN, (q, k, v, sinks), mask) - truth).max() <= 2e-2


def test_what_is_no_number_reaches_only_who_sees_it() -> None:
    sizes = Sizes(1, 2, 1, 50, 90)
    q, k, v, sinks = operands(PLAIN, sizes, 4)
    mask = random_mask(np.random.default_rng(5), "half", (1, 1, sizes.queries, sizes.keys))
    mask[..., 7] = False
    mask[..., :8, 9] = False
    truth = reference.masked_attention(q, k, v, mask, 0.2)
    hit = np.zeros(truth.shape, bool)
    k[0, 1, 9, 3] = q[0, 0, 5, 0] = v[0, 0, 7, 0] = np.nan
    hit[0, 1, mask[0, 0, :, 9]] = hit[0, 0, 5] = True
    got = run(PLAIN, (q, k, v, sinks), mask)
    assert np.isnan(got[hit]).all()
    np.testing.assert_allclose(got[~hit], truth[~hit], atol=1e-5)


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (ShapeError, {"head_dim": 0}),
        (ShapeError, {"value_dim": 2.5}),
        (DTypeError, {"dtype": "int8"}),
        (TileNotFound, {"target": resolve_target("cuda -arch=sm_90a")}),
    ],
)
def test_refuses(error: Any, change: dict[str, Any]) -> None:
    given = {"head_dim": 8, "value_dim": 8, "dtype": "float32", "target": resolve_target("llvm")}
    with pytest.raises(error, match=next(iter(change)) if error is not TileNotFound else "isa"):
        masked_attention(**(given | change))
