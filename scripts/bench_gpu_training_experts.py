"""Training steps of whole layers of experts: data, what they give exactly, and the contenders.

What the peers move is moved back by gathers too: torch's own derivative of a gather adds rows up
with atomics, and that of picking an expert's weights from all of them fills the rest with zeros,
once for each expert. A torch that compiles for the GPU compiles what lies between their products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench_gpu_cases import Layer
from bench_gpu_layer import make_data
from bench_gpu_measure import GpuSettings, generator, normal
from bench_gpu_rivals import LayerData, activate, by_expert, combine_sorted, compiled

from pit_tvm.errors import PitError
from pit_tvm.torch import moe_feed_forward

# Of 1 in the root mean square: sums of a few thousand products in float32 are off by less.
SAFE = 3e-5

Tensors = tuple[torch.Tensor, ...]
Forward = Callable[..., torch.Tensor]
Step = Callable[[], Tensors]


def step_of(forward: Forward, leaves: Tensors, dy: torch.Tensor) -> Step:
    """What runs one step: the result of ``forward(*leaves)``, and by the gradient ``dy`` to it
    those to all leaves, in their order."""

    def step() -> Tensors:
        y = forward(*leaves)
        return (y.detach(), *torch.autograd.grad(y, leaves, dy))

    return step


@dataclass(frozen=True)
class ExpertsData:
    """A layer, whose ``x``, ``gates``, ``up`` and ``down`` are leaves, and the gradient to its
    result."""

    layer: LayerData
    dy: torch.Tensor

    @property
    def leaves(self) -> Tensors:
        """What gradients go to."""
        return self.layer.x, self.layer.gates, self.layer.up, self.layer.down


def make_experts(case: Layer, settings: GpuSettings) -> ExpertsData:
    """The arrays of the suite ``layer``, and a random gradient.

    It is 0 for tokens that a ReLU's input is close to 0 of: on which side rounding puts that is
    chance, and decides about a whole row of a gradient.
    """
    layer = make_data(case, settings)
    made = generator(settings.rng(f"{case.label} gradient"), settings.device)
    data = ExpertsData(layer, normal(made, layer.x.shape, case.dtype))
    if case.act == "relu":
        for rows, (x, _, up, _) in _each(data):
            close = ((x @ up.t()).abs() < SAFE).any(1)
            data.dy[(rows // case.top_k)[close]] = 0.0
    for leaf in data.leaves:
        leaf.requires_grad_()
    return data


def _each(data: ExpertsData) -> Iterator[tuple[torch.Tensor, Tensors]]:
    """Of every expert its choices, and in float64 their tokens, gates and weights."""
    layer = data.layer
    order = layer.ids.flatten().argsort(stable=True)
    x, gates, up, down = (leaf.detach() for leaf in data.leaves)
    for expert, rows in enumerate(order.split(layer.counts)):
        taken = (x[rows // layer.case.top_k], gates.flatten()[rows], up[expert], down[expert])
        yield rows, tuple(each.double() for each in taken)


def wanted(data: ExpertsData) -> Tensors:
    """float64: the result, and its gradients to x, gates, up and down."""
    case, dy = data.layer.case, data.dy
    want = [torch.zeros(t.shape, dtype=torch.float64, device=t.device) for t in (dy, *data.leaves)]
    y, dx, dgates, dup, ddown = want
    for expert, (rows, taken) in enumerate(_each(data)):
        x, gates, up, down = leaves = tuple(each.requires_grad_() for each in taken)
        out = activate(x @ up.t(), case.act, case.gated) @ down.t() * gates[:, None]
        tokens = rows // case.top_k
        found = torch.autograd.grad(out, leaves, dy[tokens].double())
        y.index_add_(0, tokens, out.detach())
        dx.index_add_(0, tokens, found[0])
        dgates.view(-1)[rows] = found[1]
        dup[expert], ddown[expert] = found[2:]
    return tuple(want)


# --------------------------------------------------------------------------------------------
# Contenders


def pit_layer(
    x: torch.Tensor,
    gates: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    act: str,
    gated: bool,
) -> torch.Tensor:
    """The layer as users call it."""
    return moe_feed_forward(x, ids, gates, up, down, activation=act, gated=gated)


def sum_choices(rows: torch.Tensor, places: torch.Tensor, top_k: int) -> torch.Tensor:
    """Of each token the sum of its rows, which stand by expert."""
    return rows[places].view(-1, top_k, rows.shape[1]).float().sum(1).to(rows.dtype)


def uncombine(
    dy: torch.Tensor,
    rows: torch.Tensor,
    gates: torch.Tensor,
    choices: torch.Tensor,
    tokens: torch.Tensor,
    places: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `bench_gpu_rivals.combine_sorted` to rows and gates."""
    drows = dy[tokens].float() * gates.flatten()[choices][:, None]
    parts = rows[places].view(*gates.shape, -1).float()
    return drows.to(rows.dtype), (parts * dy[:, None].float()).sum(-1)


