"""Online detection on a CUDA device: lists of live micro-tiles, without a word to the host.

One or two kernels build an index on the current torch stream: no synchronisation, no counter to
clear, no memory but the result and a few bits, so calls can be captured in a CUDA graph and
replayed with other contents. CTAs that share a list count what stands before their own part
instead of taking places by atomics, so every list but that of row ids alone comes out ascending and
``deterministic`` costs nothing there. The index is that of PIT, SOSP'23, section 3.
"""

from __future__ import annotations

from typing import Any

from ..errors import ShapeError, mismatch
from ..remember import remember
from ..structs import BitMask, BlockMask, Index, Mask, MicroTile, SparsitySpec, Values
from .cuda_arrays import check_tensor, dtype_name, empty_of, signature
from .cuda_detect_axes import axes_grid
from .cuda_detect_ids import Find, Lists, SlicePlan
from .cuda_detect_plan import MaskPlan, plan_mask
from .cuda_modules import CudaKernels, GetModule
from .cuda_workspace import Take, new_index

MAX_PLANS = 1024  # kept by one detector
AxesLines = tuple[Any, Any]  # bits of live rows, and of live columns: see `axes_lines`


class MaskPlans:
    """Plans for the masks and values that were seen; ``clusters`` and ``whole`` are those of
    `plan_mask`."""

    def __init__(self, clusters: bool = True, whole: bool = False) -> None:
        self._clusters, self._whole = clusters, whole
        self._known: dict[Any, MaskPlan] = {}

    def of(
        self, spec: SparsitySpec, value: Any, shape: tuple[int, ...], micro_tile: MicroTile
    ) -> tuple[str, MaskPlan]:
        """The name of the argument ``value``, which is checked, and its plan.

        Raises
        ------
        ShapeError, DTypeError, AxisError
            As `CudaDetector.detect`.
        """
        argument = f"sparsity of {micro_tile.operand} ({type(spec).__name__})"
        check_tensor(argument, value)
        key = (spec, value.dtype, shape, micro_tile)
        plan = self._known.get(key)
        if plan is None:
            asked = (shape, micro_tile, self._clusters, self._whole)
            plan = plan_mask(spec, dtype_name(value), *asked)
            remember(self._known, key, plan, MAX_PLANS)
        if value.shape != plan.value_shape:
            expected = f"shape {list(plan.value_shape)}"
            raise ShapeError(mismatch(argument, expected, f"shape {list(value.shape)}"))
        return argument, plan


