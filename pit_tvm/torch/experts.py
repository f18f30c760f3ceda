"""Experts of transformers' mixture-of-experts models, computed here.

    from pit_tvm import torch as pit

    pit.register_experts()
    model.set_experts_implementation("pit_tvm")

Models keep their weights, routers and checkpoints, and are trained as before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

from ..errors import BackendUnavailable, mismatch
from ..gates import Gate
from ..remember import remember
from ..runtime.promise import asked_for
from . import host
from .custom_ops import combine_choices
from .functional import grouped_linear, moe_feed_forward

# What transformers' classes of activations compute, by their names, of what kernels know.
_ACTIVATIONS = {
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
    "SiLU": "silu",
    "SiLUActivation": "silu",
}
# What makes a call of a module, one of these, more than what its class computes.
_HOOKS = (
    *("forward", "_forward_hooks", "_forward_pre_hooks"),
    *("_backward_hooks", "_backward_pre_hooks"),
)
Form = tuple[str, bool | Gate]  # an activation, and what `moe_feed_forward` calls gated
# Of gates, by them, their activations, and numbers that they may read.
_FORMS: dict[object, Form | None] = {}
# Numbers of modules that gates may read, and what gates raise that read anything else.
_LIMITS, _ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")
_NOT_HERE = (
    *(ArithmeticError, AssertionError, AttributeError),
    *(LookupError, RuntimeError, TypeError, ValueError),
)


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

    One fused layer (`moe_feed_forward`) where the module is an activation, or what some `Gate`
    computes, between two products, with biases or not; else two grouped products with what the
    module has between and behind them: another gate or activation, a norm.

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
    biases = None, None
    if module.has_bias:
        first = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        biases = first, module.down_proj_bias
    x, ids = hidden_states.to(up.dtype).contiguous(), top_k_index.contiguous()
    form = _form_of(module)
    if _may_be_elsewhere(module, form is not None and x.is_cuda):
        ids = ids.masked_fill(ids >= up.shape[0], -1)
    if form is None:
        out = _by_products(module, (up, down), biases, x, ids, top_k_weights)
    else:
        out = moe_feed_forward(
            *(x, ids, top_k_weights, up, down),
            up_bias=biases[0],
            down_bias=biases[1],
            activation=form[0],
            gated=form[1],
        )
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
    told = _said(module, "_is_expert_parallel")
    silent = fused and not torch.is_grad_enabled() and not asked_for()
    return not silent if told is None else bool(told)


def _form_of(module: Any) -> Form | None:
    """How `moe_feed_forward` computes a module; None where it does not."""
    act, own = getattr(module, "act_fn", None), vars(module)
    activation = _ACTIVATIONS.get(type(act).__name__)
    if activation is not None and any(vars(act).get(name) for name in _HOOKS):
        activation = None  # somebody has to see what it is given, or changes it
    if _has_norm(module) or "_apply_gate" in own:
        return None
    if not module.has_gate:
        return None if activation is None else (activation, False)
    found = [(name, own[name]) for name in (*_LIMITS, *_ALPHAS) if name in own]
    numbers = [(name, _constant(n)) for name, n in found if isinstance(n, (int, float))]
    key = type(module)._apply_gate, activation, *numbers
    _learn(*key)
    return _FORMS[key]


def _constant(number: float) -> float:
    """A number that torch.compile knows, also where it took it for one that varies."""
    return guard_scalar(number) if torch.compiler.is_compiling() else number


@torch.compiler.assume_constant_result  # torch.compile calls it while it traces
def _learn(gate: Callable[..., Any], activation: str | None, *numbers: tuple[str, float]) -> None:
    """Have in `_FORMS` what ``gate`` computes, a method of modules with such numbers."""
    key = gate, activation, *numbers
    if key not in _FORMS:
        # In a thread of its own: a caller's modes, fake tensors and autocast, are not on there.
        with ThreadPoolExecutor(1) as alone:
            found = alone.submit(_compare, gate, activation, dict(numbers)).result()
        remember(_FORMS, key, found)


def _compare(
    gate: Callable[..., Any], activation: str | None, numbers: dict[str, float]
) -> Form | None:
    """The activation and the `Gate` that give the same as ``gate`` and have the same gradients,
    below, at and beyond all limits; None if there are none, or if it reads more of its module than
    the given."""
    module, activations = SimpleNamespace(**numbers), {"silu"}
    if activation is not None:
        module.act_fn = host.activate(activation)
        activations.add(activation)
    limits = {numbers[name] for name in _LIMITS if 0 < numbers.get(name, 0) < math.inf}
    alphas = {numbers[name] for name in _ALPHAS if math.isfinite(numbers.get(name, math.nan))}
    rows = _rows_about(limits).requires_grad_()
    try:
        got = gate(module, rows.clone())
        found = torch.cat((got, torch.autograd.grad(got.sum(), rows)[0]), -1)
    except _NOT_HERE:
        return None
    # Some compute in float32, as kernels do.
    bound = 1e-5 if torch.equal(got, got.float().to(got.dtype)) else 1e-12
    forms = product({math.inf, *limits}, {1.0, *alphas}, (0.0, 1.0), (False, True))
    for act, tried in product(activations, (Gate(*form) for form in forms)):
        if act != "silu" and tried.alpha != 1.0:
            continue
        there = host.gate_halves(rows, act, tried)
        there = torch.cat((there, host.gate_gradient(rows, torch.ones_like(there), act, tried)), -1)
        if found.shape == there.shape and torch.allclose(found.double(), there, bound, bound):
            return act, tried
    return None


def _rows_about(limits: set[float]) -> torch.Tensor:
    """Rows of gates and others, all pairs of numbers around the limits: in halves, and in turn."""
    near = torch.tensor([-2.0, -1.0, -0.6, -0.1, 0.3, 1.0, 1.9], dtype=torch.float64, device="cpu")
    numbers = torch.cat([near * by for by in sorted({1.0, *limits})])
    pairs, many = torch.cartesian_prod(numbers, numbers), len(numbers)
    halves = pairs.T.reshape(2, many, many).movedim(0, 1).flatten(1)
    return torch.cat((halves, pairs.reshape(many, 2 * many)))


def _has_norm(module: Any) -> bool:
    return bool(_said(module, "has_post_expert_norm"))


def _said(module: Any, name: str) -> Any:
    """What a module, or its class, says, None where it does not, as in older releases: that takes
    `getattr` 4 us of the host."""
    return vars(module).get(name, getattr(type(module), name, None))


def _by_products(
    module: Any,
    weights: tuple[torch.Tensor, torch.Tensor],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
) -> torch.Tensor:
    rows = grouped_linear(x, weights[0], ids, biases[0])
    rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    rows = grouped_linear(rows.contiguous(), weights[1], ids, biases[1])
    if _has_norm(module):
        rows = module.post_expert_norm(rows)
    return combine_choices(rows.to(x.dtype).contiguous(), shares, ids)
