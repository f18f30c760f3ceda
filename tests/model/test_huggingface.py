"""BERT and OPT of small random configurations against transformers' own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from pit_tvm.model import CompiledModel, compile

transformers = pytest.importorskip("transformers")

VOCABULARY, LONGEST = 97, 24

# Lengths of a batch: random ones, with empty, shortest and full sequences in the first.
LENGTHS = [[0, 1, 13, 5, 13], [7], [0, 0], [LONGEST, 3], [1, 1, 1]]


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


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One folder for the kernels of all models here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIT_TVM_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield


Both = tuple[torch.nn.Module, CompiledModel]


def compiled(module: torch.nn.Module) -> Both:
    """A module with random weights, and what is compiled of it."""
    torch.manual_seed(3)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    example = {
        "input_ids": torch.ones(2, 6, dtype=torch.int64),
        "attention_mask": torch.ones(2, 6, dtype=torch.int64),
    }
    return module.eval(), compile(module.eval(), example)


@pytest.fixture(scope="module")
def bert() -> Both:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LONGEST,
    )
    return compiled(SentenceEncoder(transformers.BertModel(config, add_pooling_layer=False)))


@pytest.fixture(scope="module")
def opt() -> Both:
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=64,
        max_position_embeddings=LONGEST,
        use_cache=False,
    )
    return compiled(transformers.OPTForCausalLM(config))


def batch(lengths: list[int], left: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ids, and the mask of sequences padded left or right."""
    rng = np.random.default_rng(seed)
    tokens = max(max(lengths), 1)
    mask = np.arange(tokens) < np.array(lengths)[:, None]
    return {
        "input_ids": torch.from_numpy(rng.integers(0, VOCABULARY, mask.shape)),
        "attention_mask": torch.from_numpy((mask[:, ::-1] if left else mask).astype(np.int64)),
    }


def check(found: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor) -> None:
    """Live tokens are equal to 1e-4 of the largest value, dead ones are 0."""
    live = mask.bool()
    assert found.shape == expected.shape
    assert not found[~live].any()
    if live.any():
        bound = 1e-4 * float(expected[live].abs().max())
        torch.testing.assert_close(found[live], expected[live], rtol=0, atol=bound)


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_bert_and_its_sentence_vectors(bert: Both, lengths: list[int], left: bool) -> None:
    model, ours = bert
    inputs = batch(lengths, left)
    with torch.no_grad():
        tokens, sentences = model(**inputs)
    found = ours(**inputs)
    check(found[0], tokens, inputs["attention_mask"])
    some = torch.tensor(lengths) > 0
    torch.testing.assert_close(found[1][some], sentences[some], rtol=0, atol=1e-5)
    assert not found[1][~some].any()


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_logits_of_opt(opt: Both, lengths: list[int], left: bool) -> None:
    model, ours = opt
    inputs = batch(lengths, left)
    with torch.no_grad():
        expected = model(**inputs).logits
    check(ours(**inputs).logits, expected, inputs["attention_mask"])


def test_only_masks_are_read_whole_by_bert(bert: Both) -> None:
    _, ours = bert
    assert "  2 of them attention, full, over live tokens" in ours.explain().splitlines()
    # The means count tokens: sums of the mask, as numbers [batch, tokens, 1].
    assert {d.operator for d in ours.decisions if d.whole} <= {"expand_dims", "astype", "sum"}
    assert any(d.reason == "reads tokens that are 0 where dead" for d in ours.decisions)


def test_only_positions_are_counted_over_all_tokens_by_opt(opt: Both) -> None:
    _, ours = opt
    assert "  2 of them attention, causal, over live tokens" in ours.explain().splitlines()
    assert [d.operator for d in ours.decisions if d.whole] == ["cumsum"]
    assert "cumsum is not lowered to one loop nest" in ours.explain()
