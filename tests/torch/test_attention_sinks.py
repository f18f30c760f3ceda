"""Sinks and caps of `pit_tvm.torch.masked_attention` on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pit_tvm.torch as pit
from pit_tvm.errors import DTypeError, ShapeError
from pit_tvm.reference import attention as reference

Tensors = tuple[torch.Tensor, ...]


def _operands(queries: int = 7, keys: int = 9) -> Tensors:
    q = torch.randn(2, queries, 4, 16).transpose(1, 2)
    return q, torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 24), torch.randn(4) * 3


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_agree_with_the_reference(data: st.DataObject) -> None:
    q, k, v, sinks = _operands(data.draw(st.integers(0, 5)), data.draw(st.integers(0, 6)))
    shape = (2, 4, q.shape[2], k.shape[2])
    own = [data.draw(st.sampled_from([1, extent])) for extent in shape]
    mask = torch.rand(own) < data.draw(st.sampled_from([0, 0.5, 1]))
    sinks[0] = data.draw(st.sampled_from([-torch.inf, -100, 0, 100]))
    cap = data.draw(st.sampled_from([None, 0.5, 7]))
    out = pit.masked_attention(q, k, v, mask, scale=0.3, sinks=sinks, softcap=cap)
    wanted = reference.masked_attention(q, k, v, mask, 0.3, sinks, cap or 0.0)
    np.testing.assert_allclose(out.numpy(), wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_types_of_16_bits(dtype: torch.dtype) -> None:
    q, k, v, sinks = (each.to(dtype) for each in _operands())
    mask = torch.rand(7, 9) < 0.5
    plain = (each.float() for each in (q, k, v))
    wanted = reference.masked_attention(*plain, mask, 0.25, sinks.float())
    for own in (sinks, sinks.float()):
        out = pit.masked_attention(q, k, v, mask, sinks=own)
        assert out.dtype == dtype
        np.testing.assert_allclose(out.float().numpy(), wanted, atol=3e-2)


def test_gradients_go_to_sinks() -> None:
    given = [each.requires_grad_() for each in _operands()]
    mask = torch.rand(7, 9) < 0.5
    mask[:, 0] = True
    out = pit.masked_attention(*given[:3], mask, sinks=given[3])
    q, k, v, sinks = given
    scores = q @ k.repeat_interleave(2, dim=1).mT / 4
    beside = sinks[:, None, None].expand(2, 4, 7, 1)
    weights = torch.cat([scores.masked_fill(~mask, -torch.inf), beside], -1).softmax(-1)[..., :-1]
    wanted = weights @ v.repeat_interleave(2, dim=1)
    for mine, theirs in zip(
        torch.autograd.grad(out.square().sum(), given),
        torch.autograd.grad(wanted.square().sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_compilers_see_one_operator() -> None:
    q, k, v, sinks = _operands()
    mask = torch.rand(2, 1, 7, 9) < 0.5
    torch.library.opcheck(torch.ops.pit_tvm.masked_attention, (q, k, v, sinks, mask, 0.25, 7.0))
    step = torch.compile(lambda *all: pit.masked_attention(*all[:4], sinks=all[4]), fullgraph=True)
    wanted = pit.masked_attention(q, k, v, mask, sinks=sinks)
    torch.testing.assert_close(step(q, k, v, mask, sinks), wanted)
    listed = pit.list_mask(mask, (2, 4, 7, 9))
    assert torch.equal(pit.masked_attention(q, k, v, listed, sinks=sinks), wanted)


@pytest.mark.parametrize(
    ("sinks", "error", "text"),
    [
        (torch.zeros(3), ShapeError, r"sinks: expected \[4\], one of a head, got \(3,\)"),
        (torch.zeros(4).double(), DTypeError, "sinks: expected one of .*got torch.float64"),
        ([0.0] * 4, DTypeError, "sinks: expected a torch tensor, got list"),
        (torch.zeros(4, device="meta"), DTypeError, "sinks: expected the device of q"),
    ],
)
def test_refuses_what_does_not_fit(sinks: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        pit.masked_attention(*_operands()[:3], torch.ones(7, 9).bool(), sinks=sinks)


@pytest.mark.parametrize("cap", [0, -1.0, float("nan"), 10**400, "1", True])
def test_refuses_caps_that_are_none(cap: Any) -> None:
    with pytest.raises(DTypeError, match="softcap: expected a positive number or None, got"):
        pit.masked_attention(*_operands()[:3], torch.ones(7, 9).bool(), softcap=cap)


@pytest.mark.parametrize("name", ["s_aux", "softcap"])
def test_refuses_biases_beside_sinks_and_caps(name: str) -> None:
    *qkv, sinks = _operands()
    given: dict[str, Any] = {name: sinks if name == "s_aux" else 50.0, "position_bias": sinks}
    with pytest.raises(DTypeError, match="without position_bias= beside sinks or a softcap, got"):
        pit.attention_forward(torch.nn.Module(), *qkv, None, **given)


@pytest.mark.parametrize("mask", [torch.ones(7, 9).bool(), torch.zeros(7, 9)])
def test_refuses_sinks_of_each_query(mask: torch.Tensor) -> None:
    q, k, v, _ = _operands()
    with pytest.raises(ShapeError, match=r"sinks: expected \[4\], one of a head"):
        pit.attention_forward(torch.nn.Module(), q, k, v, mask, sinks=torch.zeros(2, 4, 7, 1))


@pytest.mark.parametrize("causal", [True, False])
def test_layers_with_sinks_may_have_no_mask(causal: bool) -> None:
    q, k, v, sinks = _operands()  # of more keys than queries: the last of a cache to be filled
    layer = torch.nn.Module()
    layer.is_causal = causal  # type: ignore[assignment]
    out, _ = pit.attention_forward(layer, q, k, v, None, s_aux=sinks)
    mask = np.tril(np.ones((7, 9), bool)) if causal else np.ones((7, 9), bool)
    wanted = reference.masked_attention(q, k, v, mask, 0.25, sinks)
    np.testing.assert_allclose(out.transpose(1, 2).numpy(), wanted, atol=1e-5)


def test_layers_may_drop_weights_beside_sinks() -> None:
    q, k, v, sinks = _operands()
    mask, given = torch.ones(7, 9).bool(), (torch.nn.Module(), q, k, torch.ones_like(v))
    out, _ = pit.attention_forward(*given, mask, dropout=0.5, s_aux=sinks)
    kept, _ = pit.attention_forward(*given, mask, s_aux=sinks)
    assert out.shape == kept.shape and 0.5 < float(out.mean() / kept.mean()) < 2
    assert not torch.allclose(out, kept)
