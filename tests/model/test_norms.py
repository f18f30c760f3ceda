"""Layer norms of a graph as one kernel over rows, residuals included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from pit_tvm.model.kernels import CpuKernels, RowNorm
from pit_tvm.model.norms import extract_norms
from pit_tvm.target import resolve_target
from tests.model.graphs import B, T, graph, names

op = relax.op
SCALE, SHIFT = (
    relax.const(np.random.default_rng(s).uniform(-1, 1, 8).astype("float32")) for s in (1, 2)
)


def norm(x: Any, **how: Any) -> Any:
    """The layer norm over features."""
    return op.nn.layer_norm(x, SCALE, SHIFT, [-1], 1e-5, **how)


class Recorded(CpuKernels):
    """Notes what norms are asked for: width, type, eps, whether there is a residual."""

    def __init__(self) -> None:
        super().__init__(resolve_target("llvm"))
        self.asked: list[tuple[Any, ...]] = []

    def norm(self, builder: Any, terms: Any, how: RowNorm, stores_sum: bool = False) -> Any:
        """As `CpuKernels.norm`."""
        made, ty = super().norm(builder, terms, how, stores_sum), terms[0].ty
        if made is not None:
            form = int(ty.shape.values[-1]), ty.dtype, round(how.eps, 9), len(terms) == 2
            self.asked.append(form)
        return made


def extract(module: tvm.IRModule) -> tuple[tvm.IRModule, list[tuple[Any, ...]]]:
    """The module with kernels for its norms, and what was asked of each."""
    kernels = Recorded()
    return extract_norms(module, kernels), kernels.asked


@pytest.mark.parametrize("extents", [(B, T, 8), (B * T, 8), (T, 8)])
def test_norm_of_one_tensor(extents: Any) -> None:
    after, asked = extract(graph(lambda x: norm(x), x=extents))
    assert asked == [(8, "float32", 1e-5, False)]
    assert "nn.layer_norm" not in names(after)


def test_sum_before_a_norm_is_its_residual() -> None:
    after, asked = extract(graph(lambda x, y: norm(op.add(x, y)), x=(B, T, 8), y=(B, T, 8)))
    assert asked == [(8, "float32", 1e-5, True)]
    assert not {"add", "nn.layer_norm"} & set(names(after))


def test_sum_that_is_used_again_stays() -> None:
    def make(x: Any, y: Any) -> Any:
        total = op.add(x, y)
        return op.add(norm(total), total)

    after, asked = extract(graph(make, x=(B, T, 8), y=(B, T, 8)))
    assert asked == [(8, "float32", 1e-5, True)]
    assert names(after).count("add") == 2


@pytest.mark.parametrize("extents", [(8,), (T, 8), (1, T, 8), (B, 1, 8)])
def test_sum_with_what_is_repeated_stays(extents: Any) -> None:
    after, asked = extract(graph(lambda x, y: norm(op.add(x, y)), x=(B, T, 8), y=extents))
    assert asked == [(8, "float32", 1e-5, False)]
    assert "add" in names(after)


@pytest.mark.parametrize(
    ("make", "params"),
    [
        (lambda x: op.nn.layer_norm(x, SCALE, SHIFT, [1]), {"x": (B, 8, T)}),
        (lambda x: norm(x, center=False), {"x": (B, T, 8)}),
        (lambda x: norm(x, scale=False), {"x": (B, T, 8)}),
        (
            lambda x, s: op.nn.layer_norm(x, s, SHIFT, [-1]),
            {"x": (B, T, 8), "s": (8,)},
        ),
    ],
)
def test_other_norms_are_left_alone(make: Callable[..., Any], params: Any) -> None:
    after, asked = extract(graph(make, **params))
    assert asked == [] and names(after) == ["nn.layer_norm"]
