"""What is known of an operator before any array: its routes, its sums, its library product."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import te

from pit_tvm import op
from pit_tvm.errors import AxisError, ShapeError
from pit_tvm.runtime.program import Product, analyse
from pit_tvm.structs import (
    BitMask,
    BlockMask,
    Grid,
    Groups,
    Lengths,
    Mask,
    Rows,
    SparsitySpec,
    Values,
)

ROWS, DEPTH, BLOCKS, GENERIC = "contraction-rows", "contraction-depth", "contraction-blocks", ""


def routes(tensors: list[Any], operand: str, spec: SparsitySpec) -> list[tuple[str, str, str]]:
    """Micro-tile, axis and family of every route."""
    found = analyse(tensors, {operand: spec}).routes
    return [(str(r.micro_tile), r.micro_tile.axis, r.family) for r in found]


def test_masked_product_may_skip_rows_pieces_of_rows_and_terms() -> None:
    assert routes(op.matmul(None, None, None), "lhs", Mask()) == [
        ("1x*", "m", ROWS),
        ("1x64", "m", BLOCKS),
        ("32x1", "k", DEPTH),
    ]


def test_rows_and_terms_may_be_skipped_at_once_if_zeros_fill_both() -> None:
    tensors = op.linear(None, 29, 131)
    for operand, row in (("lhs", "m"), ("rhs", "n")):
        *others, both = routes(tensors, operand, Grid())
        assert others == routes(tensors, operand, Mask())
        assert both == ("1x* and *x1", row, ROWS)
    with pytest.raises(ShapeError, match="Grid of lhs"):
        routes(op.batch_matmul(3, None, 29, 131), "lhs", Grid())


@pytest.mark.parametrize("spec", [Mask(), BitMask(), Values(), BlockMask(5, 3)])
def test_every_zero_pattern_has_the_same_routes(spec: SparsitySpec) -> None:
    tensors = op.linear(None, 29, 131)
    assert routes(tensors, "rhs", spec) == routes(tensors, "rhs", Mask())
    assert [axis for _, axis, _ in routes(tensors, "rhs", spec)] == ["n", "n", "k"]


@pytest.mark.parametrize(
    ("granularity", "more"),
    [
        ((8, 1), [("8x1", "k", DEPTH)]),
        ((1, 16), [("1x16", "m", BLOCKS)]),
        ((24, 128), [("1x128", "m", BLOCKS), ("24x1", "k", DEPTH)]),
        ((32, 64), []),
        ((7, 9), []),  # nothing that register blocks and vectors divide
        ((4096, 4096), []),
    ],
)
def test_granularity_of_the_pattern_gives_micro_tiles(
    granularity: tuple[int, int], more: list[tuple[str, str, str]]
) -> None:
    tensors = op.matmul(None, None, None)
    plain = set(routes(tensors, "lhs", Mask()))
    assert set(routes(tensors, "lhs", Mask(*granularity))) - plain == set(more)


def test_transposed_operand_has_transposed_micro_tiles() -> None:
    tensors = op.matmul(None, None, None, transpose_lhs=True)
    assert routes(tensors, "lhs", Mask()) == [
        ("1x32", "k", DEPTH),
        ("*x1", "m", ROWS),
        ("64x1", "m", BLOCKS),
    ]


def test_batch_is_an_axis_of_its_own() -> None:
    tensors = op.batch_matmul(None, None, None, None)
    assert routes(tensors, "lhs", Mask()) == [
        ("1x*x*", "b", ROWS),
        ("1x1x*", "m", ROWS),
        ("1x1x64", "m", BLOCKS),
        ("1x32x1", "k", DEPTH),
    ]


@pytest.mark.parametrize("make", [Rows, Lengths])
def test_named_slices_have_one_route_of_whole_slices(make: Any) -> None:
    tensors = op.matmul(None, None, None)
    assert routes(tensors, "lhs", make(0)) == [("1x*", "m", ROWS)]
    assert routes(tensors, "lhs", make(1)) == [("*x1", "k", DEPTH)]
    assert routes(tensors, "rhs", make(1)) == [("*x1", "n", ROWS)]


def test_other_expressions_run_the_generic_schedule() -> None:
    conv = op.conv2d(None, 3, 5, 9, 9, 3)
    assert routes(conv, "data", Mask()) == [("1x*x*x*", "n", GENERIC), ("*x1x*x*", "c", GENERIC)]
    assert routes(conv, "weight", Rows()) == [("1x*x*x*", "f", GENERIC)]
    assert routes(op.reduce_sum(None, None), "data", Values()) == [
        ("1x*", "p", GENERIC),
        ("*x1", "l", GENERIC),
    ]


def test_reductions_are_marked() -> None:
    program = analyse(op.matmul(None, None, None), {"lhs": Mask()})
    assert [r.reduces for r in program.routes] == [False, False, True]


def test_inputs_output_and_sums_are_described() -> None:
    tensors = op.linear(None, 29, 131, dtype="float16")
    program = analyse(tensors, {"lhs": Rows()})
    assert [(p.name, p.dtype) for p in program.inputs] == [
        ("lhs", "float16"),
        ("rhs", "float16"),
        ("bias", "float16"),
    ]
    assert program.inputs[1].shape == (29, 131)
    assert not isinstance(program.inputs[0].shape[0], int)
    assert (program.output.name, program.output.dtype) == ("out", "float16")
    assert (program.sums.dtype, program.has_epilogue) == ("float32", True)
    plain = analyse(op.matmul(None, 29, 131), {"lhs": Rows()})
    assert plain.sums == plain.output and not plain.has_epilogue


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("operand", ["lhs", "rhs"])
def test_library_product_keeps_the_operands_order_and_transposes(
    operand: str, left: bool, right: bool
) -> None:
    options: Any = {"transpose_lhs": left, "transpose_rhs": right}
    for tensors in (
        op.matmul(None, None, None, **options),
        op.batch_matmul(None, None, None, None, **options),
    ):
        program = analyse(tensors, {operand: Mask()})
        assert program.product == Product("lhs", "rhs", left, right)


def test_no_library_computes_grouped_products_and_convolutions() -> None:
    grouped = analyse(op.grouped_matmul(None, 5, 7, 3), {"lhs": Groups(3)})
    assert grouped.contraction is not None and grouped.product is None
    conv = analyse(op.conv2d(None, 3, 5, 9, 9, 3), {"data": Mask()})
    assert conv.contraction is None and conv.product is None


def test_axis_that_is_no_pit_axis_is_refused_with_the_reason() -> None:
    with pytest.raises(AxisError, match="sparse.*data.*PIT axis"):
        analyse(op.conv2d(None, 3, 5, 9, 9, 3), {"data": Rows(3)})


@pytest.mark.parametrize("padding", [0, 1])
def test_zeros_of_a_padded_image_add_nothing_either(padding: int) -> None:
    program = analyse(op.conv2d(None, 3, 5, 9, 9, 3, padding=padding), {"data": Mask()})
    assert [r.micro_tile.axis for r in program.routes] == ["n", "c"]


def test_specification_of_another_rank_is_refused() -> None:
    with pytest.raises(ShapeError, match="^Mask of lhs.*2 extents"):
        analyse(op.matmul(None, 5, 7), {"lhs": Mask(1, 1, 1)})


def test_pieces_of_an_output() -> None:
    product = op.matmul(100, 256, 64)
    assert routes(product, "out", Mask()) == [("1x64", "m", ROWS)]
    assert routes(product, "out", BlockMask(1, 128)) == [("1x64", "m", ROWS), ("1x128", "m", ROWS)]
    assert routes(product, "out", BitMask(64, 1)) == [("64x1", "n", ROWS)]
    assert routes(product, "out", Mask(1, 256)) == [("1x*", "m", ROWS)]
    assert routes(op.matmul(8, 9999, 8), "out", Mask(1, 544)) == [("1x32", "m", ROWS)]
    batched = op.batch_matmul(None, None, None, 64)
    assert routes(batched, "out", Mask(1, 1, 96)) == [("1x1x96", "m", ROWS)]


def test_an_output_is_gathered_from_an_input() -> None:
    program = analyse(op.matmul(None, None, 64), {"out": Mask(64, 1)})
    assert program.writes and not program.zero_outside
    assert (program.gathered, program.beside) == ("rhs", "m")
    reading = analyse(op.matmul(None, None, 64), {"lhs": Mask()})
    assert not reading.writes and reading.zero_outside
    assert (reading.gathered, reading.beside) == ("lhs", "k")


def looked_up(index: Any) -> list[Any]:
    """Rows of a table at ``index(ids, i)``."""
    table = te.placeholder((te.var("n"), 8), "float32", "table")
    ids = te.placeholder((te.var("m"),), "int32", "ids")
    out = te.compute((ids.shape[0], 8), lambda i, j: table[index(ids, i), j], name="out")
    return [table, ids, out]


def test_indices_that_arrays_hold_are_checked_as_they_are_or_refused() -> None:
    (lookup,) = analyse(looked_up(lambda ids, i: ids[i]), {"table": Rows(1)}).lookups
    assert (lookup.ids, lookup.operand, lookup.dim) == ("ids", "table", 0)
    with pytest.raises(AxisError, match=r"an index of table.*ids\[.*\] \+ 1"):
        analyse(looked_up(lambda ids, i: ids[i] + 1), {"table": Rows(1)})
    made = looked_up(lambda ids, i: te.compute(ids.shape, lambda a: ids[a] * 2, name="made")[i])
    with pytest.raises(AxisError, match="an index of table.*made"):
        analyse(made, {"table": Rows(1)})


def test_tensors_are_inputs_and_then_one_that_is_computed() -> None:
    lhs, rhs, out = op.matmul(8, 8, 8)
    other = te.compute((8, 8), lambda i, j: lhs[i, j] + 1.0, name="other")
    for tensors in ([out, rhs, lhs], [lhs, other, te.compute((8, 8), lambda i, j: other[j, i])]):
        with pytest.raises(AxisError, match="one tensor that is computed"):
            analyse(tensors, {"lhs": Rows()})
    with pytest.raises(AxisError, match=r"of which \[\] are computed"):
        analyse([], {"lhs": Rows()})


def difference(names: tuple[str, str], extents: tuple[Any, Any]) -> list[Any]:
    """``out = left - right``, two inputs of the extents given."""
    left, right = (te.placeholder(extents, name=name) for name in names)
    return [left, right, te.compute(extents, lambda i, j: left[i, j] - right[i, j], name="out")]


def test_inputs_and_extents_have_names_of_their_own() -> None:
    m, n = te.var("m"), te.var("n")
    assert len(analyse(difference(("left", "right"), (m, m)), {"left": Rows()}).inputs) == 2
    text = r"^tensors: expected inputs with names .*'both', 'both', 'out'.; .* to te.placeholder"
    with pytest.raises(AxisError, match=text):
        analyse(difference(("both", "both"), (m, n)), {"both": Rows()})
    for shape in ((te.var(), te.var()), (te.var("m"), 2 * te.var("m"))):
        text = r"^tensors: expected symbolic extents with names .*; pass a name to te.var"
        with pytest.raises(AxisError, match=text):
            analyse(difference(("left", "right"), shape), {"left": Rows()})


def test_the_output_of_an_elementwise_operator_is_named_as_what_it_is() -> None:
    x = te.placeholder((6, 4), "float32", "x")
    twice = te.compute((6, 4), lambda i, j: x[i, j] * 2, "twice")
    with pytest.raises(AxisError, match=r"sparse\['twice'\].*output of matmul.*another output"):
        analyse([x, twice], {"twice": Mask()})


@pytest.mark.parametrize("spec", [Mask(), Rows(), BlockMask(2, 3)], ids=str)
def test_sums_over_no_elements_are_refused(spec: SparsitySpec) -> None:
    lhs, rhs = te.placeholder((6, 0), "float32", "lhs"), te.placeholder((0, 5), "float32", "rhs")
    k = te.reduce_axis((0, 0), "k")
    out = te.compute((6, 5), lambda i, j: te.sum(lhs[i, k] * rhs[k, j], axis=k), "out")
    with pytest.raises(ShapeError, match="^k: expected an extent of at least 1"):
        analyse([lhs, rhs, out], {"lhs": spec})
