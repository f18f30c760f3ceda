"""Custom operators that are called directly where torch's dispatcher has nothing to do."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _functorch as functorch

from ..runtime.torch_arrays import stored_weight

Formula = Callable[..., Any]

_PLAIN = (torch.Tensor, torch.nn.Parameter)
# On where many gradients are asked for at once: torch.autograd.grad(.., is_grads_batched=True).
_VMAP = torch._C._dispatch_key_parse("VmapMode")


class CustomOperator:
    """``torch.ops.pit_tvm.<name of the function>``, which takes and gives new tensors.

    The dispatcher takes 20 microseconds of the host for an operator in Python, and 50 where there
    are gradients. It is needed for tensors that stand for others (fake, wrapped, batched), for
    compilers, and for modes and profiles, which look at operators; plain tensors do without.
    ``strided``: the function takes tensors of any strides itself.
    """

    def __init__(self, function: Callable[..., Any], strided: bool = False) -> None:
        self._function, self._name = function, function.__name__
        register = torch.library.custom_op(f"pit_tvm::{self._name}", mutates_args=())
        self._library = register(function if strided else _of_any_strides(function))
        self._differentiated: Any = None

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What tells the results' shapes and types; a decorator."""
        return self._library.register_fake(function)

    def differentiate(self, formula: Formula) -> Formula:
        """The derivative: ``formula(ctx, gradient)``, with as many gradients as there are results,
        in which `arguments` gives those of the call; a decorator."""
        self._library.register_autograd(formula, setup_context=_keep)
        self._differentiated = _direct(self._function, formula)
        return formula

    def __call__(self, *args: Any) -> Any:
        """The result; as torch's own operators, of tensors that require gradients one that does."""
        seen = is_seen(args)
        if not seen and not differentiated(*args):
            return self._function(*args)
        if seen or self._differentiated is None:  # torch says on the way back that it is missing
            return getattr(torch.ops.pit_tvm, self._name)(*_alike(args))
        return self._differentiated.apply(*args)


def _of_any_strides(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as the dispatcher calls it: parts of distributed tensors lie as they were cut,
    and are copied. Calls without the dispatcher refuse such strides."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*map(_dense, args))

    return call


def _dense(value: Any) -> Any:
    """A tensor that is contiguous or turned, if it is one."""
    if not isinstance(value, torch.Tensor) or value.is_contiguous():
        return value
    turned = value.dim() > 1 and stored_weight(value)[1] == "kn"
    return value if turned else value.contiguous()


def differentiated(*args: Any) -> bool:
    """Whether gradients to one of the arguments may be asked for."""
    return torch.is_grad_enabled() and any(
        isinstance(each, torch.Tensor) and each.requires_grad for each in args
    )


def arguments(ctx: Any) -> list[Any]:
    """The arguments of the call that ``ctx`` is of, in order."""
    found, kept = list(ctx.others), ctx.saved_tensors
    for place, tensor in zip(ctx.places, kept[: len(ctx.places)], strict=True):
        found[place] = tensor
    return found


def results(ctx: Any) -> Sequence[torch.Tensor]:
    """The results of the call that ``ctx`` is of, where there were several."""
    kept: Sequence[torch.Tensor] = ctx.saved_tensors
    return kept[len(ctx.places) :]


def _keep(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    """Of several results only the first has a derivative, which may need all."""
    ctx.places = [i for i, each in enumerate(inputs) if isinstance(each, torch.Tensor)]
    ctx.others = [None if isinstance(each, torch.Tensor) else each for each in inputs]
    made = output if isinstance(output, tuple) else ()
    ctx.mark_non_differentiable(*made[1:])
    ctx.save_for_backward(*(inputs[place] for place in ctx.places), *made)


def _direct(function: Callable[..., Any], formula: Formula) -> Any:
    """The function with its derivative, without the dispatcher."""

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            out = function(*args)
            _keep(ctx, args, out)
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return formula(ctx, *gradients)

    return Direct


def _alike(args: Sequence[Any]) -> Sequence[Any]:
    """The arguments, all distributed if one tensor is."""
    distributed = sys.modules.get("torch.distributed.tensor")  # there may be such tensors
    if distributed is None or not any(isinstance(each, distributed.DTensor) for each in args):
        return args
    from .sharding import alike

    return alike(args)


def is_seen(args: Sequence[Any]) -> bool:
    """Whether somebody has to see the operator that is called."""
    if torch.compiler.is_compiling():
        return True
    for each in args:
        if isinstance(each, torch.Tensor) and (type(each) not in _PLAIN or each.is_meta):
            return True
    if torch._C._len_torch_dispatch_stack() or torch.autograd._profiler_enabled():
        return True
    if torch._C._dispatch_tls_is_dispatch_key_included(_VMAP):
        return True
    return functorch.peek_interpreter_stack() is not None or torch.jit.is_tracing()
