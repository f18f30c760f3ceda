"""Whole vectors for each thread, for functions without sums."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tvm
from tvm import te

from pit_tvm.runtime.cuda_build import cuda_source
from pit_tvm.schedules.cuda_elementwise import Vectorised

TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90a"})


def scheduled(*tensors: Any) -> str | None:
    """The script of the scheduled function of TE tensors, None where it is left to others."""
    func = te.create_prim_func(list(tensors))
    found = Vectorised().apply(func, TARGET, False)
    return None if found is None else found.mod["main"].script()


def rows(width: int, dtype: str) -> tuple[Any, ...]:
    """Rows picked from a table and scaled."""
    n = te.var("n", "int64")
    table = te.placeholder((100, width), dtype, name="table")
    ids = te.placeholder((n,), "int32", name="ids")
    picked = te.compute((n, width), lambda i, j: table[ids[i], j], name="picked")
    out = te.compute((n, width), lambda i, j: picked[i, j] * tvm.tirx.const(2, dtype), name="out")
    return table, ids, out


@pytest.mark.parametrize(("dtype", "lanes"), [("float16", 8), ("bfloat16", 8), ("float32", 4)])
def test_a_thread_moves_16_bytes(dtype: str, lanes: int) -> None:
    text = scheduled(*rows(64, dtype))
    assert text is not None
    assert f"T.vectorized({lanes})" in text and 'thread="threadIdx.x"' in text
    assert "picked" not in text.replace('"picked"', "")  # computed in place


def test_one_block_of_no_whole_vectors_moves_element_by_element() -> None:
    x = te.placeholder((16, 60), "float16", name="x")
    y = te.placeholder((1, 9, 1, 3), "float16", name="y")
    for tensors in (
        (x, te.compute((60, 16 + 1), lambda i, j: x[j % 16, i])),
        (y, te.compute((1, 1, 9, 3), lambda a, b, c, d: y[a, c, b, d])),
    ):
        text = scheduled(*tensors)
        assert text is not None and "T.vectorized" not in text and 'thread="threadIdx.x"' in text


def test_elements_by_ids_of_their_own_are_read_one_by_one() -> None:
    x, ids = te.placeholder((16, 64), "float16", name="x"), te.placeholder((16, 64), "int64", "ids")
    own = te.compute((16, 64), lambda i, j: x[ids[i, j], j])
    text, rows = scheduled(x, ids, own), te.compute((16, 64), lambda i, j: x[ids[i, 0], j])
    assert text is not None and "T.vectorized" not in text
    text = scheduled(x, ids, rows)
    assert text is not None and "T.vectorized(8)" in text


@pytest.mark.parametrize(
    ("stored", "by_row", "lanes"), [(True, True, 1), (False, False, 1), (False, True, 8)]
)
def test_conditions_in_memory_are_moved_one_by_one(stored: bool, by_row: bool, lanes: int) -> None:
    """TVM's vectors have two bytes for each, memory one."""
    x, chosen = te.placeholder((16, 64), "float16", name="x"), te.placeholder((16, 64), "bool", "c")

    def element(i: Any, j: Any) -> Any:
        if stored:
            return x[i, j] < x[i, 0]
        return tvm.tirx.if_then_else(chosen[i, 0 if by_row else j], x[i, j], x[i, 0])

    text = scheduled(x, chosen, te.compute((16, 64), element, name="out"))
    assert text is not None and ("T.vectorized" in text) == (lanes > 1)
    assert lanes == 1 or f"T.vectorized({lanes})" in text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "int16", "float32"])
@pytest.mark.parametrize(
    "pick",
    [lambda j: 2 * j, lambda j: j + 1, lambda j: 63 - j, lambda j: j // 2],
    ids=["every second", "from one on", "backwards", "twice"],
)
def test_elements_that_are_no_neighbours_are_compiled(dtype: str, pick: Any) -> None:
    x = te.placeholder((16, 65), dtype, name="x")
    func = te.create_prim_func([x, te.compute((16, 32), lambda i, j: x[i, pick(j)], name="out")])
    found = Vectorised().apply(func, TARGET, False)
    assert "T.vectorized(4)" in found.mod["main"].script()
    assert "__global__" in cuda_source(tvm.IRModule({"main": found.mod["main"]}))


@pytest.mark.parametrize(("start", "width", "lanes"), [(8, 64, 8), (4, 64, 4), (8, 60, 4)])
def test_rows_are_read_in_vectors_from_where_these_begin(
    start: int, width: int, lanes: int
) -> None:
    x = te.placeholder((16, width), "float16", name="x")
    text = scheduled(x, te.compute((16, 32), lambda i, j: x[i, j + start], name="out"))
    assert text is not None and f"T.vectorized({lanes})" in text


@pytest.mark.parametrize(("by_row", "lanes"), [(True, 8), (False, 4)])
def test_a_choice_is_no_type_to_compute_with_where_it_is_alike_for_a_vector(
    by_row: bool, lanes: int
) -> None:
    x, place = te.placeholder((9, 64), "float16", name="x"), te.placeholder((16, 64), "int32", "at")

    def element(i: Any, j: Any) -> Any:
        at = place[i, 0]
        return tvm.tirx.if_then_else(
            at >= (0 if by_row else j), x[at, j], tvm.tirx.const(0, x.dtype)
        )

    text = scheduled(x, place, te.compute((16, 64), element, name="out"))
    assert text is not None and f"T.vectorized({lanes})" in text


def test_sums_are_left_to_others() -> None:
    x = te.placeholder((16, 64), "float32", name="x")
    k = te.reduce_axis((0, 64), "k")
    assert scheduled(x, te.compute((16,), lambda i: te.sum(x[i, k], k), name="total")) is None


def test_what_two_stages_sum_is_left_to_others() -> None:
    x = te.placeholder((16, 64), "float32", name="x")
    k = te.reduce_axis((0, 64), "k")
    total = te.compute((16,), lambda i: te.sum(x[i, k], k), name="total")
    out = te.compute((16, 64), lambda i, j: x[i, j] / total[i], name="out")
    assert scheduled(x, out) is None


@pytest.mark.parametrize(
    ("narrow", "wide", "lanes"), [("float16", "float32", 4), ("int8", "int64", 2)]
)
def test_vectors_are_of_the_widest_type_on_the_way(narrow: str, wide: str, lanes: int) -> None:
    x = te.placeholder((16, 64), narrow, name="x")
    ids = te.placeholder((16,), "int64", name="ids")
    two = tvm.tirx.const(2, wide)
    out = te.compute((16, 64), lambda i, j: (x[ids[i], j].astype(wide) + two).astype(narrow))
    text = scheduled(x, ids, out)
    assert text is not None and f"T.vectorized({lanes})" in text


def test_chains_of_no_whole_vectors_move_element_by_element() -> None:
    text = scheduled(*rows(61, "float32"))
    assert text is not None and "T.vectorized" not in text
    assert 'thread="threadIdx.x"' in text and "picked" not in text.replace('"picked"', "")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "int64"])
