"""conv2d against the float64 reference."""

from __future__ import annotations

import pytest

from pit_tvm.errors import ShapeError
from pit_tvm.op import conv2d
from pit_tvm.reference import ops as reference

N, C, F, HEIGHT, WIDTH = 3, 5, 7, 11, 9

CASES = {
    "plain": {"kernel": 3},
    "pointwise": {"kernel": 1},
    "strided": {"kernel": 3, "stride": 2},
    "dilated": {"kernel": 3, "dilation": 2},
    "padded": {"kernel": 3, "padding": 1},
    "everything": {"kernel": (3, 2), "stride": (2, 3), "dilation": (1, 2), "padding": (2, 1)},
}


def shapes(kernel, stride=1, dilation=1, padding=0):
    """Shapes of data, weight and result."""
    kernels, strides, dilations, pads = (
        v if isinstance(v, tuple) else (v, v) for v in (kernel, stride, dilation, padding)
    )
    image = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, d, p in zip((HEIGHT, WIDTH), kernels, strides, dilations, pads, strict=True)
    ]
    return (N, C, HEIGHT, WIDTH), (F, C, *kernels), (N, F, *image)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_every_geometry(run, operand, assert_close, case, symbolic):
    options = dict(CASES[case])
    data_shape, weight_shape, out_shape = shapes(**options)
    inputs = [operand(data_shape, "float32"), operand(weight_shape, "float32")]
    sizes = (None, C, F, None, None) if symbolic else (N, C, F, HEIGHT, WIDTH)
    got = run(conv2d(*sizes, **options), inputs, out_shape)
    del options["kernel"]
    assert_close(got, reference.conv2d(*inputs, **options))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_every_storage_type_with_an_epilogue(run, operand, assert_close, dtype):
    data_shape, weight_shape, out_shape = shapes(3, padding=1)
    inputs = [operand(data_shape, dtype), operand(weight_shape, dtype)]
    inputs.append(operand((F,), "int32" if dtype == "int8" else dtype))
    tensors = conv2d(
        None, C, F, HEIGHT, WIDTH, 3, padding=1, dtype=dtype, bias=True, activation="relu"
    )
    got = run(tensors, inputs, out_shape)
    assert_close(got, reference.conv2d(*inputs, padding=1, activation="relu"))


def test_operands_and_axes_have_the_fixed_names():
    tensors = conv2d(N, C, F, HEIGHT, WIDTH, 3, padding=1)
    assert [t.op.name for t in tensors] == ["data", "weight", "out"]
    out = tensors[-1].op
    assert [axis.var.name for axis in out.axis] == ["n", "f", "x", "y"]
    assert [axis.var.name for axis in out.reduce_axis] == ["c", "i", "j"]


@pytest.mark.parametrize(
    "kernel, options, message",
    [
        (12, {}, "^height: expected at least 12 for this kernel"),
        ((3, 5), {"dilation": (1, 3)}, "^width: expected at least 13 for this kernel"),
        (0, {}, "^kernel: expected an integer of at least 1"),
        (3, {"stride": 0}, "^stride: expected an integer of at least 1"),
        (3, {"padding": -1}, "^padding: expected an integer of at least 0"),
        ((3, 3, 3), {}, "^kernel: expected an integer or two of them"),
    ],
)
def test_an_impossible_geometry_is_refused(kernel, options, message):
    with pytest.raises(ShapeError, match=message):
        conv2d(N, C, F, HEIGHT, WIDTH, kernel, **options)
