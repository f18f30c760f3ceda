"""Operators as loops: TVM's own, without what it prints about ids that are known to be inside."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx

from pit_tvm.model.legalize import legalize
from pit_tvm.model.lowering import fused
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


@pytest.mark.parametrize("limited", ["clip", "relu", "minimum"])
def test_operators_one_inside_the_other_stay_short(limited: str) -> None:
    def limit(x: relax.Expr, y: relax.Expr) -> relax.Expr:
        if limited == "clip":
            return relax.op.clip(x, -1.0, 1.0)
        return relax.op.nn.relu(x) if limited == "relu" else relax.op.minimum(x, y)

    def length(number: int) -> int:
        def chain(x: relax.Expr, y: relax.Expr) -> relax.Expr:
            for _ in range(number):
                x = limit(relax.op.add(x, y), y)
            return x

        target = tvm.target.Target("llvm")
        module = fused(graph(chain, x=(B, T, 8), y=(B, T, 8)), target)
        kernels = [f for f in module.functions.values() if isinstance(f, tirx.PrimFunc)]
        (kernel,) = kernels
        sch = s_tir.Schedule(kernel)
        blocks = sch.get_child_blocks(sch.get_sblock("root"))
        for block in blocks[:-1]:
            sch.compute_inline(block)
        return len(sch.mod.script())

    first, second, third = map(length, (2, 4, 6))
    assert third - second < 1.5 * (second - first)
