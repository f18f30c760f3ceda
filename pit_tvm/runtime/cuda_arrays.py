"""torch tensors on a CUDA device: checks, and memory for results.

Memory comes from torch's caching allocator: it belongs to the current stream, is handed out again
without a call of the driver, and inside a CUDA graph's capture it belongs to the graph.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from ..errors import BackendUnavailable, DTypeError, ShapeError, mismatch
from .cuda_recording import recorded
from .torch_arrays import address_of, check_contiguous, check_own, check_signs, check_strided

_EXPECTED = "a dense CUDA tensor"


def dtype_name(array: Any) -> str:
    """Name of a tensor's element type, such as "bfloat16"."""
    return str(array.dtype).removeprefix("torch.")


def check_tensor(
    name: str, array: Any, dtypes: Sequence[str] = (), shape: Sequence[int] | None = None
) -> None:
    """Refuse what is no CUDA tensor of one of ``dtypes`` (any, if empty) and of ``shape``.

    With a ``shape`` the tensor must be contiguous.

    Raises
    ------
    DTypeError
        No torch tensor, on another device, without memory of its own, or of another type.
    ShapeError
        Another shape, sparse, not contiguous, or a negated view.
    """
    import torch

    if not isinstance(array, torch.Tensor) or not array.is_cuda:
        got = f"one on {array.device}" if isinstance(array, torch.Tensor) else type(array).__name__
        raise DTypeError(mismatch(name, "a CUDA tensor", got, "pass .cuda()"))
    check_own(name, array, _EXPECTED)
    if dtypes and dtype_name(array) not in dtypes:
        raise DTypeError(mismatch(name, " or ".join(dtypes), dtype_name(array)))
    check_strided(name, array)
    check_signs(name, array)
    if shape is None:
        return
    if tuple(array.shape) != tuple(shape):
        raise ShapeError(mismatch(name, f"shape {list(shape)}", f"shape {list(array.shape)}"))
    check_contiguous(name, array)


def check_devices(name: str, array: Any, others: dict[str, Any]) -> None:
    """DTypeError for ``others``, by their names, that are not on the device of an array."""
    for other, each in others.items():
        if each.device != array.device:
            expected = f"the device of {name}, {array.device}"
            raise DTypeError(mismatch(other, expected, each.device))


def check_memory(names: Sequence[str], arrays: Sequence[Any]) -> None:
    """DTypeError for tensors without memory of their own, and what torch.func wraps."""
    for name, array in zip(names, arrays, strict=True):
        check_own(name, array, _EXPECTED)
        address_of(name, array, _EXPECTED)


def empty_of(dtype: str, like: Any, shape: tuple[int, ...]) -> Any:
    """Uninitialised tensor of a type on the device of ``like``."""
    import torch

    def make() -> Any:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)

    now = recorded()
    return make() if now is None else now.allocate(make)


def zero(array: Any) -> None:
    """Set a tensor to 0, on the current stream."""
    array.zero_()


def first_outside(ids: Any, low: int, high: int) -> tuple[int, int] | None:
    """The first of ``ids`` not in ``low .. high`` and its position; None if all are.

    Waits for the device: for checks that the user asks for.
    """
    outside = ((ids < low) | (ids > high)).nonzero()
    if not len(outside):
        return None
    place = int(outside[0])
    return int(ids[place]), place


def first_repeat(ids: Any) -> tuple[int, int] | None:
    """An id that stands twice in a vector, and its second position; waits for the device."""
    order = ids.argsort(stable=True)
    again = (ids[order].diff() == 0).nonzero()
    if not len(again):
        return None
    place = int(order[int(again[0]) + 1])
    return int(ids[place]), place


def as_cuda(names: Sequence[str], arrays: Sequence[Any]) -> list[Any]:
    """The torch tensors of CUDA arrays, without copies.

    Raises
    ------
    DTypeError, ShapeError
        Not an array, one without memory of its own, sparse, or a negated view; the message names
        it.
    BackendUnavailable
        torch is not installed.
    """
    torch = _torch()
    tensors = []
    for name, array in zip(names, arrays, strict=True):
        if not isinstance(array, torch.Tensor):
            if not hasattr(array, "__dlpack__"):
                got = type(array).__name__
                raise DTypeError(mismatch(name, "a CUDA tensor", got, "pass torch's"))
            array = torch.from_dlpack(array)
        check_own(name, array, _EXPECTED)
        check_strided(name, array)
        check_signs(name, array)
        tensors.append(array)
    return tensors


def signature(tensors: Sequence[Any]) -> tuple[object, ...]:
    """Everything about CUDA tensors that a check can depend on, but layouts and addresses."""
    key: list[object] = []
    for a in tensors:
        key += (a.shape, a.dtype, a.get_device(), a.is_contiguous(), a.is_neg())
    return tuple(key)


def empty(like: Any, shape: Sequence[int]) -> Any:
    """Uninitialised tensor of the type and on the device of ``like``."""
    now = recorded()
    if now is None:
        return like.new_empty(tuple(shape))
    return now.allocate(lambda: like.new_empty(tuple(shape)))


def is_capturing(device: int | None = None) -> bool:
    """Whether the current stream of a device, by its number, is recorded into a CUDA graph; None:
    that of the current device."""
    asked, stream, current = _questions()
    if device is None or device == current():
        return asked()
    if not stream(device):  # the default one, which nothing records
        return False
    import torch

    with torch.cuda.device(device):
        return asked()


