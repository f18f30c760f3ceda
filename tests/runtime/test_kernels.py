"""The compiled functions of one operator, each run by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te

from pit_tvm import op
from pit_tvm.errors import AxisError, ShapeError
from pit_tvm.runtime import kernels as module
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.runtime.kernels import Kernels
from pit_tvm.runtime.program import Program, analyse
from pit_tvm.schedules.contraction_space import lanes_of, starting_tiles
from pit_tvm.structs import BitMask, BlockMask, Groups, Mask, Rows, SparsitySpec
from pit_tvm.target import resolve_target

M, N, K = 37, 29, 131
TARGET = resolve_target("llvm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels of this module."""
    return tmp_path_factory.mktemp("kernels")


def kernels_of(program: Program, folder: Path) -> Kernels:
    return Kernels(program, TARGET, KernelCache(folder))


@pytest.fixture
def kernels(folder: Path) -> Kernels:
    """Of ``relu(lhs @ rhs.T + bias)`` with a mask."""
    tensors = op.linear(None, N, K, activation="relu")
    return kernels_of(analyse(tensors, {"lhs": Mask()}), folder)


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng()
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def packed(kernels: Kernels, rhs: np.ndarray) -> np.ndarray:
    out = np.full(kernels.packed(rhs.shape).shape, np.nan, np.float32)
    kernels.pack()(rhs, out)
    return out


@pytest.mark.parametrize("spec", [Rows(), Rows(1), Mask()], ids=str)
@pytest.mark.parametrize("axis", range(3))
def test_extents_of_64_bits_are_refused_before_any_call(
    spec: SparsitySpec, axis: int, folder: Path
) -> None:
    extents: list[Any] = [None] * 3
    extents[axis] = te.var("wide", "int64")
    program = analyse(op.linear(*extents), {"lhs": spec})
    with pytest.raises(ShapeError, match=r"^axis . of block .* int32 .* got int64; use te.var\("):
        kernels_of(program, folder)


def test_packed_operand_holds_panels_and_zeros_around_them(kernels: Kernels) -> None:
    (rhs,) = arrays((N, K))
    found = packed(kernels, rhs)
    panels, depth, width = found.shape
    assert width == 2 * lanes_of(TARGET.isa) and panels * width >= N and depth >= K
    columns = np.concatenate(list(found), axis=1)
    np.testing.assert_array_equal(columns[:K, :N], rhs.T)
    assert np.count_nonzero(columns[K:]) == np.count_nonzero(columns[:, N:]) == 0


@pytest.mark.parametrize("live", [0, 1, 12, 13, M])
def test_row_kernel_computes_listed_rows_in_any_order(kernels: Kernels, live: int) -> None:
    lhs, rhs, bias = arrays((M, K), (N, K), (N,))
    rows = np.random.default_rng().permutation(M)[:live]
    ids = np.zeros((1, 64), np.int32)
    ids[0, :live] = rows
    route = next(r for r in kernels.program.routes if str(r.micro_tile) == "1x*")
    tile = next(t for t in starting_tiles(TARGET.isa, "float32") if t.family == route.family)
    kernel = kernels.sparse(route.micro_tile, tile)
    assert kernels.sparse(route.micro_tile, tile) is kernel
    out = np.full((M, N), np.nan, np.float32)
    kernel(lhs, packed(kernels, rhs), bias, ids, np.array([live], np.int32), out)
    truth = np.maximum(lhs.astype(np.float64) @ rhs.T + bias, 0)
    np.testing.assert_allclose(out[rows], truth[rows], rtol=0, atol=1e-5 * truth.max())
    assert np.isnan(np.delete(out, rows, axis=0)).all()


