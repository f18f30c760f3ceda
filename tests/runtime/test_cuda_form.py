"""Which programs the GPU's m-axis family takes, and with which options; no GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
from tvm import te

from pit_tvm import op
from pit_tvm.errors import UnsupportedTarget
from pit_tvm.runtime.cuda_form import rows_form
from pit_tvm.runtime.program import analyse
from pit_tvm.schedules.hopper_knobs import ACTS
from pit_tvm.structs import Groups, Lengths, Mask, Rows


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("activation", ACTS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("extent", [None, 64])
def test_products_with_epilogues(
    dtype: str, activation: str, bias: bool, transpose: bool, extent: int | None
) -> None:
    tensors = op.matmul(
        extent,
        32,
        extent,
        dtype=dtype,
        transpose_rhs=transpose,
        bias=bias,
        activation=None if activation == "none" else activation,
    )
    form = rows_form(analyse(tensors, {"lhs": Lengths()}))
    assert (form.lhs, form.rhs, form.bias) == ("lhs", "rhs", "bias" if bias else "")
    assert form.rhs_layout == ("nk" if transpose else "kn")
    assert form.act == activation and form.dtype == dtype and form.groups == 0
    assert form.route.micro_tile.extents == (1, 0)


def test_groups() -> None:
    tensors = op.grouped_matmul(None, 32, 16, 5, dtype="bfloat16", bias=True, activation="relu")
    form = rows_form(analyse(tensors, {"lhs": Groups(5)}))
    assert form.groups == 5 and form.bias == "bias" and form.act == "relu"
    assert form.options == {"bias": True, "act": "relu", "rhs_layout": "kn"}


def test_masks_are_taken_by_their_live_rows() -> None:
    tensors = op.matmul(None, 32, 64, dtype="float16")
    form = rows_form(analyse(tensors, {"lhs": Mask(1, 32)}))
    assert form.route.micro_tile.extents == (1, 0)


def test_the_same_expression_written_by_hand_is_recognised() -> None:
    m, n, k = te.var("m"), 32, 16
    x = te.placeholder((m, k), "float16", "x")
    w = te.placeholder((n, k), "float16", "w")
    r = te.reduce_axis((0, k), "r")
    sums = te.compute(
        (m, n),
        lambda i, j: te.sum(x[i, r].astype("float32") * w[j, r].astype("float32"), axis=r),
        name="sums",
    )
    y = te.compute((m, n), lambda i, j: sums[i, j].astype("float16"), name="y")
    form = rows_form(analyse([x, w, y], {"x": Rows()}))
    assert (form.lhs, form.rhs, form.rhs_layout, form.act) == ("x", "w", "nk", "none")


def other_epilogue() -> list[Any]:
    lhs, rhs, out = op.matmul(None, 32, 16, dtype="float16")
    twice = te.compute(out.shape, lambda i, j: out[i, j] * te.const(2, "float16"), name="twice")
    return [lhs, rhs, twice]


@pytest.mark.parametrize(
    ("tensors", "spec", "match"),
    [
        (lambda: op.matmul(None, 32, 16), Lengths(), "float16 or bfloat16, got"),
        (
            lambda: op.matmul(None, 32, 16, dtype="float16", out_dtype="float32"),
            Lengths(),
            "output",
        ),
        (lambda: op.matmul(None, 8, 8, dtype="float16", transpose_lhs=True), Rows(1), "stored"),
        (lambda: op.batch_matmul(2, 8, 8, 8, dtype="float16"), Mask(), "gathered rows"),
        (lambda: op.reduce_sum(8, 8, dtype="float16"), Mask(), "gathered rows"),
        (other_epilogue, Lengths(), "epilogue"),
    ],
)
def test_other_programs_are_refused_with_a_reason(tensors: Any, spec: Any, match: str) -> None:
    made = tensors()
    operand = str(made[0].op.name)
    with pytest.raises(UnsupportedTarget, match=match):
        rows_form(analyse(made, {operand: spec}))
