"""Layers of experts on a GPU: what is refused, how kernels are called, and whole models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pit_tvm.errors import DTypeError, ShapeError
from pit_tvm.model import compile, cuda_experts, load
from pit_tvm.model.cuda_experts import CudaGroupedLayers, check_grouped
from pit_tvm.model.experts import GroupedLayer
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.store import TileStore
from pit_tvm.torch import host

TARGET = resolve_target("cuda -arch=sm_90a")


def layer(*shape: int, dtype: str = "float16", choices: int = 1) -> GroupedLayer:
    """Of random weights."""
    weight = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    return GroupedLayer(weight, weight[:, :, 0].copy(), "silu", dtype, choices)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (layer(2, 8, 8, dtype="float32"), DTypeError, "dtype: expected float16 or bfloat16"),
        (layer(2, 12, 8), ShapeError, r"experts: expected .* multiples of 8, got .*\[2, 12, 8\]"),
        (layer(2, 8, 9), ShapeError, "experts: expected .* multiples of 8"),
        (layer(1025, 8, 8), ShapeError, "experts: expected at most 1024 experts"),
    ],
)
def test_layers_that_no_kernel_computes(given: Any, error: type, match: str) -> None:
    check_grouped([layer(2, 8, 8), layer(1024, 8, 16)])
    with pytest.raises(error, match=match):
        check_grouped([layer(2, 8, 8), given])


def test_kernels_take_a_row_once_for_all_its_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    class Experts:
        def __init__(self, *_: Any) -> None:
            self.calls: list[tuple[int, ...]] = []

        def grouped(self, x: Any, ids: Any, weight: Any, bias: Any, activation: str) -> Any:
            self.calls.append((*x.shape, *ids.shape))
            return host.grouped_rows(x.float(), ids, weight.float(), bias.float(), activation)

    monkeypatch.setattr(cuda_experts, "CudaExperts", Experts)
    monkeypatch.setattr(cuda_experts, "_NUMBERS_OF_ROWS", (1, 4, 1 << 30))
    found = [layer(3, 16, 8, choices=2), layer(3, 16, 8, choices=2), layer(3, 8, 16)]
    store = TileStore.over_shipped(None, device=TARGET.device, isa=TARGET.isa)
    layers: Any = CudaGroupedLayers(found, TARGET, torch.device("cpu"), store, KernelCache())
    x, ids = torch.randn(5, 8).half(), torch.randint(-1, 3, (5, 2), dtype=torch.int32)
    out = torch.empty(10, 16, dtype=torch.float16)
    layers(1, x, ids, out)
    weight, bias = (torch.from_numpy(part).float() for part in (found[1].weight, found[1].bias))
    wanted = host.grouped_rows(x.float(), ids, weight, bias, "silu")
    torch.testing.assert_close(out.float(), wanted, rtol=1e-2, atol=1e-2)
    assert layers._experts.calls == [(5, 8, 5, 2)]
    layers.prepare()  # once for each form, of sizes that fit
    assert layers._experts.calls[1:] == [(1, 8, 1, 2), (4, 8, 4, 2), (1, 16, 1, 1), (4, 16, 4, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["Mixtral", "Olmoe"])
def test_whole_models(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    families = pytest.importorskip("tests.model.families")
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "use_cache": False}
    config = getattr(transformers, f"{name}Config")(**sizes, num_experts_per_tok=2, pad_token_id=0)
    model = families.randomised(getattr(transformers, f"{name}ForCausalLM")(config), 1).half()
    compiled = compile(model, families.example_inputs(), target="cuda")
    wide = copy.deepcopy(model).float().cuda()
    wide.set_experts_implementation("eager")
    compiled.save(tmp_path / "model.pit")
    rng = np.random.default_rng(1)
    for ours in (compiled, load(tmp_path / "model.pit")):
        assert not any(d.whole for d in ours.decisions)
        errors = []
        for mask in [*families.random_masks(rng)] * 2:  # some come again, as graphs want
            given = families.random_inputs(rng, mask, 50)
            given = {n: value.cuda() for n, value in given.items()}
            live = given["attention_mask"].bool()
            with torch.no_grad():
                wanted = wide(**given).logits
            found = ours(**given).logits
            assert not found[~live].any()
            error = (found.float() - wanted).abs().amax(-1) / wanted.abs().max()
            errors += error[live].tolist()
        # Where two experts are about equally likely, 16 bits may choose the other.
        assert np.median(errors) < 1e-2
