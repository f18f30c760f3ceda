"""Sums of outer products of groups, and of rows, on a GPU: random calls against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pit_tvm.torch.operators import KINDS, outer_of_groups, sum_of_rows, sums_of_groups

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
    return _judged(got, want, f"seed {seed}: {size} {ids.shape}")


def _judged(got: torch.Tensor, want: torch.Tensor, call: str) -> str:
    error = float((got.double() - want).norm() / want.norm().clamp(min=1e-30))
    return "" if error < LIMITS[got.dtype] else f"{call} {error:.1e}"


def existing(
    rng: np.random.Generator, batch: int, length: int, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pattern of rows, and which of them exist."""
    alive = np.arange(length) < rng.integers(0, length + 1, (batch, 1))
    pattern = alive.sum(1)
    if kind == "cu_seqlens":
        pattern = np.concatenate([[0], np.cumsum(pattern)])
    elif kind == "rows":
        alive = rng.random(batch * length) < rng.random()
        pattern = rng.permutation(np.flatnonzero(alive))
    pattern = pattern.astype(rng.choice(["int32", "int64"]))
    return torch.from_numpy(pattern), torch.from_numpy(alive.reshape(-1))


def wrong_sum(seed: int, device: str) -> str:
    """What is wrong about random sums of rows, or nothing; rows that do not exist are NaN."""
    rng = np.random.default_rng(seed)
    left, _, ids, groups = problem(rng, device)
    number, n = left.shape
    left.new_full((groups, n), torch.nan)  # memory that the call gets
    found = [left[ids.flatten() == group].double().sum(0) for group in range(groups)]
    said = _judged(
        sums_of_groups(left, ids, groups), torch.stack(found), f"seed {seed}: {groups} {left.shape}"
    )
    length, kind = int(rng.integers(1, number + 1)), str(rng.choice(KINDS))
    pattern, alive = existing(rng, number // length, length, kind)
    rows = left[: len(alive)].nan_to_num()
    rows[~alive.to(device)] = torch.nan
    got = sum_of_rows(rows, pattern.to(device), kind)
    want = rows[alive.to(device)].double().sum(0)
    return said or _judged(got, want, f"seed {seed}: {kind} {pattern.shape} {rows.shape}")


@pytest.mark.gpu
@pytest.mark.parametrize("check", [wrong, wrong_sum])
def test_random_calls(check: Callable[[int, str], str]) -> None:
    first = int(np.random.default_rng().integers(2**32))
    assert not [said for i in range(CALLS) if (said := check(first + i, "cuda"))]


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


@pytest.mark.parametrize("check", [wrong, wrong_sum])
def test_hosts_compute_the_same(check: Callable[[int, str], str]) -> None:
    first = int(np.random.default_rng().integers(2**32))
    assert not [said for i in range(CALLS) if (said := check(first + i, "cpu"))]
