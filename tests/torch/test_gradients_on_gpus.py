"""Gradients through the torch surface on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from pit_tvm import torch as pit
from pit_tvm.gates import PLAIN, Gate
from pit_tvm.torch import operators
from pit_tvm.torch.custom_ops import numbers_of
from pit_tvm.torch.host import gate_halves
from tests.torch.test_gradients import ACTIVATIONS, GROUPS, LIMITS, error, layer, leaf, routed

pytestmark = pytest.mark.gpu
EACH = pytest.mark.parametrize("activation", ["relu", "relu2", "gelu", "gelu_tanh", "silu"])
BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


@BOTH
@pytest.mark.parametrize(("n", "k"), [(264, 136), (100, 77)])
def test_live_rows_on_a_gpu(n: int, k: int, dtype: torch.dtype) -> None:
    lengths = torch.randint(0, 51, (7,), device="cuda")
    alive = (torch.arange(50, device="cuda") < lengths[:, None])[..., None]
    x, weight, bias = (leaf(*size, dtype=dtype) for size in ((7, 50, k), (n, k), (n,)))
    x, weight, bias = (t.detach().cuda().requires_grad_() for t in (x, weight, bias))
    with torch.no_grad():
        x.masked_fill_(~alive, torch.nan)
    got = pit.linear_rows(x, weight, bias, lengths=lengths, activation="gelu")
    clean = torch.where(alive, x, 0.0).double()
    exact = functional.gelu(clean @ weight.double().T + bias.double())
    check_on_gpu(got, torch.where(alive, exact, 0.0), (x, weight, bias))


@BOTH
@pytest.mark.parametrize(
    ("tokens", "top_k", "hidden", "inter"), [(301, 2, 136, 264), (64, 1, 8, 8)]
)
def test_experts_on_a_gpu(
    tokens: int, top_k: int, hidden: int, inter: int, dtype: torch.dtype
) -> None:
    sizes = ((tokens, hidden), (GROUPS, 2 * inter, hidden), (GROUPS, hidden, inter))
    x, up, down = (leaf(*size, dtype=dtype).detach().cuda().requires_grad_() for size in sizes)
    ids, weights = routed((tokens, top_k)).cuda(), torch.rand(tokens, top_k).cuda().requires_grad_()
    got = pit.moe_feed_forward(x, ids, weights, up, down)
    rest = (functional.silu, True)
    leaves = (x, weights, up, down)
    exact = layer(*(t.cpu() for t in (x, ids, weights, up, down)), *rest)
    check_on_gpu(got, exact.cuda(), leaves)


@BOTH
@EACH
@pytest.mark.parametrize("gate", [PLAIN, Gate(2.0, offset=1.0, interleaved=True)])
def test_gates_on_a_gpu(gate: Gate, activation: str, dtype: torch.dtype) -> None:
    for number, width in ((1, 8), (301, 136), (64, 1024)):
        rows = (3 * torch.randn(number, 2 * width)).to(dtype).cuda().requires_grad_()
        with torch.no_grad():
            rows[0, :4] = torch.tensor([0.0, -0.0, 60.0, -60.0])
        got = torch.ops.pit_tvm.gated_activation(rows, activation, *numbers_of(gate))
        check_on_gpu(got, gate_halves(rows.double(), activation, gate), (rows,))


@BOTH
@EACH
@pytest.mark.parametrize("many", [0, operators.MANY])
def test_activations_of_rows_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, many: int, activation: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(operators, "MANY", many)
    for batch, length, n in ((1, 1, 8), (7, 43, 136), (18, 512, 1024)):
        lengths = torch.randint(0, length + 1, (batch,), device="cuda")
        dead = torch.arange(length, device="cuda") >= lengths[:, None]
        rows, down = ((3 * torch.randn(batch, length, n, device="cuda")).to(dtype) for _ in "xy")
        rows[dead], down[dead] = 0.0, torch.nan
        if not dead[0, 0]:
            rows.view(-1)[:4] = torch.tensor([0.0, -0.0, 60.0, -60.0])
        rows.requires_grad_()
        rows.new_full(rows.shape, torch.nan)  # memory that the call gets
        got = torch.ops.pit_tvm.activate_rows(rows, lengths, "lengths", activation)
        want = ACTIVATIONS[activation](rows.double())
        assert error(got, want) < LIMITS[dtype] and not got[dead].any()
        (found,), (exact,) = (
            torch.autograd.grad(out, rows, down.to(out.dtype)) for out in (got, want)
        )
        assert error(found[~dead], exact[~dead]) < LIMITS[dtype]


def test_gradients_are_looked_through_for_nan() -> None:
    x, weight = (torch.randn(6, 8, device="cuda").half().requires_grad_() for _ in "xw")
    x.new_full((6, 6), torch.nan)
    with torch.autograd.detect_anomaly(check_nan=True):
        rows = torch.tensor([1, 4], device="cuda")
        pit.linear_rows(x, weight, rows=rows, activation="gelu").sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def check_on_gpu(got: torch.Tensor, want: torch.Tensor, leaves: tuple[torch.Tensor, ...]) -> None:
    """As `check`, by a gradient that lives where the result does."""
    limit, down = LIMITS[got.dtype], torch.randn(got.shape, device="cuda").to(got.dtype)
    assert error(got, want) < limit
    found = torch.autograd.grad(got, leaves, down)
    exact = torch.autograd.grad(want, leaves, down.double())
    assert all(error(*pair) < limit for pair in zip(found, exact, strict=True))
