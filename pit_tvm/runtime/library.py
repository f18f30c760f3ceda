"""Dense products of whole operands by the library that made the arrays: torch, or numpy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .arrays import as_numpy, as_torch, is_torch, itemsize


def library_matmul(
    lhs: Any, rhs: Any, out: Any, transpose_lhs: bool = False, transpose_rhs: bool = False
) -> Any:
    """``out[...] = lhs @ rhs`` on the whole operands by the library's BLAS; returns ``out``.

    Torch's product if any of the three is a torch tensor, else numpy's. Operands have two
    dimensions, or more with equal leading ones; a transposed operand has its last two swapped.
    Sums of 16-bit types are float32: torch does this by itself where all three types are equal;
    otherwise, and always in numpy (which has no 16-bit BLAS), the operands are converted to
    float32 first, which costs a copy of each. int8 is multiplied in float64, which is exact; what
    does not fit the result wraps. Sums in float64 are of operands converted to it.

    Shapes and types are the caller's to check.
    """
    use_torch = is_torch(lhs) or is_torch(rhs) or is_torch(out)
    convert: Callable[[Any], Any] = as_torch if use_torch else as_numpy
    left, right, result = convert(lhs), convert(rhs), convert(out)
    left = left.swapaxes(-1, -2) if transpose_lhs else left
    right = right.swapaxes(-1, -2) if transpose_rhs else right
    if not use_torch:
        _numpy_matmul(left, right, result)
    elif result.is_inference() and not sys.modules["torch"].is_inference_mode_enabled():
        with sys.modules["torch"].inference_mode():  # torch writes into such tensors there only
            _torch_matmul(left, right, result)
    else:
        _torch_matmul(left, right, result)
    return out


def library_sums(operands: Sequence[str], sums: str) -> bool:
    """Whether `library_matmul` gives what an expression sums up that casts its operands of these
    types to that of the sums: no cast loses anything, and whole products are exact in float64."""
    if any(t != sums and (sums == "bfloat16" or not _widens(t, sums)) for t in operands):
        return False
    whole = [_whole(t) for t in operands]
    return not all(whole) or all(itemsize(t) == 1 for t in operands)


def _torch_matmul(left: Any, right: Any, out: Any) -> None:
    torch, element = sys.modules["torch"], out.dtype
    if left.dtype is element and right.dtype is element and element.is_floating_point:
        torch.matmul(left, right, out=out)
        return
    whole = not (left.dtype.is_floating_point or right.dtype.is_floating_point)
    wide = torch.float64 if whole or element is torch.float64 else torch.float32
    sums = out if element is wide else torch.empty(out.shape, dtype=wide, device="cpu")
    # Autocast, which would lower the types, leaves products with a given result alone.
    torch.matmul(left.to(wide), right.to(wide), out=sums)
    if sums is not out:
        out.copy_(sums.to(torch.int64) if whole else sums)


def _numpy_matmul(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    if left.dtype == right.dtype == out.dtype and out.dtype.char in "fd":
        np.matmul(left, right, out=out)
        return
    whole = left.dtype.kind in "iub" and right.dtype.kind in "iub"
    wide = np.float64 if whole or out.dtype.char == "d" else np.float32
    sums = np.matmul(left.astype(wide), right.astype(wide))
    np.copyto(out, sums.astype(np.int64) if whole else sums, casting="unsafe")


def _widens(dtype: str, sums: str) -> bool:
    return np.can_cast("float32" if dtype == "bfloat16" else dtype, sums)


def _whole(dtype: str) -> bool:
    return dtype.startswith(("int", "uint", "bool"))
