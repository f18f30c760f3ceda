"""`pit_tvm.torch.masked_attention` on a CPU."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pit_tvm.torch as pit
from pit_tvm.errors import DTypeError, ShapeError
from pit_tvm.reference import attention as reference
from pit_tvm.torch.listed_mask import ListedMask, share_lists, shared_lists


def _operands(
    batch: int = 2, heads: int = 4, kv_heads: int = 2, queries: int = 7, keys: int = 9
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(batch, queries, heads, 16).transpose(1, 2)
    return q, torch.randn(batch, kv_heads, keys, 16), torch.randn(batch, kv_heads, keys, 24)


def _reference(q: Any, k: Any, v: Any, mask: torch.Tensor, scale: float) -> np.ndarray:
    given = (each.detach().float().numpy() for each in (q, k, v))
    return reference.masked_attention(*given, mask.numpy(), scale)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_masks_of_any_shape_that_broadcasts(data: st.DataObject) -> None:
    shape = (2, 4, data.draw(st.integers(0, 5)), data.draw(st.integers(0, 6)))
    own = [data.draw(st.sampled_from([1, extent])) for extent in shape]
    mask = torch.rand(own[data.draw(st.integers(0, 4)) :]) < data.draw(st.sampled_from([0, 0.5, 1]))
    if data.draw(st.booleans()):
        mask = mask.expand(shape)
    q, k, v = _operands(queries=shape[2], keys=shape[3])
    out = pit.masked_attention(q, k, v, mask)
    assert out.shape == (*shape[:3], 24) and out.transpose(1, 2).is_contiguous()
    np.testing.assert_allclose(out.numpy(), _reference(q, k, v, mask, 0.25), atol=1e-5)


def test_no_heads_give_none() -> None:
    out = pit.masked_attention(*_operands(heads=0, kv_heads=0), torch.ones(7, 9).bool())
    assert out.shape == (2, 0, 7, 24)


def test_no_keys_give_zeros_and_gradients() -> None:
    q, k, v = (each.requires_grad_() for each in _operands(keys=0))
    out = pit.masked_attention(q * torch.inf, k, v, torch.ones(7, 0).bool())
    assert not out.any()
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert [one.shape for one in gradients] == [q.shape, k.shape, v.shape]


def test_large_scales_may_be_negative() -> None:
    q, k, v = (each.half() for each in _operands())
    mask = torch.rand(7, 9) < 0.5
    found = pit.masked_attention(100 * q, k, v, mask, scale=-1000)
    assert torch.equal(found, pit.masked_attention(-100 * q, k, v, mask, scale=1000))


@pytest.mark.parametrize("scale", [-0.4, 0.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types_of_16_bits(dtype: torch.dtype, scale: float) -> None:
    q, k, v = (each.to(dtype) for each in _operands())
    mask = torch.rand(7, 9) < 0.5
    out = pit.masked_attention(q, k, v, mask, scale=scale)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.float().numpy(), _reference(q, k, v, mask, scale), atol=5e-2)


def test_keys_that_queries_can_see_decide_not_their_order() -> None:
    q, k, v = _operands()
    mask = torch.rand(7, 9) < 0.4
    rows, columns = torch.randperm(7), torch.randperm(9)
    turned = q[:, :, rows], k[:, :, columns], v[:, :, columns], mask[rows][:, columns]
    torch.testing.assert_close(
        pit.masked_attention(*turned), pit.masked_attention(q, k, v, mask)[:, :, rows]
    )


def test_gradients_are_those_of_attention_where_keys_are_seen() -> None:
    q, k, v = (each.double().float().detach().requires_grad_() for each in _operands())
    mask = torch.rand(7, 9) < 0.3
    mask[2] = False
    pit.masked_attention(q, k, v, mask).square().sum().backward()
    found = [each.grad for each in (q, k, v)]
    q, k, v = (each.detach().clone().requires_grad_() for each in (q, k, v))
    scores = q @ k.repeat_interleave(2, dim=1).mT / 4
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1).nan_to_num(0)
    seen = mask.any(dim=-1)
    out = (weights @ v.repeat_interleave(2, dim=1))[:, :, seen]
    for mine, theirs in zip(found, torch.autograd.grad(out.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(mine, theirs.nan_to_num(0))


def test_compilers_see_one_operator() -> None:
    q, k, v = _operands()
    mask = torch.rand(2, 1, 7, 9) < 0.5
    torch.library.opcheck(torch.ops.pit_tvm.masked_attention, (q, k, v, None, mask, 0.25, 0.0))
    step = torch.compile(lambda *given: pit.masked_attention(*given) * 2, fullgraph=True)
    torch.testing.assert_close(step(q, k, v, mask), pit.masked_attention(q, k, v, mask) * 2)


def test_compilers_take_scales_and_extents_for_symbols() -> None:
    plain = (each.requires_grad_() for each in _operands(batch=1, queries=1, keys=1))
    given = *plain, torch.ones(1).bool()
    step = torch.compile(pit.masked_attention, fullgraph=True, dynamic=True, backend="eager")
    wanted = pit.masked_attention(*given, scale=0.7)
    torch.testing.assert_close(step(*given, scale=0.7), wanted)


def test_layers_share_what_is_listed_once() -> None:
    q, k, v = _operands()
    mask = torch.rand(2, 1, 7, 9) < 0.5
    mask[..., 0] = True
    listed = pit.list_mask(mask, (2, 4, 7, 9), kv_heads=2)
    wanted = pit.masked_attention(q, k, v, mask)
    assert torch.equal(pit.masked_attention(q, k, v, listed), wanted)
    step = torch.compile(lambda *given: pit.masked_attention(*given) * 2, fullgraph=True)
    torch.testing.assert_close(step(q, k, v, listed), wanted * 2)
    q.requires_grad_()
    assert pit.masked_attention(q, k, v, listed).requires_grad


def test_lists_are_of_one_mask_and_one_shape() -> None:
    q, k, v = _operands()
    mask = torch.rand(7, 9) < 0.5
    listed = pit.list_mask(mask, (2, 4, 7, 9))
    with pytest.raises(ShapeError, match=r"one listed for \[2, 4, 7, 9\], got \[2, 4, 6, 9\]"):
        pit.masked_attention(q[:, :, 1:], k, v, listed)
    mask[0] = True
    with pytest.raises(ShapeError, match="was changed since, or a copy; call list_mask again"):
        pit.masked_attention(q, k, v, listed)
    with torch.inference_mode():
        listed = pit.list_mask(torch.ones(9).bool(), (2, 4, 7, 9))
        assert pit.masked_attention(q, k, v, listed).shape == (2, 4, 7, 24)


@pytest.mark.parametrize(
    ("mask", "shape", "error", "text"),
    [
        (torch.ones(7, 9), (2, 4, 7, 9), DTypeError, "mask: expected bool"),
        (torch.ones(7, 8).bool(), (2, 4, 7, 9), ShapeError, "mask: expected a shape that"),
        (torch.ones(9).bool(), (7, 9), ShapeError, "shape: expected .batch, heads, queries, keys"),
        (torch.ones(9).bool(), (1, 1, -1, 9), ShapeError, "shape: expected"),
        (torch.ones(9).bool(), (1, 1, 2.0, 9), ShapeError, "shape: expected"),
        (torch.ones(9).bool(), None, ShapeError, "shape: expected"),
        (None, (1, 1, 1, 1), DTypeError, "mask: expected a torch tensor"),
    ],
)
def test_lists_refuse_what_does_not_fit(mask: Any, shape: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        pit.list_mask(mask, shape)


def test_autocast_chooses_the_type() -> None:
    q, k, v = _operands()
    with torch.autocast("cpu", torch.bfloat16):
        assert pit.masked_attention(q, k, v, torch.ones(9).bool()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "changed", "error", "text"),
    [
        ("q", lambda q: q[0], ShapeError, "q: expected \\[batch, heads, rows, columns\\]"),
        ("q", lambda q: q.double(), DTypeError, "q: expected one of"),
        ("q", lambda q: q[:, :3], ShapeError, "a divisor of 3"),
        ("q", lambda q: q.numpy(), DTypeError, "q: expected a torch tensor"),
        ("k", lambda k: k.half(), DTypeError, "k: expected torch.float32 with q"),
        ("k", lambda k: k[..., :8], ShapeError, "k: expected"),
        ("k", lambda k: k[:1], ShapeError, "k: expected"),
        ("k", lambda k: k[:, :0], ShapeError, "k: expected"),
        ("v", lambda v: v[:, :, 1:], ShapeError, "v: expected"),
        ("mask", lambda mask: mask.int(), DTypeError, "mask: expected bool"),
        ("mask", lambda mask: mask[:, 1:], ShapeError, "mask: expected a shape that broadcasts"),
        ("mask", lambda mask: mask[None, None, None], ShapeError, "broadcasts to"),
        ("scale", lambda _: float("nan"), DTypeError, "scale: expected a finite number"),
        ("scale", lambda _: 10**400, DTypeError, "scale: expected a finite number"),
        ("scale", lambda _: True, DTypeError, "scale"),
        ("scale", lambda _: "1", DTypeError, "scale"),
    ],
)
def test_refuses_what_does_not_fit(name: str, changed: Any, error: Any, text: str) -> None:
    q, k, v = _operands()
    given = {"q": q, "k": k, "v": v, "mask": torch.ones(7, 9).bool(), "scale": None}
    given[name] = changed(given[name])
    with pytest.raises(error, match=text):
        pit.masked_attention(**given)  # type: ignore[arg-type]


def test_refuses_a_tensor_elsewhere() -> None:
    q, k, v = _operands()
    with pytest.raises(DTypeError, match="mask: expected the device of q"):
        pit.masked_attention(q, k, v, torch.ones(7, 9, device="meta").bool())


@pytest.mark.parametrize("kv_heads", [0, 3, 8, "2", 2.0])
def test_refuses_heads_of_keys_that_do_not_share(kv_heads: Any) -> None:
    with pytest.raises(ShapeError, match="kv_heads: expected a divisor of 4"):
        pit.list_mask(torch.ones(9).bool(), (2, 4, 7, 9), kv_heads=kv_heads)
    assert pit.list_mask(torch.ones(9).bool(), (2, 0, 7, 9), kv_heads=0).shape == (2, 0, 7, 9)


def test_shared_lists_are_those_of_the_mask() -> None:
    mask = torch.rand(2, 1, 7, 12) < 0.5
    assert isinstance(shared_lists(mask, (2, 4, 7, 9), False, 2), torch.Tensor)
    share_lists(mask)
    first = shared_lists(mask, (2, 4, 7, 9), False, 2)
    assert isinstance(shared_lists(copy.deepcopy(mask), (2, 4, 7, 9), False, 2), torch.Tensor)
    assert isinstance(first, ListedMask) and torch.equal(first.mask, mask[..., :9])
    wider = shared_lists(mask, (2, 4, 7, 12), True, 2)
    assert isinstance(wider, ListedMask) and wider.shape == (2, 4, 7, 12)
    mask[:] = True
    again = shared_lists(mask, (2, 4, 7, 9), False, 2)
    assert isinstance(again, ListedMask) and again.mask.all() and again.version > first.version
    again.check(torch.empty(2, 4, 7, 8), 9)
    gone = weakref.ref(mask)
    del mask, first, wider, again
    assert gone() is None
