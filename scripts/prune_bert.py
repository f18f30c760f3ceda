"""Iterative magnitude pruning of one BERT layer's MLP, its masks new at every step.

fc1, GELU and fc2 lose their least blocks step by step, by sums of magnitudes. Between steps the
pruned layer is trained to give what the dense one gave; then pit-tvm computes it from the masks of
that very step, by the same operators. A line for each step tells the share of zeros, the error of
the result against the dense layer's before and after training, the error of pit-tvm against torch
on the same weights, and the time of both.

Weights are random, as large as BERT's at its start; inputs have few directions, as hidden states
do, so that a pruned layer can learn them. Float16 on a GPU, float32 on a CPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from commands import parser_of, status_of
from needs import require, require_gpu

from pit_tvm.cli_options import any_seed, at_least

if TYPE_CHECKING:
    import torch
    from bench_gpu_measure import Contender, GpuSettings

    Tensors = tuple[torch.Tensor, ...]  # weight and bias of fc1, then of fc2

GRAINS = ((32, 64), (64, 64))  # columns of a result and of k in a block
STEPS = (0.0, 0.5, 0.75, 0.85, 0.9, 0.95)  # shares of zeros
SIZES, QUICK_SIZES = (4096, 768, 3072), (128, 128, 256)  # tokens, hidden, inner
DIRECTIONS = 32  # of the inputs
TRAINING, QUICK_TRAINING = 200, 2
RATE, BATCH = 1e-3, 1024


@dataclass(frozen=True)
class Step:
    """One line: times in microseconds, errors relative to the root mean square."""

    grain: tuple[int, int]
    zeros: float
    pruned: float
    trained: float
    kernel: float
    torch_us: float
    pit_us: float

    def __str__(self) -> str:
        grain = "x".join(map(str, self.grain))
        errors = f"{self.pruned:8.3f} {self.trained:8.3f} {self.kernel:8.1e}"
        ratio = self.torch_us / self.pit_us
        times = f"{self.torch_us:9.1f} {self.pit_us:9.1f} {ratio:7.2f}"
        return f"{grain:6} {100 * self.zeros:5g} {errors} {times}"


HEAD = f"{'blocks':6} {'% 0':>5} {'pruned':>8} {'trained':>8} {'kernel':>8} {'torch us':>9} " + (
    f"{'pit us':>9} {'/torch':>7}"
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--training", type=at_least(1), help=f"updates between steps (default {TRAINING})")
    add("--rounds", type=at_least(1), default=10, help="turns that are timed (default 10)")
    add("--seed", type=any_seed, default=0, help="of weights and inputs (default 0)")
    add("--quick", action="store_true", help="small sizes")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: without a GPU")
    options = parser.parse_args(argv)
    options.training = options.training or (QUICK_TRAINING if options.quick else TRAINING)
    return options


def forward(x: torch.Tensor, layer: Tensors) -> torch.Tensor:
    """The layer by torch: x [tokens, hidden], weights [inner, hidden] and [hidden, inner]."""
    from torch.nn.functional import gelu, linear

    w1, b1, w2, b2 = layer
    return linear(gelu(linear(x, w1, b1)), w2, b2)


def make(settings: GpuSettings, sizes: tuple[int, int, int]) -> tuple[torch.Tensor, Tensors]:
    """Inputs [tokens, hidden] and a dense layer, float32."""
    from bench_gpu_measure import generator, normal

    tokens, hidden, inner = sizes
    made = generator(settings.rng("prune_bert"), settings.device)
    few = min(DIRECTIONS, hidden)
    x = normal(made, (tokens, few), "float32") @ normal(made, (few, hidden), "float32") / few**0.5
    shapes = ((inner, hidden), (inner,), (hidden, inner), (hidden,))
    w1, b1, w2, b2 = (0.02 * normal(made, shape, "float32") for shape in shapes)
    return x, (w1, b1, w2, b2)


def prune(layer: Tensors, grain: tuple[int, int], zeros: float) -> Tensors:
    """The live blocks of both weights, bool."""
    from bench_gpu_weights import live_blocks

    return tuple(live_blocks(weight, grain, zeros) for weight in layer[::2])


def masked(layer: Tensors, live: Tensors, grain: tuple[int, int]) -> Tensors:
    """The layer without its dead blocks."""
    from bench_gpu_weights import whole

    w1, w2 = (weight * whole(part, grain) for weight, part in zip(layer[::2], live, strict=True))
    return w1, layer[1], w2, layer[3]


def train(
    x: torch.Tensor, want: torch.Tensor, layer: Tensors, live: Tensors, grain: Any, updates: int
) -> Tensors:
    """The layer after ``updates`` by Adam, towards ``want`` and without its dead blocks."""
    import torch

    own = tuple(part.clone().requires_grad_() for part in layer)
    adam = torch.optim.Adam(own, RATE)
    for update in range(updates):
        at = BATCH * update % len(x)
        adam.zero_grad()
        result = forward(x[at : at + BATCH], masked(own, live, grain))
        (result - want[at : at + BATCH]).square().mean().backward()
        adam.step()
    return masked(tuple(part.detach() for part in own), live, grain)


def pit_forward(grain: tuple[int, int], sizes: Any, target: str) -> Callable[..., torch.Tensor]:
    """A function of x, the layer and its live blocks: the layer by pit-tvm, compiled once."""
    from bench_gpu_pit import operator, sizes_for

    import pit_tvm

    _, hidden, inner = sizes
    spec, dtype = pit_tvm.BlockMask(*grain), "float16" if target == "cuda" else "float32"
    extents = sizes_for(target, inner, hidden), sizes_for(target, hidden, inner)
    fc1, fc2 = (
        operator("linear", spec, dtype, target, each, bias=True, act=act, side="rhs")
        for each, act in zip(extents, ("gelu", None), strict=True)
    )

    def run(x: torch.Tensor, layer: Tensors, live: Tensors) -> torch.Tensor:
        w1, b1, w2, b2 = layer
        between: torch.Tensor = fc1(x, w1, b1, sparsity=live[0])
        result: torch.Tensor = fc2(between, w2, b2, sparsity=live[1])
        return result

    return run


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Root mean square of the difference over that of ``want``."""
    apart = (got.double() - want.double()).square().mean()
    return float((apart / want.double().square().mean()).sqrt())


