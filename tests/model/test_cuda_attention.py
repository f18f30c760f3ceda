"""Attention over live tokens on a GPU, by either of torch's kernels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pit_tvm.model import cuda_kernels
from pit_tvm.model.cuda_kernels import varlen_attention

_SAME = [(width, width) for width in (8, 12, 64, 72, 128)]
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize(
    ("tokens", "sequences", "width", "taken"),
    [
        (48, 1, 64, "_efficient"),
        (49, 1, 64, "_flash"),
        (96, 2, 65, "_flash"),
        (9, 3, 12, "_efficient"),
    ],
)
def test_short_sequences_of_narrow_heads_have_a_kernel_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tokens: int, sequences: int, width: int, taken: str
) -> None:
    ran: list[Any] = []

    def attend(name: str) -> Any:
        def run(given: list[Any], *rest: Any) -> Any:
            (shape,) = {each.shape for each in given}
            assert all(place % 8 == 0 for each in given for place in each.stride()[:-1])
            ran.append((name, shape, rest))
            return given[2]

        return run

    for name in ("_flash", "_efficient"):
        monkeypatch.setattr(cuda_kernels, name, attend(name))
    q, k, v = torch.randn(3, tokens, 2, width).unbind(0)
    starts = torch.linspace(0, tokens, sequences + 1).int()
    padded = -(-width // 8) * 8
    # as parts of one product of all three, of which the last one has an odd width
    odd = torch.randn(tokens, 2 * width + 1)[:, 1:].unflatten(1, (2, width))
    for query, value in ((q, v), (q, v[..., :7]), (odd, odd)):
        ran.clear()
        assert torch.equal(varlen_attention(query, k, value, starts, 128, 1, 0.5), value)
        assert ran == [(taken, (tokens, 2, padded), (starts, 128, True, 0.5))]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize(("width", "value_width"), [*_SAME, (48, 32), (192, 128), (12, 20)])
@pytest.mark.parametrize("most", [3, 40, 130, 300])
def test_sequences_attend_to_themselves(
    most: int, width: int, value_width: int, causal: int, dtype: torch.dtype
) -> None:
    heads, generator = 3, torch.Generator().manual_seed(most + width)
    lengths = torch.randint(0, most + 1, (9,), generator=generator)
    lengths[[0, 4]] = torch.tensor([0, most])  # none at all, and as long as any
    starts = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    live, scale = int(starts[-1]), width**-0.5
    rows = live + 5  # some more than are live, in slices as of a product of all three
    widths = width, width, value_width
    whole = torch.randn(rows, heads * sum(widths), generator=generator).to("cuda", dtype)
    parts = whole.split([heads * each for each in widths], dim=1)
    given = [part.reshape(rows, heads, -1) for part in parts]
    found = varlen_attention(*given, starts.cuda(), most, causal, scale)
    for begin, end in pairwise(starts.tolist()):
        q, k, v = (one[begin:end].double().transpose(0, 1) for one in given)
        right = scaled_dot_product_attention(q, k, v, is_causal=bool(causal), scale=scale)
        error = (found[begin:end].transpose(0, 1).double() - right).abs()
        assert end == begin or error.max() <= LIMITS[dtype] * right.abs().max()
