"""Gradients of attention by a mask on a GPU, run by a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pit_tvm.errors import ScheduleError, ShapeError
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.schedules.cuda_attention_gradients import attention_gradients
from pit_tvm.schedules.cuda_gradient_rows import GradientTile
from tests.runtime.cuda_emulation import Emulator
from tests.runtime.emulated_attention import EmulatedAttention, counted, random_mask

Operands = tuple[torch.Tensor, ...]


@pytest.fixture(scope="module")
def attends(emulator: Emulator, cache: KernelCache) -> dict[str, EmulatedAttention]:
    """The class, on numpy's memory, by architectures: warps multiply alone, or as a group."""
    return {arch: EmulatedAttention(cache, emulator, arch) for arch in ("sm_80", "sm_90a")}


@pytest.fixture(scope="module")
def attend(attends: dict[str, EmulatedAttention]) -> EmulatedAttention:
    """That of Hopper."""
    return attends["sm_90a"]


def _random(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float16))


def _exact(given: Operands, mask: torch.Tensor, scale: float, down: torch.Tensor) -> Operands:
    """The result and gradients in float64."""
    q, k, v = (each.double().requires_grad_() for each in given)
    share = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(share, dim=1).mT * scale
    seen = mask.any(dim=-1, keepdim=True)
    weights = scores.masked_fill(~mask & seen, -torch.inf).softmax(dim=-1) * seen
    out = weights @ v.repeat_interleave(share, dim=1)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), down.double())


def _found(
    attend: EmulatedAttention,
    given: Operands,
    mask: torch.Tensor,
    scale: float,
    down: torch.Tensor,
) -> Operands:
    """The result, and gradients in memory in which heads of a row lie side by side."""
    q, k, v = given
    out = torch.full(down.shape, torch.nan, dtype=q.dtype)
    weights = torch.full(q.shape[:3], torch.nan)
    lists, lines = attend.lists.of_queries(mask, q.shape[:3])
    both = lists, attend.lists.of_keys(lines, lists.planes[:2], q.shape[:3], k.shape[2])
    attend(q, k, v, lists, scale, out, weights)
    made = [torch.full_like(each.transpose(1, 2), torch.nan) for each in given]
    turned = tuple(each.contiguous().transpose(1, 2) for each in made)
    attend.gradients((q, k, v), both, scale, (down, out, weights), turned)  # type: ignore[arg-type]
    return out, *turned


@pytest.mark.parametrize(
    ("arch", "shape", "heads", "widths", "planes"),
    [
        ("sm_90a", (2, 2, 70, 130), 1, (64, 64), (2, 1)),
        ("sm_80", (1, 2, 130, 200), 2, (40, 56), (1, 2)),
        ("sm_90a", (1, 1, 64, 70), 1, (128, 72), (1, 1)),
        ("sm_80", (2, 2, 1, 90), 1, (33, 7), (2, 2)),
        ("sm_90a", (1, 1, 1100, 3), 1, (64, 64), (1, 1)),
    ],
)
def test_agree_with_autograd(
    attends: dict[str, EmulatedAttention],
    rng: np.random.Generator,
    arch: str,
    shape: tuple[int, int, int, int],
    heads: int,
    widths: tuple[int, int],
    planes: tuple[int, int],
) -> None:
    batch, all_heads, queries, keys = shape
    mask = torch.from_numpy(random_mask(rng, (*planes, queries, keys)))
    q = _random(rng, batch, queries, all_heads, widths[0]).transpose(1, 2)
    k, v = (_random(rng, batch, heads, keys, width) for width in widths)
    down = _random(rng, batch, all_heads, queries, widths[1])
    found = _found(attends[arch], (q, k, v), mask, 0.3, down)
    for mine, exact in zip(found, _exact((q, k, v), mask, 0.3, down), strict=True):
        assert mine.shape == exact.shape
        limit = 4e-3 * max(1.0, float(exact.abs().max()))
        assert float((mine.double() - exact).abs().max()) < limit


def test_one_row_of_a_mask_is_that_of_all_queries(
    attend: EmulatedAttention, rng: np.random.Generator
) -> None:
    mask = torch.from_numpy(rng.random((2, 1, 1, 90)) < 0.5)
    q, k, v = (_random(rng, 2, 2, rows, 64) for rows in (75, 90, 90))
    down = _random(rng, 2, 2, 75, 64)
    found = _found(attend, (q, k, v), mask, 0.2, down)
    for mine, exact in zip(found, _exact((q, k, v), mask, 0.2, down), strict=True):
        assert float((mine.double() - exact).abs().max()) < 1e-2
    assert not any(each[~mask.expand(2, 2, 1, 90)[:, :, 0]].any() for each in found[2:])


