"""A whole module against torch, its inputs' errors, and what its report says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from pit_tvm import pools
from pit_tvm.errors import DTypeError, PitError, ShapeError
from pit_tvm.model import CompiledModel, compile, cuda

VOCABULARY, LONGEST, WIDTH, HEADS = 31, 20, 24, 3


class Encoder(nn.Module):
    """Embeddings, one layer of attention, a feed-forward part, and the first token's value."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, scale: torch.Tensor
    ) -> dict[str, Any]:
        """Values ``[batch, tokens, width]``, and those of the first token ``[batch, width]``."""
        batch, tokens = input_ids.shape
        x = self.words(input_ids) + self.places.weight[:tokens]
        q, k, v = (
            part(x).view(batch, tokens, HEADS, -1).transpose(1, 2) for part in self.parts[:3]
        )
        seen = attention_mask[:, None, None, :].bool().expand(batch, 1, tokens, tokens)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = self.norms[0](x + self.parts[3](mixed.transpose(1, 2).reshape(batch, tokens, -1)))
        x = self.norms[1](x + self.down(functional.gelu(self.up(x)))) * scale
        return {"values": x, "pair": [x[:, 0] + 1]}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Encoder()


@pytest.fixture(scope="module")
def ours(model: nn.Module) -> CompiledModel:
    model.train()
    compiled = compile(model, inputs(np.ones((2, 5))))
    assert model.training
    model.eval()
    return compiled


