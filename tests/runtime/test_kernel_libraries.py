"""Kernels that one cache hands to another as files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te

from pit_tvm import Lengths, compile, op
from pit_tvm.errors import BackendUnavailable, ShapeError
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.tile_db.store import TileStore
from pit_tvm.transform.unalign import unalign

KEY, OTHER = "ab" * 32, "cd" * 32


def build(factor: float = 3.0) -> Any:
    """Compiles ``out[p] = data[p] * factor``."""
    data = te.placeholder((te.var("p"),), "float32", "data")
    out = te.compute(data.shape, lambda p: data[p] * tvm.tirx.const(factor, "float32"), "out")
    return tvm.compile(unalign(te.create_prim_func([data, out])), target="llvm")


def never() -> Any:
    raise AssertionError("the kernel should have been there")


def result_of(function: Callable[..., Any], poisoned: Any) -> float:
    """What a kernel gives for ones."""
    out = poisoned((4,))
    function(np.ones(4, np.float32), out)
    assert (out == out[0]).all()
    return float(out[0])


@pytest.fixture
def libraries(tmp_path: Path) -> dict[str, bytes]:
    cache = KernelCache(tmp_path / "first")
    cache.get(KEY, build)
    cache.get(OTHER, lambda: build(5.0))
    return cache.libraries()


def test_another_cache_runs_them_without_building(
    libraries: dict[str, bytes], tmp_path: Path, poisoned: Any
) -> None:
    cache = KernelCache(tmp_path / "second")
    cache.adopt(libraries)
    assert result_of(cache.get(KEY, never), poisoned) == 3
    assert result_of(cache.get(OTHER, never), poisoned) == 5
    assert cache.stats.builds == 0 and not cache.directory.exists()
    assert cache.libraries() == libraries


def test_only_what_was_used_is_handed_on(libraries: dict[str, bytes], tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "first")
    assert cache.libraries() == {}
    cache.get(KEY, never)
    assert cache.libraries() == {KEY: libraries[KEY]}


def test_a_cleared_cache_has_none(libraries: dict[str, bytes], tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "second")
    cache.adopt(libraries)
    cache.clear()
    assert cache.libraries() == {}


def test_kernels_that_are_not_on_disk(libraries: dict[str, bytes], tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "first")
    cache.get(KEY, never)
    (tmp_path / "first" / f"{KEY}.so").unlink()
    with pytest.raises(BackendUnavailable, match="all kernels in its folder.*PIT_TVM_CACHE"):
        cache.libraries()


def test_a_folder_stays_where_it_was_named(
    libraries: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache = KernelCache("first")
    cache.get(KEY, never)
    monkeypatch.chdir("/")
    cache.get(OTHER, never)
    assert cache.libraries() == libraries


def test_damaged_ones_are_refused(libraries: dict[str, bytes], tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "second")
    with pytest.raises(BackendUnavailable, match=f"kernel {KEY}: expected a sound library"):
        cache.adopt({KEY: libraries[KEY][:-1]})
    with pytest.raises(ShapeError, match="key: expected 64 hexadecimal digits"):
        cache.adopt({"../" + KEY[3:]: libraries[KEY]})
    assert cache.libraries() == {}


def test_operators_share_a_cache_and_a_store(tmp_path: Path, poisoned: Any) -> None:
    cache, store = KernelCache(tmp_path), TileStore.open()
    lhs, rhs = np.ones((4, 8), np.float32), np.ones((8, 16), np.float32)
    for _ in range(2):
        operator = compile(
            op.matmul(None, 16, 8), sparse={"lhs": Lengths()}, database=store, cache=cache
        )
        out = operator(lhs, rhs, sparsity=[4], out=poisoned((4, 16)))
        assert (out == 8).all()
    assert cache.stats.memory_hits >= cache.stats.builds > 0
    assert operator.cache_directory == tmp_path
