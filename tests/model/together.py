"""Models side by side: one compilation for a test of several."""

from __future__ import annotations

import torch
from torch import nn


class Together(nn.Module):
    """Several models of one input, compiled as one: results are beside each other."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens, width, parts]``."""
        return torch.stack([part(x, attention_mask) for part in self.parts], -1)