@dataclass(frozen=True)
class Between:
    """What lies between the products of the peers."""

    index: Callable[..., Any]
    activate: Callable[..., Any]
    combine: Callable[..., Any]
    back: tuple[Callable[..., Any], Callable[..., Any]]

    @classmethod
    def on(cls, device: str) -> Between:
        """Compiled where that is a GPU."""
        parts = (by_expert, activate, combine_sorted, sum_choices, uncombine)
        index, act, combine, *back = (compiled(part, device) for part in parts)
        return cls(index, act, combine, (back[0], back[1]))


class Spread(torch.autograd.Function):
    """Rows of tokens, by expert: x, tokens, places, top_k, between."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
        """[choices, n]."""
        ctx.rest = rest
        return x[tokens]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """To x."""
        places, top_k, between = ctx.rest
        return between.back[0](gradients[0], places, top_k), None, None, None, None


class Collect(torch.autograd.Function):
    """Weighted sums of the choices of each token: rows by expert, gates, (choices, tokens, places),
    between."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, gates: torch.Tensor, order: Tensors, between: Between
    ) -> torch.Tensor:
        """[tokens, n]."""
        ctx.save_for_backward(rows, gates)
        ctx.order, ctx.back = order, between.back[1]
        return between.combine(rows, order[2], gates)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """To rows and gates."""
        return *ctx.back(gradients[0], *ctx.saved_tensors, *ctx.order), None, None


class Loop(torch.autograd.Function):
    """One cuBLAS product for each expert, and two backward: rows by expert, weights [experts, n,
    k], counts."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, counts: Sequence[int]
    ) -> torch.Tensor:
        """[rows, n]."""
        ctx.save_for_backward(rows, weights)
        ctx.counts = counts
        out = rows.new_empty((len(rows), weights.shape[1]))
        for part, weight, of in _live(counts, rows, weights, out):
            torch.mm(part, weight.t(), out=of)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """To rows and weights."""
        (dy,), (rows, weights) = gradients, ctx.saved_tensors
        drows, dweights = torch.empty_like(rows), torch.empty_like(weights)
        for count, dweight in zip(ctx.counts, dweights, strict=True):
            if not count:
                dweight.zero_()
        for part, weight, of in _live(ctx.counts, dy, weights, drows):
            torch.mm(part, weight, out=of)
        for part, of, row in _live(ctx.counts, dy, dweights, rows):
            torch.mm(part.t(), row, out=of)
        return drows, dweights, None


def _live(
    counts: Sequence[int], rows: torch.Tensor, weights: torch.Tensor, others: torch.Tensor
) -> Iterator[Tensors]:
    """Of experts that have rows: these, their weights and their other rows."""
    parts = zip(rows.split(list(counts)), weights, others.split(list(counts)), strict=True)
    return (each for each in parts if len(each[0]))


def forwards(data: ExpertsData) -> dict[str, Forward]:
    """The layer by each contender, a function of the leaves."""
    layer, case, device = data.layer, data.layer.case, data.dy.device
    experts = torch.arange(case.experts, dtype=torch.int32, device=device)
    between = Between.on(device.type)

    def peer(product: Callable[..., torch.Tensor]) -> Forward:
        def forward(
            x: torch.Tensor, gates: torch.Tensor, up: torch.Tensor, down: torch.Tensor
        ) -> torch.Tensor:
            choices, tokens, places, ends = between.index(layer.ids, experts)
            rows = product(Spread.apply(x, tokens, places, case.top_k, between), up, ends)
            rows = product(between.activate(rows, case.act, case.gated), down, ends)
            return Collect.apply(rows, gates, (choices, tokens, places), between)

        return forward

    def ours(call: Forward) -> Forward:
        return lambda *leaves: call(*leaves, layer.ids, case.act, case.gated)

    made = {
        "grouped": peer(lambda rows, w, ends: torch._grouped_mm(rows, w.mT, offs=ends)),
        "loop": peer(lambda rows, w, ends: Loop.apply(rows, w, layer.counts)),
        "pit": ours(pit_layer),
    }
    if device.type == "cuda":
        made["compiled"] = ours(compiled(pit_layer, device.type))
    return made


def steps(data: ExpertsData) -> tuple[dict[str, Step], str]:
    """Every contender's step; and why there is none of ``compiled``, or nothing."""
    found = {name: step_of(f, data.leaves, data.dy) for name, f in forwards(data).items()}
    try:
        found.get("compiled", tuple)()
    except (PitError, RuntimeError, TypeError, ValueError) as error:
        del found["compiled"]
        return found, " ".join(f"{type(error).__name__}: {error}".split())[:400]
    return found, ""
