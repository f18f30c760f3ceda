"""The models of the benchmark of whole models: sizes, lengths, goals, and a rival by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from check_models_families import FAMILIES
from torch.nn import functional

LONGEST = 128
QUICK_TOKENS = 48  # at most, of quick models
SPREAD = 0.6  # of the logarithms of lengths
_QUICK = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500}

_WITHOUT_HEAD = {
    "modernbert": "ModernBertModel",
    "mpnet": "MPNetModel",
    "bloom": "BloomModel",
    "gemma2": "Gemma2Model",
    "gemma3": "Gemma3TextModel",
    "gpt-oss": "GptOssModel",
}

Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model with random weights on ``batch`` sequences padded to ``tokens``.

    ``family``: "bert", "opt", or a name of ``FAMILIES``; ``sizes``: its configuration; ``mean``: of
    the lengths, which are log-normal; ``left``: padding stands on the left; ``goal``: times
    torch.compile, on a GPU, if there is one. ``zeros``: share of the activations behind ReLU that
    are made zero by the biases before it; then the goal is for the product that reads them, over
    torch's. ``routed``: tokens choose experts, and rounding may choose for them.
    """

    family: str
    sizes: Mapping[str, int]
    batch: int
    mean: float
    left: bool
    goal: float | None
    tokens: int = LONGEST
    zeros: float = 0.0
    routed: bool = False

    def make(self, quick: bool) -> torch.nn.Module:
        """The model in evaluation mode; ``quick`` makes a small one."""
        torch.manual_seed(0)
        if self.family in _WITHOUT_HEAD:
            return self._without_head(quick)
        sizes: Mapping[str, Any] = _QUICK if quick else self.sizes
        if self.family == "bert":
            config = transformers.BertConfig(**sizes, intermediate_size=4 * sizes["hidden_size"])
            return transformers.BertModel(config).eval()
        hidden = sizes["hidden_size"]
        inner: dict[str, Any] = {"ffn_dim": 4 * hidden, "word_embed_proj_dim": hidden}
        opt = transformers.OPTConfig(use_cache=False, **sizes, **inner)
        return transformers.OPTForCausalLM(opt).eval()

    def _without_head(self, quick: bool) -> torch.nn.Module:
        family = FAMILIES[self.family]
        config = getattr(transformers, family.config)
        sizes = family.options if quick else {"use_cache": False, **self.sizes}
        model: torch.nn.Module = getattr(transformers, _WITHOUT_HEAD[self.family])(config(**sizes))
        return model.eval()

    def batch_of(self, seed: int, quick: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and mask ``[batch, tokens]``, int64."""
        rng = np.random.default_rng(seed)
        batch = 4 if quick else self.batch
        share = min(1.0, QUICK_TOKENS / self.tokens) if quick else 1.0
        tokens = round(share * self.tokens)
        lengths = rng.lognormal(0.0, SPREAD, batch)
        lengths = np.clip(np.rint(lengths / lengths.mean() * share * self.mean), 1, tokens)
        places = np.arange(tokens)[::-1] if self.left else np.arange(tokens)
        mask = torch.from_numpy((places < lengths[:, None]).astype(np.int64))
        ids = rng.integers(3, 60 if quick else 500, (batch, tokens))
        return torch.from_numpy(ids), mask

    def silence(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Lower the biases before ReLU until ``zeros`` of its results are zero on these inputs;
        what the first layer's second product reads then, ``[rows, k]``."""
        read: list[torch.Tensor] = []
        for layer in model.model.decoder.layers:
            hook = layer.fc1.register_forward_hook(lambda _, __, out: read.append(out))
            model(**inputs)
            hook.remove()
            layer.fc1.bias -= read.pop().float().quantile(self.zeros).to(layer.fc1.bias.dtype)
        first = model.model.decoder.layers[0].fc2
        hook = first.register_forward_pre_hook(lambda _, given: read.append(given[0]))
        model(**inputs)
        hook.remove()
        return read[0].reshape(-1, first.in_features)


def _sizes(hidden: int, layers: int, heads: int) -> dict[str, int]:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    return dict(zip(names, (hidden, layers, heads), strict=True))


_BLOOM = {"vocab_size": 32000, "hidden_size": 1024, "n_layer": 12, "n_head": 16}
_GEMMA2 = {
    **{**_sizes(2304, 12, 8), "intermediate_size": 9216, "num_key_value_heads": 4, "head_dim": 256},
    **{"vocab_size": 32000, "sliding_window": 4096},
}
_GEMMA3 = {
    **{**_sizes(1152, 12, 4), "intermediate_size": 6912, "num_key_value_heads": 1, "head_dim": 256},
    **{"vocab_size": 32000, "sliding_window": 512, "max_position_embeddings": 4096},
}
_GPT_OSS = {"num_hidden_layers": 4, "num_local_experts": 32}
_ONE_LAYER = {**_sizes(5120, 1, 40), "vocab_size": 512}

CASES = {
    "bert-base": Case("bert", _sizes(768, 12, 12), 256, 30.0, False, 2.5),
    "bert-large": Case("bert", _sizes(1024, 24, 16), 256, 30.0, False, 2.5),
    "opt-1.3b": Case("opt", _sizes(2048, 24, 32), 32, LONGEST / 3, True, 2.2),
    "opt-6.7b": Case("opt", _sizes(4096, 32, 32), 32, LONGEST / 3, True, 2.2),
    "opt-13b": Case("opt", _sizes(5120, 40, 40), 32, LONGEST / 3, True, 2.2),
    "opt-13b-step": Case("opt", _ONE_LAYER, 1, 1.0, True, 4.0, tokens=1, zeros=0.95),
    "modernbert-base": Case("modernbert", {}, 32, 256.0, False, None, 512),
    "mpnet-base": Case("mpnet", {"max_position_embeddings": 514}, 32, 256.0, False, None, 512),
    "bloom-12": Case("bloom", _BLOOM, 32, 256.0, False, None, 512),
    "gemma2-12": Case("gemma2", _GEMMA2, 8, 1024.0, False, None, 2048),
    "gemma3-12": Case("gemma3", _GEMMA3, 8, 1024.0, False, None, 2048),
    "gpt-oss-4": Case("gpt-oss", _GPT_OSS, 8, 512.0, False, None, 1024, routed=True),
}


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer of a BERT, those of queries, keys and values as one product."""

    qkv: tuple[torch.Tensor, torch.Tensor]
    parts: Any


def packed_bert(model: Any) -> Run:
    """A BERT on live tokens only, as an engineer writes it: gathers, torch's attention of sequences
    of different lengths, one scatter. Needs a GPU, for the attention."""
    from torch.nn.attention import varlen

    attend: Any = varlen.varlen_attn

    embeddings, hidden = model.embeddings, model.config.hidden_size
    heads = model.config.num_attention_heads
    layers = [_Layer(_joined(part.attention.self), part) for part in model.encoder.layer]

    def run(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, tokens = ids.shape
        live = mask.view(-1).nonzero().view(-1)
        starts = functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
        x = functional.embedding(ids.view(-1)[live], embeddings.word_embeddings.weight)
        x = x + functional.embedding(live % tokens, embeddings.position_embeddings.weight)
        x = embeddings.LayerNorm(x + embeddings.token_type_embeddings.weight[0])
        for layer in layers:
            part = layer.parts
            q, k, v = functional.linear(x, *layer.qkv).view(len(x), 3, heads, -1).unbind(1)
            mixed = attend(q, k, v, starts, starts, tokens, tokens).reshape(len(x), hidden)
            x = part.attention.output.LayerNorm(part.attention.output.dense(mixed) + x)
            inner = functional.gelu(part.intermediate.dense(x))
            x = part.output.LayerNorm(part.output.dense(inner) + x)
        out = x.new_zeros(batch * tokens, hidden)
        out[live] = x
        return out.view(batch, tokens, hidden)

    return run


def _joined(attention: Any) -> tuple[torch.Tensor, torch.Tensor]:
    parts = (attention.query, attention.key, attention.value)
    return torch.cat([p.weight for p in parts]), torch.cat([p.bias for p in parts])
