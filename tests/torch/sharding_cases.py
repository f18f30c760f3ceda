"""What the processes of `sharding_world` compute: operators, layers and models over DTensors."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from pit_tvm import torch as pit
from pit_tvm.torch import custom_ops
from tests.torch.sharding_world import RANKS, Case, World

BATCH, LENGTH, K, N, GROUPS, TOP_K = 4, 6, 32, 48, 5, 3
S0, S1, S2, S3 = (Shard(dim) for dim in range(4))
R, SUM = Replicate(), Partial()

Tensors = list[torch.Tensor | None]
Make = Callable[[World], Tensors]


def pattern(world: World, kind: str) -> torch.Tensor:
    """Rows that exist of ``[BATCH, LENGTH]``."""
    if kind == "rows":
        return torch.randperm(BATCH * LENGTH)[:7].to(world.device)
    lengths = torch.randint(LENGTH + 1, (BATCH,))
    if kind == "cu_seqlens":
        lengths = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return lengths.to(world.device)


def ids(world: World, *choices: int) -> torch.Tensor:
    """Groups of rows, some of which are none."""
    return torch.randint(-1, GROUPS, (BATCH, LENGTH, *choices)).to(world.device)


# --------------------------------------------------------------------------------------------
# Rules: what lies as one asks is computed without a word between devices


def linear(world: World, kind: str, beside: bool = False, turned: bool = False) -> Tensors:
    weight = world.random(K, N).mT if turned else world.random(N, K)
    x = world.random(BATCH, LENGTH, K)
    return [x, weight, world.random(N) if beside else None, pattern(world, kind)]


def outer(world: World, kind: str, k: int = K) -> Tensors:
    return [world.random(BATCH, LENGTH, N), world.random(BATCH, LENGTH, k), pattern(world, kind)]


def activated(world: World, kind: str) -> Tensors:
    return [world.random(BATCH, LENGTH, N), pattern(world, kind)]


def grouped(world: World, *choices: int, beside: bool = False) -> Tensors:
    x, weight = world.random(BATCH, LENGTH, K), world.random(GROUPS, N, K)
    return [x, weight, world.random(GROUPS, N) if beside else None, ids(world, *choices)]


def outer_of(world: World, *choices: int) -> Tensors:
    left, right = world.random(BATCH, LENGTH, *choices, N), world.random(BATCH, LENGTH, K)
    return [left, right, ids(world, *choices)]


def rows_of(world: World, *sizes: tuple[int, ...]) -> Tensors:
    return [world.random(BATCH, LENGTH, *size) for size in sizes]


def chosen(world: World, spread: bool = False) -> Tensors:
    (rows, weights), down = rows_of(world, (TOP_K, N), (TOP_K,)), rows_of(world, (N,))
    return [rows, weights, ids(world, TOP_K), *(down if spread else [])]


def layer(world: World, gated: bool, beside: bool = False) -> Tensors:
    weights = torch.rand((BATCH, LENGTH, TOP_K)).to(world.device)
    up, down = world.random(GROUPS, N * (1 + gated), K), world.random(GROUPS, K, N)
    biases = [world.random(*weight.shape[:2]) for weight in (up, down) if beside]
    return [world.random(BATCH, LENGTH, K), ids(world, TOP_K), weights, up, down, *biases]


# By operator: how its tensors are made, its other arguments, where tensors and results lie.
Rule = tuple[Make, tuple[Any, ...], list[Placement], list[Placement]]


def _along(kind: str, **how: bool) -> Make:
    return partial(linear, kind=kind, **how)


RULES: dict[str, list[Rule]] = {
    "linear_rows": [
        (_along("lengths", beside=True), ("lengths", "gelu"), [R, S0, S0, R], [S2]),
        (_along("cu_seqlens"), ("cu_seqlens", None), [R, S0, R, R], [S2]),
        (_along("rows", turned=True), ("rows", None), [R, S0, R, R], [S2]),
        (_along("lengths"), ("lengths", None), [S2, S1, R, R], [SUM]),
        (_along("rows", beside=True), ("rows", None), [S2, S1, SUM, R], [SUM]),
        (_along("lengths", beside=True), ("lengths", "relu"), [S0, R, R, S0], [S0]),
    ],
    "outer_rows": [
        (partial(outer, kind="rows"), ("rows",), [S2, R, R], [S0]),
        (partial(outer, kind="cu_seqlens"), ("cu_seqlens",), [R, S2, R], [S1]),
        (partial(outer, kind="lengths"), ("lengths",), [S0, S0, S0], [SUM]),
    ],
    "activate_rows": [
        (partial(activated, kind="rows"), ("rows", "gelu"), [S2, R], [S2]),
        (partial(activated, kind="lengths"), ("lengths", "silu"), [S0, S0], [S0]),
    ],
    "activate_rows_gradient": [
        (partial(outer, kind="cu_seqlens", k=N), ("cu_seqlens", "relu"), [S2, S2, R], [S2]),
        (partial(outer, kind="lengths", k=N), ("lengths", "gelu_tanh"), [S0, S0, S0], [S0]),
    ],
    "grouped_linear": [
        (partial(grouped, beside=True), ("silu",), [R, S1, S1, R], [S2]),
        (lambda world: grouped(world, TOP_K), (None,), [R, S1, R, R], [S3]),
        (partial(grouped, beside=True), (None,), [S2, S2, SUM, R], [SUM]),
        (lambda world: grouped(world, TOP_K, beside=True), (None,), [S1, R, R, S1], [S1]),
    ],
    "grouped_outer": [
        (outer_of, (GROUPS,), [S2, R, R], [S1]),
        (lambda world: outer_of(world, TOP_K), (GROUPS,), [S3, R, R], [S1]),
        (lambda world: outer_of(world, TOP_K), (GROUPS,), [R, S2, R], [S2]),
        (lambda world: outer_of(world, TOP_K), (GROUPS,), [S0, S0, S0], [SUM]),
    ],
    "gated_activation": [(lambda world: rows_of(world, (2 * N,)), ("silu",), [S1], [S1])],
    "gated_gradient": [
        (lambda world: rows_of(world, (2 * N,), (N,)), ("silu",), [S0, S0], [S0]),
    ],
    "combine_choices": [
        (chosen, (), [S3, R, R], [S2]),
        (chosen, (), [SUM, R, R], [SUM]),
        (chosen, (), [S1, S1, S1], [S1]),
    ],
    "spread_choices": [
        (partial(chosen, spread=True), (), [S3, R, R, S2], [S3, SUM]),
        (partial(chosen, spread=True), (), [SUM, R, R, R], [R, SUM]),
        (partial(chosen, spread=True), (), [S0, S0, S0, S0], [S0, S0]),
    ],
    "sum_choices": [
        (lambda world: rows_of(world, (TOP_K, N)), (), [S3], [S2]),
        (lambda world: rows_of(world, (TOP_K, N)), (), [SUM], [SUM]),
        (lambda world: rows_of(world, (TOP_K, N)), (), [S1], [S1]),
    ],
    "moe_feed_forward": [
        (partial(layer, gated=False), ("relu", False), [R, R, R, S1, S2], [SUM]),
        (partial(layer, gated=True), ("silu", True), [S0, S0, S0, R, R], [S0]),
        (
            partial(layer, gated=False, beside=True),
            ("gelu", False),
            [R, R, R, S1, S2, S1, SUM],
            [SUM],
        ),
        (
            partial(layer, gated=True, beside=True),
            ("silu", True),
            [S1, S1, S1, R, R, R, R],
            [S1],
        ),
    ],
}


def follow(world: World, name: str, rule: Rule) -> None:
    """An operator on tensors that lie as a rule asks, and on whole ones."""
    make, others, places, results = rule
    tensors, operator = make(world), getattr(custom_ops, name)
    first = 5 if name == "moe_feed_forward" else len(tensors)  # biases are behind the others
    want = operator(*tensors[:first], *others, *tensors[first:])
    split = [
        each if each is None else world.place(each, place)
        for each, place in zip(tensors, places, strict=True)
    ]
    with torch.no_grad(), CommDebugMode() as talk:
        got = operator(*split[:first], *others, *split[first:])
    assert talk.get_total_counts() == 0
    pairs = [(got, want)] if len(results) == 1 else zip(got, want, strict=True)
    for (one, other), place in zip(pairs, results, strict=True):
        assert one.placements == (place,)
        world.check(one, other)


# --------------------------------------------------------------------------------------------
# Functions: tensors may lie anywhere, and gradients come back to where they do


def anywhere(world: World, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor that lies somewhere, the same place on all devices, or is no distributed one."""
    where = int(torch.randint(-2, 1 if tensor is None else tensor.dim(), ()))
    if tensor is None or where == -2:
        return tensor
    return world.place(tensor, R if where == -1 else Shard(where))


