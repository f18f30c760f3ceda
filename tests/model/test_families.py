"""Small random models of every family against transformers, under masks of every form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pit_tvm.model import CompiledModel, compile

pytest.importorskip("transformers")

from tests.model.families import (  # noqa: E402  (needs transformers)
    FAMILIES,
    Family,
    Sizes,
    example_inputs,
    random_inputs,
    random_masks,
    random_sizes,
    randomised,
)

# Every family once here; compiling takes most of the time.
FORMS = [
    ("bert", "sdpa"),
    ("bert, classifying", "sdpa"),
    ("sentence encoder", "eager"),
    ("roberta", "eager"),
    ("distilbert", "sdpa"),
    ("opt", "eager"),
    ("llama", "sdpa"),
]


def test_every_family_is_compared() -> None:
    assert {name for name, _ in FORMS} == set(FAMILIES)


@pytest.mark.parametrize(("name", "attention"), FORMS)
def test_equals_transformers_at_live_tokens(name: str, attention: str) -> None:
    compare(name, attention, seed=len(name))


@settings(max_examples=2, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    name=st.sampled_from(sorted(FAMILIES, reverse=True, key=lambda name: name == "opt")),
    attention=st.sampled_from(["sdpa", "eager"]),
    seed=st.integers(0, 2**16),
)
def test_any_family_of_any_sizes(name: str, attention: str, seed: int) -> None:
    compare(name, attention, seed)


def compare(name: str, attention: str, seed: int) -> None:
    """Compile a random model and compare random batches of it under every kind of padding."""
    family, rng = FAMILIES[name], np.random.default_rng(seed)
    sizes = random_sizes(rng, attention)
    model = randomised(family.make(sizes), seed)
    ours = compile(model, example_inputs())
    for mask in random_masks(rng):
        check(model, ours, family, random_inputs(rng, mask, sizes.vocabulary))
    check_report(ours, family, sizes)


def check(
    model: torch.nn.Module, ours: Any, family: Family, inputs: dict[str, torch.Tensor]
) -> None:
    """Outputs are equal at live tokens to 1e-4 of the largest value, and 0 at dead ones."""
    with torch.no_grad():
        expected = outputs(model(**inputs))
    found = outputs(ours(**inputs))
    mask = inputs["attention_mask"].bool()
    assert len(found) == len(expected) == len(family.by_token)
    for one, other, by_token in zip(found, expected, family.by_token, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        if by_token:
            assert not one[~mask].any()
            assert_near(one[mask], other[mask])
        else:
            # Of a sequence whose first token is dead, the model picks what it made of padding.
            rows = mask[:, 0] if family.first else mask.any(1)
            assert_near(one[rows], other[rows])
            assert one.isfinite().all()


def outputs(result: object) -> list[torch.Tensor]:
    """The tensors that a model returns, in order."""
    return torch.utils._pytree.tree_leaves(result)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    if expected.numel():
        bound = 1e-4 * float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=bound)


def check_report(ours: CompiledModel, family: Family, sizes: Sizes) -> None:
    """All attention is over live tokens, all that runs on dead ones is known, and activations of
    ReLU are followed."""
    attention = f"  {sizes.layers} of them attention, {family.kind}, over live tokens"
    assert attention in ours.explain().splitlines()
    assert {d.operator for d in ours.decisions if d.whole} <= family.whole
    assert len({one.layer for one in ours.activity}) == sizes.layers * family.relu
