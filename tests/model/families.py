"""Families of transformers as small models with random weights, and what is expected of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

LONGEST = 24
PADDINGS = ("right", "left", "anywhere")
BATCHES = 9


@dataclass(frozen=True)
class Sizes:
    """What a model of any family is made of; ``hidden`` is a multiple of ``heads``."""

    hidden: int
    heads: int
    layers: int
    inner: int
    vocabulary: int
    attention: str

    @property
    def as_bert(self) -> dict[str, Any]:
        """The sizes by the names that most configurations use."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.inner,
            "max_position_embeddings": LONGEST,
            "attn_implementation": self.attention,
        }


class SentenceEncoder(torch.nn.Module):
    """A BERT whose token vectors are averaged over each sentence's tokens, with length 1."""

    def __init__(self, bert: torch.nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """Vectors of tokens ``[batch, tokens, width]`` and of sentences ``[batch, width]``."""
        tokens = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        live = attention_mask.unsqueeze(-1).to(tokens.dtype)
        means = (tokens * live).sum(1) / live.sum(1).clamp(min=1e-9)
        return tokens, torch.nn.functional.normalize(means, dim=1)


@dataclass(frozen=True)
class Family:
    """``make`` a module; ``kind`` is its attention's. Outputs come in order: ``by_token`` says of
    each whether it has a row for every token, ``first`` of the others whether they are computed
    from the first token alone. ``whole`` are the operators that may run on all tokens; ``relu``:
    whether a linear layer of each layer reads what ReLU made."""

    make: Callable[[Sizes], torch.nn.Module]
    kind: str = "full"
    by_token: tuple[bool, ...] = (True,)
    first: bool = False
    whole: frozenset[str] = frozenset()
    relu: bool = False


def _bert(sizes: Sizes, pooler: bool) -> torch.nn.Module:
    config = transformers.BertConfig(**sizes.as_bert)
    return transformers.BertModel(config, add_pooling_layer=pooler)


def _roberta(sizes: Sizes) -> torch.nn.Module:
    # Its positions count from the padding id's, and take that many places more.
    places = {"max_position_embeddings": LONGEST + 2}
    config = transformers.RobertaConfig(**sizes.as_bert | places)
    return transformers.RobertaModel(config, add_pooling_layer=False)


def _distilbert(sizes: Sizes) -> torch.nn.Module:
    config = transformers.DistilBertConfig(
        vocab_size=sizes.vocabulary,
        dim=sizes.hidden,
        n_layers=sizes.layers,
        n_heads=sizes.heads,
        hidden_dim=sizes.inner,
        max_position_embeddings=LONGEST,
        attn_implementation=sizes.attention,
    )
    return transformers.DistilBertModel(config)


def _opt(sizes: Sizes) -> torch.nn.Module:
    config = transformers.OPTConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        word_embed_proj_dim=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        ffn_dim=sizes.inner,
        max_position_embeddings=LONGEST,
        use_cache=False,
        attn_implementation=sizes.attention,
    )
    return transformers.OPTForCausalLM(config)


def _llama(sizes: Sizes) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        **sizes.as_bert,
        # Two queries share a key where there are two.
        num_key_value_heads=(sizes.heads + 1) // 2,
        hidden_act="relu",
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def _classifier(sizes: Sizes) -> torch.nn.Module:
    config = transformers.BertConfig(**sizes.as_bert, num_labels=3)
    return transformers.BertForSequenceClassification(config)


FAMILIES = {
    "bert": Family(lambda sizes: _bert(sizes, pooler=True), by_token=(True, False), first=True),
    "bert, classifying": Family(_classifier, by_token=(False,), first=True),
    # Means count tokens: sums of the mask, as numbers [batch, tokens, 1].
    "sentence encoder": Family(
        lambda sizes: SentenceEncoder(_bert(sizes, pooler=False)),
        by_token=(True, False),
        whole=frozenset({"expand_dims", "astype", "sum"}),
    ),
    # Positions count the tokens before, and pick types from a table.
    "roberta": Family(
        _roberta,
        whole=frozenset({"cumsum", "not_equal", "astype", "multiply", "add", "gather_elements"}),
    ),
    "distilbert": Family(_distilbert),
    "opt": Family(_opt, kind="causal", whole=frozenset({"cumsum"}), relu=True),
    "llama": Family(_llama, kind="causal", relu=True),
}


def randomised(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A model for inference with weights large enough that every part of it matters."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        centre = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
        torch.nn.init.normal_(parameter, mean=centre, std=0.2, generator=generator)
    return model.eval()


def example_inputs() -> dict[str, torch.Tensor]:
    """Inputs that a model of any family is compiled with."""
    return {
        "input_ids": torch.full((3, 6), 5),
        "attention_mask": torch.ones(3, 6, dtype=torch.int64),
    }


def random_sizes(rng: np.random.Generator, attention: str) -> Sizes:
    """Sizes of a model that compiles in seconds; some are no multiples of anything."""
    heads = int(rng.choice([1, 2, 4]))
    return Sizes(
        hidden=heads * int(rng.choice([4, 8, 12, 16])),
        heads=heads,
        layers=int(rng.choice([1, 2], p=[0.8, 0.2])),
        inner=int(rng.choice([17, 24, 40])),
        vocabulary=int(rng.choice([31, 50, 97])),
        attention=attention,
    )


def _random_mask(rng: np.random.Generator, padding: str) -> np.ndarray:
    """``[batch, tokens]``: sequences padded "left", "right" or "anywhere"; empty, shortest and full
    ones are likely."""
    batch, tokens = int(rng.integers(1, 6)), int(rng.integers(1, LONGEST + 1))
    some = [rng.choice([0, 1, tokens, int(rng.integers(0, tokens + 1))]) for _ in range(batch)]
    mask = np.arange(tokens) < np.array(some)[:, None]
    if padding == "left":
        return mask[:, ::-1]
    return rng.permuted(mask, axis=1) if padding == "anywhere" else mask


def random_masks(rng: np.random.Generator) -> list[np.ndarray]:
    """Random masks under every kind of padding in turn, a full one, and an empty one."""
    drawn = [_random_mask(rng, PADDINGS[number % len(PADDINGS)]) for number in range(BATCHES)]
    return [*drawn, np.ones((2, LONGEST), bool), np.zeros((2, 3), bool)]


def random_inputs(
    rng: np.random.Generator, mask: np.ndarray, vocabulary: int
) -> dict[str, torch.Tensor]:
    """Random ids with ``mask`` ``[batch, tokens]``; no id stands for padding."""
    return {
        "input_ids": torch.from_numpy(rng.integers(5, vocabulary, mask.shape)),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
    }
