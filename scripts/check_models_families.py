"""Families of transformers as small models: classes and sizes, by the names of their options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCABULARY, PLACES = 64, 64
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT: Mapping[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": PLACES},
}
ROBERTA = {**BERT, "max_position_embeddings": PLACES + 2}  # two places stand for padding
DECODER = {**BERT, **_SPECIAL, "num_key_value_heads": 2, "use_cache": False}
_DISTIL = {
    **{"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
    "max_position_embeddings": PLACES,
}
_GPT = {
    **{"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": PLACES},
    "use_cache": False,
}
_BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}
_T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}
_BART = {
    **{"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64},
    **{"decoder_ffn_dim": 64, "max_position_embeddings": PLACES, "use_cache": False},
}
_OPT = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 64},
    **{"num_attention_heads": 4, "max_position_embeddings": PLACES, "word_embed_proj_dim": 32},
    "use_cache": False,
}
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_IN_GROUPS: Mapping[str, Any] = {
    **{"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1},
}
_LATENT: Mapping[str, Any] = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    **{"v_head_dim": 8, "num_key_value_heads": 4},
}
_FALCON = {**{n: BERT[n] for n in ("vocab_size", "hidden_size", "num_hidden_layers")}}


@dataclass(frozen=True)
class Family:
    """A class of transformers, ``config``: that of its configuration, with ``options``. ``first``:
    an output is made of the first token, so that padding stands on the right. ``decodes``: there
    are ``decoder_input_ids`` as well."""

    model: str
    config: str
    options: Mapping[str, Any] = field(default_factory=dict)
    first: bool = False
    decodes: bool = False

    def make(self) -> Any:
        """The model with random weights, in evaluation mode."""
        import transformers

        config = getattr(transformers, self.config)(**self.options)
        return getattr(transformers, self.model)(config).eval()


def _bert(kind: str, name: str = "Bert", options: Mapping[str, Any] = BERT, **more: Any) -> Family:
    first = kind in ("Model", "ForSequenceClassification")
    return Family(f"{name}{kind}", f"{name}Config", {**options, **more}, first)


def _causal(name: str, options: Mapping[str, Any] = DECODER, **more: Any) -> Family:
    return Family(f"{name}ForCausalLM", f"{name}Config", {**options, **more})


FAMILIES: dict[str, Family] = {
    "bert": _bert("Model"),
    "bert, classifier": _bert("ForSequenceClassification"),
    "bert, masked words": _bert("ForMaskedLM"),
    "bert, answers": _bert("ForQuestionAnswering"),
    "bert, all hidden states": _bert("Model", output_hidden_states=True),
    "roberta, classifier": _bert("ForSequenceClassification", "Roberta", ROBERTA),
    "xlm-roberta": _bert("Model", "XLMRoberta", ROBERTA),
    "camembert": _bert("Model", "Camembert", ROBERTA),
    "mpnet": _bert("Model", "MPNet", ROBERTA),
    "distilbert, classifier": _bert("ForSequenceClassification", "DistilBert", _DISTIL),
    "electra": _bert("Model", "Electra", embedding_size=16),
    "albert": _bert("Model", "Albert", embedding_size=16),
    "deberta-v2": _bert(
        "Model",
        "DebertaV2",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=16,
    ),
    "modernbert": _bert(
        "Model",
        "ModernBert",
        {**BERT, **_SPECIAL},
        cls_token_id=1,
        sep_token_id=2,
        local_attention=8,
        global_attn_every_n_layers=2,
    ),
    "esm": _bert("Model", "Esm", pad_token_id=0, mask_token_id=3),
    "clip, text": Family("CLIPTextModel", "CLIPTextConfig", BERT),
    "t5, encoder": Family("T5EncoderModel", "T5Config", {**_T5, "num_layers": 2}),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {**_T5, "num_layers": 2, "use_cache": False},
        decodes=True,
    ),
    "bart": Family("BartModel", "BartConfig", _BART, decodes=True),
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", _GPT),
    "gpt2, classifier": Family(
        "GPT2ForSequenceClassification", "GPT2Config", {**_GPT, "pad_token_id": 0}
    ),
    "gpt-j": Family("GPTJForCausalLM", "GPTJConfig", {**_GPT, "rotary_dim": 4}),
    "gpt-neox": _causal("GPTNeoX", {**BERT, "use_cache": False}),
    "bloom": _causal("Bloom", _BLOOM, use_cache=False),
    "falcon": _causal("Falcon", _FALCON, num_attention_heads=4, use_cache=False),
    "opt": _causal("OPT", _OPT),
    "llama": _causal("Llama"),
    "llama, classifier": Family("LlamaForSequenceClassification", "LlamaConfig", DECODER),
    "mistral": _causal("Mistral", sliding_window=8),
    "qwen2": _causal("Qwen2"),
    "qwen3": _causal("Qwen3", head_dim=8),
    "gemma": _causal("Gemma", head_dim=8),
    "gemma2": _causal("Gemma2", head_dim=8, sliding_window=8),
    "gemma3": Family(
        "Gemma3ForCausalLM", "Gemma3TextConfig", {**DECODER, "head_dim": 8, "sliding_window": 8}
    ),
    "phi": _causal("Phi", {**BERT, "use_cache": False}),
    "phi3": _causal("Phi3"),
    "stablelm": _causal("StableLm"),
    "olmo2": _causal("Olmo2"),
    "granite": _causal("Granite"),
    "smollm3": _causal("SmolLM3"),
    "mixtral": _causal("Mixtral", num_local_experts=4),
    "qwen2-moe": _causal("Qwen2Moe", DECODER, **_EXPERTS, shared_expert_intermediate_size=16),
    "qwen3-moe": _causal("Qwen3Moe", DECODER, **_EXPERTS, head_dim=8),
    "olmoe": _causal("Olmoe", num_experts=4, num_experts_per_tok=2),
    "granite-moe": _causal("GraniteMoe", num_local_experts=4, num_experts_per_tok=2),
    "phi-moe": _causal("Phimoe", num_local_experts=4),
    "glm4-moe": _causal("Glm4Moe", DECODER, **_IN_GROUPS, head_dim=8),
    "dots1": _causal("Dots1", DECODER, **_IN_GROUPS),
    "ernie4.5-moe": _causal("Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=16),
    "minimax-m2": _causal("MiniMaxM2", num_local_experts=4, num_experts_per_tok=2, head_dim=8),
    "deepseek-v3": _causal("DeepseekV3", DECODER, **_IN_GROUPS, **_LATENT),
    "gpt-oss": _causal("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=8),
}
