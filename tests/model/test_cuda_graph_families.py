"""Attention by more than a mask as a GPU has it, on the CPU with stand-ins for its kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from pit_tvm.model.cuda_attention import ATTENTION, PADDED, WINDOWED  # noqa: E402
from pit_tvm.model.importer import import_model  # noqa: E402
from tests.model.cuda_graphs import graph_of, take_float32  # noqa: E402

check_models: Any = pytest.importorskip("check_models")
check_models_families: Any = pytest.importorskip("check_models_families")

# Layers of the others are of two kinds, in turn.
ONE_LAYER = {name: {"num_hidden_layers": 1} for name in ("mpnet", "deberta-v2")} | {
    "bloom": {"n_layer": 1}
}


# What computes attention where something else than padding and order decides of it: by windows and
# sinks, by biases; capped scores are computed as in the model.
ATTENDED: dict[str, set[str]] = {
    "modernbert": {ATTENTION, WINDOWED},
    "gpt-oss": {ATTENTION, WINDOWED},
    "mistral": {WINDOWED},
    "mpnet": {PADDED},
    "deberta-v2": {PADDED},
    "bloom": {PADDED},
    "gemma2": set(),
}


@pytest.mark.parametrize("name", ATTENDED)
def test_attention_with_more_than_a_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take_float32(monkeypatch)
    family, rng = check_models_families.FAMILIES[name], np.random.default_rng(0)
    family = replace(family, options={**family.options, **ONE_LAYER.get(name, {})})
    torch.manual_seed(0)
    model = family.make()
    example, *others = (check_models.inputs(family, s, False, rng) for s in check_models.BATCHES)
    attended: set[str] = set()
    ours = graph_of(import_model(model, example, "attention_mask"), attended)
    assert attended == ATTENDED[name]
    for given in others:
        if not family.first:  # tokens may be missing anywhere
            given["attention_mask"][:, 1:-1] &= torch.from_numpy(
                rng.integers(0, 2, given["attention_mask"][:, 1:-1].shape)
            )
        with torch.no_grad():
            wanted = check_models.tensors(model(**given))
        found = check_models.tensors(ours(**given))
        assert check_models.deviation(found, wanted, given["attention_mask"].bool()) < 1e-4
