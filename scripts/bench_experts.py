"""Whole mixture-of-experts models of transformers, their experts computed by torch and by pit-tvm.

Weights and ids are random; models have fewer layers than the published ones, of the same sizes, in
bfloat16. ``grouped_mm`` is what transformers uses by default, torch's grouped product on sorted
rows; each runs as it is and by torch.compile. Where torch has no attention for a model (GPT-OSS:
windows and sinks), ours is by masks, and theirs as it is by default and by FlexAttention.
Contenders take turns in one process; times are medians of forward passes of all the model, or with
``--train`` of forward and backward passes of its loss, everything counted. The experts of the first
layer, and with ``--train`` the gradients of their weights, are compared with float64 on what the
model gives them. The exit status is 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench_models import measure, memory, run
from commands import parser_of
from out_paths import new_file

from pit_tvm.cli_options import any_seed, at_least

THEIRS, OURS = "grouped_mm", "pit_tvm"
ERROR_LIMIT = 2e-2  # of bfloat16, relative to the norm of the exact result
CHECKED = 64  # tokens that are compared
_VOCABULARY = {"vocab_size": 32000}
_QUICK = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 500}


@dataclass(frozen=True)
class Case:
    """A model: its classes' name in transformers, and its sizes."""

    family: str
    sizes: Mapping[str, int]
    masked: bool = False  # whether attention is by masks, as torch's own has not what it needs

    def make(self, quick: bool, **others: int) -> Any:
        """The model in evaluation mode; ``quick`` makes a small one, ``others`` are sizes that
        replace those of the case."""
        import torch
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{self.family}Config")
        sizes = {**_VOCABULARY, **self.sizes, **(_QUICK if quick else {}), **others}
        model = getattr(transformers, f"{self.family}ForCausalLM")
        return model(config(**sizes, use_cache=False)).to(torch.bfloat16).eval()


@dataclass(frozen=True)
class Kind:
    """By which implementations experts and attention are computed, None: transformers' default;
    and whether torch compiles the model."""

    experts: str
    attention: str | None = None
    compiled: bool = False


def _sizes(hidden: int, layers: int, inter: int, heads: int, shared: int) -> dict[str, int]:
    names = ("hidden_size", "num_hidden_layers", "intermediate_size")
    sizes = dict(zip(names, (hidden, layers, inter), strict=True))
    return sizes | {"num_attention_heads": heads, "num_key_value_heads": shared}


