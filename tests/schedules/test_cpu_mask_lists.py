"""Lists of what tiles of queries see, by masks of any strides, on every instruction set of x86."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm.target import Target

from pit_tvm.errors import TileNotFound
from pit_tvm.schedules.cpu_mask_lists import LINE, SERIAL_BYTES, WORD, mask_lists, tile_of
from pit_tvm.target import resolve_target
from tests.schedules import sparse

TARGETS = ["llvm", "llvm -mcpu=x86-64-v3", "llvm -mcpu=x86-64"]
SHARES = [0.0, 0.01, 0.3, 1.0]


@functools.cache
def kernel(target: str) -> tuple[Callable[..., None], int]:
    """A compiled kernel for three threads, and queries of a tile."""
    info = resolve_target(f"{target} -num-cores=3")
    mod = tvm.IRModule({"main": mask_lists(target=info)})
    return tvm.compile(mod, target=Target(info.tvm_target)).mod["main"], tile_of(info)


def check(target: str, mask: np.ndarray, fold: int = 0) -> None:
    """Lists name what is seen, and nothing that is not; 2 ** fold rows of a tile are a query's."""
    main, tile = kernel(target)
    batch, heads, queries, keys = mask.shape
    shared = min(1 << fold, tile)
    tiles = -(-queries * shared // tile)
    shapes = [(batch * heads * tiles, keys)] * 2 + [(batch * heads * tiles,)] * 2
    ids, bits, counts, seeing = (sparse.fenced(np.full(s, -7, np.int32)) for s in shapes)
    main(mask, ids, bits, counts, seeing, shared)
    at = np.minimum(np.arange(tiles * tile) // shared, queries - 1)
    seen = mask.astype(bool)[:, :, at].reshape(-1, tile, keys)
    words = (seen * (1 << np.arange(tile, dtype=np.uint64))[:, None]).sum(axis=1).astype(np.uint32)
    for number, word in enumerate(words):
        listed = np.flatnonzero(word)
        assert counts[number] == len(listed)
        np.testing.assert_array_equal(ids[number, : len(listed)], listed)
        np.testing.assert_array_equal(bits.view(np.uint32)[number, : len(listed)], word[listed])
    np.testing.assert_array_equal(seeing.view(np.uint32), np.bitwise_or.reduce(words, axis=-1))


@pytest.mark.parametrize("target", TARGETS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_masks_of_any_shape_and_strides(target: str, data: st.DataObject) -> None:
    extents = st.integers(1, 3), st.integers(1, 3), st.integers(1, 80)
    keys = st.one_of(st.integers(1, 2 * LINE * WORD + 20), st.sampled_from([WORD, LINE * WORD]))
    shape = tuple(data.draw(one) for one in (*extents, keys))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    given = (rng.random(shape) < data.draw(st.sampled_from(SHARES))).astype(np.uint8)
    given *= np.uint8(data.draw(st.sampled_from([1, 128, 255])))  # any of them stands for true
    order = data.draw(st.permutations(range(3)))
    laid = sparse.fenced(np.ascontiguousarray(given.transpose(*order, 3)))
    check(target, laid.transpose(*np.argsort(order), 3), data.draw(st.integers(0, 5)))


@pytest.mark.parametrize("target", TARGETS)
def test_many_threads_list_large_masks(target: str) -> None:
    rng = np.random.default_rng(0)
    keys = SERIAL_BYTES // (2 * 3 * 70) + 5
    check(target, (rng.random((2, 3, 70, keys)) < 0.02).astype(np.uint8))


def test_repeated_queries_take_no_memory() -> None:
    row = (np.random.default_rng(1).random((2, 1, 1, 90)) < 0.5).astype(np.uint8)
    shape, steps = (2, 3, 40, 90), (90, 0, 0, 1)
    check("llvm", np.lib.stride_tricks.as_strided(row, shape, steps))


def test_is_for_cpus() -> None:
    with pytest.raises(TileNotFound, match="isa"):
        mask_lists(target=resolve_target("cuda -arch=sm_90a"))