def test_list_entries_past_the_count_are_never_followed(kernels: Kernels) -> None:
    """They may hold anything but must not be read as positions."""
    lhs, rhs, bias = arrays((M, K), (N, K), (N,))
    ids = np.full((1, 64), 2**31 - 1, np.int32)
    ids[0, :3] = [5, 7, 9]
    route = next(r for r in kernels.program.routes if str(r.micro_tile) == "1x*")
    tile = next(t for t in starting_tiles(TARGET.isa, "float32") if t.family == route.family)
    out = np.full((M, N), np.nan, np.float32)
    count = np.array([3], np.int32)
    kernels.sparse(route.micro_tile, tile)(lhs, packed(kernels, rhs), bias, ids, count, out)
    assert np.isfinite(out[[5, 7, 9]]).all()
    assert np.isnan(np.delete(out, [5, 7, 9], axis=0)).all()


def test_epilogue_and_dead_value_read_what_they_need(kernels: Kernels) -> None:
    sums, bias = arrays((M, N), (N,))
    assert kernels.epilogue_inputs() == kernels.dead_inputs() == ["bias"]
    epilogue, dead = kernels.epilogue(), kernels.dead()
    assert epilogue is not None and dead is not None
    out = np.full((M, N), np.nan, np.float32)
    epilogue(sums, bias, out)
    np.testing.assert_allclose(out, np.maximum(sums + bias, 0), rtol=1e-6)
    dead(bias, out)
    np.testing.assert_array_equal(out, np.broadcast_to(np.maximum(bias, 0), (M, N)))


def test_plain_product_has_neither_epilogue_nor_dead_value(folder: Path) -> None:
    kernels = kernels_of(analyse(op.matmul(None, N, K), {"lhs": Mask()}), folder)
    assert kernels.epilogue() is None and kernels.dead() is None
    assert kernels.dead_inputs() == []


def test_epilogue_of_half_precision_converts_the_sums(folder: Path) -> None:
    tensors = op.matmul(None, N, K, dtype="float16")
    kernels = kernels_of(analyse(tensors, {"lhs": Mask()}), folder)
    epilogue = kernels.epilogue()
    assert epilogue is not None and kernels.epilogue_inputs() == []
    (sums,) = arrays((M, N))
    out = np.full((M, N), np.nan, np.float16)
    epilogue(sums, out)
    np.testing.assert_array_equal(out, sums.astype(np.float16))


@pytest.mark.parametrize("size", [1, 7, 64, 4099])
def test_clear_writes_exactly_its_bytes(kernels: Kernels, size: int) -> None:
    memory = np.full(size + 2, 0xAB, np.uint8)
    kernels.clear()(memory[1:-1])
    assert memory[0] == memory[-1] == 0xAB
    assert np.count_nonzero(memory[1:-1]) == 0


def test_kernels_that_take_what_nobody_has_looked_at_alone_check_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_, checks = module._compile, []

    def watched(*args: Any) -> Any:
        config = dict(tvm.transform.PassContext.current().config)
        checks.append(not config.get("tirx.disable_assert", False))
        return compile_(*args)

    monkeypatch.setattr(module, "_compile", watched)
    kernels = kernels_of(analyse(op.linear(None, N, K), {"lhs": Mask()}), tmp_path)
    assert kernels.look and kernels.pack() and kernels.clear()
    assert checks == [True, False, False]


def test_expression_without_a_product_has_nothing_to_pack(folder: Path) -> None:
    kernels = kernels_of(analyse(op.reduce_sum(None, None), {"data": Mask()}), folder)
    with pytest.raises(AxisError, match="contraction to pack"):
        kernels.packed((3, 4))
    with pytest.raises(AxisError, match="contraction to pack"):
        kernels.pack()


