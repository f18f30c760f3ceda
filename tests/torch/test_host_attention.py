"""`pit_tvm.torch.masked_attention` on a CPU, where keys are gathered, and where torch takes all."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pit_tvm.torch as pit
from pit_tvm.forks import Threads
from pit_tvm.reference import attention as reference
from pit_tvm.torch import host, host_attention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
MANY = {"queries": 150, "keys": 500}  # that are worth a look


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of torch's attention, whether it was told that every query sees a key."""
    calls: list[bool] = []
    inner = host.attention

    def record(*args: Any) -> torch.Tensor:
        calls.append(args[7])
        with monkeypatch.context() as patch:  # it calls itself
            patch.setattr(host, "attention", inner)
            return inner(*args)

    monkeypatch.setattr(host, "attention", record)
    return calls


def operands(
    heads: int = 4,
    kv_heads: int = 2,
    queries: int = 150,
    keys: int = 500,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of two sequences; heads of q and v lie side by side."""
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(2, queries, heads, 32, generator=rng).to(dtype).transpose(1, 2)
    k = torch.randn(2, kv_heads, keys, 32, generator=rng).to(dtype)
    v = torch.randn(2, keys, kv_heads, 24, generator=rng).to(dtype).transpose(1, 2)
    return q, k, v


def window(queries: int, keys: int, wide: int = 40) -> torch.Tensor:
    """A mask in which every query sees so many keys in a row."""
    far = torch.arange(keys) - torch.arange(queries)[:, None] * keys // max(1, queries)
    return (far >= 0) & (far < wide)


def assert_right(out: torch.Tensor, given: tuple[torch.Tensor, ...], mask: Any, **how: Any) -> None:
    """The relative error is that of rounding."""
    sinks = how.get("sinks")
    truth = reference.masked_attention(
        *(each.detach().float().numpy() for each in given),
        mask.numpy(),
        how.get("scale", 32**-0.5),
        None if sinks is None else sinks.float().numpy(),
        how.get("softcap", 0.0),
    )
    limit = TOLERANCE[out.dtype] * max(1.0, np.abs(truth).max(initial=0.0))
    assert np.abs(out.float().numpy() - truth).max(initial=0.0) <= limit


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_masks_of_many_keys(dtype: torch.dtype, data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 2))
    heads = kv_heads * data.draw(st.integers(1, 5))
    queries, keys = data.draw(st.integers(1, 150)), data.draw(st.integers(200, 600))
    seed = data.draw(st.integers(0, 2**32 - 1))
    given = operands(heads, kv_heads, queries, keys, dtype, seed)
    shape = 2, heads, queries, keys
    own = [data.draw(st.sampled_from([1, extent])) for extent in shape[:3]]
    share = data.draw(st.sampled_from([0.0, 0.01, 0.5, 1.0]))
    rng = torch.Generator().manual_seed(seed)
    mask = torch.rand((*own, keys), generator=rng) < share
    if data.draw(st.booleans()):
        mask = mask & window(own[2], keys)
    if data.draw(st.booleans()):
        mask = mask.expand(shape)
    sunk, softcap = data.draw(st.sampled_from([(False, 0.0), (True, 1.5)]))
    sinks = torch.randn(heads, generator=rng).to(dtype) if sunk else None
    out = torch.full((2, queries, heads, 24), torch.nan, dtype=dtype).transpose(1, 2)
    made = host_attention.attention(*given, sinks, mask, 0.3, softcap, out)
    assert made.dtype == dtype and made.stride() == out.stride()
    assert_right(made, given, mask, scale=0.3, sinks=sinks, softcap=softcap)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_windows_are_gathered(dtype: torch.dtype, taken: list[bool]) -> None:
    given, mask = operands(**MANY, dtype=dtype), window(**MANY)
    out = pit.masked_attention(*given, mask)
    assert not taken and out.transpose(1, 2).is_contiguous()
    assert_right(out, given, mask)


@pytest.mark.parametrize("blind", [False, True])
def test_torch_takes_dense_masks(blind: bool, taken: list[bool]) -> None:
    given, mask = operands(**MANY), torch.ones(150, 500).bool()
    mask[3] = not blind
    mask[:, 4] = False
    out = pit.masked_attention(*given, mask)
    assert taken == [not blind] and out.transpose(1, 2).is_contiguous()
    assert_right(out, given, mask)


def test_windows_of_capped_scores_are_gathered(taken: list[bool]) -> None:
    given, mask = operands(**MANY), window(**MANY)
    out = pit.masked_attention(*given, mask, softcap=0.4)
    assert not taken
    assert_right(out, given, mask, softcap=0.4)


def test_torch_takes_few_keys_and_what_has_no_columns(taken: list[bool]) -> None:
    q, k, v = operands(queries=3, keys=50)
    pit.masked_attention(q, k, v, torch.eye(3, 50).bool())
    q, k, v = operands(**MANY)
    out = pit.masked_attention(q, k, v[..., :0], window(**MANY))
    assert out.shape == (2, 4, 150, 0) and taken == [False, False]


def test_torch_takes_what_a_forked_process_has_no_threads_for(
    monkeypatch: pytest.MonkeyPatch, taken: list[bool]
) -> None:
    monkeypatch.setattr(Threads, "lost", True)
    given, mask = operands(**MANY), window(**MANY)
    assert_right(pit.masked_attention(*given, mask), given, mask)
    assert taken == [False]


def _apart(array: torch.Tensor) -> torch.Tensor:
    """Columns that lie two elements apart."""
    return array.repeat_interleave(2, dim=-1)[..., ::2]


def _negated(array: torch.Tensor) -> torch.Tensor:
    """Memory that holds the negatives."""
    return torch._neg_view(-array)


def _unaligned(array: torch.Tensor) -> torch.Tensor:
    """Elements that begin at an odd address."""
    room = bytearray(array.numel() * array.itemsize + 1)
    room[1:] = array.contiguous().numpy().tobytes()
    return torch.frombuffer(room, dtype=array.dtype, offset=1).view(array.shape)


@pytest.mark.parametrize("laid", [_apart, _negated, _unaligned, torch.nn.Parameter])
def test_elements_may_lie_anywhere(laid: Any, taken: list[bool]) -> None:
    plain, mask = operands(**MANY), window(**MANY)
    with torch.no_grad():
        out = pit.masked_attention(*map(laid, plain), mask.T.contiguous().T)
    assert not taken
    assert_right(out, plain, mask)


def test_sequences_may_share_keys(taken: list[bool]) -> None:
    q, k, v = operands(**MANY)
    given = q, k[:1].expand(2, -1, -1, -1), v[:, :1].expand(-1, 2, -1, -1)
    mask = window(**MANY)
    with torch.inference_mode():
        assert_right(pit.masked_attention(*given, mask), given, mask)
    assert not taken


def test_gradients_are_torchs() -> None:
    q, k, v = operands(**MANY)
    out = pit.masked_attention(q.requires_grad_(), k, v, window(**MANY))
    assert out.requires_grad and torch.autograd.grad(out.sum(), q)[0].shape == q.shape


def test_threads_call_at_once(taken: list[bool]) -> None:
    masks = [window(**MANY, wide=wide) for wide in range(20, 80, 5)]
    given = operands(**MANY)
    made: dict[int, torch.Tensor] = {}

    def call(number: int) -> None:
        made[number] = pit.masked_attention(*given, masks[number])

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(masks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, mask in enumerate(masks):
        assert_right(made[number], given, mask)
    assert not taken
