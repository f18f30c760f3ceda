"""`pit_tvm.torch.masked_attention` on a CPU."""

from __future__ import annotations

import copy
import sys
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pit_tvm.torch as pit
from pit_tvm.errors import BackendUnavailable, DTypeError, ShapeError
from pit_tvm.reference import attention as reference
from pit_tvm.torch import attention, listed_mask
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
    torch.library.opcheck(torch.ops.pit_tvm.masked_attention, (q, k, v, None, mask, 0.25))
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


@pytest.fixture(scope="module")
def llama() -> Any:
    """A small model of transformers, with grouped queries."""
    transformers = pytest.importorskip("transformers", reason="models are of transformers")
    pit.register_attention()
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()


def test_it_may_take_the_place_of_torchs(llama: Any) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    pit.register_attention("sdpa")
    try:
        llama.set_attn_implementation("sdpa")
        with torch.no_grad():
            llama(torch.randint(50, (2, 5)), attention_mask=torch.eye(2, 5).long())
    finally:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", sdpa_attention_forward)
        ALL_MASK_ATTENTION_FUNCTIONS.register("sdpa", sdpa_mask)


def _called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of queries of later calls of `masked_attention` by `attention_forward`."""
    calls: list[tuple[int, ...]] = []
    inner = attention.masked_attention

    def record(q: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        calls.append(tuple(q.shape))
        return inner(q, *others, **options)

    monkeypatch.setattr(attention, "masked_attention", record)
    return calls


def test_models_of_transformers_take_it_by_name(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = torch.randint(50, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    mask[0, :4] = mask[2, :7] = 0
    llama.set_attn_implementation("sdpa")
    with torch.no_grad():
        wanted = llama(ids, attention_mask=mask).logits
        text = llama.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
        llama.set_attn_implementation("pit_tvm")
        calls = _called(monkeypatch)
        found = llama(ids, attention_mask=mask).logits
        assert calls == [(3, 4, 9, 8)] * 2
        again = llama.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()])
    assert torch.equal(text, again) and len(calls) == 4  # later tokens are single queries


def test_transformers_computes_what_has_no_mask_or_gradients(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama.set_attn_implementation("pit_tvm")
    calls = _called(monkeypatch)
    ids = torch.randint(50, (2, 6))
    llama(ids).logits.sum().backward()
    with torch.no_grad():
        llama(ids)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, 0] = 0
    llama(ids, attention_mask=mask).logits.sum().backward()
    assert not calls


def test_layers_of_a_model_share_lists(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    inner = listed_mask.listed

    def record(planes: torch.Tensor, *how: Any) -> Any:
        made.append(weakref.ref(planes))
        return inner(planes, *how)

    monkeypatch.setattr(listed_mask, "listed", record)
    llama.set_attn_implementation("pit_tvm")
    ids, mask = torch.randint(50, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    mask[0, :4] = 0
    for quiet in (torch.no_grad(), torch.inference_mode()):
        made.clear()
        with quiet:
            llama(ids, attention_mask=mask)
            llama(ids, attention_mask=mask)
        assert len(made) == 2  # a mask of its own for every call
        assert not any(one() for one in made)  # of which none is kept


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


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)
    with pytest.raises(BackendUnavailable, match="transformers with an interface of att.*pip"):
        pit.register_attention()


def test_refuses_blocks_of_keys_that_neither_takes() -> None:
    q, k, v = _operands()
    expected = (
        "without blocks of keys picked by their places, got block_indices=; leave .* as it is$"
    )
    with pytest.raises(DTypeError, match=expected):
        pit.attention_forward(torch.nn.Module(), q, k, v, None, block_indices=torch.zeros(4))


@pytest.mark.parametrize("name", ["SplinterModel", "BigBirdPegasusForCausalLM"])
def test_models_without_attention_by_torch_see_what_they_may(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="models are of transformers")
    pit.register_attention()
    made = getattr(transformers, name)
    heads = {"num_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"num_hidden_layers": 1, "decoder_layers": 1, "hidden_size": 32, "d_model": 32}
    model = made(made.config_class(vocab_size=50, **sizes, **heads)).eval()
    ids, found = torch.randint(50, (2, 9)), []
    with torch.no_grad():
        for implementation in ("eager", "pit_tvm"):
            model.set_attn_implementation(implementation)
            found.append(model(ids)[0])
    torch.testing.assert_close(*found)
    layer = type("Layer", (torch.nn.Module,), {"__module__": made.__module__})()
    with pytest.raises(DTypeError, match="a layer that says whether it is causal, got Layer"):
        pit.attention_forward(layer, *_operands(), None)


@pytest.mark.parametrize("batch", [1, 3])
def test_transformers_computes_other_types_and_repeats_sequences(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="layers are of transformers")
    calls = _called(monkeypatch)
    q, k, v = (each.double() for each in _operands(batch=3, heads=2))
    dtype = torch.float64 if batch == 3 else torch.float32
    q, k, v = q[:batch].to(dtype), k.to(dtype), v.to(dtype)
    mask = torch.rand(3, 1, 7, 9) < 0.5
    out, _ = pit.attention_forward(torch.nn.Module(), q, k, v, mask)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(out, wanted.transpose(1, 2))
    assert not calls


def test_gemma4_asks_about_its_last_tokens() -> None:
    transformers = pytest.importorskip("transformers", reason="models are of transformers")
    pit.register_attention()
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    later = {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2, "global_head_dim": 8}
    config = transformers.Gemma4TextConfig(**sizes, **heads, **later, vocab_size_per_layer_input=50)
    model = transformers.Gemma4ForCausalLM(config).eval()
    ids, found = torch.randint(50, (2, 9)), []
    with torch.no_grad():
        for name in ("sdpa", "pit_tvm"):
            model.set_attn_implementation(name)
            found.append(model(ids, logits_to_keep=2).logits)
    torch.testing.assert_close(*found)
