"""The index of a batch on a GPU, with the one number that the host waits for."""

from __future__ import annotations

import torch
import tvm
from tvm import relax

from ..errors import ShapeError, mismatch
from ..runtime.cuda_arrays import is_capturing
from ..runtime.cuda_live_tokens import NOT_A_MASK, live_module
from ..runtime.cuda_modules import cached_modules
from ..runtime.kernel_cache import KernelCache
from .inputs import Inputs
from .lookups import held
from .packing import is_index
from .rebuild import is_op, rebuild

Lists = tuple[torch.Tensor, ...]

_WORDS = (torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64)  # that kernels read


class CudaIndex:
    """``index(mask, *ids)``: `pit_tvm.runtime.live_tokens.live_tokens` on the mask's device.

    The graph passes those of ``inputs`` that are ids (`pass_ids`).
    """

    def __init__(self, inputs: Inputs, arch: str, cache: KernelCache) -> None:
        self._inputs, self._tables = inputs, inputs.tables
        self._kernels = cached_modules(cache, arch)("cuda-live-tokens", live_module)

    def __call__(self, mask: torch.Tensor, *ids: torch.Tensor) -> Lists:
        """The lists, int32. The host waits for the number of live tokens.

        While the stream is recorded nothing can be waited for or checked: then lists are as long
        as the plane, and what is behind the live tokens names token 0.

        Raises
        ------
        ShapeError
            The mask holds something else than 0 and 1, or more live tokens of a sequence than the
            model admits, or ids name no row of their table.
        """
        lists = empty_lists(mask)
        if is_capturing(mask.get_device()):
            self._start(mask, lists)
            return lists
        return first(lists, self.live(self.fill(lists, mask, *ids)))

    def fill(self, lists: Lists, mask: torch.Tensor, *ids: torch.Tensor) -> torch.Tensor:
        """Write ``lists`` (`empty_lists`) up to the live tokens; what `live` reads. Nothing waits,
        so this may be recorded."""
        counts, status = self._start(mask, lists)
        for number, (each, rows) in enumerate(zip(ids, self._tables.values(), strict=False)):
            self._mark_outside(each, rows, number + 1, status)
        most = self._inputs.live
        if most is not None and mask.shape[1] > most:
            self._mark_outside(counts, most + 1, len(status) - 1, status)
        return status

    def live(self, status: torch.Tensor) -> int:
        """Wait for the number of live tokens, which `fill` leaves in ``status``.

        Raises
        ------
        ShapeError
            As for a call. The lists name tokens of the plane all the same.
        """
        live, *outside, longer = status.tolist()
        if live >= NOT_A_MASK:
            raise ShapeError(mismatch(self._inputs.mask, "only 0 and 1", "other values"))
        for (name, rows), found in zip(self._tables.items(), outside, strict=True):
            if found:
                raise ShapeError(mismatch(name, f"ids of 0 to {rows - 1}", "others"))
        if longer:
            raise ShapeError(self._inputs.too_many("more"))
        return live

    def _mark_outside(self, ids: torch.Tensor, rows: int, place: int, status: torch.Tensor) -> None:
        """Set ``status[place]`` if one of ``ids`` is none of 0 to ``rows - 1``."""
        if ids.numel():
            mark = self._kernels[f"mark_outside_{ids.element_size() * 8}"]
            mark(ids.reshape(-1), rows, place, status)

    def _start(self, mask: torch.Tensor, lists: Lists) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch what writes the lists; the live tokens of every sequence, and their number behind
        which a place follows for each table and one for ``counts``."""
        counts, status = (
            torch.zeros(size, dtype=torch.int32, device=mask.device)
            for size in (len(mask), 2 + len(self._tables))
        )
        if mask.numel():
            words = _words(mask)
            bits = words.element_size() * 8
            self._kernels[f"count_live_{bits}"](words, counts)
            self._kernels[f"place_live_{bits}"](words, counts, *lists, status)
        return counts, status


def empty_lists(mask: torch.Tensor) -> Lists:
    """Lists for the index of ``mask`` ``[batch, tokens]``: row, position and sequence for as many
    live tokens as there can be, all token 0, starts ``[batch + 1]`` and place ``[batch, tokens]``,
    int32."""
    batch, tokens = mask.shape

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=mask.device)

    row, position, sequence = (zeros(batch * tokens) for _ in range(3))
    return row, position, sequence, zeros(batch + 1), zeros(batch, tokens)


def first(lists: Lists, live: int) -> Lists:
    """The lists of so many live tokens."""
    row, position, sequence, starts, place = lists
    return row[:live], position[:live], sequence[:live], starts, place


def pass_ids(module: tvm.IRModule, names: list[str]) -> tvm.IRModule:
    """The graph with the inputs of these names handed to the index as well, and with tables that
    are read inside their bounds whatever the ids are: recorded graphs check none."""
    inputs = {p.name: p for p in module["main"].params}
    given = [inputs[name] for name in names]

    def rule(builder: relax.BlockBuilder, call: relax.Call, _: relax.Var) -> relax.Expr:
        if is_op(call, "take", "gather_elements"):
            return held(builder, call)
        if not is_index(call):
            return call
        return relax.Call(call.op, [*call.args, *given], call.attrs, call.ty_args)

    return rebuild(module, rule)


def _words(mask: torch.Tensor) -> torch.Tensor:
    """A mask as integers that the kernels read, other numbers than 0 and 1 kept apart."""
    if mask.dtype in _WORDS:
        return mask.view(torch.int8) if mask.element_size() == 1 else mask
    return torch.where((mask == 0) | (mask == 1), mask, 2).to(torch.int8)
