"""Operators that write to places, or look for them, in whole models against torch: all in float32,
and in one type of 16 bits, but for assignments, which become some of the others."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from tests.model.targets import both  # noqa: E402

WIDTH = 8
LIVE = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 0, 1]])


class Places(torch.nn.Module):  # type: ignore[misc]
    """What stays among tokens is last, what meets others is masked."""

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        live = attention_mask[..., None]
        x = (input * live.to(input.dtype)).nan_to_num()
        best, one = (x[..., :3] * 64).long() % WIDTH, input.argmax(-1, keepdim=True)
        twice = torch.cat([best, best], -1)
        bounds = torch.tensor([-1.0, -0.25, 0.0, 0.0, 0.5]).to(input.dtype)
        rows, last = bounds.expand(*input.shape[:2], -1).contiguous(), x.mT
        first = attention_mask.cumsum(1)[:, :, None].clamp(max=1).expand_as(x)
        made = input.clone()
        made[..., 1] = 3.0
        found = [
            torch.zeros_like(input).scatter(-1, best, 1.0),
            input.scatter(2, twice, torch.cat([input, input], -1)[..., :6]),
            torch.zeros_like(input).scatter_(-1, one, input[..., :1]),
            torch.ones_like(input).scatter_add(-1, twice, x[..., :6]),
            torch.ones_like(best).scatter(-1, best % 3, 7),
            torch.zeros_like(x).scatter(1, first, 2.0) * live,
            torch.zeros_like(last).scatter_add(2, first.mT, last).mT * live,
            input.index_fill(-1, torch.tensor([1, -2]), 2.0),
            input.index_fill(2, torch.tensor(3), torch.tensor(-1.0)),
            torch.nn.functional.one_hot(best % 5, 6).flatten(2),
            torch.bucketize(input, bounds),
            torch.bucketize(input, bounds, right=True, out_int32=True),
            torch.searchsorted(bounds, input, side="right"),
            torch.searchsorted(rows, input),
            input.unfold(-1, 3, 2).flatten(2),
            torch.nn.functional.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).sum(-1) * live,
            made,
        ]
        return torch.cat([each.to(input.dtype) for each in found], -1)


def numbers(dtype: Any) -> Any:
    x = torch.randn(*LIVE.shape, WIDTH).to(dtype)
    x[torch.rand(x.shape) < 0.1] = float("nan")
    x[torch.rand(x.shape) < 0.2] = 0.5
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_torch(dtype: Any) -> None:
    got, want = both(Places(), "llvm", numbers(dtype), LIVE)
    off = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(got[LIVE > 0], want[LIVE > 0], equal_nan=True, **off)


class Parts(torch.nn.Module):  # type: ignore[misc]
    """Places of some columns only, and what comes of all places up to each."""

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        live = attention_mask[..., None]
        x = (input * live.to(input.dtype)).nan_to_num()
        first = torch.zeros_like(input[:, :1, :4], dtype=torch.int64)
        halves, pairs = input.unflatten(-1, (2, -1)), x.unflatten(-1, (2, -1))
        few = (pairs[..., :1, :3] * 64).long() % 4
        square, dead = x.reshape(-1, 2, 2, 2), input.masked_fill(live == 0, -math.inf)
        found = [
            x.scatter(1, first, 1.0) * live,
            input.scatter(-1, (x[..., :3] * 64).long() % WIDTH, input.flip(-1)),
            halves.scatter(-1, few, halves.flip(-1)).flatten(-2),
            halves.scatter_add(-1, few, pairs).flatten(-2),
            input.index_add(-1, torch.tensor([1, 6, 1]), x[..., :3], alpha=2),
            input.index_add(2, torch.tensor([5]), x[..., :1]),
            input.kthvalue(3).values[..., None],
            input.gather(-1, input.kthvalue(WIDTH - 1, keepdim=True).indices),
            *input.cummax(-1),
            *input.cummin(2),
            *(x * 4).long().cummax(-1),
            x.cummax(1).values * live,
            input.logcumsumexp(-1),
            torch.exp(dead.nan_to_num(neginf=-math.inf).logcumsumexp(1)) * live,
            F.unfold(x[:, None], (3, WIDTH), padding=(1, 0)).mT * live,
            F.unfold(square, 2, dilation=2, padding=1).reshape(*x.shape[:2], -1),
        ]
        return torch.cat([each.to(input.dtype) for each in found], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parts_as_torch(dtype: Any) -> None:
    got, want = both(Parts(), "llvm", numbers(dtype), LIVE)
    off = {} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(got[LIVE > 0], want[LIVE > 0], equal_nan=True, **off)


class Assigned(torch.nn.Module):  # type: ignore[misc]
    """Assignments to what a mask, or a slice, picks."""

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        dead, row = attention_mask == 0, torch.arange(1.0 * WIDTH).to(input.dtype)
        x = (input * attention_mask[..., None].to(input.dtype)).nan_to_num()
        chosen, filled, columns = input.clone(), x.clone(), x.clone()
        chosen[dead] = 0
        chosen[chosen < 0] = 0.5
        chosen[input[..., 0] > 0.5] = row
        columns[:, :, 0] += 1
        columns[..., 3:5] = x[..., :2]
        columns[..., -2:], columns[..., :1], columns[..., ::2] = x[..., :2], 0, row[::2]
        columns[..., 4:3] = x[..., :0]
        filled[:, 0], filled[:, -1] = 0, row
        shifted, steps = torch.zeros_like(x), x.clone()
        shifted[:, 1:] = filled[:, :-1]
        shifted[:, 1:] += x[:, :-1]
        steps[:, 1::2] = 0
        found = torch.cat([chosen, filled, columns, shifted, steps], -1)
        return found * (~dead)[..., None].to(input.dtype)


def test_assignments() -> None:
    got, want = both(Assigned(), "llvm", numbers(torch.float32), LIVE)
    torch.testing.assert_close(got[LIVE > 0], want[LIVE > 0], equal_nan=True)


class Wide(torch.nn.Module):  # type: ignore[misc]
    """What TVM has for 32 bits only, in ``dtype``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.by_column = torch.nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH, bias=False)
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        torch.nn.init.normal_(self.norm.running_mean)
        torch.nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        columns = (input * attention_mask[..., None].to(input.dtype)).transpose(1, 2)
        return self.norm(self.by_column(self.conv(columns))).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_convolutions_and_batch_norms_of_16_bits(dtype: Any) -> None:
    x = torch.randn(*LIVE.shape, WIDTH).to(dtype)
    got, want = both(Wide().to(dtype), "llvm", x, LIVE)
    off = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(got[LIVE > 0], want[LIVE > 0], rtol=off, atol=off)


class Distances(torch.nn.Module):  # type: ignore[misc]
    """Of tokens to each other, and to rows of a table."""

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x, live = input * attention_mask[..., None], attention_mask[..., None]
        table = torch.arange(3.0 * WIDTH).reshape(1, 3, WIDTH).expand(x.shape[0], -1, -1)
        found = [torch.cdist(x, table, p) for p in (0.0, 1.0, 2.0, 3.0, float("inf"))]
        return torch.cat([*found, torch.cdist(x, x).sum(-1, keepdim=True)], -1) * live


def test_distances() -> None:
    got, want = both(Distances(), "llvm", torch.randn(*LIVE.shape, WIDTH), LIVE)
    torch.testing.assert_close(got[LIVE > 0], want[LIVE > 0], rtol=1e-4, atol=1e-4)
