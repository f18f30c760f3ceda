"""What the first layer's experts of a spread model give, compared with others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from bench_experts import OURS, THEIRS, relative_error


def first_experts(
    model: Any, run: Callable[[], Any], top: Any, train: bool
) -> tuple[list[Any], Any, Any]:
    """The first layer's experts in ``run``: their output, and with ``train`` the gradients of what
    their block is given and of their weights, for a fixed random gradient of the output of ``top``,
    a module that has them; then what the block is given, and what ``run`` returns."""
    import torch

    block = model.model.layers[0].mlp
    kept: dict[str, Any] = {}

    def keep_given(_: Any, args: tuple[Any, ...]) -> None:
        kept["given"] = args[0]
        if train:
            args[0].retain_grad()

    hooks = [
        block.register_forward_pre_hook(keep_given),
        block.experts.register_forward_hook(lambda _, __, out: kept.update(out=out)),
        top.register_forward_hook(lambda _, __, out: kept.update(top=out)),
    ]
    with contextlib.nullcontext() if train else torch.no_grad():
        returned = run()
    for hook in hooks:
        hook.remove()
    found, given = [kept["out"]], kept["given"]
    if train:
        out = kept["top"][0] if isinstance(kept["top"], tuple) else kept["top"]
        made = torch.Generator().manual_seed(0)
        model.zero_grad(set_to_none=True)
        out.backward(torch.randn(out.shape, generator=made).to(out))
        found += [given.grad, *(weight.grad for weight in block.experts.parameters())]
    return found, _whole(given), returned


def _whole(tensor: Any) -> Any:
    """All of a tensor that may be spread, on every rank."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def _here(tensor: Any) -> Any:
    """The part of a tensor that may be spread that this rank has: each compares its own."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def compare(model: Any, alone: Any | None, ids: Any, train: bool) -> dict[str, float]:
    """Deviations of ours from what they are compared with, by its name; ``logits`` are theirs."""

    def result(kind: str) -> tuple[list[Any], Any, Any]:
        model.set_experts_implementation(kind)
        return first_experts(model, lambda: model(ids).logits, model.model.layers[0], train)

    (theirs, _, expected), (ours, given, logits) = result(THEIRS), result(OURS)
    pairs = [(_here(got), _here(want).float()) for got, want in zip(ours, theirs, strict=True)]
    logits = [(_whole(logits), _whole(expected).float())]
    found = {THEIRS: relative_error(pairs), "logits": relative_error(logits)}
    if alone is not None:
        alone.set_experts_implementation("eager")
        given, block = given.requires_grad_(train), alone.model.layers[0].mlp
        wanted, _, _ = first_experts(alone, lambda: block(given), block, train)
        pairs = [(_whole(got), want.float()) for got, want in zip(ours, wanted, strict=True)]
        found["one process"] = relative_error(pairs)
    model.zero_grad(set_to_none=True)
    return found
