"""How rows of heads become tiles on a CPU, and what they are said to cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pit_tvm.reference import attention as reference
from pit_tvm.runtime import masked_attention
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.runtime.masked_attention import MaskedAttention
from pit_tvm.target import resolve_target
from tests.schedules import sparse


@pytest.fixture(scope="module")
def attend() -> MaskedAttention:
    """With tiles of 16 rows, on every machine that runs tests."""
    return MaskedAttention(KernelCache(), resolve_target("llvm -mcpu=x86-64-v3 -num-cores=2"))


@pytest.mark.parametrize(
    ("queries", "share", "fold"),
    [
        (1, 1, 0),
        (1, 8, 3),  # half a tile
        (1, 16, 3),  # two halves, or one tile
        (2, 8, 2),
        (1, 6, 1),
        (1, 3, 0),
        (3, 4, 2),  # 12 rows of a tile, or 6 of half a tile, twice
        (8, 8, 2),
        (100, 8, 2),
        (100, 2, 1),
    ],
)
def test_heads_become_rows_of_tiles(
    attend: MaskedAttention, queries: int, share: int, fold: int
) -> None:
    mask = np.ones((1, 1, queries, 20), np.uint8)
    lists = attend.lists(mask, queries, share)
    assert (lists.fold, lists.tiles) == (fold, -(-(queries << fold) // 16))
    assert lists.seeing
    # Heads that see keys of their own have tiles of their own.
    assert attend.lists(mask.repeat(2, axis=1), queries, share).fold == 0


def test_lists_stay_smaller_than_memory(
    attend: MaskedAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = np.ones((1, 1, 64, 20), np.uint8)
    lists = 64 // 16 * 20 * 8  # bytes, without sharing
    for most, fold in ((4 * lists, 2), (4 * lists - 1, 1), (lists, 0), (1, 0)):
        monkeypatch.setattr(masked_attention, "_MOST_LISTED", most)
        assert attend.lists(mask, 64, 4).fold == fold


def test_work_is_that_of_what_is_listed(attend: MaskedAttention) -> None:
    mask = np.zeros((1, 1, 40, 200), np.uint8)
    nothing = attend.lists(mask, 40, 2)
    mask[:, :, :8, :50] = 1
    some = attend.lists(mask, 40, 2)
    assert not nothing.seeing and not some.seeing
    # One tile of five, of 8 queries of two heads each, in three sequences of six heads.
    more = attend.pairs(some, (3, 6, 40)) - attend.pairs(nothing, (3, 6, 40))
    assert more == 3 * 3 * 50 * 16
    whole = attend.lists(np.ones((1, 1, 1, 200), np.uint8), 40, 2)
    assert whole.seeing and attend.pairs(whole, (1, 2, 40)) > 2 * 40 * 200


@given(
    share=st.integers(1, 8),
    queries=st.integers(1, 20),
    keys=st.integers(1, 90),
    own=st.tuples(*[st.booleans()] * 3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=20, deadline=None)
def test_results_do_not_depend_on_tiles(
    attend: MaskedAttention,
    share: int,
    queries: int,
    keys: int,
    own: tuple[bool, bool, bool],
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    heads = 2 * share
    q = sparse.random(rng, (2, heads, queries, 16), "float32")
    k, v = (sparse.random(rng, (2, 2, keys, 16), "float32") for _ in range(2))
    extents = (2, heads, queries)
    planes = [extent if has else 1 for has, extent in zip(own, extents, strict=True)]
    mask = (rng.random((*planes, keys)) < rng.choice([0.05, 0.5])).astype(np.uint8)
    sinks = rng.standard_normal(heads).astype(np.float32) if seed % 2 else None
    out = sparse.poisoned(q.shape, "float32")
    attend(q, k, v, attend.lists(mask, queries, share), 0.25, out, sinks)
    sparse.assert_promise(out, reference.masked_attention(q, k, v, mask > 0, 0.25, sinks))
