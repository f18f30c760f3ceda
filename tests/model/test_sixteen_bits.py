"""BERT and OPT in float16 and bfloat16 against the same weights in float32."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pit_tvm.model import CompiledModel, compile, load

transformers = pytest.importorskip("transformers")

VOCABULARY, LONGEST = 61, 16
# Largest error of a live token, relative to the largest value of any.
TOLERANCES = {"float16": 2e-3, "bfloat16": 2e-2}


def bert(attention: str = "sdpa") -> torch.nn.Module:
    config = transformers.BertConfig(
        attn_implementation=attention,
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LONGEST,
    )
    return transformers.BertModel(config)


def opt() -> torch.nn.Module:
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=64,
        max_position_embeddings=LONGEST,
        use_cache=False,
    )
    return transformers.OPTForCausalLM(config)


def batch(lengths: list[int], left: bool = False) -> dict[str, torch.Tensor]:
    """Random ids, and the mask of sequences padded left or right."""
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    ids = np.random.default_rng(0).integers(0, VOCABULARY, mask.shape)
    mask = (mask[:, ::-1] if left else mask).astype(np.int64)
    return {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}


Model = tuple[str, torch.nn.Module, CompiledModel]


def written_out() -> torch.nn.Module:
    """BERT with attention as products and a softmax in float32."""
    return bert("eager")


# Types differ in their least number, which masks are made of, and that of float16 from float32's.
MODELS = [(bert, "float16"), (opt, "float16"), (opt, "bfloat16"), (written_out, "float16")]


@pytest.fixture(scope="module", params=MODELS, ids=lambda each: f"{each[0].__name__}-{each[1]}")
def model(request: pytest.FixtureRequest) -> Model:
    """The type, the model in float32 with weights of that type, and what is compiled of it."""
    torch.manual_seed(3)
    make, dtype = request.param
    narrow = make().eval()
    for parameter in narrow.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    narrow = narrow.to(getattr(torch, dtype))
    return dtype, copy.deepcopy(narrow).float(), compile(narrow, batch([4, 6]))


def check(model: Model, inputs: dict[str, torch.Tensor]) -> None:
    dtype, wide, ours = model
    with torch.no_grad():
        expected = wide(**inputs)[0]
    found, live = ours(**inputs)[0], inputs["attention_mask"].bool()
    assert found.dtype == getattr(torch, dtype) and found.shape == expected.shape
    assert not found[~live].any()
    error = (found[live].float() - expected[live]).abs().max()
    assert error <= TOLERANCES[dtype] * expected[live].abs().max()


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("lengths", [[0, 1, 13, 5], [LONGEST, 3], [1]], ids=str)
def test_equal_to_float32_within_the_type(model: Model, lengths: list[int], left: bool) -> None:
    check(model, batch(lengths, left))


def test_only_masks_and_positions_are_read_whole(model: Model) -> None:
    _, _, ours = model
    assert any("attention" in d.reason for d in ours.decisions if d.live)
    assert {d.operator for d in ours.decisions if d.whole} <= {"cumsum"}


def test_saved_and_loaded(model: Model, tmp_path: Path) -> None:
    dtype, _, ours = model
    ours.save(tmp_path / "model.pit")
    inputs = batch([2, 5, 0])
    again = load(tmp_path / "model.pit")
    assert torch.equal(again(**inputs)[0], ours(**inputs)[0])
    arrays: dict[str, Any] = {name: value.numpy() for name, value in inputs.items()}
    found = again(**arrays)[0]
    assert isinstance(found, np.ndarray) and found.dtype.name == dtype
    np.testing.assert_array_equal(found.astype(np.float32), ours(**inputs)[0].float().numpy())
