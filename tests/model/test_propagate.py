"""Whole graphs before and after: what runs on live tokens, what does not, and the results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from pit_tvm.model.attention import Attention
from pit_tvm.model.kernels import CpuKernels
from pit_tvm.model.packing import LIVE_TOKENS
from pit_tvm.model.propagate import BY_TOKEN, Decision, propagate
from pit_tvm.model.report import summary
from pit_tvm.runtime.live_tokens import live_tokens
from pit_tvm.target import resolve_target
from pit_tvm.windows import FULL
from tests.model.graphs import PLANE, B, T, graph, names

op = relax.op
ROWS = (B, T, 8)
MASK = ("int64", B, T)
WEIGHT, TABLE = (
    relax.const(np.random.default_rng(s).uniform(-1, 1, (8, 8)).astype("float32")) for s in (1, 2)
)
LOWEST = relax.const(np.array(np.finfo("float32").min))

Made = tuple[tvm.IRModule, tvm.IRModule, list[Decision], list[Attention]]


class Recorded(CpuKernels):
    """Notes the attentions that it is asked for."""

    def __init__(self) -> None:
        super().__init__(resolve_target("llvm"))
        self.found: list[Attention] = []

    def attention(self, builder: Any, found: Attention, operands: Any, ty: Any) -> Any:
        """As `CpuKernels.attention`."""
        self.found.append(found)
        return super().attention(builder, found, operands, ty)


def packed(make: Callable[..., Any], **params: Any) -> Made:
    """A graph of ``x`` and ``mask``, the same on live tokens, decisions, attentions."""
    before = graph(make, **{"x": ROWS, "mask": MASK} | params)
    kernels = Recorded()
    after, decisions = propagate(before, PLANE, "mask", kernels)
    return before, after, decisions, kernels.found


def count(module: tvm.IRModule) -> tuple[int, int]:
    """How many gathers of live tokens a graph has, and how many scatters."""
    found = names(module)
    scatters = sum(f.startswith("call_tir") for f in found)
    return found.count("take"), scatters


def assert_same(before: tvm.IRModule, after: tvm.IRModule) -> None:
    """Results are equal at live tokens, and 0 at dead ones."""
    rng = np.random.default_rng(0)
    mask = np.array([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [1, 0, 0, 1, 1]])
    inputs = [
        mask if p.name == "mask" else rng.uniform(-1, 1, (3, 5, 8)).astype("float32")
        for p in before["main"].params
    ]
    old, new = (evaluate(module, inputs) for module in (before, after))
    live = mask.astype(bool)
    np.testing.assert_allclose(new[live], old[live], rtol=1e-5, atol=1e-5)
    assert not new[~live].any()


def evaluate(module: tvm.IRModule, inputs: list[np.ndarray]) -> np.ndarray:
    """The result of ``main``."""
    tvm.register_global_func(
        LIVE_TOKENS,
        lambda mask: [tvm.runtime.tensor(part) for part in live_tokens(mask)],
        override=True,
    )
    machine = relax.VirtualMachine(relax.build(module, "llvm"), tvm.cpu())
    return machine["main"](*[tvm.runtime.tensor(i) for i in inputs]).numpy()


def product(x: Any) -> Any:
    """A product with weights."""
    return op.matmul(x, WEIGHT)


def test_one_gather_and_one_scatter_for_a_chain() -> None:
    before, after, decisions, _ = packed(
        lambda x, mask: op.nn.gelu(op.add(product(op.nn.relu(product(x))), x))
    )
    assert count(after) == (1, 1)
    assert all(d.live and not d.whole and d.reason == BY_TOKEN for d in decisions)
    assert [d.operator for d in decisions] == names(before)
    assert_same(before, after)


def test_one_gather_for_every_input() -> None:
    before, after, _, _ = packed(lambda x, mask, y: op.add(product(x), product(y)), y=ROWS)
    assert count(after) == (2, 1)
    assert_same(before, after)


def test_one_scatter_for_every_output() -> None:
    _, after, _, _ = packed(lambda x, mask: relax.Tuple([op.exp(x), relax.Tuple([product(x)])]))
    assert count(after) == (1, 2)


def test_padded_forms_are_gone() -> None:
    _, after, _, _ = packed(lambda x, mask: op.exp(product(x)))
    assert names(after).count("exp") == names(after).count("matmul") == 1


def test_positions_and_values_of_sequences_are_gathered() -> None:
    before, after, decisions, _ = packed(
        lambda x, mask, p, s: op.add(op.add(x, p), s), p=(T, 8), s=(B, 1, 8)
    )
    assert count(after) == (3, 1)
    assert all(d.live for d in decisions)


STOPS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "sorted": (lambda y: op.sort(y, 1), "sort", "orders tokens"),
    "reversed": (lambda y: op.flip(y, 1), "flip", "does not follow the tokens"),
    "softmax": (lambda y: op.nn.softmax(y, 1), "nn.softmax", "reduces over the tokens"),
    "mean": (
        lambda y: op.mean(y, [1], keepdims=True),
        "mean",
        "mean gives no value of single tokens",
    ),
    "pairs": (
        lambda y: op.matmul(op.matmul(y, op.permute_dims(y, [0, 2, 1])), y),
        "matmul",
        "matmul reads all tokens of a sequence",
    ),
}


@pytest.mark.parametrize("name", STOPS)
def test_operator_in_the_way_runs_on_all_tokens_and_is_named(name: str) -> None:
    stop, operator, reason = STOPS[name]
    before, after, decisions, _ = packed(
        lambda x, mask: op.exp(op.add(product(x), product(stop(product(x)))))
    )
    assert any(d.operator == operator and d.whole and reason in d.reason for d in decisions)
    assert any(d.operator == "exp" and d.live for d in decisions)
    assert not any(d.operator == "exp" and not d.live for d in decisions)
    assert_same(before, after)


def test_operator_with_several_results_is_named() -> None:
    def make(x: Any, mask: Any) -> Any:
        best = relax.BlockBuilder.current().emit(op.topk(product(x), 3, -1, "both"))
        return op.exp(op.concat([best[0], x], 2))

    before, after, decisions, _ = packed(make)
    (why,) = [d.reason for d in decisions if d.operator == "topk"]
    assert why == "gives several tensors" and any(d.operator == "exp" and d.live for d in decisions)
    assert "\n  topk -> " in summary(decisions)
    assert_same(before, after)


@pytest.mark.parametrize("stop", [lambda y: op.flip(y, 1), lambda y: op.sort(y, 1)])
def test_outputs_of_an_operator_in_the_way_are_zero_where_dead(stop: Any) -> None:
    before, after, _, _ = packed(lambda x, mask: stop(product(x)))
    assert_same(before, after)


def test_extents_as_values_keep_their_meaning() -> None:
    def make(x: Any, mask: Any) -> Any:
        return op.multiply(x, op.astype(op.expand_dims(op.multiply(mask, T), [2]), "float32"))

    before, after, _, _ = packed(make)
    assert_same(before, after)


def test_first_tokens_together_are_the_models_own() -> None:
    def make(x: Any, mask: Any) -> Any:
        first = op.take(product(x), relax.const(np.array([0, 1])), 1)
        return op.add(x, op.mean(first, [1], keepdims=True))

    before, after, _, _ = packed(make)
    assert_same(before, after)


def test_pooled_first_token_needs_no_padded_values() -> None:
    def make(x: Any, mask: Any) -> Any:
        return op.take(product(x), relax.const(np.array([0])), 1)

    _, after, decisions, _ = packed(make)
    assert names(after).count("matmul") == 1
    assert [d.reason for d in decisions] == [BY_TOKEN, "picks a token of each sequence"]
    assert not any(d.whole for d in decisions)


def test_sum_of_what_is_zero_where_dead_needs_no_padded_values() -> None:
    def make(x: Any, mask: Any) -> Any:
        return op.sum(op.multiply(product(x), op.astype(op.expand_dims(mask, [2]), "float32")), [1])

    _, after, decisions, _ = packed(make)
    assert names(after).count("matmul") == 1
    assert decisions[-1].reason == "reads tokens that are 0 where dead"


# --------------------------------------------------------------------------------------------
# Attention


def heads(y: Any, width: int = 4) -> Any:
    """``[batch, heads, tokens, width]``."""
    return op.permute_dims(op.reshape(y, relax.ShapeExpr([B, T, 2, width])), [0, 2, 1, 3])


def attend(x: Any, mask: Any, excluded: Any = LOWEST, **parts: Any) -> Any:
    """Attention of ``x`` with itself, unless keys or values ``[batch, heads, tokens, width]`` are
    given."""
    q, k, v = heads(product(x)), parts.get("k", heads(op.exp(x))), parts.get("v", heads(x))
    scores = op.multiply(op.matmul(q, op.permute_dims(k, [0, 1, 3, 2])), relax.const(np.float32(2)))
    seen = op.astype(op.expand_dims(mask, [1, 2]), "bool")
    scores = op.add(scores, op.where(seen, relax.const(np.float32(0)), excluded))
    return op.permute_dims(op.matmul(op.nn.softmax(scores, -1), v), [0, 2, 1, 3])


def merged(y: Any, width: int = 8) -> Any:
    """``[batch, tokens, width]``."""
    return op.reshape(y, relax.ShapeExpr([B, T, width]))


def test_attention_with_the_mask_runs_over_live_tokens() -> None:
    before, after, decisions, (found,) = packed(lambda x, mask: merged(attend(x, mask)))
    assert (found.heads, found.head_dim, found.scale, found.kind) == (2, 4, 2.0, FULL)
    assert any(d.reason == "attention, full, over live tokens" for d in decisions)
    assert "nn.softmax" not in names(after)
    assert_same(before, after)


def test_attention_of_one_head_in_three_dimensions() -> None:
    def make(x: Any, mask: Any) -> Any:
        q, k, v = (op.reshape(y, relax.ShapeExpr([B, 1, T, 8])) for y in (product(x), op.exp(x), x))
        keys = op.reshape(op.permute_dims(k, [0, 1, 3, 2]), relax.ShapeExpr([B, 8, T]))
        queries, values = (op.reshape(y, relax.ShapeExpr([B, T, 8])) for y in (q, v))
        scores = op.matmul(queries, keys)
        scores = op.reshape(scores, relax.ShapeExpr([B, 1, T, T]))
        seen = op.astype(op.expand_dims(mask, [1, 2]), "bool")
        scores = op.add(scores, op.where(seen, relax.const(np.float32(0)), LOWEST))
        weights = op.reshape(op.nn.softmax(scores, -1), relax.ShapeExpr([B, T, T]))
        mixed = op.reshape(op.matmul(weights, values), relax.ShapeExpr([B, 1, T, 8]))
        return merged(op.permute_dims(mixed, [0, 2, 1, 3]))

    before, after, decisions, _ = packed(make)
    assert any(d.reason.startswith("attention, ") for d in decisions)
    assert_same(before, after)


def test_attention_that_is_needed_padded_as_well_is_no_stop() -> None:
    def make(x: Any, mask: Any) -> Any:
        mixed = merged(attend(x, mask))
        return op.add(mixed, op.flip(mixed, 1))

    before, after, decisions, _ = packed(make)
    assert "nn.softmax" in names(after)  # of all tokens, for the flip
    whole = {d.operator: d.reason for d in decisions if d.whole}
    assert "does not follow the tokens" in whole["flip"]
    assert not any("over live tokens" in reason for reason in whole.values())
    assert_same(before, after)


def test_attention_to_dead_keys_stays_and_says_so() -> None:
    before, after, decisions, found = packed(
        lambda x, mask: merged(attend(x, mask, excluded=relax.const(np.float32(-2))))
    )
    assert found == [] and "nn.softmax" in names(after)
    (why,) = [d.reason for d in decisions if d.reason.startswith("attention")]
    assert why.startswith("attention: the mask lets live queries see dead keys")
    assert_same(before, after)


def test_attention_of_wider_values_is_the_models_own() -> None:
    def make(x: Any, mask: Any) -> Any:
        wide = heads(op.concat([x, op.exp(x)], 2), 8)
        return merged(attend(x, mask, v=wide), 16)

    before, after, _, _ = packed(make)
    assert_same(before, after)


@pytest.mark.parametrize("name", ["k", "v"])
def test_attention_of_heads_that_share_keys_or_values(name: str) -> None:
    def make(x: Any, mask: Any) -> Any:
        shared = op.strided_slice(heads(x), [1], [0], [1], assume_inbound=True)
        return merged(attend(x, mask, **{name: shared}))

    before, after, _, _ = packed(make)
    assert_same(before, after)
