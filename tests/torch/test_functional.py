"""The torch surface on the CPU: values, fake implementations, torch.compile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pit_tvm import torch as pit
from pit_tvm.errors import DTypeError, PitError, ShapeError

M, N, K, GROUPS = 4, 40, 24, 3  # batch, columns, depth, experts
PADDED = 7


def data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(M, PADDED, K, generator=make)
    return x, torch.randn(N, K, generator=make), torch.randn(N, generator=make)


def exact(x: Any, weight: Any, bias: Any, live: np.ndarray, activation: str | None) -> np.ndarray:
    out = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    if activation == "relu":
        out = out.relu()
    elif activation is not None:
        gelu = torch.nn.functional.gelu
        out = torch.nn.functional.silu(out) if activation == "silu" else gelu(out)
    return np.where(live[..., None], out.detach().numpy(), 0.0)


def live_of(lengths: list[int]) -> np.ndarray:
    return np.arange(PADDED)[None] < np.array(lengths)[:, None]


@pytest.mark.parametrize("lengths", [[3, 0, 7, 1], [0] * M, [PADDED] * M])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_linear_rows_by_lengths(lengths: list[int], activation: str | None) -> None:
    x, weight, bias = data()
    got = pit.linear_rows(x, weight, bias, lengths=torch.tensor(lengths), activation=activation)
    want = exact(x, weight, bias, live_of(lengths), activation)
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pattern", [{"lengths": [7, 3]}, {"cu_seqlens": [0, 7, 9]}])
def test_lengths_of_other_sequences_than_those_of_x_are_refused(pattern: dict[str, Any]) -> None:
    x, weight, _ = data()
    ((name, numbers),) = pattern.items()
    with pytest.raises(ShapeError, match=rf"{name}: expected the {M} sequences of x, got 2"):
        pit.linear_rows(x, weight, **{name: torch.tensor(numbers)})


def test_the_three_ways_to_name_rows_agree() -> None:
    x, weight, _ = data()
    lengths = [2, 5, 0, 7]
    live = live_of(lengths)
    want = exact(x, weight, None, live, None)
    sums = torch.tensor(np.cumsum([0, *lengths]))
    rows = torch.tensor(np.random.default_rng().permutation(np.flatnonzero(live)))
    for pattern in ({"lengths": torch.tensor(lengths)}, {"cu_seqlens": sums}, {"rows": rows}):
        got = pit.linear_rows(x, weight, **pattern)
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-4)


def test_grouped_linear() -> None:
    x, _, _ = data()
    weight, bias = torch.randn(GROUPS, N, K), torch.randn(GROUPS, N)
    ids = torch.randint(-1, GROUPS, (M, PADDED), dtype=torch.int32)
    got = pit.grouped_linear(x, weight, ids, bias, activation="relu")
    each = torch.einsum("bsk,gnk->gbsn", x.double(), weight.double()) + bias.double()[:, None, None]
    picked = torch.zeros(M, PADDED, N, dtype=torch.float64)
    for group in range(GROUPS):
        picked = torch.where((ids == group)[..., None], each[group].relu(), picked)
    np.testing.assert_allclose(got.numpy(), picked.numpy(), rtol=1e-4, atol=1e-4)


def test_grouped_linear_with_several_choices() -> None:
    x, weight = torch.randn(5, 6, K), torch.randn(GROUPS, N, K)
    ids = torch.randint(-1, GROUPS, (5, 6, 2))
    got = pit.grouped_linear(x, weight, ids)
    assert got.shape == (5, 6, 2, N)
    for choice in range(2):
        alone = pit.grouped_linear(x, weight, ids[..., choice])
        torch.testing.assert_close(got[:, :, choice], alone)
    with pytest.raises(ShapeError, match="group_ids"):
        pit.grouped_linear(x, weight, ids[0])


def test_operators_pass_torchs_own_checks() -> None:
    x, weight, bias = data()
    arguments = (x, weight, bias, torch.tensor([3, 0, 7, 1]), "lengths", "relu")
    torch.library.opcheck(torch.ops.pit_tvm.linear_rows.default, arguments)
    ids = torch.randint(-1, GROUPS, (M, PADDED), dtype=torch.int32)
    grouped = (x, torch.randn(GROUPS, N, K), None, ids, None)
    torch.library.opcheck(torch.ops.pit_tvm.grouped_linear.default, grouped)


def test_products_of_int8_are_int32_when_compiled_too() -> None:
    x, weight = (torch.randint(-9, 9, size, dtype=torch.int8) for size in ((PADDED, K), (N, K)))
    rows, ids = torch.tensor([0, 2, 5]), torch.tensor([0, -1, 1, 1, 0, 0, 1], dtype=torch.int32)
    arguments = (x, weight, None, rows, "rows", None)
    torch.library.opcheck(torch.ops.pit_tvm.linear_rows.default, arguments)
    grouped = (x, weight.reshape(2, N // 2, K), None, ids, None)
    torch.library.opcheck(torch.ops.pit_tvm.grouped_linear.default, grouped)

    def model(x: torch.Tensor) -> torch.Tensor:
        return pit.linear_rows(x, weight, rows=rows).float()

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))


def test_compiled_without_a_graph_break() -> None:
    x, weight, bias = data()
    module = pit.LinearRows(K, N, activation="relu")

    def model(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return module(x * 2, lengths=lengths) + 1

    lengths = torch.tensor([3, 0, 7, 1])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, lengths), model(x, lengths))


def test_a_weight_that_is_stored_in_by_out_is_refused_with_advice() -> None:
    x, weight, _ = data()
    with pytest.raises(ShapeError, match=r"^x: .*pass weight\.mT$"):
        pit.linear_rows(x, weight.T.contiguous(), lengths=torch.ones(M, dtype=torch.int64))


def test_a_pattern_must_be_given_once() -> None:
    x, weight, _ = data()
    with pytest.raises(ShapeError, match="exactly one of lengths"):
        pit.linear_rows(x, weight)
    with pytest.raises(ShapeError, match="exactly one of lengths"):
        pit.linear_rows(x, weight, lengths=torch.tensor([1]), rows=torch.tensor([1]))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weight": torch.zeros(N, K + 1)}, "x: expected"),
        ({"weight": torch.zeros(N)}, "weight: expected 2 dimensions"),
        ({"bias": torch.zeros(N + 1)}, "bias"),
        ({"lengths": torch.tensor([3, 0, 7, PADDED + 1])}, "lengths"),
        ({"lengths": torch.tensor([1.0] * M)}, "expected int32 or int64"),
    ],
)
def test_arguments_that_do_not_fit(change: dict[str, torch.Tensor], match: str) -> None:
    x, weight, bias = data()
    arguments = {"weight": weight, "bias": bias, "lengths": torch.tensor([1] * M), **change}
    with pytest.raises(PitError, match=match):
        pit.linear_rows(x, **arguments)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("top_k", [1, 3])
def test_moe_feed_forward(gated: bool, top_k: int) -> None:
    hidden, inter, tokens = 16, 24, 11
    layer = pit.MoeFeedForward(GROUPS, hidden, inter, gated=gated)
    x = torch.randn(tokens, hidden)
    ids = torch.randint(-1, GROUPS, (tokens, top_k))
    weights = torch.rand(tokens, top_k)
    want = torch.zeros(tokens, hidden, dtype=torch.float64)
    up, down = layer.up.detach().double(), layer.down.detach().double()
    for t in range(tokens):
        for c in range(top_k):
            expert = int(ids[t, c])
            if expert >= 0:
                inner = up[expert] @ x[t].double()
                silu = torch.nn.functional.silu
                inner = silu(inner[:inter]) * inner[inter:] if gated else silu(inner)
                want[t] += float(weights[t, c]) * (down[expert] @ inner)
    got = layer(x, ids, weights).detach().double()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert f"experts={GROUPS}" in repr(layer)


def test_moe_feed_forward_passes_torchs_own_checks() -> None:
    x, ids, weights = torch.randn(5, 16), torch.randint(0, GROUPS, (5, 2)), torch.rand(5, 2)
    up, down = torch.randn(GROUPS, 48, 16), torch.randn(GROUPS, 16, 24)
    arguments = (x, ids, weights, up, down, "silu", True)
    torch.library.opcheck(torch.ops.pit_tvm.moe_feed_forward.default, arguments)


def test_moe_arguments_that_do_not_fit() -> None:
    x, ids, weights = torch.randn(5, 16), torch.randint(0, GROUPS, (5, 2)), torch.rand(5, 2)
    up, down = torch.randn(GROUPS, 48, 16), torch.randn(GROUPS, 16, 24)
    with pytest.raises(ShapeError, match="down"):
        pit.moe_feed_forward(x, ids, weights, up, down[:, :8])
    with pytest.raises(ShapeError, match="up: expected 3 dimensions"):
        pit.moe_feed_forward(x, ids, weights, up[0], down)
    with pytest.raises(PitError, match="activation"):
        pit.moe_feed_forward(x, ids, weights, up, down, activation="sine")


# Shapes of what is computed with, and what else each function takes.
CALLS: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, torch.Tensor]]] = {
    "linear_rows": ({"x": (6, K), "weight": (N, K), "bias": (N,)}, {"rows": torch.arange(3)}),
    "grouped_linear": (
        {"x": (6, K), "weight": (GROUPS, N, K), "bias": (GROUPS, N)},
        {"group_ids": torch.zeros(6, dtype=torch.int32)},
    ),
    "moe_feed_forward": (
        {
            "x": (6, K),
            "up": (GROUPS, 48, K),
            "down": (GROUPS, K, 24),
            "up_bias": (GROUPS, 48),
            "down_bias": (GROUPS, K),
        },
        {"expert_ids": torch.zeros(6, 1, dtype=torch.int32), "expert_weights": torch.rand(6, 1)},
    ),
}


@pytest.mark.parametrize(
    ("function", "name"), [(function, name) for function in CALLS for name in CALLS[function][0]]
)
@pytest.mark.parametrize("learns", [False, True])
def test_errors_name_the_arguments_of_the_function(function: str, name: str, learns: bool) -> None:
    shapes, others = CALLS[function]
    given = {key: torch.randn(shape, requires_grad=learns) for key, shape in shapes.items()}
    call = getattr(pit, function)
    if len(shapes[name]) > 1:
        with pytest.raises(ShapeError, match=f"^{name}: expected a contiguous tensor"):
            call(**given | {name: given[name].repeat_interleave(2, -1)[..., ::2]}, **others)
    if function == "linear_rows":  # the others' are read by torch itself here
        with pytest.raises(ShapeError, match=f"^{name}: expected a plain tensor, got a negated"):
            call(**given | {name: torch._neg_view(given[name])}, **others)
    if name != "x":
        expected = "torch.float32 with x of torch.float32, got torch.float16"
        with pytest.raises(DTypeError, match=f"^{name}: expected {expected}"):
            call(**given | {name: given[name].half()}, **others)


@pytest.mark.parametrize("ids", [[0] * 5, torch.zeros(5), torch.zeros(5, dtype=torch.bool)])
def test_ids_are_int32_or_int64_tensors(ids: Any) -> None:
    x, up, down = torch.randn(5, 16), torch.randn(GROUPS, 48, 16), torch.randn(GROUPS, 16, 24)
    with pytest.raises(DTypeError, match="group_ids"):
        pit.grouped_linear(x, up, ids)
    choices = ids[:, None] if isinstance(ids, torch.Tensor) else ids
    with pytest.raises(DTypeError, match="expert_ids"):
        pit.moe_feed_forward(x, choices, torch.rand(5, 1), up, down)
    with pytest.raises(DTypeError, match="rows: expected a torch tensor"):
        pit.linear_rows(x, up[0], rows=[0, 1])


def test_wide_ids_are_not_cut_off() -> None:
    x, weight = torch.randn(4, K), torch.randn(GROUPS, N, K)
    ids = torch.tensor([0, 1, 2**32, -1])
    with pytest.raises(PitError, match="4294967296"):
        pit.grouped_linear(x, weight, ids)


def test_routing_is_that_of_the_tokens() -> None:
    x, ids, weights = torch.randn(12, 16), torch.randint(0, GROUPS, (12, 2)), torch.rand(12, 2)
    up, down = torch.randn(GROUPS, 48, 16), torch.randn(GROUPS, 16, 24)
    with pytest.raises(ShapeError, match="expert_ids"):
        pit.moe_feed_forward(x, ids[:6], weights[:6], up, down)
    with pytest.raises(ShapeError, match="expert_weights"):
        pit.moe_feed_forward(x, ids, weights[:6], up, down)
    with pytest.raises(DTypeError, match="expert_weights"):
        pit.moe_feed_forward(x, ids, ids, up, down)


def test_moe_widths_and_activations_that_do_not_fit() -> None:
    x, ids, weights = torch.randn(5, 16), torch.randint(0, GROUPS, (5, 2)), torch.rand(5, 2)
    up, down = torch.randn(GROUPS, 49, 16), torch.randn(GROUPS, 16, 24)
    with pytest.raises(ShapeError, match="up: expected an even number"):
        pit.moe_feed_forward(x, ids, weights, up, down)
    with pytest.raises(ShapeError, match="^gated: expected True or False, got 'no'"):
        pit.moe_feed_forward(x, ids, weights, up, down, gated="no")  # type: ignore[arg-type]
    for activation in (3, None):
        with pytest.raises(DTypeError, match="activation"):
            pit.moe_feed_forward(x, ids, weights, up[:, :48], down, activation=activation)  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="activation"):
        pit.linear_rows(x, up[0], rows=ids[0], activation=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("tokens", "top_k"), [(0, 0), (0, 2), (4, 0)])
def test_moe_without_tokens_or_choices(tokens: int, top_k: int) -> None:
    layer, ids = pit.MoeFeedForward(GROUPS, 16, 24), torch.zeros(tokens, top_k, dtype=torch.int64)
    got = layer(torch.randn(tokens, 16), ids, torch.rand(tokens, top_k))
    torch.testing.assert_close(got, torch.zeros(tokens, 16))


def test_moe_of_tokens_that_are_not_contiguous_is_compiled() -> None:
    layer, ids = pit.MoeFeedForward(GROUPS, 16, 24), torch.randint(0, GROUPS, (3, 2, 2))
    x, weights = torch.randn(2, 3, 16).transpose(0, 1), torch.rand(3, 2, 2)
    arguments = (x, ids, weights, layer.up.detach(), layer.down.detach(), "silu", True)
    torch.library.opcheck(torch.ops.pit_tvm.moe_feed_forward.default, arguments)
    assert layer(x, ids, weights).is_contiguous()


@pytest.mark.filterwarnings("ignore:Sparse.*beta state", "ignore:.*prototype stage")
@pytest.mark.parametrize(
    ("other", "error", "seen"),
    [
        (
            torch.Tensor.to_sparse,
            ShapeError,
            "strided tensor, got torch.sparse_coo; pass .to_dense",
        ),
        (torch.Tensor.to_sparse_csr, ShapeError, "strided tensor, got torch.sparse_csr"),
        (
            lambda x: torch.nested.nested_tensor([x, x]),
            DTypeError,
            "nested tensor; pass .to_padded",
        ),
        (lambda x: x[:, :0], ShapeError, r"depth of at least 1, got \(5, 0\)"),
    ],
)
def test_operands_are_dense_and_have_a_depth(other: Any, error: type[PitError], seen: str) -> None:
    x, ids = other(torch.randn(5, 16)), torch.zeros(5, 1, dtype=torch.int32)
    depth = 0 if not x.is_nested and 0 in x.shape else 16
    up, down = torch.randn(GROUPS, 48, depth), torch.randn(GROUPS, depth, 24)
    for run in (
        lambda: pit.linear_rows(x, up[0], rows=ids[0]),
        lambda: pit.grouped_linear(x, up, ids),
        lambda: pit.moe_feed_forward(x, ids, torch.rand(5, 1), up, down),
    ):
        with pytest.raises(error, match=f"x: expected .*{seen}"):
            run()


@pytest.mark.parametrize("name", ["group_ids", "weight", "bias"])
def test_what_stands_beside_x_is_dense_too(name: str) -> None:
    given = {"weight": torch.randn(GROUPS, N, K), "group_ids": torch.zeros(4, dtype=torch.int32)}
    given["bias"] = torch.randn(GROUPS, N)
    given[name] = given[name].to_sparse()
    with pytest.raises(ShapeError, match=f"{name}: expected a strided tensor"):
        pit.grouped_linear(torch.randn(4, K), **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", ["linear_rows", "grouped_linear"])
def test_a_bias_is_never_spread(function: str, dtype: torch.dtype) -> None:
    shapes, others = CALLS[function]
    given = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    whole = shapes["bias"]
    for shape in ((), (1,), (*whole[:-1], 1), (*whole[:-1], N + 1), (*whole, 1), (5, *whole[1:])):
        with pytest.raises(ShapeError, match=f"^bias: expected shape .*{N}], as weight"):
            getattr(pit, function)(**given | {"bias": torch.zeros(shape, dtype=dtype)}, **others)


@pytest.mark.parametrize("function", CALLS)
def test_tensors_are_where_x_is(function: str) -> None:
    shapes, others = CALLS[function]
    given = {name: torch.randn(shape) for name, shape in shapes.items()} | others
    for name in given.keys() - {"x"}:
        with pytest.raises(DTypeError, match=f"^{name}: expected the device of x, cpu, got meta"):
            getattr(pit, function)(**given | {name: given[name].to("meta")})


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64, torch.int8])
def test_types_of_x(function: str, dtype: torch.dtype) -> None:
    shapes, others = CALLS[function]
    given = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    if dtype == torch.int8 and function != "moe_feed_forward":
        given["bias"] = given["bias"].int()
        assert getattr(pit, function)(**given, **others).dtype == torch.int32
        with pytest.raises(DTypeError, match="^activation: .*'relu' for x of int8"):
            getattr(pit, function)(**given, **others, activation="gelu")
        return
    with pytest.raises(DTypeError, match=f"^x: expected .*, got {dtype}"):
        getattr(pit, function)(**given, **others)
