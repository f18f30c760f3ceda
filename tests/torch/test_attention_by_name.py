"""Attention by masks of models of transformers, by name, on a CPU."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
import torch

import pit_tvm.torch as pit
from pit_tvm.errors import BackendUnavailable, DTypeError
from pit_tvm.torch import attention_by_name, listed_mask


def _operands(heads: int = 4, batch: int = 2) -> tuple[torch.Tensor, ...]:
    q = torch.randn(batch, 7, heads, 16).transpose(1, 2)
    return q, torch.randn(batch, 2, 9, 16), torch.randn(batch, 2, 9, 24)


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


def _called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], bool]]:
    """Of later calls of `masked_attention` by `attention_forward`, shapes of queries, and whether
    there were sinks."""
    calls: list[tuple[tuple[int, ...], bool]] = []
    inner = attention_by_name.masked_attention

    def record(q: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        calls.append((tuple(q.shape), options.get("sinks") is not None))
        return inner(q, *others, **options)

    monkeypatch.setattr(attention_by_name, "masked_attention", record)
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
        assert calls == [((3, 4, 9, 8), False)] * 2
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


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)
    with pytest.raises(BackendUnavailable, match="transformers with an interface of att.*pip"):
        pit.register_attention()


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


_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_SIZES = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 50}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "kv_lora_rank": 16},
    **{"q_lora_rank": 24, "index_topk": 3, "index_head_dim": 16, "index_n_heads": 2},
    **{"n_routed_experts": 4, "moe_intermediate_size": 16, "num_key_value_heads": 4},
    **{"n_group": 1, "topk_group": 1},
}
_BLOCKS = {
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 40},
    **{"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 2, "index_topk_blocks": 2},
    **{"shared_intermediate_size": 16, "rotary_dim": 4},
    "layer_types": ["full_attention", "minimax_m3_sparse"],
}
_MODELS: dict[str, dict[str, Any]] = {
    "GptOss": {"sliding_window": 4, **_EXPERTS},
    "GraniteSWA": {"sliding_window": 4},
    "Gemma2": {"sliding_window": 4, "attn_logit_softcapping": 0.05, "query_pre_attn_scalar": 8},
    "DeepseekV32": _LATENT,  # picks three keys
    "GlmMoeDsa": _LATENT,
    "MiniMaxM3VL": _BLOCKS,  # two blocks of two keys
}


def _model(name: str) -> Any:
    transformers = pytest.importorskip("transformers", reason="models are of transformers")
    made = getattr(transformers, f"{name}ForCausalLM", None)
    if made is None:
        pytest.skip(f"this transformers has no {name}")
    pit.register_attention()
    torch.manual_seed(3)
    model = made(made.config_class(**{**_SIZES, **_HEADS, **_MODELS[name]})).eval()
    for key, weight in model.named_parameters():
        if key.endswith("sinks"):
            torch.nn.init.normal_(weight)
    return model


@pytest.mark.parametrize("name", _MODELS)
def test_models_with_sinks_or_picks_take_it_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, calls = _model(name), torch.randint(50, (3, 9)), _called(monkeypatch)
    mask = torch.ones(3, 9, dtype=torch.long)
    picks_blocks = name == "MiniMaxM3VL"  # in the wrong places behind padding
    mask[0, 5:] = mask[2, 2:] = 0
    options = {"max_new_tokens": 4, "do_sample": False}
    padded = {} if picks_blocks else {"attention_mask": mask.flip(1)}
    found = {}
    for implementation in ("eager", "pit_tvm"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            logits = model(ids, attention_mask=mask).logits[mask.bool()]
            texts = [model.generate(ids, **options, **padded)]
            texts += [model.generate(ids, **options, cache_implementation="static")]
            found[implementation] = logits, model(ids).logits, *texts
    for wanted, mine in zip(*found.values(), strict=True):
        torch.testing.assert_close(mine, wanted)
    sinks = any("sinks" in key for key, _ in model.named_parameters())
    assert len(calls) >= 4 and all(one == sinks for _, one in calls)


def test_compilers_do_not_trace_what_modules_name() -> None:
    transformers = pytest.importorskip("transformers", reason="models are of transformers")
    pit.register_attention()
    # Part of it cannot be compiled, and names of what can are put into its module meanwhile.
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "dff": 8, "n_positions": 16}
    config = transformers.CTRLConfig(vocab_size=50, use_cache=False, **sizes)
    model = transformers.CTRLModel(config).eval()
    model.set_attn_implementation("pit_tvm")
    given = {"input_ids": torch.randint(50, (2, 6)), "attention_mask": torch.ones(2, 6).long()}
    given["attention_mask"][0, :2] = 0
    with torch.no_grad():
        found = torch.compile(model, backend="eager")(**given)[0]
        torch.testing.assert_close(found, model(**given)[0])


@pytest.mark.parametrize("name", ["GptOss", "Gemma2"])
def test_padding_leaves_gradients_as_they_are(name: str) -> None:
    model, ids, found = _model(name).train(), torch.randint(50, (2, 9)), []
    mask = torch.ones_like(ids)
    mask[0, 3:] = mask[1, :5] = 0  # its last queries have nothing in their windows
    for implementation in ("eager", "pit_tvm"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        # Nothing of what padding makes, not the first token either.
        labels = ids.masked_fill((mask == 0) | (mask.roll(1, 1) == 0), -100)
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        found.append({key: one.grad for key, one in model.named_parameters()})
    torch.testing.assert_close(*found)


def test_sinks_of_models_are_trained() -> None:
    model, ids, found = _model("GptOss").train(), torch.randint(50, (2, 9)), []
    for implementation in ("eager", "pit_tvm"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        found.append({key: one.grad for key, one in model.named_parameters()})
    assert any("sinks" in key and one is not None and one.any() for key, one in found[1].items())
    torch.testing.assert_close(*found)
