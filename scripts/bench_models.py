"""Whole models on padded batches: pit-tvm against torch, torch.compile, and packing by hand.

Weights and ids are random, lengths log-normal. Contenders take turns in one process; times are
medians of calls with everything counted, the index too. ``bound`` is what the linear layers of the
live tokens take at least, at 790 TFLOP/s. opt-13b-step is one layer of that model for one token,
with 95 % of its activations zero; fc2 alone is timed there as well. The exit status is 1 if a
result is wrong; a goal that is not reached does not change it. Goals are for an H200 and float16.
Names that end in a number are models of fewer layers than the published ones.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from commands import parser_of, status_of
from needs import require, require_gpu
from out_paths import new_file, picture

from pit_tvm.cli_options import any_seed, at_least

NAMES = (
    *("bert-base", "bert-large", "opt-1.3b", "opt-6.7b", "opt-13b", "opt-13b-step"),
    *("modernbert-base", "mpnet-base", "bloom-12", "gemma2-12", "gemma3-12", "gpt-oss-4"),
)
MOST_TFLOPS = 790.0
# Largest deviation at live tokens from the same weights in float32, relative to the largest value;
# where tokens choose experts, twice that of torch in the same type if that is more.
ERROR_LIMIT = {"float16": 2e-2, "bfloat16": 1e-1, "float32": 1e-4}
WARM_UPS = 3
TOGETHER = 20  # products in one measurement

Times = dict[str, list[float]]
Row = Mapping[str, Any]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("models", nargs="+", choices=(*NAMES, "all"), metavar="model", help=f"{', '.join(NAMES)}")
    add("--rounds", type=at_least(1), default=20, help="turns of each contender (default 20)")
    add("--seed", type=any_seed, default=1, help="of lengths and ids (default 1)")
    add("--dtype", choices=("float16", "bfloat16"), default="float16", help="on a GPU")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run in float32")
    add("--quick", action="store_true", help="small models, which are held to no goal")
    add("--no-torch-compile", action="store_true", help="leave torch.compile out")
    add("--json", type=new_file, metavar="FILE", help="write everything measured to FILE")
    add("--plot", type=picture, metavar="PNG", help="draw how many times faster than torch each is")
    options = parser.parse_args(argv)
    options.models = [n for n in NAMES if n in options.models or "all" in options.models]
    return options


def measure(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    cuda: bool,
    before: Callable[[], Any] | None = None,
) -> Times:
    """Milliseconds of each call, contenders in turn, every round beginning with another one.
    ``before`` is called before each timed call, and not counted."""
    from bench_rows import in_turn
    from tqdm import tqdm

    for run in runs.values():
        for _ in range(WARM_UPS):
            run()
    times: Times = {name: [] for name in runs}
    for turn in tqdm(range(rounds), unit="round", leave=False):
        for name in in_turn(runs, turn):
            if before is not None:
                before()
            times[name].append(_timed(runs[name], cuda))
    return times


def _timed(run: Callable[[], Any], cuda: bool) -> float:
    import torch

    if not cuda:
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def memory(run: Callable[[], Any], cuda: bool) -> tuple[int, int]:
    """Bytes on the GPU beside what was there before the first calls, those included in which a
    graph is recorded: of tensors at most, and of what the process then keeps for further calls.
    What cuBLAS keeps for a stream is given back before, so that each contender's own counts. Room
    that other models left in the same process is not counted: what a model keeps is told by a run
    of that model alone."""
    import torch

    if not cuda:
        return 0, 0
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(WARM_UPS):
        run()
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    return found[0] - before[0], found[1] - before[1]


def deviation(found: Any, expected: Any, mask: Any) -> float:
    """Largest difference at live tokens, relative to the largest value there; infinite for NaN."""
    live = mask.bool()
    got, want = found[live].double(), expected[live].double()
    worst = float((got - want).abs().max() / want.abs().max())
    return worst if worst == worst else float("inf")


def rivals(
    model: Any, inputs: Mapping[str, Any], *, by_hand: bool, options: argparse.Namespace
) -> dict[str, Callable[[], Any]]:
    """Calls of the model without pit-tvm; ``by_hand``: one that packs its tokens, too."""
    import torch
    from bench_models_cases import packed_bert

    runs: dict[str, Callable[[], Any]] = {"torch": lambda: model(**inputs)}
    if not options.no_torch_compile:
        quick = torch.compile(model)
        runs["torch.compile"] = lambda: quick(**inputs)
    if by_hand:
        packed = packed_bert(model)
        runs["packed by hand"] = lambda: packed(*inputs.values())
    return runs


def run_model(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Compile one model, compare, and measure; the row as JSON values."""
    import torch
    from bench_models_cases import CASES

    import pit_tvm.model
    from pit_tvm.runtime.live_tokens import live_tokens

    cuda, case = options.device == "cuda", CASES[name]
    dtype = options.dtype if cuda else "float32"
    with torch.device(options.device):
        model = case.make(options.quick).to(getattr(torch, dtype))
    ids, mask = (t.to(options.device) for t in case.batch_of(options.seed, options.quick))
    inputs = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        activations = case.silence(model, inputs) if case.zeros else None
    start = time.perf_counter()
    shape = (3, max(8, ids.shape[1]))  # as long as what comes: masks of windows depend on it
    example = {each: torch.ones(shape, dtype=torch.int64) for each in inputs}
    target = "cuda" if cuda else "llvm"
    compiled: Any = pit_tvm.model.compile(copy.deepcopy(model).cpu(), example, target=target)
    compile_s = time.perf_counter() - start
    with torch.inference_mode():
        runs = rivals(model, inputs, by_hand=cuda and case.family == "bert", options=options)
        for run in runs.values():  # what the first call of all keeps is for compilers and libraries
            run()
        runs["pit-tvm"] = lambda: compiled(**inputs)
        bytes_of = {n: memory(run, cuda) for n, run in runs.items()}
        expected = copy.deepcopy(model).float()(**inputs)[0]
        error, limit = deviation(compiled(**inputs)[0], expected, mask), ERROR_LIMIT[dtype]
        if case.routed:
            limit = max(limit, 2 * deviation(model(**inputs)[0], expected, mask))
        del expected
        index = compiled.index if cuda else lambda m: live_tokens(m.numpy())
        times = measure({**runs, "index": lambda: index(mask)}, options.rounds, cuda)
        if activations is not None:
            times |= second_products(model, compiled, activations, options.rounds, cuda)
    live = int(mask.sum())
    ms = {n: statistics.median(found) for n, found in times.items()}
    ours = ms["pit-tvm"]
    return {
        "model": name,
        "dtype": dtype,
        "batch": list(mask.shape),
        "fill": live / mask.numel(),
        "ms": ms,
        "ratio": {n: ms[n] / ours for n in runs if n != "pit-tvm"},
        "fc2": ms["fc2, torch"] / ms["fc2, pit-tvm"] if case.zeros else None,
        "goal": case.goal,
        "index_share": ms["index"] / ours,
        "bound_ms": 2e-9 * live * _weights(model) / MOST_TFLOPS,
        "peak_bytes": {n: most for n, (most, _) in bytes_of.items()},
        "kept_bytes": {n: kept for n, (_, kept) in bytes_of.items()},
        "error": error,
        "error_limit": limit,
        "compile_seconds": compile_s,
        "not_skipped": sum(d.whole for d in compiled.decisions),
        "samples": times,
    }