def test_choices_by_conditions_on_elements_are_compiled(dtype: str) -> None:
    n = te.var("n", "int64")
    x, y = (te.placeholder((n, 64), dtype, name=name) for name in ("x", "y"))
    most = tvm.tirx.const(3, dtype)

    def element(i: Any, j: Any) -> Any:
        chosen = tvm.tirx.Select(x[i, j] < y[i, j], x[i, j], y[i, j])
        return tvm.tirx.Select(chosen > most, most, chosen)

    func = te.create_prim_func([x, y, te.compute((n, 64), element, name="out")])
    found = Vectorised().apply(func, TARGET, False)
    lanes = 2 if dtype == "int64" else 4
    assert f"T.vectorized({lanes})" in found.mod["main"].script()
    assert "__global__" in cuda_source(tvm.IRModule({"main": found.mod["main"]}))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_conditions_that_turn_out_alike_for_a_vector_are_compiled(dtype: str, index: str) -> None:
    x, y = (te.placeholder((16, 64), dtype, name=name) for name in ("x", "y"))

    def element(i: Any, j: Any) -> Any:  # a multiple of every vector
        first = (j.astype(index) < tvm.tirx.const(32, index)).astype(index)
        return tvm.tirx.Select(tvm.tirx.const(0, index) < first, x[i, j], y[i, j])

    func = te.create_prim_func([x, y, te.compute((16, 64), element, name="out")])
    found = Vectorised().apply(func, TARGET, False)
    assert "T.vectorized" in found.mod["main"].script()
    source = cuda_source(tvm.IRModule({"main": found.mod["main"]}))
    made = re.findall(r"(\w+) \w+ = make_ushort(\d)", source)
    assert made and all(kind == f"ushort{lanes}" for kind, lanes in made)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_conditions_alike_for_a_vector_choose_whole_vectors(dtype: str) -> None:
    n = te.var("n", "int64")
    x, y = (te.placeholder((n, 64), dtype, name=name) for name in ("x", "y"))
    row = te.placeholder((n,), "bool", name="row")

    def element(i: Any, j: Any) -> Any:
        less = tvm.tirx.Select(x[i, j] < y[i, j], x[i, j], y[i, j])
        return tvm.tirx.Select(row[i], less, x[i, j])

    func = te.create_prim_func([x, y, row, te.compute((n, 64), element, name="out")])
    script = Vectorised().apply(func, TARGET, False).mod["main"].script()
    assert "T.if_then_else(row[v_i], T.Select(x[v_i, v_j] < y[v_i, v_j]" in script
    assert "T.vectorized(4)" in script


def test_conditions_on_values_with_names_are_vectors() -> None:
    x, zero = te.placeholder((16, 64), "float16", name="x"), tvm.tirx.const(0, "float16")
    one, two = (tvm.tirx.Var("named", tvm.ir.PrimType("float16")) for _ in range(2))

    def relu(name: Any, value: Any) -> Any:
        return tvm.tirx.Let(name, value, tvm.tirx.Select(name < zero, zero, name))

    out = te.compute((16, 64), lambda i, j: relu(one, x[i, j]) - relu(two, -x[i, j]), name="out")
    found = Vectorised().apply(te.create_prim_func([x, out]), TARGET, False)
    script = found.mod["main"].script()
    assert "T.Select(named < " in script and "T.vectorized(4)" in script
    assert "__global__" in cuda_source(tvm.IRModule({"main": found.mod["main"]}))


def test_values_with_names_may_be_read_twice() -> None:
    x, zero = te.placeholder((16, 64), "float16", name="x"), tvm.tirx.const(0, "float16")
    inner, outer = (tvm.tirx.Var("named", tvm.ir.PrimType("float16")) for _ in range(2))

    def positive(name: Any, value: Any) -> Any:
        return tvm.tirx.Let(name, value, tvm.tirx.Select(name < zero, zero, name))

    def element(i: Any, j: Any) -> Any:
        return positive(outer, positive(inner, x[i, j]) - x[i, 0])

    once = te.compute((16, 64), element, name="once")
    out = te.compute((16, 64), lambda i, j: once[i, j] * (once[i, j] + x[i, j]), name="out")
    found = Vectorised().apply(te.create_prim_func([x, out]), TARGET, False)
    script = found.mod["main"].script()
    assert script.count("T.Let(") == 4 and "T.vectorized(4)" in script
    assert "__global__" in cuda_source(tvm.IRModule({"main": found.mod["main"]}))
