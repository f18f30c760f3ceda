"""Two-dimensional convolution, channels before the image: NCHW and FCHW."""

from __future__ import annotations

from tvm import te, tirx
from tvm.ir import Expr, Var

from ..errors import ShapeError, mismatch
from ..structs import check_flags
from .arguments import Extent, pair, resolve_dtypes, resolve_extent
from .contraction import reduce_and_finish


def conv2d(
    n: Extent,
    c: Extent,
    f: Extent,
    height: Extent,
    width: Extent,
    kernel: int | tuple[int, int],
    *,
    stride: int | tuple[int, int] = 1,
    dilation: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dtype: str = "float32",
    out_dtype: str | None = None,
    bias: bool = False,
    activation: str | None = None,
) -> list[te.Tensor]:
    """``out[n, f, x, y] = activation(sum_cij data[n, c, x', y'] * weight[f, c, i, j] + bias[f])``.

    x' = x * stride + i * dilation - padding, y' likewise from y and j; data outside the image is
    zero. Axes n, f, x, y and c, i, j, of which n, f and c are PIT axes. The padding is a
    predicate of the one block, so that data stays the operand which is read.

    Parameters
    ----------
    n, c, f, height, width
        Extents of the batch, the input channels, the output channels and the image; None is
        symbolic. ``c`` is at least 1.
    kernel, stride, dilation, padding
        One number, or (vertical, horizontal).
    dtype, out_dtype
        Types of the operands and of the result (`arguments.resolve_dtypes` has the table).
    bias
        Add an operand ``bias`` [f].
    activation
        None, "relu", "relu2", "gelu", "gelu_tanh" or "silu".

    Returns
    -------
    [data, weight, out] or [data, weight, bias, out], of shapes [n, c, height, width],
    [f, c, *kernel], [f] and [n, f, x, y].

    Raises
    ------
    ShapeError, DTypeError
        An extent, type or activation is not one of those above, or the kernel is larger than
        the padded image.
    """
    check_flags(bias=bias)
    dtypes = resolve_dtypes(dtype, out_dtype)
    kernels, pads = pair("kernel", kernel, 1), pair("padding", padding, 0)
    strides, dilations = pair("stride", stride, 1), pair("dilation", dilation, 1)
    batch, channels = resolve_extent("n", n), resolve_extent("c", c, 1)
    filters = resolve_extent("f", f)
    image = (resolve_extent("height", height), resolve_extent("width", width))
    rows, columns = (
        _out_extent(axis, image[d], kernels[d], strides[d], dilations[d], pads[d])
        for d, axis in enumerate(("height", "width"))
    )
    data = te.placeholder((batch, channels, *image), dtype, "data")
    weight = te.placeholder((filters, channels, *kernels), dtype, "weight")
    offsets = [te.placeholder((filters,), dtypes.bias, "bias")] if bias else []
    rc = te.reduce_axis((0, channels), "c")
    ri, rj = te.reduce_axis((0, kernels[0]), "i"), te.reduce_axis((0, kernels[1]), "j")

    def product(n, f, x, y):  # type: ignore[no-untyped-def]
        row = x * strides[0] + ri * dilations[0] - pads[0]
        column = y * strides[1] + rj * dilations[1] - pads[1]
        value = data[n, rc, row, column]
        inside = _inside(row, image[0], pads[0]) + _inside(column, image[1], pads[1])
        if inside:
            value = tirx.if_then_else(tirx.all(*inside), value, tirx.const(0, dtype))
        tap = weight[f, rc, ri, rj].astype(dtypes.accumulator)
        return te.sum(value.astype(dtypes.accumulator) * tap, axis=[rc, ri, rj])

    out = reduce_and_finish(
        (batch, filters, rows, columns),
        product,
        dtypes,
        bias=(lambda n, f, x, y: offsets[0][f]) if bias else None,
        activation=activation,
    )
    return [data, weight, *offsets, out]


def _out_extent(
    axis: str, image: int | Var, kernel: int, stride: int, dilation: int, pad: int
) -> int | Expr:
    """Positions of the dilated kernel inside the padded image, ``stride`` apart."""
    room = image + 2 * pad - dilation * (kernel - 1) - 1
    if isinstance(image, int):
        if room < 0:
            expected = f"at least {image - room} for this kernel, dilation and padding"
            raise ShapeError(mismatch(axis, expected, image))
        return room // stride + 1
    return tirx.floordiv(room, stride) + 1


def _inside(position: Expr, image: int | Var, pad: int) -> list[Expr]:
    """Conditions for a position to lie in the image; none are needed without padding."""
    return [position >= 0, position < image] if pad else []
