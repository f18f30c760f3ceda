"""Gradients through the torch surface, against float64 and torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from pit_tvm import torch as pit
from pit_tvm.errors import DTypeError, ShapeError
from pit_tvm.torch import host

ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda rows: rows,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "gelu": functional.gelu,
    "gelu_tanh": lambda rows: functional.gelu(rows, approximate="tanh"),
    "silu": functional.silu,
}
LIMITS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
BATCH, LENGTH, K, N, GROUPS, TOP_K = 4, 6, 16, 24, 5, 3
PATTERNS = {
    "lengths": torch.tensor([3, 0, 6, 2]),
    "cu_seqlens": torch.tensor([0, 3, 3, 9, 11], dtype=torch.int32),
    "rows": torch.tensor([23, 0, 7, 12]),
}
# Where our kernels and torch's library compute on the CPU.
BOTH = pytest.mark.parametrize("by_library", [True, False])


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    """Fresh random numbers; pytest shows the seed of a test that fails."""
    print("seed", torch.seed())
    yield


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A random tensor that gradients are asked of."""
    return torch.randn(shape).to(dtype).requires_grad_()


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error of a whole tensor."""
    difference = (got.detach().double() - want.detach().double()).norm()
    return float(difference / want.detach().double().norm().clamp(min=1e-30))


def check(
    got: torch.Tensor,
    want: torch.Tensor,
    leaves: tuple[torch.Tensor, ...],
    dead: torch.Tensor | None = None,
) -> None:
    """Both results, and their gradients to leaves, by the same random one, which is NaN where
    ``dead``."""
    limit = LIMITS[got.dtype]
    assert error(got, want) < limit
    down = torch.randn(got.shape).to(got.dtype)
    poisoned = down if dead is None else down.masked_fill(dead, torch.nan)
    exact = down if dead is None else down.masked_fill(dead, 0.0)
    found = torch.autograd.grad(got, leaves, poisoned)
    for one, other in zip(found, torch.autograd.grad(want, leaves, exact.double()), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert error(one, other) < limit


def live(kind: str) -> torch.Tensor:
    """bool [BATCH, LENGTH]: the rows that a pattern names."""
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    if kind == "rows":
        mask.view(-1)[PATTERNS[kind]] = True
    else:
        lengths = PATTERNS["lengths"]
        mask |= torch.arange(LENGTH) < lengths[:, None]
    return mask


@BOTH
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("kind", PATTERNS)
def test_live_rows_alone_count(
    kind: str, dtype: torch.dtype, by_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "computes", lambda dtype: by_library)
    x, weight, bias = leaf(BATCH, LENGTH, K, dtype=dtype), leaf(N, K, dtype=dtype), leaf(N)
    bias, alive = bias.detach().to(dtype).requires_grad_(), live(kind)[..., None]
    with torch.no_grad():
        x.masked_fill_(~alive, torch.nan)
    got = pit.linear_rows(x, weight, bias, **{kind: PATTERNS[kind]})
    clean = torch.where(alive, x, 0.0).double()
    want = torch.where(alive, clean @ weight.double().T + bias.double(), 0.0)
    check(got, want, (x, weight, bias), ~alive.expand(got.shape))
    (dx,) = torch.autograd.grad(pit.linear_rows(x, weight, **{kind: PATTERNS[kind]}).sum(), x)
    assert not dx[~alive[..., 0]].any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_differentiated(activation: str | None) -> None:
    x, weight, bias = leaf(BATCH, LENGTH, K), leaf(N, K), leaf(N)
    how: Any = {"activation": activation}
    alive, act = live("lengths")[..., None], ACTIVATIONS[activation]
    got = pit.linear_rows(x, weight, bias, lengths=PATTERNS["lengths"], **how)
    want = torch.where(alive, act(x.double() @ weight.double().T + bias.double()), 0.0)
    check(got, want, (x, weight, bias))
    weights, offsets, ids = leaf(GROUPS, N, K), leaf(GROUPS, N), routed((BATCH, LENGTH))
    got = pit.grouped_linear(x, weights, ids, offsets, **how)
    check(got, grouped(x, weights, ids, offsets, act), (x, weights, offsets))


def routed(shape: tuple[int, ...]) -> torch.Tensor:
    """Random ids of all groups but the last, and -1."""
    return torch.randint(-1, GROUPS - 1, shape)


def grouped(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor | None,
    act: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """`pit.grouped_linear` in float64: every row by all weights, of which one is picked."""
    every = torch.einsum("...k,gnk->...gn", x.double(), weight.double())
    if bias is not None:
        every = every + bias.double()
    if ids.dim() == x.dim():  # several choices
        every = every[..., None, :, :]
    picked = functional.one_hot(ids.clamp(min=0), len(weight)) * (ids >= 0)[..., None]
    return (picked[..., None] * act(every)).sum(-2)


@BOTH
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("choices", [(), (1,), (TOP_K,)])
@pytest.mark.parametrize("turned", [False, True])
def test_groups_get_the_gradients_of_their_rows(
    choices: tuple[int, ...],
    turned: bool,
    dtype: torch.dtype,
    by_library: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "computes", lambda dtype: by_library)
    sizes = (GROUPS, K, N) if turned else (GROUPS, N, K)
    x, stored, bias = leaf(7, K, dtype=dtype), leaf(*sizes, dtype=dtype), leaf(GROUPS, N)
    bias, ids = bias.detach().to(dtype).requires_grad_(), routed((7, *choices))
    weight = stored.mT if turned else stored
    got = pit.grouped_linear(x, weight, ids, bias)
    want = grouped(x, weight, ids, bias, lambda rows: rows)
    check(got, want, (x, stored, bias), (ids < 0)[..., None].expand(got.shape))


def layer(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    act: Callable[[torch.Tensor], torch.Tensor],
    gated: bool,
) -> torch.Tensor:
    """`pit.moe_feed_forward` in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert, (wide, narrow) in enumerate(zip(up.double(), down.double(), strict=True)):
        rows = x.double() @ wide.T
        gate, *other = rows.chunk(2, -1) if gated else (rows,)
        inner = act(gate) * other[0] if gated else act(gate)
        share = torch.where(ids == expert, weights.double(), 0.0).sum(-1, keepdim=True)
        out = out + share * (inner @ narrow.T)
    return out