def derived(
    call: Callable[..., torch.Tensor], tensors: Tensors, down: torch.Tensor
) -> list[torch.Tensor]:
    """A result, and its gradients to all that can have one, ``down`` being that to it."""
    given = [
        None if each is None else each.detach().requires_grad_(each.is_floating_point())
        for each in tensors
    ]
    out = call(*given)
    leaves = [each for each in given if each is not None and each.requires_grad]
    return [out, *torch.autograd.grad(out, leaves, down)]


def scatter(world: World, make: Make, call: Callable[..., torch.Tensor]) -> None:
    """A function and its gradients, of tensors that lie anywhere, x somewhere."""
    x, *others = make(world)
    assert x is not None
    down = torch.randn_like(call(x, *others))
    exact = derived(call, [x, *others], down)
    for _ in range(6):
        somewhere = world.place(x, (R, S0, S1, S2)[int(torch.randint(4, ()))])
        split = [somewhere, *(anywhere(world, each) for each in others)]
        found = derived(call, split, world.place(down, R))
        for got, want in zip(found, exact, strict=True):
            world.check(got, want)


def _linear_by(kind: str, activation: str | None) -> Callable[..., torch.Tensor]:
    def call(x: Any, weight: Any, bias: Any, rows: Any) -> torch.Tensor:
        named: Any = {kind: rows}
        return pit.linear_rows(x, weight, bias, **named, activation=activation)

    return call


