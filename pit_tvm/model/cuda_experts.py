"""The layers of experts of a model on a GPU, by the kernels that `pit_tvm.torch` runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import ShapeError, mismatch
from ..runtime.arrays import as_torch
from ..runtime.cuda_experts import CudaExperts
from ..runtime.cuda_rows import ROW_STEP
from ..runtime.kernel_cache import KernelCache
from ..schedules.hopper_space import GROUP_STEPS
from ..target import TargetInfo
from ..tile_db.store import TileStore
from .experts import GroupedLayer
from .wide import check_narrow

# Numbers of rows whose kernels are compiled for a file: tiles are chosen by them; and the most
# elements of what they give.
_NUMBERS_OF_ROWS, _MOST_ELEMENTS = tuple(2**i for i in range(17)), 1 << 28


def check_grouped(layers: Sequence[GroupedLayer]) -> None:
    """DTypeError or ShapeError for a layer that no kernel computes."""
    for layer in layers:
        check_narrow(layer.dtype)
        groups, n, k = layer.weight.shape
        if n % ROW_STEP or k % ROW_STEP or groups > GROUP_STEPS[-1]:
            most = f"at most {GROUP_STEPS[-1]} experts, widths that are multiples of {ROW_STEP}"
            raise ShapeError(mismatch("experts", most, f"weights {list(layer.weight.shape)}"))


class CudaGroupedLayers:
    """`GroupedLayers` on the current stream; the host waits for nothing."""

    def __init__(
        self,
        found: Sequence[GroupedLayer],
        target: TargetInfo,
        device: torch.device,
        store: TileStore,
        cache: KernelCache,
    ) -> None:
        self.found, self._device = tuple(found), device
        self._experts = CudaExperts(target, store, cache)
        self._operands = [
            [
                None if part is None else as_torch(part).to(device)
                for part in (each.weight, each.bias)
            ]
            for each in found
        ]

    def __call__(self, number: int, x: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
        """As `GroupedLayers`, every row of ``x`` for all of ``ids`` ``[m, choices]``."""
        weight, bias = self._operands[number]
        activation = self.found[number].activation or "none"
        out.copy_(self._experts.grouped(x, ids, weight, bias, activation))

    def prepare(self) -> None:
        """Compile what calls need whose groups are about equally large, by running them."""
        forms = {(each.form, each.choices): number for number, each in enumerate(self.found)}
        for (_, choices), number in forms.items():
            layer, device = self.found[number], self._device
            groups, n, k = layer.weight.shape
            for rows in (r for r in _NUMBERS_OF_ROWS if r * choices * n <= _MOST_ELEMENTS):
                x = torch.zeros((rows, k), dtype=getattr(torch, layer.dtype), device=device)
                ids = torch.arange(rows * choices, dtype=torch.int32, device=device) % groups
                self(number, x, ids.view(rows, choices), x.new_empty(rows * choices, n))