class CudaDetector:
    """Builds indices of CUDA tensors. Threads may share it.

    Parameters
    ----------
    get_module
        ``get_module(name, build)`` returns the loaded module of the kernels that ``build()``
        makes: see `pit_tvm.runtime.cuda_modules.cached_modules`. It is asked when a kernel is
        first needed.
    checked
        Look for ids and lengths out of range, for which the host waits.
    clusters
        Whether CTAs of the GPU form clusters.
    """

    def __init__(
        self, get_module: GetModule, *, checked: bool = False, clusters: bool = True
    ) -> None:
        self._kernels, self._checked = CudaKernels(get_module, clusters), checked
        self._plans = MaskPlans(clusters)
        self._finds: dict[Any, Find] = {}

    def detect(
        self,
        spec: SparsitySpec,
        value: Any,
        shape: tuple[int, ...],
        micro_tile: MicroTile,
        *,
        deterministic: bool = False,
        take: Take = new_index,
    ) -> Index:
        """Lists of the live micro-tiles of one operand, on the device of ``value``.

        Parameters
        ----------
        spec, value
            The operand's specification and the CUDA tensor passed for it: for `Mask` bool or
            uint8 of ``shape``; for `BitMask` and `BlockMask` of the shapes that they state; for
            `Values` the operand itself (NaN is live, -0.0 is not). Rows of these may lie any
            distance apart; elements of a row are neighbours, but for `BlockMask`. For `Rows`,
            `Lengths` and `Groups` a vector of int32 or int64; for `Groups` also
            [tokens, top_k], where an id of the result stands for ``token * top_k + choice``.
        shape
            The operand's shape: two dimensions for masks and values, any number for the others.
        micro_tile
            One extent per dimension; for `Rows`, `Lengths` and `Groups` all 0 but the PIT one,
            which is the specification's ``dim``.
        deterministic
            Ascending lists whatever the input: row ids are sorted, at the cost of one more launch.
            All other lists always ascend.
        take
            Where the result's memory comes from.

        Returns
        -------
        Index
            ``capacity`` is the extent of the PIT dimension rounded up to a multiple of 64, at
            least 64. Ids out of range (-1 is a dead slice) are dropped and impossible lengths
            count as 0, since the host never sees them.

        Raises
        ------
        ShapeError, DTypeError, AxisError
            The message names the argument.
        """
        find = self.prepared(spec, value, shape, micro_tile, deterministic, False, top_k=True)
        return find(value, take)[0]

    def detect_split(
        self,
        spec: SparsitySpec,
        value: Any,
        shape: tuple[int, ...],
        micro_tile: MicroTile,
        *,
        take: Take = new_index,
    ) -> tuple[Index, Index]:
        """`detect`, ascending, and the index of all other positions, the dead ones, ascending too.

        `Groups` are refused (AxisError): the lists of groups name no slice that is dead.
        """
        find = self.prepared(spec, value, shape, micro_tile, False, True)
        live, dead = find(value, take)
        assert dead is not None
        return live, dead

    def detect_axes(
        self,
        spec: SparsitySpec,
        value: Any,
        shape: tuple[int, ...],
        micro_tiles: tuple[MicroTile, ...],
        *,
        split: bool = False,
        take: Take = new_index,
        lines: AxesLines | None = None,
    ) -> tuple[Index, Index | None, Index]:
        """`detect` for slices along either axis of a mask, which is read once: those of the first
        of ``micro_tiles``, with ``split`` the other ones beside them, and those of the second.

        ``take`` is asked for the roles live, dead and beside; ``lines``, of `axes_lines`, get the
        bits that the lists are made of.
        """
        rows, columns = micro_tiles
        argument, _ = self._plans.of(spec, value, shape, rows)
        extents = shape[rows.dim], shape[columns.dim]
        live = take(value, "live", 1, extents[0])
        dead = take(value, "dead", 1, extents[0]) if split else None
        beside = take(value, "beside", 1, extents[1])
        lines = lines or axes_lines(value, shape)
        self._fold_axes(argument, value, shape, lines)
        bits = lines[rows.dim], lines[columns.dim]
        self._kernels.emit_axes(bits, extents, live, dead, beside)
        return live, dead, beside

    def prepared(
        self,
        spec: SparsitySpec,
        value: Any,
        shape: tuple[int, ...],
        micro_tile: MicroTile,
        deterministic: bool,
        split: bool,
        top_k: bool = False,
    ) -> Find:
        """``find(value, take)``: `detect`, or with ``split`` `detect_split`, for every value that
        has the type, shape and strides of this one. Errors are theirs. Group ids [tokens, top_k],
        which name rows that the operand does not have, are refused without ``top_k``."""
        shape = tuple(shape)
        if isinstance(spec, (Mask, Values, BitMask, BlockMask)):
            return lambda given, take: self._mask(spec, given, shape, micro_tile, split, take)
        check_tensor(f"sparsity of {micro_tile.operand}", value)
        key = (spec, *signature((value,)), shape, micro_tile, deterministic, split, top_k)
        run = self._finds.get(key)
        if run is None:
            asked = (shape, micro_tile, deterministic, split, self._checked, top_k)
            plan = SlicePlan(self._kernels, spec, value, *asked)
            run = remember(self._finds, key, plan.run(), MAX_PLANS)
        return run

    def report(self, count: Any, address: int) -> None:
        """Write ``count``, int32 [slots], to pinned memory of the host, on the current stream."""
        self._kernels.slices("report_counts")(count, address)

    def _fold_axes(
        self, argument: str, value: Any, shape: tuple[int, ...], lines: AxesLines
    ) -> None:
        rows, cols = shape
        if rows and cols:
            address, stride, wide = rows_of(argument, value)
            fold, height = self._kernels.mask("fold_axes"), axes_grid(rows, cols)[0]
            fold(address, stride, rows, cols, height, wide, *lines)

    def _mask(
        self,
        spec: SparsitySpec,
        value: Any,
        shape: tuple[int, ...],
        micro_tile: MicroTile,
        split: bool,
        take: Take,
    ) -> Lists:
        argument, plan = self._plans.of(spec, value, shape, micro_tile)
        live = take(value, "live", plan.slots, plan.extent)
        dead = take(value, "dead", plan.slots, plan.extent) if split else None
        if plan.slots == 0:
            return live, dead
        if plan.lists is not None and dead is None:
            name, numbers = plan.lists
            lists = live.ids, live.count
            if isinstance(spec, BlockMask):
                places = value.data_ptr(), *_strides(value, micro_tile)
                self._kernels.mask(name)(*places, *numbers, *lists, live.lines)
                return live, None
            address, stride, wide = rows_of(argument, value)
            bits = [live.lines] if micro_tile.dim else []  # columns have some, rows none
            self._kernels.mask(name)(address, stride, *numbers, wide, plan.keep, *lists, *bits)
            return live, None
        kept = live.lines if plan.fold.parts == 1 else None
        lines = fold_lines(self._kernels, argument, value, spec, micro_tile, plan, kept)
        axis = (plan.entries, plan.grain, plan.extent)
        self._kernels.emit(lines, plan.fold.parts, axis, live, dead)
        return live, dead


