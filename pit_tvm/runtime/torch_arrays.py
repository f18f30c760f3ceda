"""Checks of torch tensors that compiled functions for CPUs take, and of their memory."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import DTypeError, ShapeError, mismatch


def check_shape(name: str, shape: tuple[int, ...], expected: tuple[int | None, ...]) -> None:
    """ShapeError if an extent of ``expected`` (None: any) is another one of ``shape``."""
    if shape == expected or _fits(shape, expected):
        return
    wanted = ", ".join("any" if extent is None else str(extent) for extent in expected)
    advice = ""
    if _fits(shape[::-1], expected):
        advice = "pass a contiguous copy of its transpose"
    elif len(shape) > len(expected) > 1 and shape[1 - len(expected) :] == expected[1:]:
        advice = f"pass .reshape({', '.join(map(str, (-1, *expected[1:])))})"
    raise ShapeError(mismatch(name, f"shape [{wanted}]", f"shape {list(shape)}", advice))


def _fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    pairs = zip(shape, expected, strict=False)
    return len(shape) == len(expected) and all(want in (None, got) for got, want in pairs)


def check_torch(
    name: str, array: Any, dtype: str, shape: tuple[int | None, ...], writable: bool
) -> None:
    """Refuse a tensor that `pit_tvm.runtime.arrays.as_tensor` does not take."""
    torch = sys.modules["torch"]  # there is a tensor

    # Each question to a tensor takes 0.1 us, so that most are left to what cannot be right.
    if type(array) is not torch.Tensor or not array.is_cpu:
        check_memory(name, array)
    is_bytes = dtype == "uint8" and array.dtype is torch.bool
    if array.dtype is not getattr(torch, dtype) and not is_bytes:
        check_memory(name, array)
        advice = f"convert it with .to(torch.{dtype})"
        raise DTypeError(mismatch(name, dtype, str(array.dtype).removeprefix("torch."), advice))
    try:
        found = array.shape
    except RuntimeError:  # of a nested tensor
        check_memory(name, array)
        raise
    check_shape(name, found, shape)
    check_strided(name, array)
    check_contiguous(name, array)
    check_signs(name, array)
    if address_of(name, array) % array.itemsize:
        raise ShapeError(mismatch(name, "aligned elements", "unaligned", "pass .clone()"))
    if writable:
        check_written(name, array)


def check_written(name: str, array: Any) -> None:
    """ShapeError if autograd would have to know what is written to a tensor."""
    if array.requires_grad:
        got = "one that requires grad"
        raise ShapeError(mismatch(name, "a tensor to write to", got, "pass .detach()"))


def check_memory(name: str, array: Any) -> None:
    """DTypeError if a tensor has no elements of its own in the CPU's memory."""
    expected = "a dense tensor on the CPU"
    check_own(name, array, expected)
    if not array.is_cpu:
        advice = "pass .cpu(), or compile for that device"
        raise DTypeError(mismatch(name, "a tensor on the CPU", str(array.device), advice))
    if array.is_quantized:
        got = f"a quantized tensor of {array.dtype}"
        raise DTypeError(mismatch(name, expected, got, "pass .dequantize()"))


def check_own(name: str, array: Any, expected: str) -> None:
    """DTypeError if what a tensor holds, if anything, is behind other tensors: of nested, fake and
    distributed ones."""
    torch = sys.modules["torch"]  # there is a tensor

    check_plain(name, array, expected)
    if type(array).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        got = type(array).__name__
        advice = "functions of pit_tvm.torch can be exported" if got == "FakeTensor" else ""
        raise DTypeError(mismatch(name, expected, got, advice))


def check_contiguous(name: str, array: Any) -> None:
    """ShapeError if elements are not one behind the other in memory."""
    if not array.is_contiguous():
        got = f"strides {array.stride()} elements"
        raise ShapeError(mismatch(name, "a contiguous tensor", got, "pass .contiguous()"))


def stored_weight(weight: Any) -> tuple[Any, str]:
    """A weight of every group as memory has it: ``[groups, n, k]`` itself and "nk", or what it is a
    view ``.mT`` of, ``[groups, k, n]``, and "kn"; anything else is as it is."""
    turned = not weight.is_contiguous() and weight.mT.is_contiguous()
    return (weight.mT, "kn") if turned else (weight, "nk")


def check_weight(name: str, weight: Any) -> None:
    """ShapeError for a weight of every group that `stored_weight` cannot tell the layout of."""
    stored, _ = stored_weight(weight)
    if not stored.is_contiguous():
        expected, got = "a contiguous tensor, or .mT of one", f"strides {weight.stride()} elements"
        raise ShapeError(mismatch(name, expected, got, "pass .contiguous()"))


def check_signs(name: str, array: Any) -> None:
    """ShapeError if memory holds the negatives of a tensor's elements."""
    if array.is_neg():
        raise ShapeError(mismatch(name, "a plain tensor", "a negated view", "pass .resolve_neg()"))


def address_of(name: str, array: Any, expected: str = "a dense tensor on the CPU") -> int:
    """Where the first element of a strided tensor is; DTypeError if torch.func wraps it, or if
    zeros, of a derivative, stand nowhere."""
    try:
        found = int(array.data_ptr())
    except RuntimeError as error:
        raise DTypeError(mismatch(name, expected, "a tensor of torch.func")) from error
    if not found and array.numel():
        raise DTypeError(mismatch(name, expected, "zeros without memory", "pass .clone()"))
    return found


def check_plain(name: str, array: Any, expected: str = "a dense tensor") -> None:
    """DTypeError if a tensor is made of others of several shapes."""
    if array.is_nested:
        advice = "pass .to_padded_tensor(0.0)"
        raise DTypeError(mismatch(name, expected, "a nested tensor", advice))


def check_strided(name: str, array: Any) -> None:
    """ShapeError if elements lie in memory in another way than by strides."""
    torch = sys.modules["torch"]  # there is a tensor

    if array.layout is not torch.strided:
        raise ShapeError(mismatch(name, "a strided tensor", array.layout, "pass .to_dense()"))