def test_generic_kernels_of_one_expression_sparse_and_dense(folder: Path) -> None:
    kernels = kernels_of(analyse(op.reduce_sum(None, None), {"data": Mask()}), folder)
    (data,) = arrays((M, K))
    out = np.full(M, np.nan, np.float32)
    kernels.dense(None)(data, out)
    truth = data.sum(axis=1, dtype=np.float64)
    np.testing.assert_allclose(out, truth, rtol=0, atol=1e-5 * np.abs(truth).max())
    ids, count = np.zeros((1, 64), np.int32), np.array([2], np.int32)
    ids[0, :2] = [30, 4]
    out[:] = np.nan
    rows = next(r.micro_tile for r in kernels.program.routes if r.micro_tile.axis == "p")
    kernels.sparse(rows, None)(data, ids, count, out)
    atol = 1e-5 * np.abs(truth).max()
    np.testing.assert_allclose(out[[4, 30]], truth[[4, 30]], rtol=0, atol=atol)
    assert np.isnan(np.delete(out, [4, 30])).all()


def test_kernels_are_kept_by_content_among_operators(tmp_path: Path) -> None:
    tensors = op.matmul(None, 5, 7)
    first = kernels_of(analyse(tensors, {"lhs": Rows()}), tmp_path)
    first.pack(), first.clear()
    again = kernels_of(analyse(op.matmul(None, 5, 7), {"lhs": Rows()}), tmp_path)
    again.pack(), again.clear()
    assert (first.cache.stats.builds, again.cache.stats.disk_hits) == (2, 2)
    assert again.cache.stats.builds == 0
    # What clears depends on the target alone.
    strange = kernels_of(analyse(op.reduce_sum(None, None), {"data": Mask()}), tmp_path)
    strange.clear()
    assert (strange.cache.stats.builds, strange.cache.stats.disk_hits) == (0, 1)
    # Same shape of the result, another operand to pack.
    other = kernels_of(analyse(op.matmul(None, 5, 7), {"rhs": Rows()}), tmp_path)
    other.pack()
    assert other.cache.stats.builds == 1


def test_kernels_that_read_a_mask_are_others_than_those_that_do_not(tmp_path: Path) -> None:
    """One folder: only what reads the mask is built again for it, once for each form of it."""
    built = []
    for spec, apply in [
        (BlockMask(32, 64), False),
        (BlockMask(32, 64), True),
        (BlockMask(16, 1), True),
        (Mask(), True),
        (Mask(32, 1), True),
        (BitMask(), True),
    ]:
        tensors = op.matmul(None, 5, 7, bias=True)
        kernels = kernels_of(analyse(tensors, {"lhs": spec}, apply_mask=apply), tmp_path)
        depth = next(r for r in kernels.program.routes if str(r.micro_tile) == "32x1")
        tile = next(t for t in starting_tiles(TARGET.isa, "float32") if t.family == depth.family)
        kernels.sparse(depth.micro_tile, tile)
        kernels.pack()
        kernels.dead()
        built.append(kernels.cache.stats.builds)
    assert built == [3, 0, 1, 1, 0, 1]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_masked_copy_holds_zeros_outside(folder: Path, dtype: str) -> None:
    tensors = op.matmul(None, N, K, dtype=dtype)
    program = analyse(tensors, {"lhs": BitMask()}, apply_mask=True)
    rng = np.random.default_rng()
    lhs = (100 * rng.standard_normal((M, K))).astype(dtype)
    mask = rng.random((M, K)) < 0.5
    if dtype != "int8":
        lhs[~mask] = np.nan
    copy = np.full((M, K), 77, dtype)
    bits = np.packbits(mask, axis=-1, bitorder="little")
    kernels_of(program, folder).masked_copy()(lhs, bits, copy)
    np.testing.assert_array_equal(copy, np.where(mask, lhs, 0))


def test_numbers_of_groups_have_kernels_of_their_own(tmp_path: Path) -> None:
    for number in (2, 3):
        tensors = op.grouped_matmul(None, 5, 7, None)
        kernels = kernels_of(analyse(tensors, {"lhs": Groups(number)}), tmp_path)
        route = kernels.program.routes[0]
        tile = next(t for t in starting_tiles(TARGET.isa, "float32") if t.family == route.family)
        kernels.sparse(route.micro_tile, tile)
        assert kernels.cache.stats.builds == 1