def inputs(mask: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random ids, and ``mask`` ``[batch, tokens]``."""
    mask = np.asarray(mask)
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, mask.shape)
    return {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        "scale": torch.linspace(0.5, 1.5, WIDTH),
    }


def check(model: nn.Module, ours: CompiledModel, mask: np.ndarray, seed: int = 0) -> None:
    given_inputs = inputs(mask, seed)
    with torch.no_grad():
        expected = model.eval()(**given_inputs)
    model.train()
    before = {name: value.clone() for name, value in given_inputs.items()}
    found = ours(**given_inputs)
    live = torch.from_numpy(mask.astype(bool))
    assert found.keys() == expected.keys() and isinstance(found["pair"], list)
    assert found["values"].shape == expected["values"].shape
    torch.testing.assert_close(found["values"][live], expected["values"][live], rtol=0, atol=1e-5)
    assert not found["values"][~live].any()
    first = expected["pair"][0].where(live[:, :1], torch.tensor(1.0))
    torch.testing.assert_close(found["pair"][0], first, rtol=0, atol=1e-5)
    assert all(torch.equal(given_inputs[name], value) for name, value in before.items())


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    batch=st.integers(1, 5),
    tokens=st.integers(1, LONGEST),
    fill=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_live_tokens_equal_torch_under_any_mask(
    model: nn.Module, ours: CompiledModel, batch: int, tokens: int, fill: float, seed: int
) -> None:
    mask = np.random.default_rng(seed).uniform(size=(batch, tokens)) < fill
    check(model, ours, mask, seed)


@pytest.mark.parametrize(
    "mask",
    [
        [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
        [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]],
        [[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]],
        [[1]],
        [[0]],
        [[1] * LONGEST] * 2,
    ],
    ids=["right", "left", "holes", "one", "none", "longest"],
)
def test_patterns_of_padding(model: nn.Module, ours: CompiledModel, mask: Any) -> None:
    check(model, ours, np.array(mask))


def test_threads_may_share_a_model(ours: CompiledModel) -> None:
    given_inputs = [inputs(np.ones((2, tokens)), tokens) for tokens in (3, 9, 14, LONGEST)]
    alone = [ours(**each)["values"] for each in given_inputs]

    def often(number: int) -> bool:
        found = [ours(**given_inputs[number])["values"] for _ in range(20)]
        return all(torch.equal(each, alone[number]) for each in found)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(often, range(4)))


def test_threads_that_come_late_leave_no_pools(
    ours: CompiledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "MOST_OWNERS", 0)
    monkeypatch.setattr(pools, "_OWNERS", pools._Owners())
    monkeypatch.setattr(pools, "_LAUNCHERS", launchers := pools._Launchers())
    given_inputs = inputs(np.ones((2, 9)))
    alone = ours(**given_inputs)["values"]
    assert launchers._number == 0
    with ThreadPoolExecutor(1) as late:
        found = late.submit(lambda: ours(**given_inputs)["values"]).result()
    assert torch.equal(found, alone) and launchers._number == 1


def test_batch_of_nothing(ours: CompiledModel) -> None:
    assert ours(**inputs(np.ones((0, 4))))["values"].shape == (0, 4, WIDTH)


def test_inputs_need_not_be_contiguous(model: nn.Module, ours: CompiledModel) -> None:
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]])
    plain = inputs(mask)
    turned = {name: v.t().contiguous().t() for name, v in plain.items() if v.dim() == 2}
    assert torch.equal(ours(**plain | turned)["values"], ours(**plain)["values"])


def changed(**values: Any) -> dict[str, Any]:
    """Correct inputs ``[2, 5]`` but for these; None takes one away."""
    found = inputs(np.ones((2, 5))) | values
    return {name: value for name, value in found.items() if value is not None}


IDS = torch.zeros(2, 5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"input_ids": None}, ShapeError, "inputs: expected .*input_ids.* got "),
        ({"token_type_ids": IDS}, ShapeError, "inputs: .*got .*token_type_ids"),
        ({"attention_mask": IDS[0]}, ShapeError, r"attention_mask: expected \[batch, tokens\]"),
        ({"attention_mask": IDS + 2}, ShapeError, "attention_mask: expected only 0 and 1"),
        ({"attention_mask": IDS - 1}, ShapeError, "attention_mask: expected only 0 and 1"),
        ({"attention_mask": IDS.float()}, DTypeError, "attention_mask"),
        ({"attention_mask": IDS[:, :4]}, ShapeError, "input_ids"),
        ({"attention_mask": IDS[:1]}, ShapeError, "input_ids"),
        ({"input_ids": IDS[None]}, ShapeError, "input_ids"),
        ({"input_ids": IDS.int()}, DTypeError, "input_ids"),
        (
            {"input_ids": IDS + VOCABULARY},
            ShapeError,
            f"input_ids: expected ids of 0 to {VOCABULARY - 1}",
        ),
        ({"input_ids": IDS - 1}, ShapeError, "input_ids: expected ids of 0"),
        ({"scale": torch.ones(WIDTH + 1)}, ShapeError, "scale"),
        ({"scale": torch.ones(WIDTH, dtype=torch.float64)}, DTypeError, "scale"),
    ],
)
def test_wrong_inputs_are_named(
    ours: CompiledModel, wrong: dict[str, Any], error: type[PitError], words: str
) -> None:
    with pytest.raises(error, match=words):
        ours(**changed(**wrong))


def test_more_tokens_than_there_are_places_for(ours: CompiledModel) -> None:
    with pytest.raises(ShapeError, match=f"attention_mask: expected at most {LONGEST} tokens"):
        ours(**inputs(np.ones((1, LONGEST + 1))))


def test_report_says_that_nothing_runs_on_dead_tokens(ours: CompiledModel) -> None:
    lines = ours.explain().splitlines()
    assert "  1 of them attention, full, over live tokens" in lines
    assert "0 operators on all tokens, dead ones included" in lines
    assert not any(d.whole for d in ours.decisions)
    names = "input_ids int64, attention_mask int64, scale float32"
    assert repr(ours) == f"<CompiledModel {names}; {lines[0]}; llvm>"


def test_mask_must_be_among_the_inputs(model: nn.Module) -> None:
    example = inputs(np.ones((2, 5)))
    with pytest.raises(ShapeError, match="mask: expected one of .*, got 'padding'"):
        compile(model, example, mask="padding")
    with pytest.raises(ShapeError, match=r"expected scale with two dimensions"):
        compile(model, example, mask="scale")


def test_export_must_leave_batch_and_length_open(model: nn.Module) -> None:
    example = inputs(np.ones((2, 5)))
    program = torch.export.export(model, (), example, strict=False)
    with pytest.raises(ShapeError, match="dynamic batch and a dynamic length"):
        compile(program, example)


def test_gpus_take_16_bit_models_only(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "current_device", lambda: torch.device("cpu"))
    with pytest.raises(DTypeError, match="dtype: expected float16 or bfloat16, got 'float32'"):
        compile(model, inputs(np.ones((2, 5))), target={"kind": "cuda", "arch": "sm_90a"})
