"""Programs on CUDA cores: which axis they gather on, and their kernels' code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm import te

from pit_tvm import op
from pit_tvm.errors import UnsupportedTarget
from pit_tvm.runtime.cuda_build import cuda_source
from pit_tvm.runtime.cuda_general import GeneralKernels
from pit_tvm.runtime.cuda_general_form import GeneralForm, banded, general_form, turned
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.runtime.program import Program, analyse
from pit_tvm.schedules.cuda_contraction_space import PIECES, starting_tiles
from pit_tvm.structs import BlockMask, Groups, Lengths, Mask, Rows, SparsitySpec, Values


def program(tensors: Any, spec: SparsitySpec, operand: str = "lhs") -> Program:
    return analyse(tensors, {operand: spec})


def form(tensors: Any, spec: SparsitySpec, operand: str = "lhs") -> GeneralForm:
    return general_form(program(tensors, spec, operand))


@pytest.mark.parametrize(
    ("tensors", "spec", "operand", "axis", "extents"),
    [
        (op.matmul(None, 64, 32), Rows(), "lhs", "rows", (1, 0)),
        (op.matmul(None, 64, 32), Lengths(1), "lhs", "depth", (0, 1)),
        (op.matmul(None, 64, 32), Values(), "lhs", "rows", (1, 0)),
        (op.matmul(64, 64, 64), Mask(32, 1), "lhs", "depth", (32, 1)),
        (op.matmul(64, 64, 64, transpose_lhs=True), Mask(1, 64), "lhs", "depth", (1, 64)),
        (op.matmul(None, 256, 64), Mask(32, 256), "rhs", "depth", (1, 128)),
        (op.linear(None, 256, 64), BlockMask(96, 64), "rhs", "depth", (32, 1)),
        (op.linear(None, 256, 64), Rows(), "rhs", "rows", (1, 0)),
        (op.matmul(None, 64, 192), Mask(1, 64), "lhs", "pieces", (1, 64)),
        (op.linear(None, 64, None), BlockMask(2, 96), "lhs", "pieces", (1, 96)),
        (op.matmul(64, 64, 512, transpose_lhs=True), Mask(256, 1), "lhs", "pieces", (256, 1)),
        (op.matmul(None, 64, 64), Mask(1, 64), "lhs", "rows", (1, 0)),  # whole rows
        (op.matmul(None, 64, 192), Mask(1, 16), "lhs", "rows", (1, 0)),
        (op.linear(None, 64, 192), Mask(1, 64), "rhs", "pieces", (1, 64)),
        (op.linear(None, 64, 192, dtype="int8"), Mask(1, 64), "rhs", "rows", (1, 0)),
        (op.batch_matmul(None, 8, 9, 10), Rows(), "lhs", "batch", (1, 0, 0)),
        (op.batch_matmul(None, 8, 9, 10), Rows(1), "lhs", "rows", (0, 1, 0)),
        (op.grouped_matmul(None, 8, 9, 3), Groups(3), "lhs", "rows", (1, 0)),
        (op.reduce_sum(None, 7), Mask(), "data", "", (1, 0)),
        (op.conv2d(2, 3, 4, 5, 6, 3), Rows(1), "data", "", (0, 1, 0, 0)),
        (op.matmul(None, 8, 8, dtype="int8"), Rows(), "lhs", "rows", (1, 0)),
    ],
)
def test_the_axis_is_the_one_on_which_zeros_are_one_wide(
    tensors: Any, spec: SparsitySpec, operand: str, axis: str, extents: tuple[int, ...]
) -> None:
    found = form(tensors, spec, operand)
    assert (found.axis, found.route.micro_tile.extents) == (axis, extents)


@pytest.mark.parametrize(
    ("tensors", "act", "bias", "library"),
    [
        (op.matmul(None, 64, 32), "none", "", True),
        (op.linear(None, 64, 32, activation="gelu"), "gelu", "bias", True),
        (op.matmul(None, 64, 32, dtype="bfloat16", activation="silu"), "silu", "", True),
        (op.matmul(None, 64, 32, dtype="float16", out_dtype="float32"), "none", "", False),
        (op.matmul(None, 64, 32, dtype="int8"), "none", "", False),
    ],
)
def test_the_library_computes_what_it_has_an_epilogue_for(
    tensors: Any, act: str, bias: str, library: bool
) -> None:
    found = form(tensors, Rows())
    assert (found.act, found.bias, found.library) == (act, bias, library)


def test_an_epilogue_that_no_library_has_leaves_the_dense_form_to_us() -> None:
    lhs, rhs, out = op.matmul(None, 64, 32)
    twice = te.compute(out.shape, lambda i, j: out[i, j] * 2.0 + 1.0, name="twice")
    assert not form([lhs, rhs, twice], Rows()).library


def test_sums_in_a_fixed_order_gather_whole_rows() -> None:
    own = program(op.matmul(None, 64, 192), Mask(1, 64))
    assert [general_form(own, fixed).axis for fixed in (False, True)] == ["pieces", "rows"]


@pytest.mark.parametrize(
    ("tensors", "apart"),
    [
        (op.matmul(None, 64, 192), False),
        (op.linear(None, 64, 192, bias=True), False),  # stands in the output before
        (op.linear(None, 64, 192, activation="relu"), True),
        (op.matmul(None, 64, 192, dtype="float16"), True),
        (op.matmul(None, 64, 192, dtype="float16", out_dtype="float32"), False),
    ],
)
def test_tiles_of_pieces_add_to_the_output_unless_more_follows(tensors: Any, apart: bool) -> None:
    assert form(tensors, Mask(1, 64)).apart == apart


def test_masks_over_more_dimensions_are_refused() -> None:
    with pytest.raises(UnsupportedTarget, match="a mask over two dimensions"):
        form(op.batch_matmul(None, 8, 9, 10), Mask())


@pytest.mark.parametrize(
    ("options", "operand", "grain", "turns", "band"),
    [
        ({"transpose_rhs": True, "bias": True}, "lhs", (32, 1), ("lhs", "rhs"), 32),
        ({"transpose_rhs": True}, "lhs", (256, 8), ("lhs", "rhs"), 128),
        ({"activation": "relu"}, "lhs", (64, 1), ("lhs",), 64),
        ({"transpose_lhs": True}, "lhs", (1, 32), (), 0),
        ({"activation": "relu"}, "rhs", (1, 64), ("lhs",), 0),
        ({"transpose_lhs": True, "transpose_rhs": True}, "rhs", (64, 1), ("rhs",), 64),
    ],
)
def test_operands_are_turned_where_rows_of_the_depth_are_not_stored(
    options: dict[str, Any], operand: str, grain: tuple[int, int], turns: tuple[str, ...], band: int
) -> None:
    own = program(op.matmul(None, 96, 64, **options), Mask(*grain), operand)
    found = general_form(own)
    assert (found.turns, banded(found)) == (turns, band)
    if not turns:
        return
    same, micro_tile = turned(own, found)
    stored = {
        **{name: value for name, value in options.items() if not name.startswith("transpose")},
        "transpose_lhs": options.get("transpose_lhs", False) ^ ("lhs" in turns),
        "transpose_rhs": options.get("transpose_rhs", False) ^ ("rhs" in turns),
    }
    spec = Mask(*(grain[::-1] if operand in turns else grain))
    other = program(op.matmul(None, 96, 64, **stored), spec, operand)
    tvm.ir.assert_structural_equal(same.func, other.func, map_free_vars=True)
    assert micro_tile == general_form(other).route.micro_tile
    assert form(op.matmul(None, 96, 64, dtype="int8", **options), spec, operand).turns == ()


def test_a_sparse_operand_whose_slices_are_named_stays() -> None:
    linear = op.linear(None, 96, 64)
    assert form(linear, Lengths(1), "lhs").turns == ("rhs",)
    assert form(op.matmul(None, 96, 64), Rows(1), "lhs").turns == ()


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("turns", [False, True])
def test_products_over_pieces_of_the_right_operand_are_computed_turned(
    linear: bool, turns: bool
) -> None:
    stored = {"transpose_lhs": turns, "transpose_rhs": linear}
    tensors = op.matmul(128, 96, 192, bias=True, activation="relu", **stored)
    own = program(tensors, Mask(*((1, 64) if linear else (64, 1))), "rhs")
    found = general_form(own)
    assert found.flips and found.apart and found.turns == (() if linear else ("rhs",))
    same, micro_tile = turned(own, found)
    other = program(op.matmul(96, 128, 192, transpose_rhs=not turns), Mask(1, 64), "lhs")
    assert micro_tile == general_form(other).route.micro_tile
    tvm.ir.assert_structural_equal(same.func, other.func, map_free_vars=True)
    assert not general_form(own, deterministic=True).flips


def test_pieces_of_an_operand_stored_by_columns_are_turned_first() -> None:
    options: dict[str, Any] = {"bias": True, "activation": "relu"}
    own = program(op.matmul(None, 96, 192, transpose_lhs=True, **options), Mask(64, 1), "lhs")
    found = general_form(own)
    same, micro_tile = turned(own, found)
    other = program(op.matmul(None, 96, 192, **options), Mask(1, 64), "lhs")
    assert found.turns == ("lhs",) and banded(found) == 64 and not general_form(other).turns
    assert micro_tile == general_form(other).route.micro_tile != found.route.micro_tile
    tvm.ir.assert_structural_equal(same.func, other.func, map_free_vars=True)
    whole = op.matmul(None, 96, 192, transpose_lhs=True, dtype="int8")
    assert form(whole, Mask(64, 1)).axis == "pieces" and not form(whole, Mask(64, 1)).turns


# --------------------------------------------------------------------------------------------
# Code


def test_kernels_of_one_expression_are_kept_apart_by_the_sparse_operand(tmp_path: Path) -> None:
    tensors = op.elementwise((None, 8), ["add", ("add", 2)])

    class Keys(KernelCache):
        def get(self, key: str, build: Any) -> Any:
            asked.append(key)

    asked: list[str] = []
    for operand in ("data", "rhs"):
        own = program(tensors, Mask(), operand)
        GeneralKernels(own, general_form(own), Keys(tmp_path), "sm_90a").dead()
    assert len(set(asked)) == 2


def source(tensors: Any, spec: SparsitySpec, operand: str = "lhs", arch: str = "sm_90a") -> str:
    own = program(tensors, spec, operand)
    found = general_form(own)
    kernels = GeneralKernels(own, found, KernelCache(), arch)
    height = max(found.route.micro_tile.extents) if found.axis == "depth" else 0
    tile = starting_tiles(arch, found.dtype, height)[-1] if found.rhs else None
    return cuda_source(kernels._made(found.route.micro_tile, tile), arch, pipelined=True)


def test_sums_of_sums_of_unknown_number_are_refused_by_name() -> None:
    """A thread holds the sums that it sums up in memory of its own."""

    def tensors(columns: Any) -> list[te.Tensor]:
        lhs, rhs, acc = op.matmul(None, columns, 9)
        n = te.reduce_axis((0, rhs.shape[1]), "n")
        shape = (lhs.shape[0],)
        return [lhs, rhs, te.compute(shape, lambda m: te.sum(acc[m, n], axis=n), "total")]

    assert "__global__" in source(tensors(8), Rows())
    with pytest.raises(UnsupportedTarget, match="the sums out.*: expected extents .* got 1, 1, n"):
        source(tensors(None), Rows())


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100"])
def test_rows_are_gathered_asynchronously_on_every_architecture(arch: str) -> None:
    text = source(op.linear(None, 256, 128, activation="gelu"), Rows(), arch=arch)
    assert "cp_async" in text and "wait_group" in text
    assert "return;" in text  # CTAs behind the live rows


def test_both_operands_are_gathered_along_k_up_to_the_live_count() -> None:
    text = source(op.matmul(256, 256, 128, transpose_lhs=True), Mask(1, 32))
    assert text.count("ids_ptr[") >= 2 and "cp_async" in text


@pytest.mark.parametrize(
    ("tensors", "arch", "vectors"),
    [
        (op.matmul(None, 256, 128), "sm_90", True),
        (op.matmul(None, 256, 128), "sm_80", False),
        (op.linear(None, 256, 128), "sm_90", False),  # a thread's results are no neighbours
    ],
)
def test_tiles_of_pieces_are_added_in_vectors_where_they_can_be(
    tensors: Any, arch: str, vectors: bool
) -> None:
    text = source(tensors, Mask(1, 64), arch=arch)
    assert ("red.global.add.v4.f32" in text) == vectors
    assert ("tvm_builtin_cuda_atomic_add((&" in text) != vectors
    assert "cp_async" in text and "return;" not in text
    assert "count_ptr[((int)blockIdx.x)]" in text  # one CTA takes all tiles of a piece


@pytest.mark.parametrize(
    ("tensors", "spec", "operand"),
    [
        (op.matmul(None, None, None), Rows(), "lhs"),
        (op.matmul(None, 203, 101, dtype="float16"), Rows(1), "rhs"),
        (op.batch_matmul(3, 8, 9, 10, dtype="bfloat16", activation="relu"), Rows(), "rhs"),
        (op.grouped_matmul(None, 96, 64, 4), Groups(4), "lhs"),
        (op.conv2d(2, 3, 4, 5, 6, 3, bias=True), Rows(1), "weight"),
        (op.reduce_sum(None, 7), Lengths(1), "data"),
        (op.matmul(None, 8, 8, dtype="int8"), Mask(), "rhs"),
    ],
)
def test_every_operator_has_a_kernel(tensors: Any, spec: SparsitySpec, operand: str) -> None:
    assert "__global__" in source(tensors, spec, operand)


@pytest.mark.parametrize(
    ("dtype", "transpose_rhs", "tile", "added"),
    [
        ("float32", False, "float32", "pit_add4"),
        ("float32", True, "float32", "atomic_add"),  # a thread's columns lie apart
        ("float32", False, "tf32", "pit_add2"),
        ("float32", True, "tf32", "pit_add2"),
        ("float16", False, "float16", "pit_add2"),
        ("int8", False, "int8", "atomic_add"),  # of integers there are no vectors
        ("int8", True, "int8", "atomic_add"),
    ],
)
def test_neighbours_are_added_at_once_where_a_gpu_can(
    dtype: str, transpose_rhs: bool, tile: str, added: str
) -> None:
    wide = "int32" if dtype == "int8" else None
    for width, arch in ((256, "sm_90a"), (256, "sm_80"), (250, "sm_90a")):
        options: dict[str, Any] = {"dtype": dtype, "out_dtype": wide}
        tensors = op.matmul(None, width, 256, transpose_rhs=transpose_rhs, **options)
        own = program(tensors, Mask(1, 64))
        found = general_form(own)
        kernels = GeneralKernels(own, found, KernelCache(), arch)
        (first,) = starting_tiles(arch, tile, family=PIECES)
        text = str(kernels._made(found.route.micro_tile, first))
        vectors = (width, arch) == (256, "sm_90a")
        assert (added if vectors else "atomic_add") in text
        assert ("pit_add" in text) == (vectors and added.startswith("pit"))
