"""Experts of transformers' mixture-of-experts models, computed here.

    from pit_tvm import torch as pit

    pit.register_experts()
    model.set_experts_implementation("pit_tvm")

Models keep their weights, routers and checkpoints, and are trained as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..errors import BackendUnavailable, mismatch
from ..runtime.promise import asked_for
from .custom_ops import combine_choices
from .functional import grouped_linear, moe_feed_forward

# What transformers' classes of activations compute, by their names, of what kernels know.
_ACTIVATIONS = {
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "SiLU": "silu",
    "SiLUActivation": "silu",
}
_INTERFACE = "transformers.integrations.moe"


def register_experts(name: str = "pit_tvm") -> None:
    """Make `experts_forward` known to transformers, for ``model.set_experts_implementation(name)``
    and ``from_pretrained(..., experts_implementation=name)``.

    Raises
    ------
    BackendUnavailable
        transformers is missing, or has no interface of experts.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        advice = "pip install 'transformers>=5'"
        expected = "a transformers with an interface of experts"
        got = mismatch("register_experts", expected, str(error), advice)
        raise BackendUnavailable(got) from error
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)


def experts_forward(
    experts: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Forward of a module that transformers' ``use_experts_implementation`` decorates.

    One fused layer (`moe_feed_forward`) where the module is an activation, gated or not, between
    two products; else two grouped products with what the module has between and behind them:
    biases, a gate of its own, another activation, a norm.

    Parameters
    ----------
    experts
        The module, with weights ``[experts, out, in]``, or ``[experts, in, out]`` if it says so.
    hidden_states
        ``[..., hidden]``.
    top_k_index, top_k_weights
        ``[..., top_k]``: experts, and their weights. -1 adds nothing.

    Returns
    -------
    ``[..., hidden]``

    Raises
    ------
    ShapeError, DTypeError
        An argument does not fit.
    """
    module: Any = experts
    up, down = module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj
    if module.is_transposed:
        up, down = up.mT, down.mT
    x, ids = hidden_states.to(up.dtype).contiguous(), top_k_index.contiguous()
    activation = _fused_activation(module)
    if _may_be_elsewhere(module, activation is not None and x.is_cuda):
        ids = ids.masked_fill(ids >= up.shape[0], -1)
    if activation is None:
        out = _by_products(module, up, down, x, ids, top_k_weights)
    else:
        how: dict[str, Any] = {"activation": activation, "gated": module.has_gate}
        out = moe_feed_forward(x, ids, top_k_weights, up, down, **how)
    return out.to(hidden_states.dtype)


@contextmanager
def experts_here(model: torch.nn.Module) -> Iterator[None]:
    """For a time, all modules of experts in ``model`` that transformers decorates run
    `experts_forward`, whatever is set; instances are changed, no configuration is."""
    found: list[Any] = [each for each in model.modules() if _is_decorated(each)]
    before = [vars(each).get("forward") for each in found]
    try:
        for each in found:
            each.forward = partial(experts_forward, each)
        yield
    finally:
        for each, own in zip(found, before, strict=True):
            del each.forward
            if own is not None:
                each.forward = own


def _is_decorated(module: torch.nn.Module) -> bool:
    known = ("_apply_gate", "has_gate", "has_bias", "is_transposed")
    return all(hasattr(module, name) for name in known)


def _may_be_elsewhere(module: Any, fused: bool) -> bool:
    """Whether ids may be beyond, of experts of other devices, where that matters. Older releases do
    not say; a GPU's ``fused`` layer leaves such choices out, if ids are not checked."""
    silent = fused and not torch.is_grad_enabled() and not asked_for()
    return bool(getattr(module, "_is_expert_parallel", not silent))


def _fused_activation(module: Any) -> str | None:
    """The activation of a module that is nothing but a layer of `moe_feed_forward`."""
    own_gate = module.has_gate and type(module)._apply_gate.__module__ != _INTERFACE
    if own_gate or module.has_bias or _has_norm(module):
        return None
    return _ACTIVATIONS.get(type(module.act_fn).__name__)


def _has_norm(module: Any) -> bool:
    return getattr(module, "has_post_expert_norm", False)  # older releases know of none


def _by_products(
    module: Any,
    up: torch.Tensor,
    down: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    bias, beside = None, None
    if module.has_bias:
        bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        beside = module.down_proj_bias
    rows = grouped_linear(x, up, ids, bias)
    rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    rows = grouped_linear(rows.contiguous(), down, ids, beside)
    if _has_norm(module):
        rows = module.post_expert_norm(rows)
    return combine_choices(rows.to(x.dtype).contiguous(), weights, ids)
