"""Calls of the GPU's families that gather along k: their products write every tile of the output,
of zeros too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .cuda_arrays import empty
from .cuda_dispatch import CudaDispatcher
from .cuda_fill import stepped


class BandDispatcher(CudaDispatcher):
    """Runs one program of such a family on one GPU target; threads may share it."""

    packed = False  # whether live parts of the sparse operand are packed first, however they lie

    def _unaligned(
        self,
        kernel: Callable[..., Any],
        index: Any,
        dead: Any,
        inputs: Sequence[Any],
        out: Any,
    ) -> None:
        """Rows that do not begin at 16 bytes: through padded copies."""
        sparse, (dense, bias) = inputs[self._gathered], self._beside(inputs)
        wide, beside = empty(out, stepped(out.shape)), self.fill.padded(dense)
        rest = [beside if self.matrix else beside.unsqueeze(0)]
        if bias is not None:
            rest.append(self.fill.padded(bias.unsqueeze(0))[:1])
        own = sparse if self.packed else self.fill.padded(sparse)
        kernel(own, *index.views, *rest, wide)
        self.fill.pad_copy(wide[: out.shape[0]], out)
