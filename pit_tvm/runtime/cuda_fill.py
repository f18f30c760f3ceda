"""Rows written and rows copied on a CUDA device: dead output rows, and padding to whole vectors.

`CudaFill` writes a constant row to the rows that a list on the device names, and copies arrays
whose rows are no multiples of 16 bytes into padded ones and back, which operands with such rows
need before a kernel that moves 16 bytes at a time can take them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DTypeError, ShapeError, mismatch
from ..structs import Index
from . import cuda_arrays
from .cuda_detect_device import BYTES
from .cuda_fill_kernels import MOST_BLOCKS, STORES, THREADS, fill_module
from .cuda_modules import GetModule, Kernel, ModuleKernels

_STEP = BYTES // 2  # elements of 16 bits in a piece


class CudaFill:
    """Fills and copies on the current torch stream, without a host synchronisation.

    ``get_module(name, build)`` gives the loaded module of what ``build()`` makes, such as
    `pit_tvm.runtime.cuda_modules.cached_modules`.
    """

    def __init__(self, get_module: GetModule) -> None:
        self._kernels = ModuleKernels(get_module)

    def _kernel(self, name: str) -> Kernel:
        return self._kernels.find("cuda-fill", fill_module, name)

    def fill_rows(self, out: Any, index: Index, row: Any = None) -> None:
        """``out[i, :] = row``, or zeros, for every i that a list names.

        Parameters
        ----------
        out
            CUDA tensor [rows, n] of any type, rows contiguous and any distance apart.
        index
            ``ids`` int32 [1, capacity] and ``count`` int32 [1], on the same device. Ids outside
            ``out`` are dropped.
        row
            [n], contiguous, of the type of ``out``; None: zeros.

        Raises
        ------
        ShapeError, DTypeError
        """
        _check_rows("out", out, (2,))
        rows, n = out.shape
        address = 0
        if row is not None:
            cuda_arrays.check_tensor("row", row, (cuda_arrays.dtype_name(out),), (n,))
            address = row.data_ptr()
        if rows == 0 or n == 0:
            return
        item = out.element_size()
        stride = _strides(out)[1]
        cut = _cut(out, n * item, index.ids.shape[-1])
        aligned = cut.aligned and not (address | n * item) % BYTES
        self._kernel(f"fill_rows{'_aligned' * aligned}")(
            address,
            n * item if row is not None else 0,
            out.data_ptr(),
            stride,
            n * item,
            cut.width,
            rows,
            cut.even,
            cut.lanes,
            cut.blocks,
            index.ids,
            index.count,
        )

    def clear_ungrouped(self, out: Any, ids: Any, groups: int) -> None:
        """``out[i, :] = 0`` for every i whose id names none of ``groups`` groups.

        Parameters
        ----------
        out
            CUDA tensor [rows, n] of any type, rows contiguous and any distance apart.
        ids
            int32 or int64 with ``rows`` elements, of any shape.

        Raises
        ------
        ShapeError, DTypeError
        """
        _check_rows("out", out, (2,))
        cuda_arrays.check_tensor("ids", ids, ("int32", "int64"))
        rows, n = out.shape
        if ids.numel() != rows:
            raise ShapeError(mismatch("ids", f"{rows} ids", ids.numel()))
        if rows == 0 or n == 0:
            return
        size = n * out.element_size()
        cut = _cut(out, size, rows)
        self._kernel(f"clear_rows_{8 * ids.element_size()}")(
            out.data_ptr(),
            _strides(out)[1],
            size,
            cut.width,
            groups,
            cut.even,
            min(MOST_BLOCKS, -(-rows // THREADS)),
            ids.reshape(-1),
        )

    def padded(self, array: Any) -> Any:
        """A copy [rows, n] whose extents are `stepped`, 0 beyond; errors as `pad_copy`."""
        made = cuda_arrays.empty(array, stepped(array.shape))
        cuda_arrays.zero(made)
        self.pad_copy(array, made[: array.shape[0]])
        return made

    def pad_copy(self, src: Any, dst: Any) -> None:
        """``dst[..., :n] = src[..., :n]`` for the shorter rows' n; the rest of ``dst`` becomes 0.

        Parameters
        ----------
        src, dst
            CUDA tensors [rows, n] or [batch, rows, n] of one type, equal but for the last extent;
            rows contiguous, and any distance apart.

        Raises
        ------
        ShapeError, DTypeError
        """
        _check_rows("src", src, (2, 3))
        _check_rows("dst", dst, (2, 3))
        if src.dtype != dst.dtype:
            name = cuda_arrays.dtype_name
            raise DTypeError(mismatch("dst", name(src), name(dst), "copy between equal types"))
        if src.shape[:-1] != dst.shape[:-1]:
            expected = f"leading extents {tuple(src.shape[:-1])}"
            raise ShapeError(mismatch("dst", expected, tuple(dst.shape[:-1])))
        if dst.numel() == 0:
            return
        size, total = dst.shape[-1] * dst.element_size(), dst.numel() // dst.shape[-1]
        cut = _cut(dst, size, total)
        self._kernel("copy_rows")(
            src.data_ptr(),
            *_strides(src),
            src.shape[-1] * src.element_size(),
            dst.data_ptr(),
            *_strides(dst),
            size,
            cut.width,
            dst.shape[-2],
            total,
            cut.even,
            cut.lanes,
            cut.blocks,
            cuda_arrays.empty_of("int32", dst, (1,)),  # tells the device and the stream
        )


def stepped(shape: Sequence[int]) -> list[int]:
    """Extents rounded up to whole pieces of 16 bytes of 16-bit elements."""
    return [-(-size // _STEP) * _STEP for size in shape]


@dataclass(frozen=True)
class _Cut:
    """How rows are cut into pieces of 16 bytes, and how many threads share them."""

    aligned: bool  # whether all rows begin at multiples of 16 bytes
    width: int  # pieces of a row at most
    even: int  # whether pieces begin and end at multiples of 2 bytes
    lanes: int  # logarithm of the threads of one row
    blocks: int  # CTAs


def _cut(dst: Any, size: int, rows: int) -> _Cut:
    """For ``rows`` rows of ``size`` bytes of ``dst``."""
    numbers = (dst.data_ptr(), *_strides(dst))
    aligned = not any(number % BYTES for number in numbers)
    width = -(-size // BYTES) if aligned else (size - 1) // BYTES + 2
    lanes = min(5, (width - 1).bit_length())
    shares = -(-width // (STORES << lanes))
    blocks = max(1, min(MOST_BLOCKS, -(-rows * shares // (THREADS >> lanes))))
    return _Cut(aligned, width, int(not any(n % 2 for n in (size, *numbers))), lanes, blocks)


def _check_rows(name: str, array: Any, ranks: tuple[int, ...]) -> None:
    cuda_arrays.check_tensor(name, array)
    if array.dim() not in ranks:
        expected = " or ".join(f"{rank} dimensions" for rank in ranks)
        raise ShapeError(mismatch(name, expected, array.dim()))
    if array.numel() and array.shape[-1] > 1 and array.stride(-1) != 1:
        got = f"strides {array.stride()} elements"
        raise ShapeError(mismatch(name, "contiguous rows", got, "pass .contiguous()"))


def _strides(array: Any) -> tuple[int, int]:
    """Bytes between batches and between rows; 0 where there is but one."""
    item, shape, strides = array.element_size(), array.shape, array.stride()
    batch = strides[0] * item if array.dim() == 3 and shape[0] > 1 else 0
    return batch, strides[-2] * item if shape[-2] > 1 else 0
