"""Numbers in a GPU's memory, for kernels that read ids and counts there."""

from __future__ import annotations

import torch

from ..runtime.cuda_arrays import is_capturing


class Numbers:
    """0, 1, 2 and so on, int32, on ``device``.

    Recorded graphs read them where they were when they were recorded, so memory that has become
    too short is kept beside the next, which is twice as long at least.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: list[torch.Tensor] = []

    def below(self, end: int) -> torch.Tensor:
        """``[1, end]``: the numbers below ``end``."""
        return self._at_least(end)[:end].view(1, end)

    def one(self, number: int) -> torch.Tensor:
        """``[1]``: ``number``."""
        return self._at_least(number + 1)[number : number + 1]

    def _at_least(self, size: int) -> torch.Tensor:
        if self._made and len(self._made[-1]) >= size:
            return self._made[-1]
        # Powers of two, so that what is asked for next is usually there.
        made = torch.arange(1 << size.bit_length(), dtype=torch.int32, device=self._device)
        if not is_capturing(self._device.index):  # what is recorded is written when it is replayed
            self._made.append(made)
        return made