@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("gelu", False)])
@pytest.mark.parametrize("dtype", LIMITS)
def test_a_layer_of_experts_is_differentiated(
    dtype: torch.dtype, activation: str, gated: bool
) -> None:
    x, ids = leaf(3, 5, K, dtype=dtype), routed((3, 5, TOP_K))
    up, down = leaf(GROUPS, 2 * N if gated else N, K, dtype=dtype), leaf(GROUPS, K, N, dtype=dtype)
    weights = torch.rand(3, 5, TOP_K).masked_fill(ids == 1, 0.0).requires_grad_()
    got = pit.moe_feed_forward(x, ids, weights, up, down, activation=activation, gated=gated)
    want = layer(x, ids, weights, up, down, ACTIVATIONS[activation], gated)
    check(got, want, (x, weights, up, down))
    with torch.no_grad():
        whole = pit.moe_feed_forward(x, ids, weights, up, down, activation=activation, gated=gated)
    assert error(whole, got) < LIMITS[dtype]


@pytest.mark.parametrize("activation", ["relu", "relu2", "gelu", "gelu_tanh", "silu"])
def test_gates_and_their_gradients(activation: str) -> None:
    rows = leaf(3, 5, 2 * N)

    def made() -> tuple[torch.Tensor, torch.Tensor]:
        gate, other = rows.double().chunk(2, -1)
        got = torch.ops.pit_tvm.gated_activation(rows, activation)
        return got, ACTIVATIONS[activation](gate) * other

    check(*made(), (rows,))
    got, want = (
        torch.autograd.grad(out.pow(3).sum(), rows, create_graph=True)[0] for out in made()
    )
    check(got, want.double(), (rows,))


