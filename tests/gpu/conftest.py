"""Operators on a GPU behind numpy arrays, so that the tests of the interface serve for it too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import pit_tvm
from pit_tvm import Operator
from pit_tvm.structs import Plan, SparsitySpec, Tile
from tests.api import test_groups, test_masks, test_slices
from tests.api.cases import Case


class OnGpu:
    """An operator for CUDA tensors that takes and gives numpy arrays.

    Of the tiles that plans list it runs the smallest, whose kernels compile fastest. Plans are for
    outputs that exist, as all that it is given do.
    """

    def __init__(self, operator: Operator) -> None:
        self._operator, self._dispatcher = operator, self
        planner = operator._dispatcher.planner
        tiles = getattr(planner, "tiles", ())
        if tiles:
            planner.tiles = (min(tiles, key=_unrolled),)
        decide = planner.decide
        planner.decide = lambda layout, counts, fresh=False: decide(layout, counts, False)

    def explain(self, *arrays: Any, sparsity: Any) -> Plan:
        self._plan = self._operator.explain(*map(to_gpu, arrays), sparsity=to_gpu(sparsity))
        return self._plan

    def run(self, arrays: Any, sparsity: Any, out: np.ndarray, choose: Any) -> tuple[Any, Plan]:
        """By a candidate of the plan that was explained: a call's own knows no counts yet."""
        choice = choose(self._plan)
        given, place = [to_gpu(array) for array in arrays], to_gpu(out)
        run = self._operator._dispatcher.run
        found, plan = run(given, to_gpu(sparsity), place, choose=lambda _: choice)
        out[...] = to_host(found)
        return out, replace(plan or self._plan, choice=choice)

    def __call__(self, *arrays: Any, sparsity: Any = None, out: np.ndarray) -> np.ndarray:
        given = [to_gpu(array) for array in arrays]
        out[...] = to_host(self._operator(*given, sparsity=to_gpu(sparsity), out=to_gpu(out)))
        return out


def _unrolled(tile: Tile) -> int:
    """Results of a thread, or of a CTA where threads share them."""
    knobs = dict(tile.knobs)
    return knobs.get("reg_m", tile.tile_m) * knobs.get("reg_n", tile.tile_n)


def to_gpu(array: Any) -> Any:
    """A CUDA tensor of a numpy array; None stays None."""
    if array is None:
        return None
    array = np.ascontiguousarray(array)
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(array).cuda()


def to_host(tensor: torch.Tensor) -> np.ndarray:
    """The numpy array of a CUDA tensor."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
    return tensor.cpu().numpy()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of `tests.api` compile for the GPU."""
    for module in (test_masks, test_slices, test_groups):
        monkeypatch.setattr(module, "compiled", _compiled)


def _compiled(
    case: Case, dtype: str, operand: str, spec: SparsitySpec, dead: str = "skip", **_: Any
) -> Any:
    tensors = case.tensors(dtype)
    made = pit_tvm.compile(tensors, sparse={operand: spec}, dead=dead, target="cuda")
    return OnGpu(made)