def _gated(x: Any, ids: Any, *others: Any) -> torch.Tensor:
    *weights, up_bias, down_bias = others
    gate = pit.Gate(0.5, 1.702, 1.0, interleaved=True)
    return pit.moe_feed_forward(x, ids, *weights, up_bias=up_bias, down_bias=down_bias, gated=gate)


def _grouped(x: Any, weight: Any, bias: Any, groups: Any) -> torch.Tensor:
    return pit.grouped_linear(x, weight, groups, bias, activation="gelu_tanh")


FUNCTIONS: dict[str, tuple[Make, Callable[..., torch.Tensor]]] = {
    "linear_rows": (_along("lengths", beside=True), _linear_by("lengths", "gelu")),
    "linear_rows of .mT": (_along("rows", turned=True), _linear_by("rows", None)),
    "grouped_linear": (partial(grouped, beside=True), _grouped),
    "grouped_linear of choices": (lambda world: grouped(world, TOP_K), _grouped),
    "moe_feed_forward, gated": (partial(layer, gated=True), pit.moe_feed_forward),
    "moe_feed_forward": (partial(layer, gated=False), partial(pit.moe_feed_forward, gated=False)),
    "moe_feed_forward of a Gate": (partial(layer, gated=True, beside=True), _gated),
}

# --------------------------------------------------------------------------------------------
# Layers and models, split by torch's and transformers' own plans


