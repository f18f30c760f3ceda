"""Tasks, the registry of families, and the random data that tiles are checked with."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import te

from pit_tvm.errors import DTypeError, ShapeError, TileNotFound, TuningError
from pit_tvm.structs import TileTask
from pit_tvm.tuning.tasks import (
    FAMILIES,
    OPERATORS,
    load_space,
    make_example,
    make_tasks,
    parameters,
    random_array,
    workload_module,
)
from tests.tuning import adding
from tests.tuning.stand_in import LANES, SPACE, space_with, task


def plain_workload(task: TileTask):
    lhs = te.placeholder((task.m, task.k), task.dtype, "lhs")
    rhs = te.placeholder((task.k, task.n), task.dtype, "rhs")
    k = te.reduce_axis((0, task.k), "k")
    acc = "int32" if task.dtype == "int8" else task.dtype
    return te.create_prim_func(
        [
            lhs,
            rhs,
            te.compute(
                (task.m, task.n),
                lambda i, j: te.sum(lhs[i, k].astype(acc) * rhs[k, j].astype(acc), axis=k),
            ),
        ]
    )


@settings(max_examples=20, deadline=None)
@given(st.tuples(*[st.integers(1, 9)] * 3), st.integers(0, 2**31))
def test_packed_example_holds_the_float64_product(shape: tuple[int, int, int], seed: int) -> None:
    m, panels, k = shape
    example = make_example(SPACE, task("avx2", m, panels * LANES, k), np.random.default_rng(seed))
    lhs, rhs = example.inputs
    expected = np.einsum("mk,pkl->mpl", lhs.astype(np.float64), rhs).reshape(m, -1)
    np.testing.assert_allclose(example.expected, expected, rtol=1e-12, atol=1e-12)
    assert lhs.dtype == np.float32 and example.expected.dtype == np.float64


@pytest.mark.parametrize(
    ("dtype", "out", "tolerance"),
    [
        ("float32", "float32", 1e-5),
        ("float16", "float16", 2e-3),
        ("bfloat16", "bfloat16", 1.6e-2),
        ("int8", "int32", 0.0),
    ],
)
def test_plain_example_has_the_workloads_types(dtype: str, out: str, tolerance: float) -> None:
    space = space_with(workload=plain_workload)
    example = make_example(space, task("avx2", 3, 5, 7, dtype), np.random.default_rng(0))
    assert {str(array.dtype) for array in example.inputs} == {dtype}
    assert (example.dtype, example.tolerance) == (out, tolerance)
    lhs, rhs = (array.astype(np.float64) for array in example.inputs)
    np.testing.assert_array_equal(example.expected, lhs @ rhs)


def test_examples_own_data_is_taken() -> None:
    def example(task, rng):
        lhs = np.ones((task.m, task.k), np.float32)
        rhs = np.ones((task.n // LANES, task.k, LANES), np.float32)
        return [lhs, rhs], np.full((task.m, task.n), float(task.k))

    made = make_example(space_with(example=example), task("avx2"), np.random.default_rng(0))
    assert (made.expected == 32.0).all() and (made.inputs[0] == 1).all()


def test_example_of_other_shapes_is_refused() -> None:
    space = space_with(example=lambda task, rng: ([np.ones((2, 2))], np.ones((2, 2))))
    with pytest.raises(TuningError, match="example"):
        make_example(space, task("avx2"), np.random.default_rng(0))


ADDING = space_with(workload=lambda task: adding.add_rows, example=adding.example)


def test_symbolic_extents_become_those_of_the_example() -> None:
    shapes = [shape for shape, _ in parameters(workload_module(ADDING, task("avx2")))]
    assert shapes == [(adding.SIZE,)] * 3


def test_only_a_workload_that_reads_its_output_adds_to_it() -> None:
    rng = np.random.default_rng(0)
    plain = space_with(workload=plain_workload)
    spaces = (ADDING, SPACE, plain)
    assert [make_example(space, task("avx2"), rng).accumulates for space in spaces] == [
        True,
        False,
        False,
    ]


def test_unknown_parameter_layout_asks_for_an_example() -> None:
    def transposed(task: TileTask):
        lhs = te.placeholder((task.k, task.m), "float32", "lhs")
        rhs = te.placeholder((task.k, task.n), "float32", "rhs")
        k = te.reduce_axis((0, task.k), "k")
        out = te.compute((task.m, task.n), lambda i, j: te.sum(lhs[k, i] * rhs[k, j], axis=k))
        return te.create_prim_func([lhs, rhs, out])

    with pytest.raises(TuningError, match=r"example\(task, rng\)"):
        make_example(
            space_with(workload=transposed), task("avx2", 2, 8, 4), np.random.default_rng(0)
        )


def test_output_type_without_tolerance_is_refused() -> None:
    space = space_with(workload=plain_workload)
    with pytest.raises(DTypeError, match="float64"):
        make_example(space, task("avx2", 2, 2, 2, "float64"), np.random.default_rng(0))


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [("int8", -8, 8), ("uint8", 0, 8), ("int32", -8, 8)]
)
def test_random_integers_stay_small(dtype: str, low: int, high: int) -> None:
    array = random_array((1000,), dtype, np.random.default_rng(0))
    assert array.dtype == dtype and array.min() == low and array.max() == high - 1


def test_random_bfloat16_is_ml_dtypes_own() -> None:
    assert random_array((4,), "bfloat16", np.random.default_rng(0)).dtype == ml_dtypes.bfloat16


def test_operator_gives_a_task_for_each_family() -> None:
    made = make_tasks("matmul", (1, 2, 3), "float16", "avx512")
    assert [task.family for task in made] == list(OPERATORS["matmul"][""])
    assert {replace(task, family="") for task in made} == {
        TileTask("", "avx512", "float16", 1, 2, 3)
    }


def test_registry_gives_a_complete_space_for_every_family() -> None:
    families = {name for sets in OPERATORS.values() for names in sets.values() for name in names}
    assert families == set(FAMILIES)
    for family in families:
        space = load_space(family)
        assert all(map(callable, (space.workload, space.sample, space.tile_of, space.lower)))


@pytest.mark.parametrize("shape", [(1, 2), (1, 2, 3, 4), (0, 1, 1), (1, -1, 1)])
def test_shape_of_a_task_is_checked(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="shape"):
        make_tasks("matmul", shape, "float32", "avx2")


def test_gpu_has_families_of_its_own() -> None:
    (single,) = make_tasks("matmul", (8, 16, 24), "float16", "sm_90a")
    assert single == TileTask("rows-hopper", "sm_90a", "float16", 8, 16, 24)
    (grouped,) = make_tasks("grouped_matmul", (8, 16, 24), "float16", "sm_90a", groups=3)
    assert grouped == TileTask("groups-hopper", "sm_90a", "float16", 8, 16, 24, 3)
    (shared,) = make_tasks("grouped_matmul", (8, 16, 24), "float16", "sm_90a", groups=3, share=2)
    assert shared == replace(grouped, share=2)
    with pytest.raises(ShapeError, match="share: expected 1 for one group, got 2"):
        make_tasks("matmul", (8, 16, 24), "float16", "sm_90a", share=2)
    with pytest.raises(TileNotFound, match="target of grouped_matmul: expected one of .'sm_90a'."):
        make_tasks("grouped_matmul", (8, 16, 24), "float32", "avx2", groups=3)
    with pytest.raises(TileNotFound, match="target of grouped_matmul: .* in float32"):
        make_tasks("grouped_matmul", (8, 16, 24), "float32", "sm_90a", groups=3)
    with pytest.raises(ShapeError, match="groups: expected 1 for matmul, got 3"):
        make_tasks("matmul", (8, 16, 24), "float16", "sm_90a", groups=3)


@pytest.mark.parametrize(("dtype", "isa"), [("float32", "sm_90a"), ("float16", "sm_80")])
def test_any_gpu_has_families_for_what_it_has_none_of_its_own(dtype: str, isa: str) -> None:
    made = make_tasks("matmul", (8, 16, 24), dtype, isa)
    assert {task.family for task in made} == set(OPERATORS["matmul"]["sm"])
    assert {(task.isa, task.dtype, task.k) for task in made} == {(isa, dtype, 24)}


def test_families_that_are_named_are_tuned_beside_better_ones() -> None:
    wanted = ["rows-cuda", "rows-hopper", "rows-elsewhere"]
    made = make_tasks("matmul", (8, 16, 24), "float16", "sm_90a", wanted=wanted)
    assert [task.family for task in made] == ["rows-hopper", "rows-cuda"]


def test_large_arrays_repeat_their_random_elements() -> None:
    array = random_array((4200, 1000), "int8", np.random.default_rng(0))
    assert (array.reshape(-1)[4_194_301:] == array.reshape(-1)[: 4_200_000 - 4_194_301]).all()
    assert len(np.unique(array, axis=0)) == 4200


def test_unknown_operator_and_family_are_refused() -> None:
    with pytest.raises(TileNotFound, match="conv9d"):
        make_tasks("conv9d", (1, 1, 1), "float32", "avx2")
    with pytest.raises(TileNotFound, match="scan"):
        load_space("scan")


def test_module_that_is_no_space_is_refused() -> None:
    with pytest.raises(TuningError, match="workload"):
        load_space("odd", {"odd": "pit_tvm.errors"})
