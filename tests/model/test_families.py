"""Small random models of every family against transformers, under masks of every form: compiled
for CPUs, and their graphs as a GPU has them, with stand-ins for its kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pit_tvm.model import CompiledModel, compile, compiler
from pit_tvm.model.importer import import_model

pytest.importorskip("transformers")

from tests.model.cuda_graphs import graph_of, take_float32  # noqa: E402
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


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_transformers_at_live_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random model of any sizes, and random batches of it under every kind of padding."""
    family, seed = FAMILIES[name], int(np.random.default_rng().integers(2**31))
    rng = np.random.default_rng(seed)
    sizes = random_sizes(rng, str(rng.choice(["sdpa", "eager"])))
    print(f"{sizes}, seed {seed}")  # shown if the test fails
    model = randomised(family.make(sizes), seed)
    imported = import_model(model, example_inputs(), "attention_mask")
    monkeypatch.setattr(compiler, "import_model", lambda *_: imported)  # which takes most time
    ours = compile(model, example_inputs())
    take_float32(monkeypatch)
    on_gpu = graph_of(imported)
    for mask in random_masks(rng):
        inputs = random_inputs(rng, mask, sizes.vocabulary)
        check(model, ours, family, inputs)
        check(model, on_gpu, family, inputs)
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