def test_gradients_of_gradients() -> None:
    x, weight, bias = leaf(BATCH, LENGTH, K), leaf(N, K), leaf(N)
    alive = live("rows")[..., None]
    weights, ids = leaf(GROUPS, K, N), routed((BATCH, LENGTH, TOP_K))

    def twice(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = (x, weight, weights)
        once = torch.autograd.grad(out.pow(3).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in once), (*leaves, bias))

    inner = pit.linear_rows(x, weight, bias, rows=PATTERNS["rows"], activation="silu")
    found = twice(pit.grouped_linear(inner, weights, ids))
    inner = torch.where(alive, functional.silu(x.double() @ weight.double().T + bias.double()), 0.0)
    exact = twice(grouped(inner, weights, ids, None, lambda rows: rows))
    for one, other in zip(found, exact, strict=True):
        assert error(one, other) < 1e-4


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("dtype", LIMITS)
def test_many_gradients_at_once(dtype: torch.dtype) -> None:
    x, weight, ids = leaf(BATCH, LENGTH, K, dtype=dtype), leaf(N, K, dtype=dtype), routed((BATCH,))
    rows = pit.linear_rows(x, weight, lengths=PATTERNS["lengths"], activation="gelu")
    up, down = leaf(GROUPS, 2 * K, N, dtype=dtype), leaf(GROUPS, N, K, dtype=dtype)
    shares = leaf(BATCH, 1)
    out = pit.moe_feed_forward(rows[:, 0].contiguous(), ids[:, None], shares, up, down)
    leaves, downs = (x, weight, up, down, shares), torch.randn(3, *out.shape).to(dtype)
    many = torch.autograd.grad(out, leaves, downs, retain_graph=True, is_grads_batched=True)
    single = [torch.autograd.grad(out, leaves, each, retain_graph=True) for each in downs]
    for got, want in zip(many, zip(*single, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(want))


@settings(deadline=None, max_examples=30)
@given(
    tokens=st.integers(0, 9),
    choices=st.integers(0, 3),
    groups=st.integers(1, 4),
    drawn=st.randoms(use_true_random=False),
)
def test_any_routing(tokens: int, choices: int, groups: int, drawn: Any) -> None:
    ids = torch.tensor([[drawn.randrange(-1, groups) for _ in range(choices)]] * tokens)
    ids = ids.long().reshape(tokens, choices)[:, torch.randperm(choices)]
    x, weight, bias = leaf(tokens, 3), leaf(groups, 2, 3), leaf(groups, 2)
    check(
        pit.grouped_linear(x, weight, ids, bias),
        grouped(x, weight, ids, bias, lambda rows: rows),
        (x, weight, bias),
    )


@BOTH
@pytest.mark.parametrize("dtype", LIMITS)
def test_layers_without_columns(
    dtype: torch.dtype, by_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "computes", lambda dtype: by_library)
    x, weight, bias = leaf(BATCH, LENGTH, K, dtype=dtype), leaf(0, K, dtype=dtype), leaf(0)
    up, down = leaf(GROUPS, 0, K, dtype=dtype), leaf(GROUPS, K, 0, dtype=dtype)
    ids, bias = routed((BATCH, LENGTH, TOP_K)), bias.detach().to(dtype).requires_grad_()
    for got, leaves in (
        (pit.linear_rows(x, weight, bias, lengths=PATTERNS["lengths"]), (x, weight, bias)),
        (pit.grouped_linear(x, up, ids), (x, up)),
        (pit.moe_feed_forward(x, ids, torch.rand(ids.shape), up, down), (x, up, down)),
    ):
        found = torch.autograd.grad(got.sum(), leaves, create_graph=True)
        assert not got.any() and not any(each.any() for each in found)
        assert [each.shape for each in found] == [each.shape for each in leaves]
        sum(each.sum() for each in found).backward()  # type: ignore[union-attr]
        assert not x.grad.any()  # type: ignore[union-attr]


def test_what_is_not_asked_for_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(BATCH, LENGTH, K), leaf(N, K)
    seen: list[str] = []
    outer = host.live_groups
    monkeypatch.setattr(host, "live_groups", lambda *a: seen.append("") or outer(*a))
    (dw,) = torch.autograd.grad(pit.linear_rows(x, weight, rows=PATTERNS["rows"]).sum(), weight)
    assert dw.shape == weight.shape and not seen
    rows = x.view(-1, K)[PATTERNS["rows"]].sum(0)
    torch.testing.assert_close(dw, rows.expand(N, K))


def test_layers_learn_with_torchs_optimisers_and_compilers() -> None:
    first, second = (pit.LinearRows(K, K, activation="gelu") for _ in range(2))
    second.load_state_dict(first.state_dict())
    compiled = torch.compile(second, fullgraph=True)
    x, lengths = torch.randn(BATCH, LENGTH, K), PATTERNS["lengths"]
    for module, run in ((first, first), (second, compiled)):
        optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
        losses = []
        for _ in range(4):
            optimiser.zero_grad()
            loss = (run(x, lengths=lengths) - x).square().mean()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        assert losses == sorted(losses, reverse=True)
    torch.testing.assert_close(first.state_dict(), second.state_dict())


@pytest.mark.parametrize("call", ["linear_rows", "grouped_linear", "moe_feed_forward"])
def test_autocast_chooses_the_type_as_for_torchs_layers(call: str) -> None:
    x, ids = leaf(BATCH, LENGTH, K), routed((BATCH, LENGTH, 1)).clamp(min=0)
    up, down, weights = leaf(GROUPS, N, K), leaf(GROUPS, K, N), torch.rand(ids.shape)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "linear_rows": lambda: pit.linear_rows(x, up[0], leaf(N), lengths=PATTERNS["lengths"]),
        "grouped_linear": lambda: pit.grouped_linear(x, up, ids),
        "moe_feed_forward": lambda: pit.moe_feed_forward(x, ids, weights, up, down, gated=False),
    }
    with torch.autocast("cpu", torch.bfloat16):
        got = calls[call]()
    assert got.dtype == torch.bfloat16 and calls[call]().dtype == torch.float32
    dx, dup = torch.autograd.grad(got.float().sum(), (x, up))
    assert dx.dtype == dup.dtype == torch.float32 and dx.any() and dup.any()


