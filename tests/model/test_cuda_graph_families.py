"""The graphs of every family as a GPU has them, on the CPU with stand-ins for its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from pit_tvm.model import cuda, cuda_kernels  # noqa: E402  (needs transformers)
from pit_tvm.model.compiled import LINEAR  # noqa: E402
from pit_tvm.model.cuda_attention import (  # noqa: E402
    ATTENTION,
    PADDED,
    WINDOWED,
    padded_attention,
)
from pit_tvm.model.cuda_kernels import CudaKernels  # noqa: E402
from pit_tvm.model.experts import GROUPED  # noqa: E402
from pit_tvm.model.importer import import_model  # noqa: E402
from pit_tvm.model.packing import LIVE_TOKENS  # noqa: E402
from pit_tvm.model.plane import Plane  # noqa: E402
from pit_tvm.model.rewrite import rewrite  # noqa: E402
from pit_tvm.schedules.cuda_norm import norm_rows  # noqa: E402
from tests.model.cuda_stand_ins import (  # noqa: E402
    attention,
    grouped_of,
    index_of,
    layers_of,
    norm_of,
    placed_by,
)
from tests.model.families import (  # noqa: E402
    FAMILIES,
    example_inputs,
    random_inputs,
    random_masks,
    random_sizes,
    randomised,
)
from tests.model.test_families import check  # noqa: E402
from tests.model.test_torch_program import program  # noqa: E402

check_models: Any = pytest.importorskip("check_models")
check_models_families: Any = pytest.importorskip("check_models_families")


def some_norm() -> Any:
    """A kernel that is never compiled."""
    return norm_rows(8, "float16", 1e-5, 1)


@pytest.fixture
def _in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    # 16 bits would hide what is wrong.
    monkeypatch.setattr(CudaKernels, "attends", lambda *_: True)
    monkeypatch.setattr(cuda_kernels, "NARROW", ("float32",))
    monkeypatch.setattr(cuda_kernels, "norm_rows", lambda *_, **__: some_norm())


def graph_of(
    model: Any, example: dict[str, torch.Tensor], attended: set[str] | None = None
) -> Callable[..., Any]:
    """What a GPU would run of a model, with stand-ins for its kernels; ``attended`` gets the names
    of those for attention."""
    imported = import_model(model, example, "attention_mask")
    kernels = CudaKernels(Plane(imported.batch, imported.tokens))
    rewritten = rewrite(imported, kernels)
    module, layers = cuda._graph(imported, rewritten)
    run = layers_of(layers)
    norms = {name: norm_of(eps, *how) for (_, _, eps, *how), name in kernels._norms.items()}
    packed: dict[str, Any] = {
        LINEAR: run,
        GROUPED: grouped_of(rewritten.grouped),
        cuda.PLACED: placed_by(run),
        LIVE_TOKENS: index_of,
        ATTENTION: attention,
        WINDOWED: attention,
        PADDED: padded_attention,
    }
    if attended is not None:
        attended |= {
            name for name in (ATTENTION, WINDOWED, PADDED) if f'"{name}"' in module.script()
        }
    made = program(module, **packed, **norms)
    return lambda **inputs: made(*inputs.values())


@pytest.mark.usefixtures("_in_float32")
@pytest.mark.parametrize(
    ("name", "attended"), [(n, ("sdpa", "eager")[i % 2]) for i, n in enumerate(sorted(FAMILIES))]
)
def test_equals_transformers_at_live_tokens(name: str, attended: str) -> None:
    family, rng = FAMILIES[name], np.random.default_rng()
    sizes = random_sizes(rng, attended)
    seed = int(rng.integers(2**31))
    print(f"{sizes}, seed {seed}")  # shown if the test fails
    model = randomised(family.make(sizes), seed)
    ours = graph_of(model, example_inputs())
    for mask in random_masks(rng):
        check(model, ours, family, random_inputs(rng, mask, sizes.vocabulary))


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


@pytest.mark.usefixtures("_in_float32")
@pytest.mark.parametrize("name", ATTENDED)
def test_attention_with_more_than_a_mask(name: str) -> None:
    family, rng = check_models_families.FAMILIES[name], np.random.default_rng(0)
    family = replace(family, options={**family.options, **ONE_LAYER.get(name, {})})
    torch.manual_seed(0)
    model = family.make()
    example, *others = (check_models.inputs(family, s, False, rng) for s in check_models.BATCHES)
    attended: set[str] = set()
    ours = graph_of(model, example, attended)
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
