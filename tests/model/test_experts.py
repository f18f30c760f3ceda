"""Models with layers of experts: transformers' families, and modules of `pit_tvm.torch`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pit_tvm import torch as pit
from pit_tvm.errors import ShapeError, UnsupportedModel
from pit_tvm.model import CompiledModel, compile, load

transformers = pytest.importorskip("transformers")

from tests.model.elsewhere import WITHOUT_TORCH  # noqa: E402
from tests.model.families import (  # noqa: E402  (needs transformers)
    LONGEST,
    example_inputs,
    random_inputs,
    random_masks,
    randomised,
)

EXPERTS = "of them products of experts, over live tokens"
VOCABULARY, WIDTH = 50, 12


def config(name: str, seed: int, **options: Any) -> Any:
    """A small configuration with random numbers of experts and choices."""
    rng = np.random.default_rng(seed)
    experts = int(rng.integers(2, 9))
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8 * int(rng.integers(2, 7)),
        "intermediate_size": int(rng.integers(5, 40)),
        "moe_intermediate_size": int(rng.integers(5, 40)),
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LONGEST,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
        "num_experts_per_tok": int(rng.integers(1, experts + 1)),
    }
    sizes |= {} if "n_group" in options else {"num_experts": experts, "num_local_experts": experts}
    return getattr(transformers, f"{name}Config")(**sizes | options)


GROUPS = {"n_routed_experts": 6, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 8, "norm_topk_prob": True}),
    "experts in groups, and one for all": (
        "Glm4Moe",
        {**GROUPS, "n_shared_experts": 1, "first_k_dense_replace": 0, "head_dim": 8},
    ),
    "biases, a gate of its own, weights turned": (
        "GptOss",
        {"head_dim": 8, "layer_types": ["full_attention"]},
    ),
}


@cache
def compiled(name: str) -> tuple[Any, CompiledModel]:
    """A model of a family, and the same compiled."""
    family, options = FAMILIES[name]
    sizes = config(family, len(name), **options)
    made = getattr(transformers, f"{family}ForCausalLM")(sizes)
    model = randomised(made, len(name))
    model.set_experts_implementation("eager")  # which nothing exports, and takes all widths
    return model, compile(model, example_inputs())


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_transformers_at_live_tokens(name: str) -> None:
    rng, (model, ours) = np.random.default_rng(len(name)), compiled(name)
    assert model.get_experts_implementation()[""] == "eager"
    assert not any("forward" in vars(part) for part in model.modules())
    for mask in random_masks(rng):
        given = random_inputs(rng, mask, VOCABULARY)
        with torch.no_grad():
            check(ours(**given).logits, model(**given).logits, given["attention_mask"].bool())
    assert f"2 {EXPERTS}" in ours.explain()
    if FAMILIES[name][0] != "GptOss":  # whose attention has sinks
        assert not any(d.whole for d in ours.decisions)


def test_in_16_bits() -> None:
    model = randomised(transformers.OlmoeForCausalLM(config("Olmoe", 3)), 3)
    narrow = transformers.OlmoeForCausalLM(model.config)
    narrow.load_state_dict(model.state_dict())
    ours = compile(narrow.eval().bfloat16(), example_inputs())
    exact = narrow.float()  # weights as they were rounded
    exact.set_experts_implementation("eager")
    rng = np.random.default_rng(3)
    errors = []
    for mask in random_masks(rng):
        given = random_inputs(rng, mask, VOCABULARY)
        with torch.no_grad():
            wanted = exact(**given).logits
        errors += deviations(ours(**given).logits, wanted, torch.bfloat16, mask)
    assert np.median(errors) < 2e-2


def deviations(
    found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, mask: np.ndarray
) -> list[float]:
    """Of live tokens, relative to the largest number. Where two experts are about equally likely,
    16 bits may choose the other. Dead ones are 0."""
    live = torch.from_numpy(mask.astype(bool))
    assert found.dtype == dtype and not found[~live].any()
    error: list[float] = (found.float() - wanted).abs().amax(-1)[live].tolist()
    return [each / float(wanted.abs().max()) for each in error]


class Layers(nn.Module):
    """A layer of experts of transformers, apart from the rest of its model, in several types."""

    def __init__(self) -> None:
        super().__init__()
        sizes = config("Olmoe", 5)
        block = transformers.models.olmoe.modeling_olmoe.OlmoeSparseMoeBlock
        self.table = nn.Embedding(VOCABULARY, sizes.hidden_size)
        self.wide, self.narrow = block(sizes), block(sizes)
        for each in (self.wide, self.narrow):
            each.experts.config._experts_implementation = "eager"

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """In float32, and in float16."""
        x = self.table(input_ids)
        return self.wide(x), self.narrow(x.to(self.narrow.gate.weight.dtype))


def test_a_layer_alone() -> None:
    model, rng = randomised(Layers(), 5), np.random.default_rng()
    model.narrow.half()
    ours = compile(model, example_inputs())
    model.narrow.float()  # weights as they were rounded
    errors = []
    for mask in random_masks(rng):
        given = random_inputs(rng, mask, VOCABULARY)
        with torch.no_grad():
            (wide, narrow), found = model(**given), ours(**given)
        check(found[0], wide, given["attention_mask"].bool())
        errors += deviations(found[1], narrow, torch.float16, mask)
    assert np.median(errors) < 5e-3


class Model(nn.Module):
    """Embeddings ``x``, and what ``rest(self, x, ids, mask)`` makes of them."""

    def __init__(self, rest: Callable[..., Any], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table, self.router = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 6)
        self.experts = pit.MoeFeedForward(6, WIDTH, 20)
        self.plain = pit.MoeFeedForward(6, WIDTH, 20, activation="relu", gated=False)
        gate = pit.Gate(0.7, 1.702, 1.0, interleaved=True)
        self.limited = pit.MoeFeedForward(6, WIDTH, 20, bias=True, gated=gate)
        self.grouped = pit.GroupedLinear(6, WIDTH, 9, activation="gelu")
        self.live = pit.LinearRows(WIDTH, 7, activation="silu")
        self.rest = rest

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """What ``rest`` returns."""
        return self.rest(self, self.table(input_ids), input_ids, attention_mask)

    def routing(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two choices for each token, and their weights."""
        weights, ids = self.router(x).softmax(-1).topk(2)
        return ids, weights