@pytest.mark.parametrize("dtype", LIMITS)
def test_autocast_changes_no_gradients_of_what_was_computed_without_it(dtype: torch.dtype) -> None:
    x, weight, ids = leaf(BATCH, LENGTH, K, dtype=dtype), leaf(K, K, dtype=dtype), routed((24, 2))
    up, down, shares = leaf(GROUPS, N, K, dtype=dtype), leaf(GROUPS, K, N, dtype=dtype), leaf(24, 2)
    rows = pit.linear_rows(x, weight, lengths=PATTERNS["lengths"], activation="gelu").view(24, K)
    out = pit.moe_feed_forward(rows, ids, shares, up, down, gated=False)
    loss, leaves = out.square().sum(), (x, weight, up, down, shares)
    want = torch.autograd.grad(loss, leaves, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(loss, leaves)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("activation", ["relu", "relu2", "gelu", "gelu_tanh", "silu"])
def test_activations_of_rows_have_all_derivatives(activation: str) -> None:
    rows = torch.zeros(BATCH, LENGTH, 3, dtype=torch.float64)
    rows.view(-1, 3)[PATTERNS["rows"]] = torch.randn(4, 3, dtype=torch.float64)
    rows.requires_grad_()

    def call(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.pit_tvm.activate_rows(
            rows, PATTERNS["rows"], "rows", activation
        )
        return out.view(-1, 3)[PATTERNS["rows"]]

    assert torch.autograd.gradcheck(call, rows) and torch.autograd.gradgradcheck(call, rows)


def test_operators_themselves_have_no_gradients_behind_activations() -> None:
    x, weight = leaf(BATCH, K), leaf(N, K)
    out = torch.ops.pit_tvm.linear_rows(x, weight, None, torch.tensor([1]), "rows", "relu")
    with pytest.raises(DTypeError, match="^activation: expected None where gradients go, got relu"):
        out.sum().backward()


def test_wrong_calls_say_so_with_gradients_too() -> None:
    x, weight = leaf(BATCH, K), leaf(GROUPS, N, K)
    ids = torch.zeros(BATCH, dtype=torch.int64)
    with pytest.raises(DTypeError, match="^activation: .*got tanh"):
        pit.grouped_linear(x, weight, ids, activation="tanh")
    with pytest.raises(ShapeError, match="got 5 at position 2"):
        pit.grouped_linear(x, weight, torch.tensor([0, 1, GROUPS, 0]))
