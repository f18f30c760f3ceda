"""Scheduled contractions against float64, each sparse axis and each form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs
from tvm import s_tir, te

from pit_tvm import op
from pit_tvm.analysis.contraction import Contraction, contraction_of
from pit_tvm.reference import ops as reference
from pit_tvm.schedules import contraction, generic
from pit_tvm.schedules.contraction_forms import contraction_form, pack_func, packed_shape
from pit_tvm.schedules.contraction_space import lanes_of
from pit_tvm.structs import MicroTile, Tile
from pit_tvm.transform.pipeline import lower
from pit_tvm.transform.unalign import unalign
from tests.primitive.replay import assert_schedules
from tests.schedules import sparse
from tests.schedules.sparse import Case, masked, rows

N, K, REG_M = 70, 19, 4
ROWS = MicroTile("lhs", "m", 0, (1, 0))
STEPS = MicroTile("lhs", "k", 1, (8, 1))
BLOCKS = MicroTile("lhs", "m", 0, (1, 8))


def matrices(m: int) -> list[tuple[int, ...]]:
    return [(m, K), (K, N)]


def batches(m: int) -> list[tuple[int, ...]]:
    return [(3, m, K), (3, K, N)]


def staged() -> list[te.Tensor]:
    """``gate * (lhs @ rhs + bias)``, gate = max of the same and 0, in stages of their own."""
    m = te.var("m")
    lhs, rhs = te.placeholder((m, K), name="lhs"), te.placeholder((K, N), name="rhs")
    bias = te.placeholder((N,), name="bias")
    k = te.reduce_axis((0, K), "k")
    twice = te.compute((N,), lambda n: bias[n] * 2.0, name="twice")
    acc = te.compute((m, N), lambda m, n: te.sum(lhs[m, k] * rhs[k, n], axis=k), name="acc")
    full = te.compute((m, N), lambda m, n: acc[m, n] + twice[n], name="full")
    gate = te.compute((m, N), lambda m, n: te.max(full[m, n], 0.0), name="gate")
    out = te.compute((m, N), lambda m, n: gate[m, n] * full[m, n], name="out")
    return [lhs, rhs, bias, out]


def staged_truth(lhs: Any, rhs: Any, bias: Any, mask: Any) -> np.ndarray:
    full = reference.matmul(lhs, rhs, 2.0 * bias, lhs_mask=mask)
    return np.maximum(full, 0.0) * full


LHS = masked("lhs", reference.matmul)
RHS = masked("rhs", reference.matmul)
BATCH = masked("lhs", reference.batch_matmul)


def by_type(dtype: str, accumulator: str) -> dict[str, Case]:
    tensors = op.matmul(None, N, K, dtype=dtype)
    return {
        f"rows {dtype}": Case(tensors, ROWS, matrices, LHS, rows),
        f"steps {dtype}": Case(tensors, STEPS, matrices, LHS),
        f"blocks {dtype}": Case(tensors, BLOCKS, matrices, LHS, None, accumulator),
    }


CASES: dict[str, Case] = {
    **by_type("float32", "float32"),
    **by_type("float16", "float32"),
    **by_type("bfloat16", "float32"),
    **by_type("int8", "int32"),
    "linear with bias and gelu": Case(
        op.linear(None, N, K, activation="gelu"),
        ROWS,
        lambda m: [(m, K), (N, K), (N,)],
        masked("lhs", reference.linear, activation="gelu"),
        rows,
    ),
    "steps of linear with bias": Case(
        op.linear(None, N, K, dtype="float16"),
        STEPS,
        lambda m: [(m, K), (N, K), (N,)],
        masked("lhs", reference.linear),
    ),
    "epilogue in stages": Case(
        staged(), ROWS, lambda m: [(m, K), (K, N), (N,)], staged_truth, rows
    ),
    "transposed operand": Case(
        op.matmul(None, N, K, transpose_lhs=True),
        MicroTile("lhs", "m", 1, (0, 1)),
        lambda m: [(K, m), (K, N)],
        masked("lhs", reference.matmul, transpose_lhs=True),
        lambda mask: mask.any(axis=0)[:, None],
    ),
    "blocks of a transposed operand": Case(
        op.matmul(None, N, K, transpose_lhs=True, transpose_rhs=True),
        MicroTile("lhs", "m", 1, (8, 1)),
        lambda m: [(K, m), (N, K)],
        masked("lhs", reference.matmul, transpose_lhs=True, transpose_rhs=True),
        None,
        "float32",
    ),
    "all extents symbolic": Case(op.matmul(None, None, None), ROWS, matrices, LHS, rows),
    "columns of rhs": Case(
        op.matmul(None, N, K, bias=True),
        MicroTile("rhs", "n", 1, (0, 1)),
        lambda m: [*matrices(m), (N,)],
        RHS,
        lambda mask: mask.any(axis=0),
    ),
    "steps of rhs": Case(op.matmul(None, N, K), MicroTile("rhs", "k", 0, (1, 8)), matrices, RHS),
    "blocks of rhs": Case(
        op.matmul(None, N, K), MicroTile("rhs", "n", 1, (8, 1)), matrices, RHS, None, "float32"
    ),
    "batch elements": Case(
        op.batch_matmul(None, 6, N, K),
        MicroTile("lhs", "b", 0, (1, 0, 0)),
        lambda m: [(m, 6, K), (m, K, N)],
        BATCH,
        rows,
    ),
    "rows of a batch": Case(
        op.batch_matmul(3, None, N, K), MicroTile("lhs", "m", 1, (1, 1, 0)), batches, BATCH, rows
    ),
    "steps of a batch": Case(
        op.batch_matmul(3, None, N, K), MicroTile("lhs", "k", 2, (1, 8, 1)), batches, BATCH
    ),
    "blocks of a batch": Case(
        op.batch_matmul(3, None, N, K),
        MicroTile("lhs", "m", 1, (1, 1, 8)),
        batches,
        BATCH,
        None,
        "float32",
    ),
}


@dataclass(frozen=True)
class Kernel:
    """A compiled contraction, and what packs its dense operand."""

    run: Callable[..., None]
    pack: Callable[..., None]
    con: Contraction

    def packed(self, dense: np.ndarray) -> np.ndarray:
        """The dense operand as the kernel takes it."""
        shape = packed_shape(self.con, list(dense.shape), lanes())
        out = sparse.poisoned(tuple(shape), self.con.accumulator)
        self.pack(dense, out)
        return out


def lanes() -> int:
    return lanes_of(sparse.target().isa)


def schedule(
    func: Any,
    con: Contraction,
    micro_tile: MicroTile | None,
    groups: int = 0,
    reg_m: int = REG_M,
    tile: tuple[int, int, int] = (2 * REG_M, 1, 8),
    threads: int = 2,
) -> tuple[Any, s_tir.Schedule]:
    """The form of a contraction, and its schedule; ``tile`` in rows, panels and steps."""
    tile_m, panels, tile_k = tile
    sizes = Tile("", sparse.target().isa, "", tile_m, 2 * lanes() * panels, tile_k)
    form, roles = contraction_form(func, con, sizes, lanes(), micro_tile, groups)
    sch = s_tir.Schedule(form)
    contraction.apply(sch, roles, reg_m=reg_m, lanes=lanes(), threads=threads)
    return form, sch


def build(
    tensors: list[te.Tensor],
    operand: str,
    micro_tile: MicroTile | None,
    groups: int = 0,
    **how: Any,
) -> Kernel:
    func = te.create_prim_func(tensors)
    con = contraction_of(func, operand)
    assert con is not None
    _, sch = schedule(func, con, micro_tile, groups, **how)
    packing = s_tir.Schedule(unalign(pack_func(func, con, lanes())))
    generic.apply(packing)
    return Kernel(sparse.build(lower(sch.mod)), sparse.build(lower(packing.mod)), con)


@pytest.fixture(scope="module", params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def kernel(name: str) -> Kernel:
    case = CASES[name]
    return build(case.tensors, case.micro_tile.operand, case.micro_tile)


@given(
    m=hs.integers(0, 21),
    pattern=hs.sampled_from(sparse.PATTERNS),
    before=hs.booleans(),
    seed=hs.integers(0, 2**32),
)
@settings(max_examples=12, deadline=None)
def test_live_micro_tiles_alone_are_read_and_their_promise_is_kept(
    name, kernel, m, pattern, before, seed
):
    packing = {kernel.con.dense: kernel.packed}
    sparse.check(CASES[name], kernel.run, seed, m, pattern, before, packing)


GROUPS = 3


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def grouped(request: pytest.FixtureRequest) -> tuple[list[te.Tensor], Kernel]:
    tensors = op.grouped_matmul(
        None, N, K, GROUPS, dtype=request.param, bias=True, activation="relu"
    )
    return tensors, build(tensors, "lhs", ROWS, GROUPS)


@given(m=hs.integers(0, 21), used=hs.integers(0, GROUPS), seed=hs.integers(0, 2**32))
@settings(max_examples=12, deadline=None)
def test_rows_of_groups_meet_the_matrix_of_their_group(grouped, m, used, seed):
    tensors, kernel = grouped
    rng = np.random.default_rng(seed)
    dtype = str(tensors[0].dtype)
    group_of = rng.integers(-1, used, m)
    ids = np.full((GROUPS, m + 2), sparse.DEAD, np.int32)
    count = np.zeros(GROUPS, np.int32)
    for group in range(GROUPS):
        of_group = rng.permutation(np.flatnonzero(group_of == group))
        ids[group, : len(of_group)], count[group] = of_group, len(of_group)
    shapes = ((m, K), (GROUPS, K, N), (GROUPS, N))
    lhs, rhs, bias = (sparse.random(rng, shape, dtype) for shape in shapes)
    truth = reference.grouped_matmul(lhs, rhs, bias, group_of, activation="relu")
    lhs[group_of < 0] = np.nan
    arrays = (lhs, kernel.packed(rhs), bias, ids, count, sparse.poisoned((m, N), dtype))
    fenced = [sparse.fenced(array) for array in arrays]
    kernel.run(*fenced)
    sparse.assert_promise(fenced[-1], truth, (group_of >= 0)[:, None])


DENSE = {
    "float32": op.matmul(None, N, K, bias=True, activation="silu"),
    "float16": op.matmul(None, N, K, dtype="float16", bias=True, activation="silu"),
    "int8": op.matmul(None, N, K, dtype="int8", bias=True),
}


@pytest.fixture(scope="module", params=DENSE)
def dense(request: pytest.FixtureRequest) -> tuple[list[te.Tensor], Kernel]:
    return DENSE[request.param], build(DENSE[request.param], "lhs", None)


@given(m=hs.integers(0, 21), seed=hs.integers(0, 2**32))
@settings(max_examples=8, deadline=None)
def test_dense_form_computes_every_row(dense, m, seed):
    tensors, kernel = dense
    rng = np.random.default_rng(seed)
    shapes = [*matrices(m), (N,)]
    lhs, rhs, bias = (
        sparse.random(rng, shape, str(tensor.dtype))
        for shape, tensor in zip(shapes, tensors[:-1], strict=True)
    )
    truth = reference.matmul(lhs, rhs, bias, activation="silu" if sparse.is_real(lhs) else None)
    out = sparse.poisoned((m, N), str(tensors[-1].dtype))
    arrays = [sparse.fenced(a) for a in (lhs, kernel.packed(rhs), bias, out)]
    kernel.run(*arrays)
    sparse.assert_promise(arrays[-1], truth)


@pytest.mark.parametrize("transposed", [False, True])
def test_packed_operand_holds_zeros_beyond_its_columns_and_steps(transposed):
    kernel = build(op.matmul(None, N, K, transpose_rhs=transposed), "lhs", None)
    rhs = sparse.random(np.random.default_rng(), (N, K) if transposed else (K, N), "float32")
    width = 2 * lanes()
    full = np.zeros((64, -(-N // width) * width), np.float32)
    full[:K, :N] = rhs.T if transposed else rhs
    panels = full.reshape(64, -1, width).transpose(1, 0, 2)
    assert np.array_equal(kernel.packed(rhs), panels)


@pytest.mark.parametrize("name", ["rows float32", "steps float32", "blocks float32"])
def test_register_blocks_need_not_divide_the_tile(name):
    case = CASES[name]
    kernel = build(case.tensors, "lhs", case.micro_tile, reg_m=3)
    for m in (0, 1, 8, 21):
        sparse.check(case, kernel.run, m, m, "random", prepare={"rhs": kernel.packed})


@pytest.mark.parametrize(
    "name",
    [
        *("rows float32", "rows bfloat16", "linear with bias and gelu", "epilogue in stages"),
        *("columns of rhs", "rows of a batch", "batch elements", "all extents symbolic"),
    ],
)
def test_sums_of_the_whole_depth_never_leave_registers(name):
    case = CASES[name]
    operand = case.micro_tile.operand
    kernel = build(case.tensors, operand, case.micro_tile, tile=(2 * REG_M, 1, 64), threads=3)
    prepare = {kernel.con.dense: kernel.packed}
    for m in (0, 1, 9, 21):
        sparse.check(case, kernel.run, m, m, "random", prepare=prepare)


WIDE = 16 * 8 - 3  # columns of an even number of panels at every vector width, the last not full
WIDE_TENSORS = op.matmul(None, WIDE, K)


def wide_matrices(m: int) -> list[tuple[int, ...]]:
    return [(m, K), (K, WIDE)]


WIDE_CASES = {
    "rows": Case(WIDE_TENSORS, ROWS, wide_matrices, LHS, rows),
    "steps": Case(WIDE_TENSORS, STEPS, wide_matrices, LHS),
    "blocks": Case(WIDE_TENSORS, BLOCKS, wide_matrices, LHS, None, "float32"),
}


@pytest.mark.parametrize("depth", [8, 64])
@pytest.mark.parametrize("name", WIDE_CASES)
def test_register_blocks_stand_on_two_panels(name, depth):
    case = WIDE_CASES[name]
    kernel = build(case.tensors, "lhs", case.micro_tile, reg_m=2, tile=(6, 4, depth), threads=2)
    for m in (0, 1, 8, 21):
        sparse.check(case, kernel.run, m, m, "random", prepare={"rhs": kernel.packed})


@pytest.mark.parametrize("name", ["rows float32", "steps of a batch", "blocks of rhs"])
def test_one_thread_works_without_a_parallel_loop(name):
    case = CASES[name]
    func, operand = te.create_prim_func(case.tensors), case.micro_tile.operand
    con = contraction_of(func, operand)
    scripts = [
        lower(schedule(func, con, case.micro_tile, threads=threads)[1].mod).script()
        for threads in (1, 2)
    ]
    assert ["T.parallel" in script for script in scripts] == [False, True]
    kernel = build(case.tensors, operand, case.micro_tile, threads=1)
    for m in (0, 1, 9, 21):
        sparse.check(case, kernel.run, m, m, "random", prepare={kernel.con.dense: kernel.packed})


@pytest.mark.parametrize("name", ["rows int8", "steps of a batch", "blocks of rhs"])
def test_trace_replays_from_json(name):
    case = CASES[name]
    func = te.create_prim_func(case.tensors)
    con = contraction_of(func, case.micro_tile.operand)
    form, sch = schedule(func, con, case.micro_tile)
    assert_schedules(sch, form, sch.mod["main"])


@pytest.mark.parametrize("name", ["rows float32", "steps float32", "blocks float32"])
def test_inner_kernel_sees_neither_index_nor_guard(name):
    case = CASES[name]
    func = te.create_prim_func(case.tensors)
    _, sch = schedule(func, contraction_of(func, "lhs"), case.micro_tile)
    lines = lower(sch.mod).script().splitlines()
    (inner,) = (i for i, line in enumerate(lines) if "lhs_panel[" in line and "rhs[" in line)
    assert "if" not in lines[inner]
    # Rows of the packed operand are chosen by the list of steps; nothing else is.
    assert ("ids[" in lines[inner]) == name.startswith("steps")
    loops = [line.split(" in ")[1].split("(")[0] for line in lines[inner - 3 : inner]]
    assert loops == ["T.unroll", "T.unroll", "T.vectorized"]
