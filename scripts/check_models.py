"""Compiles small models of transformers' families and compares them with torch.

Weights, ids and lengths are random; padding stands right and, where no output is made of the first
token, left. One line for each family: the largest deviation at live tokens relative to the largest
value, and how many operators run on live tokens only, and on all. The exit status is 1 if a result
is wrong or a family is refused. A family whose class the installed transformers lacks is left out,
and said to be.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import bench_models
import numpy as np
from check_models_families import FAMILIES, Family
from commands import parser_of, status_of
from needs import require, require_gpu

from pit_tvm.cli_options import any_seed
from pit_tvm.errors import PitError

LIMITS = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2}
BATCHES = ((2, 12), (3, 10), (1, 7), (4, 16))  # the first is the example


@dataclass(frozen=True)
class Checked:
    """What one family came to."""

    name: str
    error: float
    live: int
    whole: int
    seconds: float

    def __str__(self) -> str:
        counts = f"{self.live} operators on live tokens, {self.whole} on all"
        return f"{self.name}: error {self.error:.1e}, {counts}, {self.seconds:.0f} s"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--match", default="", metavar="TEXT", help="only families whose name contains TEXT")
    add("--seed", type=any_seed, default=0, help="of weights and batches (default 0)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where models run (default cpu)")
    add("--dtype", choices=tuple(LIMITS), default="float32", help="of weights (default float32)")
    add("--list", action="store_true", help="print the names and do nothing else")
    options = parser.parse_args(argv)
    options.families = {n: f for n, f in FAMILIES.items() if options.match in n}
    if not options.families:
        parser.error(f"no family's name contains {options.match!r}; --list prints them")
    return options


def inputs(
    family: Family, shape: tuple[int, int], left: bool, rng: np.random.Generator
) -> dict[str, Any]:
    """Ids and mask ``[batch, tokens]`` of sequences of random lengths."""
    import torch

    lengths = rng.integers(1, shape[1] + 1, shape[0])
    lengths[0] = shape[1]
    places = np.arange(shape[1])[::-1] if left else np.arange(shape[1])
    mask = torch.from_numpy((places < lengths[:, None]).astype(np.int64))
    ids = {"input_ids": torch.from_numpy(rng.integers(3, 60, shape)) * mask}
    if family.decodes:
        ids["decoder_input_ids"] = torch.from_numpy(rng.integers(3, 60, shape))
    return {**ids, "attention_mask": mask}


def check(name: str, family: Family, options: argparse.Namespace) -> Checked:
    """Compile and compare one family with torch, which computes in float32.

    Raises
    ------
    PitError
        It is refused.
    """
    import torch

    import pit_tvm.model

    torch.manual_seed(options.seed)
    rng, start = np.random.default_rng(options.seed), time.perf_counter()
    model = family.make().to(getattr(torch, options.dtype))
    exact = copy.deepcopy(model).float().to(options.device)
    example, *others = BATCHES
    target = "cuda" if options.device == "cuda" else "llvm"
    first = inputs(family, example, False, rng)
    compiled: Any = pit_tvm.model.compile(model, first, target=target)
    worst = 0.0
    for number, shape in enumerate(others):
        made = inputs(family, shape, bool(number % 2) and not family.first, rng)
        given = {name: value.to(options.device) for name, value in made.items()}
        with torch.no_grad():
            wanted = tensors(exact(**given))
        found = tensors(compiled(**given))
        worst = max(worst, deviation(found, wanted, given["attention_mask"].bool()))
    live, whole = (sum(getattr(d, w) for d in compiled.decisions) for w in ("live", "whole"))
    return Checked(name, worst, live, whole, time.perf_counter() - start)


def tensors(outputs: Any) -> list[Any]:
    """All tensors of a model's outputs, in order."""
    import torch
    from torch.utils import _pytree as pytree

    return [one for one in pytree.tree_leaves(outputs) if isinstance(one, torch.Tensor)]


def deviation(found: Sequence[Any], wanted: Sequence[Any], live: Any) -> float:
    """The largest, at live tokens of what has a value for each; infinite for NaN, and for other
    outputs than torch's."""
    if [one.shape for one in found] != [one.shape for one in wanted]:
        return float("inf")
    worst = 0.0
    for one, exact in zip(found, wanted, strict=True):
        by_token = exact.shape[:2] == live.shape
        rows = live if by_token else live.new_ones(exact.shape)
        worst = max(worst, bench_models.deviation(one, exact, rows))
    return worst


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = parse(argv)
    if options.list:
        print("\n".join(options.families))
        return 0
    return status_of("check_models", lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Check and print; the exit status."""
    require("check_models", ("torch", "transformers"), "quickstart")
    if options.device == "cuda":
        require_gpu("--device", "leave it out")
    import transformers

    wrong = []
    for name, family in options.families.items():
        if not hasattr(transformers, family.model):
            print(f"{name}: transformers {transformers.__version__} has no {family.model}")
            continue
        try:
            checked = check(name, family, options)
        except PitError as error:
            wrong.append(name)
            print(f"{name}: refused: {error}", flush=True)
            continue
        if not checked.error < LIMITS[options.dtype]:
            wrong.append(name)
        print(checked, flush=True)
    print(f"{len(wrong)} wrong or refused{': ' * bool(wrong)}{', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