class Mlp(torch.nn.Module):
    """Two layers over padded tokens."""

    def __init__(self, world: World) -> None:
        super().__init__()
        how: Any = {"device": world.device, "dtype": world.dtype}
        self.up = pit.LinearRows(K, N, activation="gelu", **how)
        self.down = pit.LinearRows(N, K, **how)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x, lengths=lengths), lengths=lengths)


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients to parameters, by name."""
    model.zero_grad()
    loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def check_step(world: World, one: torch.nn.Module, other: torch.nn.Module, *args: Any) -> None:
    """A step of a model that is split is that of a whole one."""
    want, got = other(*args), one(*args)
    world.check(got, want)
    down = torch.randn_like(want)
    whole, split = gradients(other, (want * down).sum()), gradients(one, (got * down).sum())
    assert whole.keys() == split.keys()
    for name, each in whole.items():
        world.check(split[name], each)


def columns_and_depth(world: World) -> None:
    """Tensor parallelism: one sum over devices, by torch.compile too."""
    model = Mlp(world)
    whole = copy.deepcopy(model)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, world.mesh, plan)
    x, lengths = world.random(BATCH, LENGTH, K), pattern(world, "lengths")
    check_step(world, model, whole, x, lengths)
    with torch.no_grad(), CommDebugMode() as talk:
        model(x, lengths)
    assert talk.get_total_counts() == 1
    model.compile(backend="aot_eager", fullgraph=True)
    check_step(world, model, whole, x, lengths)


def two_dimensions(world: World) -> None:
    """Sequences along one dimension of a mesh, columns along the other."""
    x, weight, _, lengths = linear(world, "lengths")
    assert x is not None and weight is not None and lengths is not None
    mesh = init_device_mesh(world.device, (1, RANKS))
    split = [
        distribute_tensor(each, mesh, list(places))
        for each, places in ((x, (S0, R)), (weight, (R, S0)), (lengths, (S0, R)))
    ]
    got = pit.linear_rows(*split[:2], lengths=split[2])
    assert isinstance(got, DTensor) and got.placements == (S0, S2)
    world.check(got, pit.linear_rows(x, weight, lengths=lengths))


def sharded_weights(world: World) -> None:
    """FSDP: parameters are brought together for a layer."""
    model = Mlp(world)
    whole = copy.deepcopy(model)
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=world.mesh)
    check_step(world, model, whole, world.random(BATCH, LENGTH, K), pattern(world, "lengths"))


def meshes(world: World, split: DistributedConfig) -> Any:
    """Devices as transformers arranges them, those of this world."""
    from transformers.distributed.utils import TransformersDeviceMesh

    dense = ("pp", "dp_replicate", "fsdp", "tp"), (1, 1, split.fsdp_size, split.tp_size)
    experts = ("pp", "dp_replicate", "efsdp", "ep"), (1, 1, split.efsdp_size, split.ep_size)
    return TransformersDeviceMesh(
        *(
            init_device_mesh(world.device, of, mesh_dim_names=names)
            for names, of in (dense, experts)
        )
    )


def spread_model(world: World, **how: Any) -> None:
    """A model of transformers by its own plan: our experts are as its own."""
    name = "pit_tvm_sharded"
    pit.register_experts(name)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 48}
    counts = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    # Rounding of 16 bits chooses other experts where there is a choice.
    chosen = 2 if world.dtype == torch.float32 else 6
    experts = {"num_hidden_layers": 2, "num_experts": 6, "num_experts_per_tok": chosen}
    config = Qwen3MoeConfig(**sizes, **counts, **experts, vocab_size=90)
    whole = Qwen3MoeForCausalLM(config).to(world.device, world.dtype)
    model, split = copy.deepcopy(whole), DistributedConfig(**how)
    model = type(model).maybe_distribute_model(model, split, meshes(world, split))
    model.set_experts_implementation(name)
    whole.set_experts_implementation("eager")
    tokens = torch.randint(90, (2, 7)).to(world.device)
    with torch.no_grad():  # experts are spread in another way than in training
        world.check(model(tokens).logits, whole(tokens).logits)
    got, want = (gradients(each, each(tokens, labels=tokens).loss) for each in (model, whole))
    assert got.keys() == want.keys()
    for key, each in want.items():
        world.check(got[key], each)


MODELS: dict[str, Case] = {
    "columns and depth": columns_and_depth,
    "a mesh of two dimensions": two_dimensions,
    "sharded weights": sharded_weights,
}
# Of releases that arrange devices so; older ones take a model that is loaded by their own plans.
SPREAD: dict[str, Case] = {
    "transformers: experts": partial(spread_model, tp_size=2, ep_size=2),
    "transformers: experts of sharded models": partial(spread_model, fsdp_size=2, ep_size=2),
    "transformers: tensors": partial(spread_model, tp_size=2),
    "transformers: sharded": partial(spread_model, fsdp_size=2),
}


def cases() -> dict[str, Case]:
    """All, by name."""
    found: dict[str, Case] = {
        f"{name}, rule {number}": partial(follow, name=name, rule=rule)
        for name, rules in RULES.items()
        for number, rule in enumerate(rules)
    }
    for name, (make, call) in FUNCTIONS.items():
        found[f"{name}, anywhere"] = partial(scatter, make=make, call=call)
    here = importlib.util.find_spec("transformers.distributed.expert_parallel")
    return found | MODELS | (SPREAD if here else {})
