"""How ``torch.distributed`` may split the custom operators: sharding rules of DTensors.

A product's tokens, the columns of its weight, or its depth may lie on different devices; its
gradients are products that split the same way, so a layer is trained as it is computed. What no
rule splits (the experts of a weight) is brought together first. Rules are of one dimension of a
device mesh; torch combines them for more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

# Placements of the results, and of the arguments that are tensors, present or not.
Rule = tuple[tuple[Placement, ...], tuple[Placement, ...]]
Rules = Callable[..., Iterator[Rule]]

_WHOLE, _SUM = Replicate(), Partial()


def alike(args: Sequence[Any]) -> list[Any]:
    """The arguments of an operator, of which one is a DTensor, as DTensors of its mesh. Plain
    tensors are those that every device has."""
    mesh = next(each.device_mesh for each in args if isinstance(each, DTensor))
    places = [_WHOLE] * mesh.ndim
    return [
        DTensor.from_local(each, mesh, places, run_check=False)
        if isinstance(each, torch.Tensor) and not isinstance(each, DTensor)
        else each
        for each in args
    ]


def _rules_of(*names: str) -> Callable[[Rules], Rules]:
    """Tell torch the rules of operators, beside that of whole tensors; a decorator."""

    def register(rules: Rules) -> Rules:
        for name in names:
            operator = getattr(torch.ops.pit_tvm, name).default
            register_sharding(operator)(_strategies(rules, len(operator._schema.returns)))
        return rules

    return register


def _strategies(rules: Rules, results: int) -> Callable[..., list[tuple[list[Any], list[Any]]]]:
    """The rules as torch asks for them: lists, without places of arguments that are no tensors."""

    def strategies(*args: Any) -> list[tuple[list[Any], list[Any]]]:
        is_tensor = [hasattr(each, "ndim") for each in args]
        whole = (_WHOLE,) * results, (_WHOLE,) * len(args)
        return [
            (list(outputs), [at for at, here in zip(inputs, is_tensor, strict=False) if here])
            for outputs, inputs in (whole, *rules(*args))
        ]

    return strategies


@_rules_of("linear_rows")
def _(
    x: Any, weight: Any, bias: Any, pattern: Any, kind: str, activation: str | None
) -> Iterator[Rule]:
    last = x.ndim - 1
    yield (Shard(last),), (_WHOLE, Shard(0), Shard(0), _WHOLE)
    if activation is None:
        yield (_SUM,), (Shard(last), Shard(1), _SUM, _WHOLE)
    if kind == "lengths" and x.ndim == 3:
        yield (Shard(0),), (Shard(0), _WHOLE, _WHOLE, Shard(0))


@_rules_of("outer_rows")
def _(left: Any, right: Any, pattern: Any, kind: str) -> Iterator[Rule]:
    last = left.ndim - 1
    yield (Shard(0),), (Shard(last), _WHOLE, _WHOLE)
    yield (Shard(1),), (_WHOLE, Shard(last), _WHOLE)
    if kind == "lengths" and left.ndim == 3:
        yield (_SUM,), (Shard(0), Shard(0), Shard(0))


@_rules_of("activate_rows", "activate_rows_gradient")
def _(rows: Any, *others: Any) -> Iterator[Rule]:
    *down, _, kind, _ = others  # the gradient has one to the results beside the rows
    alike = 1 + len(down)
    yield (Shard(rows.ndim - 1),), (Shard(rows.ndim - 1),) * alike + (_WHOLE,)
    if kind == "lengths" and rows.ndim == 3:
        yield (Shard(0),), (Shard(0),) * (alike + 1)


@_rules_of("grouped_linear")
def _(x: Any, weight: Any, bias: Any, ids: Any, activation: str | None) -> Iterator[Rule]:
    last = x.ndim - 1
    yield (Shard(ids.ndim),), (_WHOLE, Shard(1), Shard(1), _WHOLE)
    if activation is None:
        yield (_SUM,), (Shard(last), Shard(2), _SUM, _WHOLE)
    for dim in range(last):
        yield (Shard(dim),), (Shard(dim), _WHOLE, _WHOLE, Shard(dim))


@_rules_of("grouped_outer")
def _(left: Any, right: Any, ids: Any, groups: int) -> Iterator[Rule]:
    last = right.ndim - 1
    yield (Shard(1),), (Shard(left.ndim - 1), _WHOLE, _WHOLE)
    yield (Shard(2),), (_WHOLE, Shard(last), _WHOLE)
    for dim in range(last):
        yield (_SUM,), (Shard(dim), Shard(dim), Shard(dim))


@_rules_of("gated_activation", "gated_gradient")
def _(rows: Any, *_: Any) -> Iterator[Rule]:
    for dim in range(rows.ndim - 1):
        yield (Shard(dim),), (Shard(dim), Shard(dim))


@_rules_of("combine_choices")
def _(rows: Any, weights: Any, ids: Any) -> Iterator[Rule]:
    tokens = rows.ndim - 2
    yield (Shard(tokens),), (Shard(tokens + 1), _WHOLE, _WHOLE)
    yield (_SUM,), (_SUM, _WHOLE, _WHOLE)
    for dim in range(tokens):
        yield (Shard(dim),), (Shard(dim), Shard(dim), Shard(dim))


@_rules_of("spread_choices")
def _(rows: Any, weights: Any, ids: Any, down: Any) -> Iterator[Rule]:
    tokens = rows.ndim - 2
    yield (Shard(tokens + 1), _SUM), (Shard(tokens + 1), _WHOLE, _WHOLE, Shard(tokens))
    yield (_WHOLE, _SUM), (_SUM, _WHOLE, _WHOLE, _WHOLE)
    for dim in range(tokens):
        yield (Shard(dim),) * 2, (Shard(dim),) * 4


@_rules_of("sum_choices")
def _(rows: Any) -> Iterator[Rule]:
    tokens = rows.ndim - 2
    yield (Shard(tokens),), (Shard(tokens + 1),)
    yield (_SUM,), (_SUM,)
    for dim in range(tokens):
        yield (Shard(dim),), (Shard(dim),)


@_rules_of("moe_feed_forward")
def _(
    x: Any, ids: Any, weights: Any, up: Any, down: Any, activation: str, gated: bool, *_: Any
) -> Iterator[Rule]:
    beside = (_WHOLE,) * 2  # in the places of activation and gated
    if not gated:  # a shard of gates and others would hold gates alone
        yield (_SUM,), (*(_WHOLE,) * 3, Shard(1), Shard(2), *beside, Shard(1), _SUM)
    for dim in range(x.ndim - 1):
        yield (Shard(dim),), (*(Shard(dim),) * 3, *(_WHOLE,) * 2, *beside, *(_WHOLE,) * 2)
