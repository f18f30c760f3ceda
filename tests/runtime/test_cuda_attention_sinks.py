"""Sinks and capped scores of attention by a mask on a GPU, and their gradients, run by a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pit_tvm.reference import attention as reference
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.torch import host
from pit_tvm.torch.attention_ops import _to_sinks
from tests.runtime.cuda_emulation import Emulator
from tests.runtime.emulated_attention import EmulatedAttention, random_mask


@pytest.fixture(scope="module")
def attends(emulator: Emulator, cache: KernelCache) -> dict[str, EmulatedAttention]:
    """The class, on numpy's memory, by architectures: warps multiply alone, or as a group."""
    return {arch: EmulatedAttention(cache, emulator, arch) for arch in ("sm_80", "sm_90a")}


@pytest.mark.parametrize(
    ("arch", "heads", "queries", "keys", "dtype"),
    [
        ("sm_90a", (6, 2), 70, 900, torch.float16),  # long lists are cut, and heads share tiles
        ("sm_80", (4, 4), 5, 100, torch.float32),
        ("sm_90a", (40, 1), 1, 300, torch.float32),
    ],
)
def test_sinks_are_scores_that_have_no_values(
    attends: dict[str, EmulatedAttention],
    rng: np.random.Generator,
    arch: str,
    heads: tuple[int, int],
    queries: int,
    keys: int,
    dtype: torch.dtype,
) -> None:
    q, k, v = (
        rng.standard_normal((2, own, rows, 64)).astype(np.float16)
        for own, rows in ((heads[0], queries), (heads[1], keys), (heads[1], keys))
    )
    mask = random_mask(rng, (2, 1, queries, keys))
    mask[0, :, 0] = False
    sinks = rng.standard_normal(heads[0]) * 3
    sinks[:4] = -np.inf, 300, -300, 9  # of no weight, and of nearly all
    out = torch.full((2, heads[0], queries, 64), torch.nan, dtype=torch.float16)
    given = [torch.from_numpy(one) for one in (q, k, v, mask)]
    told = torch.from_numpy(sinks).to(dtype)
    attends[arch].by_mask(*given, 0.125, out, told)
    wanted = reference.masked_attention(q, k, v, mask, 0.125, told.float().numpy())
    np.testing.assert_allclose(out.numpy(), wanted, atol=4e-3)
    assert not out[0, :, 0].any() and not out[:, 1].any()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("cap", [0.5, 5.0])
def test_scores_are_capped(
    attends: dict[str, EmulatedAttention], rng: np.random.Generator, arch: str, cap: float
) -> None:
    q, k, v = (
        rng.standard_normal((2, own, rows, 64)).astype(np.float16)
        for own, rows in ((4, 70), (2, 130), (2, 130))
    )
    k[:, :, :3] *= 50  # far beyond the cap
    mask = random_mask(rng, (2, 1, 70, 130))
    out = torch.full((2, 4, 70, 64), torch.nan, dtype=torch.float16)
    attends[arch].by_mask(*map(torch.from_numpy, (q, k, v, mask)), 0.3, out, None, cap)
    wanted = reference.masked_attention(q, k, v, mask, 0.3, softcap=cap)
    np.testing.assert_allclose(out.numpy(), wanted, atol=4e-3)


@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_gradients_know_of_sinks_and_caps(
    attends: dict[str, EmulatedAttention], rng: np.random.Generator, arch: str, cap: float
) -> None:
    attend = attends[arch]
    q, k, v, down = (
        torch.from_numpy(rng.standard_normal((2, own, rows, 64)).astype(np.float16))
        for own, rows in ((4, 70), (2, 130), (2, 130), (4, 70))
    )
    mask = torch.from_numpy(random_mask(rng, (2, 1, 70, 130)))
    sinks = torch.tensor([-torch.inf, 4, 300, 0])
    out, weights = torch.full_like(down, torch.nan), torch.full(q.shape[:3], torch.nan)
    lists, lines = attend.lists.of_queries(mask, q.shape[:3])
    both = lists, attend.lists.of_keys(lines, lists.planes[:2], q.shape[:3], 130)
    attend(q, k, v, lists, 0.3, out, weights, sinks, cap)
    made = torch.full_like(q, torch.nan), torch.full_like(k, torch.nan), torch.full_like(v, 7)
    drops = attend.gradients((q, k, v), both, 0.3, (down, out, weights), made, cap)
    found = *made, _to_sinks(sinks, weights, drops.view_as(weights))
    given = [each.double().requires_grad_() for each in (q, k, v, sinks)]
    wanted = torch.autograd.grad(host.attention(*given, mask, 0.3, cap), given, down.double())
    for mine, theirs in zip(found, wanted, strict=True):
        assert float((mine.double() - theirs).abs().max()) < 0.02
