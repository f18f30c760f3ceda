"""Gates with limits, offsets and columns that alternate, and layers of experts with biases."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pit_tvm import torch as pit
from pit_tvm.errors import DTypeError, PitError, ShapeError
from pit_tvm.torch import custom_ops, host

GROUPS, TOKENS, TOP_K, HIDDEN, INTER = 5, 13, 2, 16, 24
GPT_OSS = pit.Gate(0.7, 1.702, 1.0, interleaved=True)
GATES = {
    "plain": ("gelu", pit.Gate()),
    "a limit": ("relu", pit.Gate(0.4)),
    "alpha": ("silu", pit.Gate(alpha=-1.5)),
    "none of a sigmoid": ("silu", pit.Gate(alpha=0.0)),
    "an offset, in turn": ("gelu_tanh", pit.Gate(offset=-0.5, interleaved=True)),
    "gpt-oss": ("silu", GPT_OSS),
}
EACH = pytest.mark.parametrize("name", GATES)


def split(rows: np.ndarray, gate: pit.Gate) -> tuple[np.ndarray, np.ndarray]:
    half = rows.shape[-1] // 2
    found = (rows[..., ::2], rows[..., 1::2]) if gate.interleaved else np.split(rows, [half], -1)
    return found[0], found[1]


def act(name: str, alpha: float, x: np.ndarray) -> np.ndarray:
    if name == "relu":
        return np.maximum(x, 0)
    if name == "silu":
        return x / (1 + np.exp(-alpha * x))
    if name == "gelu":
        return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def exact(rows: np.ndarray, name: str, gate: pit.Gate) -> np.ndarray:
    gates, others = split(rows, gate)
    inner = np.clip(others, -gate.limit, gate.limit) + gate.offset
    return act(name, gate.alpha, np.minimum(gates, gate.limit)) * inner


@EACH
def test_host_gates_are_as_numpys(name: str) -> None:
    activation, gate = GATES[name]
    rows = torch.randn(7, 2 * INTER, dtype=torch.float64)
    rows[0, 3], rows[1, INTER + 3], rows[2, 4], rows[2, 5] = torch.nan, torch.nan, 50.0, -50.0
    got = host.gate_halves(rows, activation, gate)
    np.testing.assert_allclose(got, exact(rows.numpy(), activation, gate), rtol=1e-9, atol=1e-12)
    assert int(got.isnan().sum()) == 2


@EACH
def test_host_gradients_are_numpys_slopes(name: str) -> None:
    activation, gate = GATES[name]
    rows, down = torch.randn(7, 2 * INTER).double(), torch.randn(7, INTER).double()
    got, step = host.gate_gradient(rows, down, activation, gate), 1e-6
    slopes = np.empty(rows.shape)
    for column in range(2 * INTER):
        move = np.zeros(2 * INTER)
        move[column] = step
        above, below = (exact(rows.numpy() + by, activation, gate) for by in (move, -move))
        slopes[:, column] = ((above - below) / (2 * step) * down.numpy()).sum(-1)
    np.testing.assert_allclose(got, slopes, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_are_those_of_torchs_clamps(interleaved: bool) -> None:
    """Which pass at limits, and not beyond."""
    above = math.nextafter(0.5, 1)
    given = [(0.5, 0.5), (0.5, -0.5), (above, 0.2), (-9.0, above), (0.1, -above), (math.nan, 0.1)]
    pairs = torch.tensor(given, dtype=torch.float64)
    rows = (pairs if interleaved else pairs.T).reshape(-1).requires_grad_()
    gates, others = rows.view(-1, 2).T if interleaved else rows.view(2, -1)
    want = torch.nn.functional.silu(gates.clamp(max=0.5)) * others.clamp(-0.5, 0.5)
    got = torch.ops.pit_tvm.gated_activation(rows[None], "silu", 0.5, 1.0, 0.0, interleaved)
    torch.testing.assert_close(got[0], want, equal_nan=True)
    found, wanted = (torch.autograd.grad(out.sum(), rows)[0] for out in (got, want))
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert int((wanted == 0).sum()) == 4


def layer(dtype: torch.dtype, gate: pit.Gate | None, leaves: bool = True) -> list[Any]:
    """What `pit.moe_feed_forward` takes, with choices that are none."""
    wide = INTER if gate is None else 2 * INTER
    sizes = [(GROUPS, wide, HIDDEN), (GROUPS, HIDDEN, INTER), (GROUPS, wide), (GROUPS, HIDDEN)]
    x, *weights = (
        (torch.randn(size) * 0.5).to(dtype).requires_grad_(leaves)
        for size in ((TOKENS, HIDDEN), *sizes)
    )
    ids, shares = torch.randint(-1, GROUPS, (TOKENS, TOP_K)), torch.rand(TOKENS, TOP_K)
    return [x, ids, shares.requires_grad_(leaves), *weights]


def run(given: list[Any], activation: str, gate: pit.Gate | None) -> torch.Tensor:
    *first, up_bias, down_bias = given
    how: dict[str, Any] = {"activation": activation, "gated": gate or False}
    return pit.moe_feed_forward(*first, up_bias=up_bias, down_bias=down_bias, **how)


def wanted(given: list[Any], activation: str, gate: pit.Gate | None) -> torch.Tensor:
    """The same in float64."""
    x, ids, shares, up, down, up_bias, down_bias = (
        each.double() if each.is_floating_point() else each for each in given
    )
    out = torch.zeros_like(x)
    for expert in range(GROUPS):
        rows = x @ up[expert].T + up_bias[expert]
        inner = host.activate(activation)(rows) if gate is None else torch_gate(rows, gate)
        share = torch.where(ids == expert, shares, 0.0).sum(-1, keepdim=True)
        out = out + share * (inner @ down[expert].T + down_bias[expert])
    return out


def torch_gate(rows: torch.Tensor, gate: pit.Gate) -> torch.Tensor:
    gates, others = rows.unflatten(-1, (-1, 2)).unbind(-1) if gate.interleaved else rows.chunk(2, 1)
    gates, others = gates.clamp(max=gate.limit), others.clamp(-gate.limit, gate.limit)
    return gates * torch.sigmoid(gate.alpha * gates) * (others + gate.offset)


FORMS = [("gelu", None), ("silu", pit.Gate()), ("silu", pit.Gate(0.5, 0.8)), ("silu", GPT_OSS)]


@pytest.mark.parametrize(("activation", "gate"), FORMS)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("by_library", [True, False])
def test_layers_are_as_in_float64(
    activation: str,
    gate: pit.Gate | None,
    dtype: torch.dtype,
    bound: float,
    by_library: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "computes", lambda dtype: by_library)
    if dtype != torch.float32 and gate is not None:
        # Out of reach: rounding would decide on which side of a limit some numbers are.
        gate = replace(gate, limit=100.0)
    given = layer(dtype, gate)
    got, want = run(given, activation, gate), wanted(given, activation, gate)
    leaves = [each for each in given if each.requires_grad]
    down = torch.randn(TOKENS, HIDDEN)
    with torch.no_grad():
        whole = run(given, activation, gate)
    for one in (got, whole):
        assert (one.double() - want).norm() < bound * want.norm()
    found = torch.autograd.grad(got, leaves, down.to(dtype))
    exact = torch.autograd.grad(want, leaves, down.double())
    for one, other in zip(found, exact, strict=True):
        assert (one.double() - other.double()).norm() < bound * other.double().norm()


def test_gradients_of_gradients() -> None:
    given = layer(torch.float32, GPT_OSS)
    leaves = [each for each in given if each.requires_grad]
    twice = []
    for out in (run(given, "silu", GPT_OSS), wanted(given, "silu", GPT_OSS)):
        once = torch.autograd.grad(out.pow(3).sum(), leaves, create_graph=True)
        twice.append(torch.autograd.grad(sum(each.square().sum() for each in once), leaves))
    for one, other in zip(*twice, strict=True):
        assert (one - other).norm() < 1e-3 * other.norm()


def test_choices_that_are_none_add_no_bias() -> None:
    given = layer(torch.float32, GPT_OSS, leaves=False)
    given[1][:, 0], given[2][:, 1], given[-1][1] = -1, 0.0, torch.nan
    assert not run(given, "silu", GPT_OSS).any()
    for each in given[2:]:
        each.requires_grad_()
    assert not run(given, "silu", GPT_OSS).any()


def test_autocast_and_torchs_own_checks() -> None:
    given = layer(torch.float32, GPT_OSS, leaves=False)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(given, "silu", GPT_OSS)
    narrow = [each if i in (1, 2) else each.bfloat16() for i, each in enumerate(given)]
    torch.testing.assert_close(got, run(narrow, "silu", GPT_OSS))
    numbers = custom_ops.numbers_of(GPT_OSS)
    form = ("silu", True, *given[-2:], *numbers)
    ours = torch.ops.pit_tvm
    torch.library.opcheck(ours.moe_feed_forward.default, (*given[:-2], *form))
    rows = torch.randn(3, 2 * INTER, requires_grad=True)
    torch.library.opcheck(ours.gated_activation.default, (rows, "silu", *numbers))
    down = torch.randn(3, INTER)
    torch.library.opcheck(ours.gated_gradient.default, (rows.detach(), down, "silu", *numbers))


def test_biases_and_gates_that_do_not_fit() -> None:
    given = layer(torch.float32, GPT_OSS, leaves=False)
    for place, name, columns, of in ((5, "up_bias", 48, "up"), (6, "down_bias", 16, "down")):
        for wrong, error, says in (
            (given[place][:, :8], ShapeError, f"shape [5, {columns}], as {of}, got (5, 8)"),
            (given[place].half(), DTypeError, "torch.float32 with x of torch.float32"),
            (given[place].mT.contiguous().mT, ShapeError, "a contiguous tensor"),
            (given[place].tolist(), DTypeError, "a torch tensor, got list"),
            (given[place].to("meta"), DTypeError, "the device of x, cpu, got meta"),
        ):
            with pytest.raises(PitError) as caught:
                run([*given[:place], wrong, *given[place + 1 :]], "silu", GPT_OSS)
            assert isinstance(caught.value, error), caught.value
            assert str(caught.value).startswith(f"{name}: expected "), caught.value
            assert says in str(caught.value)
    with pytest.raises(ShapeError, match="^Gate.alpha: expected 1 for activations other than silu"):
        run(given, "gelu", GPT_OSS)
    with pytest.raises(ShapeError, match="^Gate.limit: expected a number, got 1000"):
        pit.Gate(limit=10**400)
    with pytest.raises(ShapeError, match="^Gate.alpha"):
        pit.MoeFeedForward(2, 8, 8, activation="relu", gated=GPT_OSS)


@pytest.mark.parametrize("gate", [None, GPT_OSS])
def test_module_with_biases(gate: pit.Gate | None) -> None:
    module = pit.MoeFeedForward(GROUPS, HIDDEN, INTER, bias=True, gated=gate or False)
    x, ids, shares, *_ = layer(torch.float32, gate, leaves=False)
    names = dict(module.named_parameters())
    assert list(names) == ["up", "down", "up_bias", "down_bias"] and "bias=True" in repr(module)
    torch.testing.assert_close(
        module(x, ids, shares), run([x, ids, shares, *names.values()], "silu", gate)
    )
    for name, bound in (("up_bias", HIDDEN**-0.5), ("down_bias", INTER**-0.5)):
        assert 0.5 * bound < names[name].abs().max() <= bound
    plain = pit.MoeFeedForward(GROUPS, HIDDEN, INTER)
    assert plain.up_bias is None and list(plain.state_dict()) == ["up", "down"]


@pytest.mark.parametrize("dynamic", [None, True])
def test_module_is_traced_and_exported(dynamic: bool | None) -> None:
    torch._dynamo.reset()
    module = pit.MoeFeedForward(GROUPS, HIDDEN, INTER, bias=True, gated=GPT_OSS)
    x, ids, shares, *_ = layer(torch.float32, GPT_OSS, leaves=False)
    traced = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    leaves = tuple(module.parameters())
    results = [run(x, ids, shares) for run in (traced, module)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), leaves) for out in results))
    with torch.no_grad():
        torch.testing.assert_close(traced(x, ids, shares), module(x, ids, shares))
        program = torch.export.export(module, (x, ids, shares))
        torch.testing.assert_close(program.module()(x, ids, shares), module(x, ids, shares))