def some_without(model: Model, x: torch.Tensor) -> torch.Tensor:
    """Choices, some of them none."""
    ids, weights = model.routing(x)
    return model.experts(x, ids.masked_fill(weights < 0.25, -1), weights)


def turned(model: Model, x: torch.Tensor) -> torch.Tensor:
    """By weights stored ``[experts, in, out]``, with biases."""
    weight = model.experts.down.mT.contiguous().mT
    weight = torch.cat([weight.mT, weight.mT], 1)[:, :WIDTH].contiguous()
    return pit.grouped_linear(x, weight, model.routing(x)[0])


def modules(model: Model, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    choices = model.routing(x)
    scores = model.router(x)
    kept = torch.zeros_like(scores).scatter(-1, choices[0], choices[1])
    return {
        "gated": model.experts(x, *choices),
        "biases, limits and columns in turn": model.limited(x, *choices),
        "not gated": model.plain(x, *choices),
        "choices that are none": some_without(model, x),
        "one group for each": model.grouped(x, choices[0][..., 0]),
        "several groups for each": model.grouped(x, choices[0].int()),
        "flattened": model.experts(x.flatten(0, 1), *(c.flatten(0, 1) for c in choices)),
        "weights turned": turned(model, x),
        "scattered": kept,
        "a number scattered": scores.scatter(-1, choices[0], -3.5),
        "equal places": scores.scatter(-1, choices[0] // 3, choices[1]),
        "smallest first": scores.topk(3, largest=False).values,
        "rows by lengths": model.live(x, lengths=mask.sum(1)),
        "rows by running sums": model.live(
            x, cu_seqlens=nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
        ),
    }


def test_modules_are_torchs() -> None:
    model, rng = randomised(Model(modules), 0), np.random.default_rng(0)
    ours = compile(model, example_inputs())
    for mask in random_masks(rng):
        lengths = np.sort(mask, axis=1)[:, ::-1].copy()  # as told by lengths
        given = random_inputs(rng, lengths, VOCABULARY)
        with torch.no_grad():
            wanted = model(**given)
        for name, found in ours(**given).items():
            live = torch.from_numpy(lengths)
            check(found, wanted[name], live.flatten() if name == "flattened" else live)
    assert {d.operator for d in ours.decisions if d.whole} == {"sum"}  # lengths


def test_exported_with_gradients() -> None:
    """Where gradients may be asked for, layers are exported in parts."""
    model = randomised(Model(lambda m, x, ids, mask: m.experts(x, *m.routing(x))), 1)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
    given = {"input_ids": torch.full((2, 5), 4), "attention_mask": torch.ones(2, 5).long()}
    shapes = dict.fromkeys(given, sizes)
    ours = compile(torch.export.export(model, (), given, dynamic_shapes=shapes), given)
    mask = np.arange(7) < np.array([7, 0, 3])[:, None]
    given = random_inputs(np.random.default_rng(1), mask, VOCABULARY)
    with torch.no_grad():
        check(ours(**given), model(**given), torch.from_numpy(mask))


def test_ids_that_are_inputs() -> None:
    class Told(Model):
        def forward(  # type: ignore[override]
            self, input_ids: torch.Tensor, expert_ids: torch.Tensor, attention_mask: torch.Tensor
        ) -> Any:
            return self.grouped(self.table(input_ids), expert_ids)

    model = randomised(Told(modules), 6)
    ours = compile(model, example_inputs() | {"expert_ids": torch.zeros(3, 6).long()})
    given = random_inputs(np.random.default_rng(6), np.arange(5) < np.array([[5], [2]]), VOCABULARY)
    given["expert_ids"] = torch.tensor([[0, 5, 2, -1, 1], [3, 4, 99, 6, -2]])
    mask = given["attention_mask"].bool()
    wanted = model(**given | {"expert_ids": given["expert_ids"].where(mask, 0)}).detach()
    check(ours(**given), wanted, mask)  # nobody looks at those of dead tokens
    given["expert_ids"][0, 2] = 6
    with pytest.raises(ShapeError, match="ids from -1 .* to 5, got 6"):
        ours(**given)


def test_weights_that_inputs_make() -> None:
    """Loops compute what no operator has a constant weight for."""

    def scaled(model: Model, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        weight = model.grouped.weight * (1 + mask[0, 0])
        return pit.grouped_linear(x, weight, model.routing(x)[0], model.grouped.bias)

    model = randomised(Model(scaled), 2)
    ours = compile(model, example_inputs())
    given = random_inputs(np.random.default_rng(2), np.arange(5) < np.array([[5], [2]]), VOCABULARY)
    with torch.no_grad():
        check(ours(**given), model(**given), given["attention_mask"].bool())


def test_order_among_tokens_reads_all() -> None:
    """The largest of a sequence are no matter of single tokens."""

    def best(model: Model, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        return x.sort(1).values, x.transpose(1, 2).topk(2).values

    model = randomised(Model(best), 4)
    ours = compile(model, example_inputs())
    given = random_inputs(np.random.default_rng(4), np.arange(5) < np.array([[5], [2]]), VOCABULARY)
    mask = given["attention_mask"].bool()
    with torch.no_grad():
        wanted = model(**given)
    found = ours(**given)
    check(found[0], wanted[0], mask)
    torch.testing.assert_close(found[1], wanted[1])


def test_a_list_of_rows_is_refused() -> None:
    def listed(model: Model, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        return model.live(x, rows=torch.arange(2))

    with pytest.raises(UnsupportedModel, match="got linear_rows"):
        compile(Model(listed), example_inputs())


ELSEWHERE = (
    WITHOUT_TORCH
    + """

np.save(sys.argv[3], load(sys.argv[1])(**dict(np.load(sys.argv[2]))).logits)
"""
)


def test_saved_and_loaded_without_torch(tmp_path: Path) -> None:
    _, ours = compiled("mixtral")
    ours.save(tmp_path / "model.pit")
    given = random_inputs(np.random.default_rng(5), np.arange(9) < np.array([[9], [4]]), VOCABULARY)
    wanted = ours(**given).logits.numpy()
    arrays = {name: value.numpy() for name, value in given.items()}
    again = load(tmp_path / "model.pit")
    np.testing.assert_array_equal(again(**arrays).logits, wanted)
    assert again.explain() == ours.explain()
    np.savez(tmp_path / "given.npz", **arrays)
    files = [str(tmp_path / name) for name in ("model.pit", "given.npz", "found.npy")]
    subprocess.run([sys.executable, "-c", ELSEWHERE, *files], check=True)
    np.testing.assert_array_equal(np.load(files[2]), wanted)


def check(found: torch.Tensor, wanted: torch.Tensor, live: torch.Tensor) -> None:
    """Equal at live tokens to 1e-4 of the largest value, and 0 at dead ones."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert not found[~live].any()
    if live.any():
        bound = 1e-4 * float(wanted[live].abs().max())
        torch.testing.assert_close(found[live], wanted[live], rtol=0, atol=bound)
