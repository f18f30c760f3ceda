"""Small random models of every family on a GPU against the same weights in float32."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from pit_tvm.model import compile  # noqa: E402
from tests.model.families import (  # noqa: E402  (needs transformers)
    FAMILIES,
    example_inputs,
    random_inputs,
    random_masks,
    random_sizes,
    randomised,
)
from tests.model.test_families import outputs  # noqa: E402

# Of the largest value: weights are large here, and so is what 16 bits round off.
LIMIT = 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True], ids=["launched", "replayed"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_transformers_at_live_tokens(name: str, attention: str, cuda_graphs: bool) -> None:
    family, seed = FAMILIES[name], len(name) + len(attention) + cuda_graphs
    rng = np.random.default_rng(seed)
    drawn = random_sizes(rng, attention)
    # Of four heads that share keys torch 2.11 exports none.
    sizes = replace(drawn, layers=1, heads=2, hidden=2 * drawn.hidden // drawn.heads)
    model = randomised(family.make(sizes), seed).half()
    ours = compile(model, example_inputs(), target="cuda", cuda_graphs=cuda_graphs)
    wide = copy.deepcopy(model).float().cuda()
    masks = random_masks(rng)
    for mask in (*masks, *masks[:2]):  # some come again, as graphs want
        inputs = random_inputs(rng, mask, sizes.vocabulary)
        on_gpu = {n: value.cuda() for n, value in inputs.items()}
        with torch.no_grad():
            expected = outputs(wide(**on_gpu))
        found = outputs(ours(**on_gpu))
        live = on_gpu["attention_mask"].bool()
        for one, other, by_token in zip(found, expected, family.by_token, strict=True):
            assert one.shape == other.shape
            rows = live if by_token else live[:, 0] if family.first else live.any(1)
            assert not by_token or not one[~live].any()
            bound = LIMIT * float(other[rows].abs().max()) if rows.any() else 0.0
            torch.testing.assert_close(one[rows].float(), other[rows], rtol=0, atol=bound)
    whole = {d.operator for d in ours.decisions if d.whole}
    assert whole <= family.whole
