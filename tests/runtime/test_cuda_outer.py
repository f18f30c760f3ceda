"""Sums of outer products of groups on a GPU: random routings against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pit_tvm.torch.operators import outer_of_groups

LIMITS = {torch.float16: 1e-3, torch.bfloat16: 6e-3}
CHOICES = (1, 3)  # of a token; each is a kernel, as is each width of a tile
CALLS = 25


def routed(rng: np.random.Generator, tokens: int, top_k: int, groups: int) -> torch.Tensor:
    """Ids [tokens, top_k]: of all groups alike, of a hot one, of few, or of none at all."""
    ids = rng.integers(0, groups, (tokens, top_k))
    kind = rng.integers(4)
    if kind == 1:
        ids[rng.random(ids.shape) < 0.7] = rng.integers(groups)
    elif kind == 2:
        ids %= min(groups, 2)
    ids[rng.random(ids.shape) < (1.0 if kind == 3 else rng.choice([0.0, 0.3]))] = -1
    return torch.from_numpy(ids.astype(rng.choice(["int32", "int64"])))


def problem(rng: np.random.Generator, device: str) -> tuple[Any, ...]:
    """left, right, ids, groups; rows of no group are NaN."""
    tokens, groups, top_k = rng.integers(1, 700), int(rng.integers(1, 41)), int(rng.choice(CHOICES))
    n, k = (8 * int(rng.integers(1, 70)) for _ in range(2))
    dtype = list(LIMITS)[rng.integers(2)]
    ids = routed(rng, tokens, top_k, groups).to(device)
    made = torch.Generator(device).manual_seed(int(rng.integers(2**40)))
    left, right = (
        torch.randn(size, generator=made, device=device).to(dtype)
        for size in ((tokens * top_k, n), (tokens, k))
    )
    left[ids.flatten() < 0] = torch.nan
    right[(ids < 0).all(1)] = torch.nan
    return left, right, ids, groups


def exact(left: torch.Tensor, right: torch.Tensor, ids: torch.Tensor, groups: int) -> torch.Tensor:
    """[groups, n, k] in float64."""
    places = [(ids.flatten() == group).nonzero()[:, 0] for group in range(groups)]
    parts = [left[at].double().T @ right[at // ids.shape[1]].double() for at in places]
    return torch.stack(parts)


def wrong(seed: int, device: str) -> str:
    """What is wrong about a random call, or nothing."""
    left, right, ids, groups = problem(np.random.default_rng(seed), device)
    size = (groups, left.shape[1], right.shape[1])
    left.new_full(size, torch.nan)  # memory that the call gets
    got, want = outer_of_groups(left, right, ids, groups), exact(left, right, ids, groups)
    error = float((got.double() - want).norm() / want.norm().clamp(min=1e-30))
    return "" if error < LIMITS[left.dtype] else f"seed {seed}: {size} {ids.shape} {error:.1e}"


@pytest.mark.gpu
def test_random_routings() -> None:
    first = int(np.random.default_rng().integers(2**32))
    assert not [said for i in range(CALLS) if (said := wrong(first + i, "cuda"))]


@pytest.mark.gpu
def test_routings_change_in_a_graph() -> None:
    rng = np.random.default_rng()
    left, right, ids, groups = problem(rng, "cuda")
    left, right = left.nan_to_num(), right.nan_to_num()
    for _ in range(3):
        outer_of_groups(left, right, ids, groups)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = outer_of_groups(left, right, ids, groups)
    for _ in range(4):
        ids.copy_(routed(rng, *ids.shape, groups))
        out.fill_(torch.nan)
        graph.replay()
        want = exact(left, right, ids, groups)
        error = (out.double() - want).norm() / want.norm().clamp(min=1e-30)
        assert error < LIMITS[left.dtype]


def test_hosts_compute_the_same() -> None:
    first = int(np.random.default_rng().integers(2**32))
    assert not [said for i in range(CALLS) if (said := wrong(first + i, "cpu"))]
