"""The pages on families of models: their code runs, on tiny models instead of the named ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

PAGES = Path(__file__).resolve().parent.parent / "docs" / "models"
VOCABULARY = 60
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


class Tokenizer:
    """A number for every word, whatever it is."""

    padding_side = "right"

    def __call__(self, texts: list[str], padding: bool, return_tensors: str) -> dict[str, Any]:
        """Ids and mask ``[texts, words]``, and types as BERT's tokenizers give them."""
        assert padding and return_tensors == "pt"
        words = [[3 + sum(map(ord, w)) % (VOCABULARY - 3) for w in t.split()] for t in texts]
        longest = max(map(len, words))
        rows = [self._padded(row, longest, 1) for row in words]
        live = [self._padded([1] * len(row), longest, 0) for row in words]
        ids = torch.tensor(rows)
        mask = torch.tensor(live)
        return {"input_ids": ids, "token_type_ids": ids * 0, "attention_mask": mask}

    def _padded(self, row: list[int], length: int, by: int) -> list[int]:
        rest = [by] * (length - len(row))
        return rest + row if self.padding_side == "left" else row + rest

    def batch_decode(self, ids: torch.Tensor) -> list[str]:
        """A word for every id."""
        return [f"word {number}" for number in ids.tolist()]


def bert() -> torch.nn.Module:
    config = transformers.BertConfig(**SIZES, intermediate_size=24)
    return transformers.BertModel(config)


def opt() -> torch.nn.Module:
    config = transformers.OPTConfig(**SIZES, ffn_dim=24, word_embed_proj_dim=16)
    return transformers.OPTForCausalLM(config)


def llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(**SIZES, intermediate_size=24, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config)


def mixtral() -> torch.nn.Module:
    sizes = {"intermediate_size": 24, "num_key_value_heads": 1, "num_local_experts": 4}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **sizes))


MODELS = {"bert": bert, "opt": opt, "llama": llama}


def test_every_page_is_run() -> None:
    assert {page.stem for page in PAGES.glob("*.md")} == {*MODELS, "mixtral"}


def run_page(name: str, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the code of a page defines; ``model`` is the one that it names."""
    for factory in ("AutoModel", "AutoModelForCausalLM"):
        kind = getattr(transformers, factory)
        monkeypatch.setattr(kind, "from_pretrained", lambda _, **how: model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: Tokenizer())
    page: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (PAGES / f"{name}.md").read_text(), re.DOTALL):
        exec(compile(block, f"{name}.md", "exec"), page)
    return page


@pytest.mark.parametrize("name", MODELS)
def test_code_of_page(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    page = run_page(name, model, monkeypatch)
    assert "of them attention" in capsys.readouterr().out
    batch, mask = page["batch"], page["batch"]["attention_mask"].bool()
    assert not mask.all()
    with torch.no_grad():
        expected = model(**batch)[0]
    found = page["compiled"](**batch)[0]
    torch.testing.assert_close(found[mask], expected[mask], rtol=0, atol=1e-5)
    assert not found[~mask].any()


def test_code_of_the_page_on_experts(
    monkeypatch: pytest.MonkeyPatch, kernel_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    torch.manual_seed(0)
    monkeypatch.setenv("PIT_TVM_CACHE", str(kernel_folder))
    model = mixtral()
    try:
        page = run_page("mixtral", model, monkeypatch)
        assert model.get_experts_implementation()[""] == "pit_tvm"
    finally:
        ALL_EXPERTS_FUNCTIONS._global_mapping.pop("pit_tvm", None)
    printed = capsys.readouterr().out
    assert "word" in printed and "2 of them products of experts, over live tokens" in printed
    model.set_experts_implementation("eager")
    wanted = model.generate(**page["batch"], max_new_tokens=8, do_sample=False)
    assert (
        torch.equal(page["tokens"], wanted)
        and wanted.shape[1] > page["batch"]["input_ids"].shape[1]
    )
    batch, mask = page["batch"], page["batch"]["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**batch).logits
    torch.testing.assert_close(page["logits"][mask], expected[mask], rtol=0, atol=1e-5)
    assert not page["logits"][~mask].any()