def second_products(model: Any, compiled: Any, x: Any, rounds: int, cuda: bool) -> Times:
    """Milliseconds of torch's and our product behind ReLU in the first layer: of many in a CUDA
    graph on a GPU, because the host takes longer to launch one; others of its weights live in each,
    so that none finds its own in a cache."""
    import torch

    fc2, number = model.model.decoder.layers[0].fc2, compiled.activity[0].layer
    given = [x.roll(257 * turn, 1).contiguous() for turn in range(TOGETHER)]
    out = x.new_empty(len(x), fc2.out_features)

    def torch_s() -> None:
        for each in given:
            torch.nn.functional.linear(each, fc2.weight, fc2.bias)

    def ours() -> None:
        for each in given:
            compiled.layers(number, each, out)

    runs: dict[str, Callable[[], Any]] = {"fc2, torch": torch_s, "fc2, pit-tvm": ours}
    if cuda:
        runs = {name: _recorded(run) for name, run in runs.items()}
    times = measure(runs, rounds, cuda)
    return {name: [ms / TOGETHER for ms in found] for name, found in times.items()}


def _recorded(run: Callable[[], Any]) -> Callable[[], None]:
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _weights(model: Any) -> int:
    """Elements of all matrices of linear layers."""
    import torch

    layers = (part for part in model.modules() if isinstance(part, torch.nn.Linear))
    return sum(layer.weight.numel() for layer in layers)


