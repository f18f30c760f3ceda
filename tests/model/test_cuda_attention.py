"""Attention over live tokens on a GPU, by either of torch's kernels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from pit_tvm.model import cuda_attention
from pit_tvm.model.cuda_attention import ANY, PackedAttention, kernels_of_holed
from pit_tvm.reference import attention as reference
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.windows import Window

_SAME = [(width, width) for width in (8, 12, 64, 72, 128)]
LIMITS = {torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize(
    ("tokens", "sequences", "width", "before", "sunk", "taken"),
    [
        (48, 1, 64, ANY, False, "_efficient"),
        (49, 1, 64, ANY, False, "_flash"),
        (96, 2, 65, ANY, False, "_flash"),
        (9, 3, 12, ANY, False, "_efficient"),
        (9, 3, 12, 127, False, "_efficient"),  # no sequence is longer
        (9, 3, 12, 126, False, "_flash"),
        (9, 3, 12, ANY, True, "_flash"),
    ],
)
def test_short_sequences_of_narrow_heads_have_a_kernel_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    sequences: int,
    width: int,
    before: int,
    sunk: bool,
    taken: str,
) -> None:
    ran: list[Any] = []

    def attend(name: str) -> Any:
        def run(given: list[Any], *rest: Any) -> Any:
            (shape,) = {each.shape for each in given}
            assert all(place % 8 == 0 for each in given for place in each.stride()[:-1])
            ran.append((name, shape, *rest))
            out = given[2].clone()
            return out if name == "_efficient" else (out, torch.zeros(2, tokens))

        return run

    for name in ("_flash", "_efficient"):
        monkeypatch.setattr(cuda_attention, name, attend(name))
    q, k, v = torch.randn(3, tokens, 2, width).unbind(0)
    starts, index = torch.linspace(0, tokens, sequences + 1).int(), torch.arange(tokens)
    sinks = torch.zeros(2 * sunk)  # as much as all keys have together
    padded = -(-width // 8) * 8
    # as parts of one product of all three, of which the last one has an odd width
    odd = torch.randn(tokens, 2 * width + 1)[:, 1:].unflatten(1, (2, width))
    form = cuda_attention._Form(128, before if before < 127 else ANY, 0, 0.5)
    for query, value in ((q, v), (q, v[..., :7]), (odd, odd)):
        ran.clear()
        found = PackedAttention()(query, k, value, starts, index, sinks, 128, before, 0, 0.5)
        assert torch.equal(found, value / (1 + sunk))
        assert ran == [(taken, (tokens, 2, padded), starts, form)]


def packed(
    lengths: torch.Tensor, heads: int, widths: tuple[int, ...], dtype: torch.dtype, made: Any
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Operands on a GPU, some rows more than are live, in slices as of a product of all three; and
    where sequences start."""
    starts = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    rows = int(starts[-1]) + 5
    whole = torch.randn(rows, heads * sum(widths), generator=made).to("cuda", dtype)
    parts = whole.split([heads * each for each in widths], dim=1)
    return [part.reshape(rows, heads, -1) for part in parts], starts


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("after", [0, ANY])
@pytest.mark.parametrize(("width", "value_width"), [*_SAME, (48, 32), (192, 128), (12, 20)])
@pytest.mark.parametrize("most", [3, 40, 130, 300])
def test_sequences_attend_to_themselves(
    most: int, width: int, value_width: int, after: int, dtype: torch.dtype
) -> None:
    made = torch.Generator().manual_seed(most + width)
    lengths = torch.randint(0, most + 1, (9,), generator=made)
    lengths[[0, 4]] = torch.tensor([0, most])  # none at all, and as long as any
    given, starts = packed(lengths, 3, (width, width, value_width), dtype, made)
    none, scale = torch.empty(0, device="cuda"), width**-0.5
    found = PackedAttention()(*given, starts.cuda(), none, none, most, ANY, after, scale)
    for begin, end in pairwise(starts.tolist()):
        q, k, v = (one[begin:end].double().transpose(0, 1) for one in given)
        right = scaled_dot_product_attention(q, k, v, is_causal=after == 0, scale=scale)
        error = (found[begin:end].transpose(0, 1).double() - right).abs()
        assert end == begin or error.max() <= LIMITS[dtype] * right.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("holes", ["none", "some", "everywhere"])
@pytest.mark.parametrize("far", [(ANY, 0), (5, 0), (64, 0), (7, 7), (100, ANY), (0, 3), (999, 999)])
@pytest.mark.parametrize(("width", "value_width"), [(64, 64), (128, 128), (20, 12)])
def test_windows_and_sinks(
    width: int,
    value_width: int,
    far: tuple[int, int],
    holes: str,
    sunk: bool,
    dtype: torch.dtype,
) -> None:
    made, heads, most = torch.Generator().manual_seed(width + far[0]), 3, 260
    lengths = torch.tensor([0, 1, 40, most, 7, 129])
    given, starts = packed(lengths, heads, (width, width, value_width), dtype, made)
    share = {"none": 0.0, "some": 0.02, "everywhere": 0.5}[holes]
    steps = 1 + (torch.rand(len(given[0]), generator=made) < share).int()
    edges = starts.tolist()
    position = torch.cat([steps[b:e].cumsum(0) for b, e in [*pairwise(edges), (edges[-1], None)]])
    sinks = torch.randn(heads * sunk, generator=made)
    index = [one.cuda() for one in (starts, position.int(), sinks)]
    attend = PackedAttention(kernels_of_holed("sm_90a", KernelCache()))
    longest = int(position.max()) + 1
    found = attend(*given, *index, longest, *far, width**-0.5)[: edges[-1]]
    window = Window(*(None if each == ANY else each for each in far))
    q, k, v = (one[: edges[-1]].double().cpu() for one in given)
    more = {"sinks": sinks} if sunk else {}
    right = reference.attention(
        q, k, v, starts, width**-0.5, window=window, position=position, **more
    )
    error = np.abs(found.double().cpu().numpy() - right).max()
    assert error <= LIMITS[dtype] * np.abs(right).max()
