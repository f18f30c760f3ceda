"""Memory that operators keep beyond a call."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from pit_tvm.runtime import cuda_detect_ids
from pit_tvm.runtime.cuda_detect_ids import SlicePlan
from pit_tvm.structs import Groups, Lengths, MicroTile, Rows, SparsitySpec

torch = pytest.importorskip("torch")

ROWS = MicroTile("lhs", "m", 0, (1, 0))


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("spec", [Rows(), Lengths(), Lengths(cumulative=True), Groups(4)], ids=str)
def test_what_tells_a_pattern_is_not_kept(
    spec: SparsitySpec, split: bool, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_detect_ids, "check_tensor", lambda *given: None)
    kernels: Any = SimpleNamespace(slices=lambda name: name, clusters=True)
    told = torch.zeros(64, dtype=torch.int32)
    rows = 63 if spec == Lengths(cumulative=True) else 64
    split = split and not isinstance(spec, Groups)
    find = SlicePlan(kernels, spec, told, (rows, 8), ROWS, False, split, checked).run()
    held = weakref.ref(told)
    del told
    assert held() is None and find is not None
