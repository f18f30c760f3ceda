"""Groups of rows on the CPU: by torch's library and by our kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pit_tvm import torch as pit
from pit_tvm.errors import ShapeError
from pit_tvm.torch import host

GROUPS, TOKENS, TOP_K, HIDDEN, INTER = 6, 19, 2, 32, 40
BOTH = pytest.mark.parametrize("by_library", [True, False])


def choose(monkeypatch: pytest.MonkeyPatch, by_library: bool) -> None:
    monkeypatch.setattr(host, "computes", lambda dtype: by_library)


def routed() -> torch.Tensor:
    """Choices [TOKENS, TOP_K], some of which are none; groups 2 and 5 never live."""
    ids = torch.tensor([-1, 0, 1, 3, 4])[torch.randint(5, (TOKENS, TOP_K))]
    ids[0] = torch.tensor([-1, 4])
    return ids


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_groups_are_as_in_float64(
    by_library: bool, dtype: torch.dtype, activation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, by_library)
    x, ids = torch.randn(TOKENS, HIDDEN).to(dtype), routed()
    weight, bias = (torch.randn(GROUPS, INTER, *k).to(dtype) for k in ((HIDDEN,), ()))
    if by_library:  # our kernels pack what does not live, too
        weight[[2, 5]] = torch.nan
    got = pit.grouped_linear(x, weight, ids, bias, activation=activation)
    exact = torch.zeros(TOKENS, TOP_K, INTER, dtype=torch.float64)
    for t, c in (ids >= 0).nonzero().tolist():
        group = int(ids[t, c])
        row = weight[group].double() @ x[t].double() + bias[group].double()
        exact[t, c] = row if activation is None else torch.nn.functional.gelu(row)
    assert got.dtype == dtype
    limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert (got.double() - exact).norm() / exact.norm() < limit
    assert not got[ids < 0].any()


@pytest.mark.parametrize("gated", [True, False])
def test_both_ways_give_the_same_layer(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = pit.MoeFeedForward(GROUPS, HIDDEN, INTER, activation="relu", gated=gated)
    x, ids, weights = torch.randn(TOKENS, HIDDEN), routed(), torch.rand(TOKENS, TOP_K)
    found = []
    for by_library in (True, False):
        choose(monkeypatch, by_library)
        found.append(layer(x, ids, weights))
    torch.testing.assert_close(*found)


@BOTH
@pytest.mark.parametrize("wrong", [-2, GROUPS])
def test_ids_that_are_no_group(
    by_library: bool, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, by_library)
    layer, ids = pit.MoeFeedForward(GROUPS, HIDDEN, INTER), routed()
    ids[3, 1] = wrong
    x, message = torch.randn(TOKENS, HIDDEN), f"expected ids from -1 .* got {wrong} at position 7"
    for recorded in (True, False):
        with torch.set_grad_enabled(recorded):
            with pytest.raises(ShapeError, match=f"^expert_ids: {message}"):
                layer(x, ids, torch.rand(TOKENS, TOP_K))
            with pytest.raises(ShapeError, match=f"^group_ids: {message}"):
                pit.grouped_linear(x, layer.up, ids)


def test_what_the_library_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = SimpleNamespace(
        _is_mkldnn_fp16_supported=lambda: False, _is_mkldnn_bf16_supported=lambda: True
    )
    monkeypatch.setattr(torch.ops, "mkldnn", library)
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
    assert [host.computes(dtype) for dtype in kinds] == [True, True, False, False]
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert [host.computes(dtype) for dtype in kinds] == [True, False, False, False]


PATTERNS = {
    "lengths": torch.tensor([3, 0, 5]),
    "cu_seqlens": torch.tensor([0, 3, 3, 8]),
    "rows": torch.tensor([0, 1, 2, 10, 11, 12, 13, 14]),
}


@BOTH
@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_live_rows_are_as_in_float64(
    by_library: bool, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, by_library)
    x, weight = torch.randn(3, 5, HIDDEN).to(dtype), torch.randn(INTER, HIDDEN).to(dtype)
    bias, pattern = torch.randn(INTER).to(dtype), {kind: PATTERNS[kind]}
    got = pit.linear_rows(x, weight, bias, activation="relu", **pattern)
    exact = (x.double() @ weight.double().T + bias.double()).relu()
    lives = torch.zeros(15, dtype=torch.bool)
    lives[PATTERNS["rows"]] = True
    exact = exact * lives.view(3, 5, 1)
    assert (got.double() - exact).norm() / exact.norm() < 2e-2
    assert got.dtype == dtype and not got.view(15, INTER)[~lives].any()


@BOTH
@pytest.mark.parametrize(
    ("kind", "pattern", "message"),
    [
        ("lengths", [3, 0, 6], "expected 0 to 5 rows, got 6 at position 2"),
        ("rows", [3, 15], "got 15"),
        ("cu_seqlens", [0, 3, 2, 8], "expected 0 to 5 rows, got -1 at position 1"),
    ],
)
def test_patterns_that_are_none(
    by_library: bool, kind: str, pattern: list[int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, by_library)
    x, weight = torch.randn(3, 5, HIDDEN).bfloat16(), torch.randn(INTER, HIDDEN).bfloat16()
    with pytest.raises(ShapeError, match=message):
        pit.linear_rows(x, weight, **{kind: torch.tensor(pattern)})
