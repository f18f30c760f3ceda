"""The index of a padded batch on a GPU against the one of the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pit_tvm.runtime.cuda_live_tokens import NOT_A_MASK, count_live, live_module
from pit_tvm.runtime.cuda_modules import cached_modules
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.runtime.live_tokens import live_tokens
from tests.schedules.cuda_text import cuda_text

torch = pytest.importorskip("torch")


def test_a_warp_counts_a_sequence() -> None:
    text = cuda_text(count_live(64))
    assert "__shfl_xor_sync" in text and "int64_t* __restrict__ mask_ptr" in text


def test_kernels_for_all_masks_and_ids() -> None:
    names = {var.name_hint for var in live_module().get_global_vars()}
    masks = {f"{name}_live_{bits}" for name in ("count", "place") for bits in (8, 32, 64)}
    assert names == masks | {"mark_outside_32", "mark_outside_64"}


def listed(mask: Any) -> tuple[Any, ...]:
    """Lists, starts, place, and the status of a mask on a GPU; memory is full of -7 before."""
    kernels = cached_modules(KernelCache())("cuda-live-tokens", live_module)
    batch, tokens = mask.shape
    bits = 8 * mask.element_size()

    def empty(*shape: int) -> Any:
        return torch.full(shape, -7, dtype=torch.int32, device="cuda")

    counts, status = empty(batch), empty(2)
    lists = [empty(batch * tokens) for _ in range(3)]
    starts, place = empty(batch + 1), empty(batch, tokens)
    kernels[f"count_live_{bits}"](mask, counts)
    kernels[f"place_live_{bits}"](mask, counts, *lists, starts, place, status)
    return lists, starts, place, status


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (256, 128), (9, 33), (300, 1), (2, 4000)])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_lists_are_those_of_the_cpu(shape: tuple[int, int], share: float, dtype: str) -> None:
    mask = (torch.rand(shape) < share).to(getattr(torch, dtype))
    *parts, starts, place = live_tokens(mask)
    lists, found_starts, found_place, status = listed(mask.cuda())
    live = int(mask.sum())
    assert status.tolist() == [live, -7]
    for found, expected in zip(lists, parts, strict=True):
        np.testing.assert_array_equal(found[:live].cpu().numpy(), expected)
        assert bool((found[live:] == -7).all())
    np.testing.assert_array_equal(found_starts.cpu().numpy(), starts)
    np.testing.assert_array_equal(found_place.cpu().numpy(), place)


@pytest.mark.gpu
@pytest.mark.parametrize("place", [(0, 0), (4, 50), (7, 99)])
def test_other_numbers_than_0_and_1_are_told(place: tuple[int, int]) -> None:
    mask = torch.ones(8, 100, dtype=torch.int64)
    mask[place] = 3
    status = listed(mask.cuda())[-1]
    assert int(status[0]) == 800 + NOT_A_MASK


@pytest.mark.gpu
@pytest.mark.parametrize(("value", "outside"), [(0, 0), (9, 0), (10, 1), (-1, 1)])
def test_ids_outside_their_table_are_told(value: int, outside: int) -> None:
    kernels = cached_modules(KernelCache())("cuda-live-tokens", live_module)
    for bits in (32, 64):
        ids = torch.zeros(1000, dtype=getattr(torch, f"int{bits}"), device="cuda")
        ids[777] = value
        status = torch.zeros(3, dtype=torch.int32, device="cuda")
        kernels[f"mark_outside_{bits}"](ids, 10, 2, status)
        assert status.tolist() == [0, 0, outside]