def axes_lines(like: Any, shape: tuple[int, ...]) -> AxesLines:
    """Memory for the bits of live rows of a mask of this shape, and of its live columns: lines, of
    which a bit counts in any (see `fold_axes`)."""
    rows, cols = shape
    _, parts, chunks = axes_grid(rows, cols)
    sizes = ((chunks, rows), (parts, cols))
    across, down = (empty_of("uint32", like, (n, max(1, -(-of // 32)))) for n, of in sizes)
    return across, down


def fold_lines(
    kernels: CudaKernels,
    argument: str,
    value: Any,
    spec: SparsitySpec,
    micro_tile: MicroTile,
    plan: MaskPlan,
    lines: Any = None,
) -> Any:
    """Bits of the live entries along the PIT axis: a CUDA tensor (slots * parts, words), uint32;
    into ``lines``, of as many words or more, unless that is None."""
    fold = plan.fold
    if lines is None:
        lines = empty_of("uint32", value, (plan.slots * fold.parts, max(1, plan.words)))
    if plan.words and isinstance(spec, BlockMask):
        places = value.data_ptr(), *_strides(value, micro_tile)
        kernels.mask(fold.kernel)(*places, *fold.numbers, lines)
    elif plan.words:
        address, stride, wide = rows_of(argument, value)
        kernels.mask(fold.kernel)(address, stride, *fold.numbers, wide, plan.keep, lines)
    return lines


def _strides(value: Any, micro_tile: MicroTile) -> tuple[int, int]:
    """Bytes between neighbours of a block mask along the PIT axis, and along the other."""
    return value.stride(micro_tile.dim), value.stride(1 - micro_tile.dim)


def rows_of(argument: str, value: Any) -> tuple[int, int, int]:
    """Address, bytes between rows, and whether all rows begin at multiples of 16 bytes."""
    if value.numel() and value.shape[1] > 1 and value.stride(1) != 1:
        got = f"strides {value.stride()} elements"
        raise ShapeError(mismatch(argument, "contiguous rows", got, "pass .contiguous()"))
    address = value.data_ptr()
    stride = value.stride(0) * value.element_size() if value.shape[0] > 1 else 0
    return address, stride, int((address | stride) % 16 == 0)