def steps(settings: GpuSettings, sizes: tuple[int, int, int], updates: int) -> Iterator[Step]:
    """Prune, train and measure, step by step, for each grain from the same layer."""
    import torch
    from bench_gpu_measure import measure

    x, dense = make(settings, sizes)
    want = forward(x, dense)
    kind = torch.float16 if settings.device == "cuda" else torch.float32
    for grain in GRAINS:
        layer, run = dense, pit_forward(grain, sizes, settings.target)
        for zeros in STEPS:
            live = prune(layer, grain, zeros)
            pruned = masked(layer, live, grain)
            layer = train(x, want, pruned, live, grain, updates) if zeros else pruned
            given, own = x.to(kind), tuple(part.to(kind) for part in layer)
            found = measure(contenders(given, own, live, run), settings)
            pit, dense_us = (found.stats[name].median for name in ("pit", "torch"))
            before, after = (error(forward(x, each), want) for each in (pruned, layer))
            yield Step(grain, zeros, before, after, found.errors["pit"], dense_us, pit)


def contenders(
    x: torch.Tensor, layer: Tensors, live: Tensors, run: Callable[..., torch.Tensor]
) -> dict[str, Contender]:
    """The layer by torch and by pit-tvm, whose result is compared with torch's."""
    from bench_gpu_measure import Contender

    want = forward(x, layer)
    return {
        "torch": Contender(lambda: forward(x, layer)),
        "pit": Contender(lambda: run(x, layer, live), lambda got: error(got, want)),
    }


def run(options: argparse.Namespace) -> int:
    """Prune and print; 0."""
    require("prune_bert", ("torch",), "quickstart")
    from bench_gpu_measure import GpuSettings

    if options.device == "cuda":
        require_gpu("prune_bert", "--device cpu runs without one")
    settings = GpuSettings(options.rounds, options.seed, options.quick, options.device)
    print(HEAD)
    for step in steps(settings, QUICK_SIZES if options.quick else SIZES, options.training):
        print(step, flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Prune and print; the exit status is 2 if something is missing."""
    options = parse(argv)
    return status_of("prune_bert", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