def test_long_lists_are_computed_in_parts(
    attend: EmulatedAttention, rng: np.random.Generator
) -> None:
    mask = torch.from_numpy(rng.random((1, 1, 400, 400)) < 0.01)
    mask[..., 7] = mask[..., 9, :] = True  # a key that all see, a query that sees all
    q, k, v = (_random(rng, 1, 1, 400, 64) for _ in range(3))
    down = _random(rng, 1, 1, 400, 64)
    lists, lines = attend.lists.of_queries(mask, (1, 1, 400))
    for each in (lists, attend.lists.of_keys(lines, (1, 1), (1, 1, 400), 400)):
        assert (each.work[..., 3] >= 0).any()
    found = _found(attend, (q, k, v), mask, 0.125, down)
    for mine, exact in zip(found, _exact((q, k, v), mask, 0.125, down), strict=True):
        assert float((mine.double() - exact).abs().max()) < 1e-2


def test_lists_of_keys_are_those_of_the_mask_turned(
    attend: EmulatedAttention, rng: np.random.Generator
) -> None:
    mask = torch.from_numpy(random_mask(rng, (2, 1, 1100, 130)))
    shape = 2, 1, 1100
    turned = attend.lists.of_keys(attend.lists.of_queries(mask, shape)[1], (2, 1), shape, 130)
    own, _ = attend.lists.of_queries(mask.mT.contiguous(), (2, 1, 130))
    counts = counted(own)
    assert (counted(turned) == counts).all() and torch.equal(turned.order, own.order)
    assert torch.equal(turned.work, own.work)
    for plane, tile in np.ndindex(*counts.shape):
        for mine, theirs in ((turned.ids, own.ids), (turned.bits, own.bits)):
            some = slice(counts[plane, tile])
            assert torch.equal(mine[plane, tile, ..., some], theirs[plane, tile, ..., some])


def test_missing_numbers_stay_where_they_are_seen(
    attend: EmulatedAttention, rng: np.random.Generator
) -> None:
    mask = torch.eye(4, dtype=torch.bool)[None, None]
    q, k, v = (_random(rng, 1, 1, 4, 64) for _ in range(3))
    down, finite = _random(rng, 1, 1, 4, 64), q.clone()
    q[0, 0, 1, 0] = torch.nan
    others = [0, 2, 3]
    exact = _exact((finite, k, v), mask, 1.0, down)
    for mine, want in zip(_found(attend, (q, k, v), mask, 1.0, down), exact, strict=True):
        apart = (mine.double() - want).abs()[:, :, others]
        assert float(apart[..., 1:].max()) < 1e-2  # 0 times the missing number is in column 0
        assert torch.isnan(mine[0, 0, 1, 1:]).all()


@pytest.mark.parametrize(("queries", "keys", "width"), [(0, 5, 8), (5, 0, 8), (5, 5, 0)])
def test_nothing_has_gradients_of_zero(
    attend: EmulatedAttention, queries: int, keys: int, width: int
) -> None:
    q, k, v = (
        torch.ones(1, 1, rows, wide).half()
        for rows, wide in ((queries, 8), (keys, 8), (keys, width))
    )
    mask, down = torch.ones(1, 1, queries, keys).bool(), torch.ones(1, 1, queries, width).half()
    found = _found(attend, (q, k, v), mask, 1.0, down)
    assert not any(each.any() for each in found)


def test_refuses_wide_heads(attend: EmulatedAttention) -> None:
    wide = torch.ones(1, 1, 3, 136).half()
    weights, lists = (
        torch.zeros(1, 1, 3),
        attend.lists.of_queries(torch.ones(1, 1, 3, 3).bool(), (1, 1, 3))[0],
    )
    with pytest.raises(ShapeError, match="heads of at most 128"):
        attend.gradients((wide,) * 3, (lists, lists), 1.0, (wide, wide, weights), (wide,) * 3)


@pytest.mark.parametrize(
    "tile",
    [
        GradientTile("float32", 64, 64, False, False),
        GradientTile("float16", 64, 32, False, True),
        GradientTile("float16", 192, 64, False, True),
    ],
)
def test_refuses_tiles_that_cannot_be_built(tile: GradientTile) -> None:
    with pytest.raises(ScheduleError, match="attention_gradients"):
        attention_gradients(tile)
