"""Checks of arguments that all functions of torch tensors share, and their types under
``torch.autocast``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._C import _functorch as functorch
from torch.autograd import forward_ad

from ..errors import DTypeError, mismatch
from ..runtime.cuda_arrays import check_devices
from ..runtime.torch_arrays import check_plain, check_strided
from .dispatch import differentiated

CAST = (torch.float16, torch.bfloat16, torch.float32)  # what autocast converts, and experts take


def autocast(x: torch.Tensor, *others: Any) -> Any:
    """The tensors in the type of ``torch.autocast``, where that is on; what is none as it is."""
    if x.is_meta:  # torch knows of no autocast there
        return x, *others
    if not torch.is_autocast_enabled(x.device.type):
        return x, *others
    dtype = torch.get_autocast_dtype(x.device.type)
    return [
        each.to(dtype) if isinstance(each, torch.Tensor) and each.dtype in CAST else each
        for each in (x, *others)
    ]


def check_type(
    name: str, array: torch.Tensor, x: torch.Tensor, dtype: torch.dtype, of: str = "x"
) -> None:
    """DTypeError if an array is not of ``dtype``, as it has to be beside ``x``, called ``of``."""
    if array.dtype != dtype:
        expected, advice = f"{dtype} with {of} of {x.dtype}", f"convert it with .to({dtype})"
        raise DTypeError(mismatch(name, expected, array.dtype, advice))


def check_tensors(arrays: Mapping[str, object]) -> None:
    """DTypeError or ShapeError for what is no tensor that operators take."""
    transformed = not torch.compiler.is_compiling() and (
        forward_ad._current_level >= 0 or functorch.peek_interpreter_stack() is not None
    )
    for name, array in arrays.items():
        if not isinstance(array, torch.Tensor):
            raise DTypeError(mismatch(name, "a torch tensor", type(array).__name__))
        check_plain(name, array)
        check_strided(name, array)
        if transformed:
            _check_derivatives(name, array)


def _check_derivatives(name: str, array: torch.Tensor) -> None:
    """DTypeError for a tensor with a tangent, also beneath ``torch.vmap``: torch calls operators
    without a formula for it as if it were zero. And for one that ``torch.func`` takes gradients
    to, which torch's custom operators have not."""
    while functorch.is_batchedtensor(array):
        array = functorch.get_unwrapped(array)
    if forward_ad.unpack_dual(array).tangent is not None:
        advice = "pass .detach(), or use torch's own layers: these go backward only"
        raise DTypeError(mismatch(name, "a tensor without a tangent", "one that has one", advice))
    if functorch.is_gradtrackingtensor(array) and differentiated(array):
        expected, got = "a tensor without gradients of torch.func", "one that has them"
        raise DTypeError(mismatch(name, expected, got, "use .backward() or torch.autograd.grad"))


def check_same_device(x: torch.Tensor, others: dict[str, torch.Tensor], of: str = "x") -> None:
    """DTypeError for a tensor on another device than ``x``, called ``of``: torch calls the fake
    implementation, as for ``x`` on "meta", if any of them is there, and nothing would be
    computed."""
    if not x.is_meta:
        check_devices(of, x, others)