def is_rehearsed() -> bool:
    """Whether ``torch.compile`` runs what it records next as a CUDA graph, on a stream of its own.

    Memory is its graphs' then, which use it again: torch refuses what is kept of it.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    found = getattr(getattr(trees, "local", None), "tree_manager_containers", {})
    managers = [(device, each.tree_manager) for device, each in found.items()]
    return any(m is not None and m.stream.cuda_stream == stream_of(d) for d, m in managers)


def stream_of(device: int) -> int:
    """Handle of the current stream of a device."""
    return _questions()[1](device)


def start_library(device: int) -> None:
    """Start torch's library of products on a device, for this thread, if it is not: its first call
    cannot while a CUDA graph is captured."""
    import torch

    with torch.cuda.device(device):
        torch.cuda.current_blas_handle()


def tf32_allowed() -> bool:
    """Whether torch lets tensor cores multiply float32, with 10 bits of mantissa: what
    ``torch.set_float32_matmul_precision`` or ``torch.backends.cuda.matmul`` say now."""
    torch = sys.modules.get("torch")
    if torch is None:  # nobody has set it
        return False
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # torch 2.9 and later
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


@cache
def _questions() -> tuple[Callable[[], bool], Callable[[int], int], Callable[[], int]]:
    """torch's functions behind `is_capturing` and `stream_of`: whether the current stream of the
    current device is recorded, a device's current stream, and the current device.

    torch's own compiled code asks for a stream this way: ``torch.cuda.current_stream`` takes ten
    times as long.
    """
    import torch

    return (
        torch.cuda.is_current_stream_capturing,
        torch._C._cuda_getCurrentRawStream,
        torch._C._cuda_getDevice,
    )


def synchronize(device: int) -> None:
    """Wait for a device, by its number."""
    import torch

    torch.cuda.synchronize(device)


def dense_product(lhs: Any, rhs: Any, bias: Any, act: str, out: Any, *, transpose_rhs: bool) -> Any:
    """``out = act(lhs @ rhs + bias)`` by cuBLAS and torch's activations, all rows, without
    gradients; without a bias also of matrices beside each other. ``out`` may be None: torch makes
    one, which takes less of the host. RuntimeError where a call is recorded: cuBLAS keeps memory
    for every stream that it ever ran on."""
    import torch

    if recorded() is not None:
        raise RuntimeError("a dense product is no part of a graph")
    # torch refuses to write into what is given where an operand requires a gradient.
    if lhs.requires_grad:
        lhs = lhs.detach()
    if rhs.requires_grad:
        rhs = rhs.detach()
    if bias is not None and bias.requires_grad:
        bias = bias.detach()
    if out is None and torch.is_autocast_enabled("cuda" if lhs.is_cuda else "cpu"):
        columns = rhs.shape[-2 if transpose_rhs else -1]
        out = lhs.new_empty((*lhs.shape[:-1], columns))  # torch's own would be of another type
    if out is None and transpose_rhs and rhs.ndim == 2:
        out = torch.nn.functional.linear(lhs, rhs, bias)
    elif bias is None:
        right = rhs.mT if transpose_rhs else rhs
        out = (torch.mm if lhs.ndim == 2 else torch.matmul)(lhs, right, out=out)
    else:
        out = torch.addmm(bias, lhs, rhs.mT if transpose_rhs else rhs, out=out)
    if act != "none":
        _activate(out, act)
    return out


def activated(row: Any, act: str) -> Any:
    """A copy of a tensor with an activation applied."""
    copy = row.clone()
    _activate(copy, act)
    return copy


def _activate(array: Any, act: str) -> None:
    import torch

    functional = torch.nn.functional
    if act == "relu":
        array.relu_()
    elif act == "relu2":
        array.relu_().square_()
    elif act == "silu":
        functional.silu(array, inplace=True)
    elif act != "none":
        form = "tanh" if act == "gelu_tanh" else "none"
        torch.ops.aten.gelu_(array, approximate=form)  # functional.gelu has no way to be in place


class PinnedCounts:
    """Counts in pinned memory that a kernel writes and the host reads, without a word to CUDA.

    A count is never negative, so -1 stands where nothing has arrived yet.
    """

    def __init__(self, number: int) -> None:
        import torch

        _arrived_since()
        self._memory = torch.empty(number, dtype=torch.int32, device="cpu", pin_memory=True)
        self.address = self._memory.data_ptr()  # for the host and, addresses being unified, GPUs
        self._view = (ctypes.c_int32 * number).from_address(self.address)

    def expect(self) -> None:
        """Forget the values, before the launch that writes new ones."""
        ctypes.memset(self.address, 0xFF, ctypes.sizeof(self._view))

    def values(self) -> tuple[int, ...] | None:
        """All counts, or None as long as one is missing."""
        if -1 in self._view[-1:]:  # the usual case; to read them all takes microseconds
            return None
        found = tuple(self._view)
        return None if -1 in found else found


def keep_until_arrived(memory: Sequence[PinnedCounts]) -> None:
    """Keep memory that kernels still write to: torch does not know of them, and would hand it to
    somebody else."""
    _unfinished().extend(memory)


def _arrived_since() -> None:
    """Let go of kept memory that nothing writes to any more."""
    kept = _unfinished()
    for _ in range(len(kept)):
        try:
            memory = kept.pop(0)
        except IndexError:  # another thread does the same
            return
        if memory.values() is None:
            kept.append(memory)


@cache
def _unfinished() -> list[PinnedCounts]:
    return []


def _torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError as error:
        advice = "pip install torch"
        raise BackendUnavailable(mismatch("target cuda", "torch", "none", advice)) from error
    return torch
