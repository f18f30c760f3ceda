"""Calls whose tensors lie elsewhere every time, by the graph that was recorded of some of them."""

from __future__ import annotations

import pytest
import torch

from pit_tvm.runtime.cuda_repeat_code import OFTEN
from pit_tvm.runtime.cuda_watch import PERIOD
from pit_tvm.runtime.kernel_cache import KernelCache
from tests.gpu.device_cases import KINDS, LAYERS, case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", [*KINDS, *LAYERS])
def test_calls_are_right_wherever_tensors_lie(cache: KernelCache, name: str) -> None:
    run, draw = case(name, cache)
    kept = []
    for turn in range(OFTEN + 2 * PERIOD):
        problem = draw(turn, "cuda")
        with torch.no_grad():
            found = problem.call(run)
        kept.append((problem, found))  # its memory is nobody else's
    assert [problem.is_right(found) for problem, found in kept] == [True] * len(kept)