def text(row: Mapping[str, Any]) -> str:
    """One row for people."""
    ms = ", ".join(f"{name} {value:.2f}" for name, value in row["ms"].items())
    ratios = ", ".join(f"{value:.2f}x over {name}" for name, value in row["ratio"].items())
    goal = f" (goal {row['goal']}x over torch.compile)" if row["goal"] else ""
    if row["fc2"]:
        ratios += f"; fc2 {row['fc2']:.2f}x over torch"
        goal = f" (goal {row['goal']}x for fc2)"
    sizes = ", ".join(
        f"{name} {size >> 20} ({row['kept_bytes'][name] >> 20})"
        for name, size in row["peak_bytes"].items()
    )
    lines = [
        f"{row['model']}, {row['dtype']}, {row['batch'][0]} x {row['batch'][1]}, fill "
        f"{row['fill']:.2f}",
        f"  ms: {ms} (bound {row['bound_ms']:.2f})",
        f"  {ratios}{goal}; index {row['index_share']:.1%}",
        f"  MiB of tensors at most (and kept by the process): {sizes}",
        f"  error {row['error']:.1e}, compiled in {row['compile_seconds']:.0f} s, "
        f"{row['not_skipped']} operators on all tokens",
    ]
    return "\n".join(lines)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Bars: times faster than each contender."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for row in rows for name in row["ratio"]))
    figure = Figure(figsize=(2 + 1.6 * len(rows), 4), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        found = [(at, row["ratio"][name]) for at, row in enumerate(rows) if name in row["ratio"]]
        places = [at + (number - (len(names) - 1) / 2) * width for at, _ in found]
        axes.bar(places, [ratio for _, ratio in found], width, label=f"over {name}")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [row["model"] for row in rows])
    axes.set_ylabel("times faster")
    axes.legend()
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = parse(argv)
    after = partial(draw, path=options.plot) if options.plot else None
    return run("bench_models", options, run_model, text, after)


def run(
    script: str,
    options: argparse.Namespace,
    measured: Callable[[str, argparse.Namespace], Row],
    said: Callable[[Row], str],
    after: Callable[[Sequence[Row]], None] | None = None,
) -> int:
    """Measure, print and write the rows of a benchmark of models; the exit status. ``after`` is
    given all of them."""

    def rows_of() -> int:
        require(script, ("torch", "transformers", "tqdm"), "quickstart")
        rows = _rows(script, options, measured, said)
        if after is not None:
            after(rows)
        wrong = [row["model"] for row in rows if not row["error"] < row["error_limit"]]
        print(f"{len(wrong)} wrong results{': ' * bool(wrong)}{', '.join(wrong)}")
        return 1 if wrong else 0

    return status_of(script, rows_of)


def _rows(
    script: str,
    options: argparse.Namespace,
    measured: Callable[[str, argparse.Namespace], Row],
    said: Callable[[Row], str],
) -> list[Row]:
    from bench_report import write

    found = where(script, options)
    rows: list[Row] = []
    for name in options.models:
        rows.append(measured(name, options))
        print(said(rows[-1]), flush=True)
        if options.json:
            write(options.json, json.dumps({**found, "rows": rows}, indent=1))
    return rows


def where(script: str, options: argparse.Namespace) -> dict[str, Any]:
    """When and on what a benchmark of models runs, as JSON values; raises BackendUnavailable if
    that GPU is missing."""
    import torch
    from bench_report import stamp

    if options.device == "cuda":
        require_gpu(script, "--device cpu tries the benchmark without one")
    return {
        **stamp("torch", "transformers"),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu: a dry run",
        "quick": options.quick or options.device == "cpu",
        "seed": options.seed,
    }


if __name__ == "__main__":
    sys.exit(main())
