"""Operators as loops: TVM's own, without what it prints about ids that are known to be inside."""

from __future__ import annotations

from typing import Any

import pytest
import tvm_ffi
from tvm import relax

from pit_tvm.model.legalize import legalize
from tests.model.graphs import B, T, graph

TAKES: dict[str, tuple[int | None, str, dict[str, Any]]] = {
    "rows": (0, "fast", {"x": (10, 8), "ids": ("int32", T)}),
    "of a middle axis": (1, "fast", {"x": (B, 10, 8), "ids": ("int64", 5, 2)}),
    "from the end": (-2, "fast", {"x": (B, T, 8), "ids": ("int32", 6)}),
    "of a vector": (0, "fast", {"x": (10,), "ids": ("int64", B, T)}),
    "without an axis": (None, "fast", {"x": (10,), "ids": ("int32", T)}),
    "wrapped": (0, "wrap", {"x": (10, 8), "ids": ("int32", T)}),
    "clipped": (0, "clip", {"x": (10, 8), "ids": ("int32", T)}),
}


@pytest.mark.parametrize("name", TAKES)
def test_loops_are_those_of_tvm(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    axis, mode, params = TAKES[name]
    module = graph(lambda x, ids: relax.op.take(x, ids, axis, mode), **params)
    found, printed = legalize()(module), capfd.readouterr().err
    assert tvm_ffi.structural_equal(found, relax.transform.LegalizeOps()(module))
    assert axis is None or printed == ""


def test_operators_that_are_kept() -> None:
    module = graph(
        lambda x, ids: relax.op.exp(relax.op.take(x, ids, 0, "fast")), **TAKES["rows"][2]
    )
    found = legalize(["exp"])(module).script()
    assert "R.exp" in found and "R.take" not in found