CASES = {
    "olmoe-1b-7b": Case(
        "Olmoe", {**_sizes(2048, 8, 1024, 16, 16), "num_experts": 64, "num_experts_per_tok": 8}
    ),
    "qwen3-30b-a3b": Case(
        "Qwen3Moe",
        {
            **_sizes(2048, 8, 6144, 32, 4),
            **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        },
    ),
    "mixtral-8x7b": Case(
        "Mixtral", {**_sizes(4096, 4, 14336, 32, 8), "num_local_experts": 8, "head_dim": 128}
    ),
    "gpt-oss-20b": Case(
        "GptOss",
        {
            **_sizes(2880, 6, 2880, 64, 8),
            **{"num_local_experts": 32, "num_experts_per_tok": 4, "head_dim": 64},
        },
        masked=True,
    ),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("models", nargs="+", choices=(*CASES, "all"), metavar="model", help=", ".join(CASES))
    add("--no-torch-compile", action="store_true", help="leave torch.compile out")
    options = parse_shared(parser, argv)
    options.models = [n for n in CASES if n in options.models or "all" in options.models]
    return options


def parse_shared(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, with what benchmarks of such models have in common."""
    add = parser.add_argument
    add("--rounds", type=at_least(1), default=20, help="turns of each contender (default 20)")
    add("--seed", type=any_seed, default=1, help="of the ids (default 1)")
    add("--batch", type=at_least(1), default=4, help="sequences (default 4)")
    add("--tokens", type=at_least(1), default=2048, help="of each sequence (default 2048)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run")
    add("--train", action="store_true", help="forward and backward, gradients to all weights")
    add("--quick", action="store_true", help="small models")
    add("--json", type=new_file, metavar="FILE", help="write everything measured to FILE")
    return parser.parse_args(argv)


def run_model(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Make one model, compare, and measure; the row as JSON values."""
    import torch

    from pit_tvm.torch import register_attention, register_experts

    register_experts(OURS)
    register_attention(OURS)
    cuda = options.device == "cuda"
    with torch.device(options.device):
        model = CASES[name].make(options.quick)
    ids = ids_of(model, options)
    with contextlib.nullcontext() if options.train else torch.inference_mode():
        kinds = _contenders(CASES[name], options).items()
        runs = {label: one_pass(model, ids, kind, options.train) for label, kind in kinds}
        for run in runs.values():  # what the first call of all keeps is for compilers and libraries
            run()
        bytes_of = peak_bytes(model, runs, cuda)
        error = experts_error(model, runs["pit-tvm"], options.train)
        times = measure(runs, options.rounds, cuda)
    return row_of(name, options, model.config.num_hidden_layers, times, bytes_of, error)


def peak_bytes(model: Any, runs: Mapping[str, Callable[[], Any]], cuda: bool) -> dict[str, int]:
    """Bytes of tensors at most in each run, gradients included, beside the weights."""
    found = {}
    for label, call in runs.items():
        model.zero_grad(set_to_none=True)
        found[label] = memory(call, cuda)[0]
    return found


def row_of(
    name: str,
    options: argparse.Namespace,
    layers: int,
    times: Mapping[str, list[float]],
    bytes_of: Mapping[str, int],
    error: float,
) -> dict[str, Any]:
    """What was measured of one model, as JSON values."""
    ms = {label: statistics.median(found) for label, found in times.items()}
    best = min(value for label, value in ms.items() if "pit-tvm" not in label)
    ours = min(value for label, value in ms.items() if "pit-tvm" in label)
    return {
        "model": name,
        "tokens": [options.batch, options.tokens],
        "train": options.train,
        "layers": layers,
        "ms": ms,
        "ratio": best / ours,
        "peak_bytes": bytes_of,
        "error": error,
        "error_limit": ERROR_LIMIT,
        "samples": times,
    }


def _contenders(case: Case, options: argparse.Namespace) -> dict[str, Kind]:
    kinds = {"torch": Kind(THEIRS), "pit-tvm": Kind(OURS, OURS if case.masked else None)}
    if case.masked and options.device == "cuda":  # on CPUs FlexAttention has no sinks
        kinds["torch, FlexAttention"] = Kind(THEIRS, "flex_attention")
    if not options.no_torch_compile:
        compiled = {label: replace(kind, compiled=True) for label, kind in kinds.items()}
        kinds |= {f"{label}, torch.compile": kind for label, kind in compiled.items()}
    return kinds


def ids_of(model: Any, options: argparse.Namespace) -> Any:
    """Random ids ``[batch, tokens]``."""
    import torch

    made = torch.Generator().manual_seed(options.seed)
    ids = torch.randint(model.config.vocab_size, (options.batch, options.tokens), generator=made)
    return ids.to(options.device)


def one_pass(model: Any, ids: Any, kind: Kind, train: bool) -> Callable[[], Any]:
    """A forward pass, with ``train`` and a backward one, that computes as ``kind`` says."""
    import torch

    call = torch.compile(model.forward) if kind.compiled else model
    attention = kind.attention or model.config._attn_implementation

    def run() -> Any:
        model.set_experts_implementation(kind.experts)
        model.set_attn_implementation(attention)
        if not train:
            return call(ids)
        model.zero_grad(set_to_none=True)
        return call(ids, labels=ids).loss.backward()

    return run


def experts_error(model: Any, run: Callable[[], Any], train: bool) -> float:
    """Deviation of the first layer's experts from float64 on some of the tokens that they get in a
    forward pass, and with ``train`` of the gradients of their weights; infinite for NaN."""
    import torch

    experts = next(part for part in model.modules() if _is(part))
    given: list[Any] = []
    hook = experts.register_forward_hook(lambda _, args, out: given.append((args, out)))
    run()
    hook.remove()
    args, out = given[0]
    some = [each[:CHECKED].detach() for each in args]
    exact = copy.deepcopy(experts).double()
    exact.config._experts_implementation = "eager"
    want = exact(*(each.double() if each.is_floating_point() else each for each in some))
    pairs = [(out[:CHECKED], want)]
    if train:
        weights = (tuple(experts.parameters()), tuple(exact.parameters()))
        down = torch.randn_like(want)
        own = experts(*some)
        found = torch.autograd.grad(own, weights[0], down.to(own.dtype))
        pairs += zip(found, torch.autograd.grad(want, weights[1], down), strict=True)
    return relative_error(pairs)


def relative_error(pairs: Iterable[tuple[Any, Any]]) -> float:
    """Largest deviation of the first of each pair from the second, by norms, computed in the type
    of the second; infinite for NaN."""
    errors = [((got.to(want.dtype) - want).norm() / want.norm()).item() for got, want in pairs]
    return max(error if error == error else float("inf") for error in errors)


def _is(part: Any) -> bool:
    """Whether a module's experts are computed by transformers' interface."""
    return hasattr(part, "is_transposed") and hasattr(part, "has_gate")


def text(row: Mapping[str, Any]) -> str:
    """One row for people."""
    ms = ", ".join(f"{label} {value:.2f}" for label, value in row["ms"].items())
    sizes = ", ".join(f"{label} {size >> 20}" for label, size in row["peak_bytes"].items())
    batch, tokens = row["tokens"]
    how = ", forward and backward" if row["train"] else ""
    lines = [
        f"{row['model']}, {row['layers']} layers, {batch} x {tokens} tokens{how}",
        f"  ms: {ms}",
        f"  {row['ratio']:.2f}x over the best of torch; error of experts {row['error']:.1e}",
        f"  MiB of tensors at most: {sizes}",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    return run("bench_experts", parse(argv), run_model, text)


if __name__ == "__main__":
    sys.exit(main())
