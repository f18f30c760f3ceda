"""What is pooled over tokens of which the mask makes dead ones one number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import pit_tvm.model  # noqa: E402

Pool = Callable[[Any, Any], Any]


def _assigned(x: Any, mask: Any) -> Any:
    y = x.clone()
    y[mask.unsqueeze(-1).expand(x.size()).float() == 0] = -1e9
    return torch.max(y, 1)[0]


def _both(x: Any, mask: Any) -> Any:
    largest = x.masked_fill((mask < 0.5)[..., None], -1e9).amax(1)
    return torch.cat([largest, (x * mask[..., None]).sum(1)], -1)


POOLS: dict[str, Pool] = {
    "the largest": lambda x, mask: x.masked_fill(~mask.bool()[..., None], -torch.inf).max(1).values,
    "the largest of what was assigned": _assigned,
    "the smallest, turned": lambda x, mask: (
        torch.where(mask[..., None] > 0, x, torch.tensor(1e4)).transpose(1, 2).amin(-1)
    ),
    "exponentials": lambda x, mask: x.masked_fill(mask[..., None] == 0, -1e9).logsumexp(1),
    "the largest and the sum": _both,
}


class Encoder(nn.Module):
    """Layers token by token, and every pool of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(50, 16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        x = self.down(torch.relu(self.up(self.words(input_ids))))
        return {name: pool(x, attention_mask) for name, pool in POOLS.items()}


def batch(size: int, tokens: int) -> dict[str, Any]:
    """Random ids, and tokens that live anywhere; the second sequence is empty if there is one."""
    alive = torch.rand(size, tokens) < 0.5
    alive[0, -1], alive[1:2] = True, False
    return {
        "input_ids": torch.randint(50, (size, tokens)),
        "attention_mask": alive.long(),
    }


def test_layers_before_pools_see_live_tokens_alone() -> None:
    torch.manual_seed(0)
    model = Encoder().eval()
    compiled = pit_tvm.model.compile(model, batch(2, 6))
    layers = [d for d in compiled.decisions if d.operator in ("matmul", "nn.relu", "take")]
    assert len(layers) >= 4 and all(layer.live for layer in layers)
    for sizes in ((3, 7), (1, 5), (4, 1)):
        inputs = batch(*sizes)
        with torch.no_grad():
            torch.testing.assert_close(compiled(**inputs), model(**inputs))
