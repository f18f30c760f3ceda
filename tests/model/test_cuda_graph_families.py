"""The graphs of every family as a GPU has them, on the CPU with stand-ins for its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from pit_tvm.model import cuda, cuda_kernels  # noqa: E402  (needs transformers)
from pit_tvm.model.compiled import LINEAR  # noqa: E402
from pit_tvm.model.cuda_kernels import ATTENTION, CudaKernels  # noqa: E402
from pit_tvm.model.importer import import_model  # noqa: E402
from pit_tvm.model.linear import LinearLayer  # noqa: E402
from pit_tvm.model.packing import LIVE_TOKENS  # noqa: E402
from pit_tvm.model.plane import Plane  # noqa: E402
from pit_tvm.model.rewrite import rewrite  # noqa: E402
from pit_tvm.runtime.live_tokens import live_tokens  # noqa: E402
from pit_tvm.schedules.cuda_norm import norm_rows  # noqa: E402
from tests.model.families import (  # noqa: E402
    FAMILIES,
    LONGEST,
    example_inputs,
    random_inputs,
    random_mask,
    random_sizes,
    randomised,
)
from tests.model.test_families import check  # noqa: E402
from tests.model.test_torch_program import program  # noqa: E402

ACTIVATIONS: dict[str | None, Callable[[Any], Any]] = {
    None: lambda x: x,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}


def layers_of(found: Sequence[LinearLayer]) -> Callable[..., None]:
    """`CudaLayers` of these layers."""

    def run(number: int, x: torch.Tensor, out: torch.Tensor) -> None:
        layer = found[number]
        bias = None if layer.bias is None else torch.from_numpy(layer.bias)
        whole = torch.nn.functional.linear(x, torch.from_numpy(layer.weight), bias)
        out.copy_(ACTIVATIONS[layer.activation](whole))

    return run


def placed_by(run: Callable[..., None]) -> Callable[..., None]:
    """``placed`` of `CudaLayers`; what ``row`` names beyond the live tokens is not touched."""

    def placed(number: int, x: torch.Tensor, row: Any, starts: Any, out: torch.Tensor) -> None:
        out.zero_()
        live = row[: int(starts[-1])].long()
        some = out.new_empty(len(live), out.shape[1])
        run(number, x[live], some)
        out[live] = some

    return placed


def norm(eps: float, terms: int, stores_sum: bool) -> Callable[..., None]:
    """A kernel of `CudaKernels`: terms, scale, shift, result, and their sum where it is stored."""

    def run(*given: torch.Tensor) -> None:
        *added, scale, shift, out = given[: terms + 3]
        whole = sum(added[1:], added[0])
        out.copy_(torch.nn.functional.layer_norm(whole, whole.shape[-1:], scale, shift, eps))
        if stores_sum:
            given[-1].copy_(whole)

    return run


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    causal: int,
    scale: float,
) -> torch.Tensor:
    """`varlen_attention`, sequence by sequence."""
    out, places = torch.empty_like(query), starts.tolist()
    assert max(np.diff(places), default=0) <= longest
    for begin, end in zip(places, places[1:], strict=False):
        q, k, v = (one[begin:end].transpose(0, 1) for one in (query, keys, values))
        whole = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=bool(causal), scale=scale
        )
        out[begin:end] = whole.transpose(0, 1)
    return out


def some_norm() -> Any:
    """A kernel that is never compiled."""
    return norm_rows(8, "float16", 1e-5, 1)


def index(mask: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`CudaIndex`."""
    return tuple(torch.from_numpy(part) for part in live_tokens(mask.numpy()))


@pytest.mark.parametrize(
    ("name", "attended"), [(n, ("sdpa", "eager")[i % 2]) for i, n in enumerate(sorted(FAMILIES))]
)
def test_equals_transformers_at_live_tokens(
    name: str, attended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In float32, too: 16 bits would hide what is wrong.
    monkeypatch.setattr(CudaKernels, "attends", lambda *_: True)
    monkeypatch.setattr(cuda_kernels, "DTYPES", ("float32",))
    monkeypatch.setattr(cuda_kernels, "norm_rows", lambda *_, **__: some_norm())
    family, rng = FAMILIES[name], np.random.default_rng()
    sizes = random_sizes(rng, attended)
    seed = int(rng.integers(2**31))
    print(f"{sizes}, seed {seed}")  # shown if the test fails
    model = randomised(family.make(sizes), seed)
    imported = import_model(model, example_inputs(), "attention_mask")
    kernels = CudaKernels(Plane(imported.batch, imported.tokens))
    module, layers = cuda._graph(imported, rewrite(imported, kernels))
    run = layers_of(layers)
    norms = {name: norm(eps, *how) for (_, _, eps, *how), name in kernels._norms.items()}
    packed: dict[str, Any] = {
        LINEAR: run,
        cuda.PLACED: placed_by(run),
        LIVE_TOKENS: index,
        ATTENTION: attention,
    }
    made = program(module, **packed, **norms)

    def ours(**inputs: torch.Tensor) -> Any:
        return made(*inputs.values())

    masks = [random_mask(rng, padding) for padding in ("right", "left", "anywhere") * 2]
    for mask in (*masks, np.ones((2, LONGEST), bool), np.zeros((2, 3), bool)):
        check(model, ours, family, random_inputs(rng, mask, sizes.vocabulary))
