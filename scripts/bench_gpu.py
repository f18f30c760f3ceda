"""The GPU benchmark: live rows, experts, index and selection against cuBLAS and torch's kernels.

Suites, or all of them: padding, moe, layer; training, steps forward and backward; index, and
conversion, which is index for every way to tell the zeros of a matrix (the paper's figure 17);
granularity (its figure 15), tensorcore (its figure 16), weights, outputs, grid, decode; sread, what
SRead and SWrite add to a dense tile; attention, by masks that are new at every call,
attention-training, with its gradients, and attention-decode, of few queries; and search.

With --all-candidates every candidate of the plans of padding, moe and the suites of sparse operands
is timed instead, to see how good predictions and choices are.

Peers run in the same process, in turn with pit-tvm, as replays of CUDA graphs; times are medians,
and every result is compared with float64. With --sustained each contender runs alone instead, under
steady load, where a GPU that is short of power is slower. The shapes of HELD_OUT in
bench_gpu_cases.py and all seeds of the benchmark are never tuned on, and held-out shapes have rows
and goals of their own. The last lines say which goals are reached. The exit status is 1 if a result
is wrong, and 2 if something is missing; a goal that is not reached does not change it.

The suite layer also times kernels of others if their sources are on PYTHONPATH, and prints "-"
where they are missing: OpenAI's triton_kernels with matmul_ogs (github.com/triton-lang/triton,
python/triton_kernels, of the release that torch came with; also in vllm/third_party of vLLM's
wheels; the package of that name on PyPI is another one), and github.com/shawntan/scattermoe.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from commands import parser_of, status_of
from needs import require, require_gpu
from out_paths import new_file

from pit_tvm.cli_options import any_seed, at_least
from pit_tvm.errors import ShapeError, mismatch

if TYPE_CHECKING:
    from bench_gpu_measure import GpuSettings
    from bench_report import Result
    from bench_rows import Target

INDEX = ("index", "conversion")
SPARSE = ("granularity", "tensorcore", "weights", "outputs", "grid", "decode", "sread")
ATTENTION = ("attention", "attention-training", "attention-decode")
SUITES = ("padding", "moe", "layer", "training", *INDEX, *SPARSE, *ATTENTION, "search")
ROUNDS, QUICK_ROUNDS = 30, 3


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("suites", nargs="*", metavar="suite", help=f"{', '.join(SUITES)} or all")
    add("--rounds", type=at_least(1), help=f"turns of each contender (default {ROUNDS})")
    add("--seed", type=any_seed, default=0, help="of the benchmark's own random data (default 0)")
    add("--quick", action="store_true", help="small sizes, which are held to no goal")
    add("--match", default="", metavar="TEXT", help="only rows whose label contains TEXT")
    add("--tiles", type=at_least(1), default=4, help="tiles of each plan to time (default 4)")
    add("--all-candidates", action="store_true", help="time every candidate of plans, and no peers")
    sustained = "time each contender alone, after so long under load (default: in turns)"
    add("--sustained", type=at_least(1), default=0, metavar="MS", help=sustained)
    add("--json", type=new_file, metavar="FILE", help="write everything measured to FILE")
    add("--plot", type=Path, metavar="FILE", help="draw the suites of a saved FILE beside it")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run without a GPU")
    add("--build-only", action="store_true", help="compile the kernels; needs nvcc, and no GPU")
    add("--jobs", type=at_least(1), help="processes that compile kernels (default: all processors)")
    options = parser.parse_args(argv)
    named = list(SUITES) if "all" in options.suites else options.suites
    if set(named) - set(SUITES):
        parser.error(f"suites are {', '.join(SUITES)} and all, not {sorted(set(named))}")
    if not named and not options.plot:
        parser.error("name a suite, or all, or a file to --plot")
    options.suites = [name for name in SUITES if name in named]
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    return options


def plot(path: Path) -> int:
    """Draw a saved run; the exit status."""
    require("--plot", ("matplotlib",), "plot")
    from bench_gpu_plot import plot_file

    for picture in plot_file(path):
        print(picture)
    return 0


def build(options: argparse.Namespace, settings: GpuSettings) -> None:
    """Compile what the suites will run, many kernels at once."""
    from bench_gpu_build import all_processors, build_all, product_cases, wanted

    start = time.perf_counter()
    cases = product_cases(options.suites, options.quick)
    kernels = wanted([case for case in cases if options.match in case.label], settings)
    number = build_all(kernels, options.jobs or all_processors())
    print(f"{number} libraries of kernels in {time.perf_counter() - start:.0f} s", flush=True)


def run(options: argparse.Namespace) -> int:
    """Compile, measure, print and write; the exit status."""
    require("bench_gpu", ("torch",), "quickstart")
    from bench_gpu_measure import GpuSettings

    cuda = options.device == "cuda"
    settings = GpuSettings(
        options.rounds,
        options.seed,
        options.quick,
        options.device,
        tiles=options.tiles,
        sustained=options.sustained,
    )
    if cuda and not options.build_only:
        require_gpu("bench_gpu", "--device cpu tries the benchmark without one")
    if cuda or options.build_only:
        build(options, settings)
    return 0 if options.build_only else measure(options, settings)


def measure(options: argparse.Namespace, settings: GpuSettings) -> int:
    """Measure, print and write; the exit status."""
    import bench_gpu_report as report
    import bench_report
    from bench_gpu_search import predictions
    from bench_gpu_suites import PLANNED, run_suite, sound, to_run

    where = report.describe(settings)
    print(f"{where['device']}, {where['clocks']}, {where['versions']}, {where['tile database']}")
    results: list[Result] = []

    def save(more: Sequence[Result]) -> None:
        if options.json:
            kept = [*results, *more]
            text = bench_report.to_json(where, kept, targets_of(kept, settings))
            bench_report.write(options.json, text)

    for suite in to_run(options.suites, options.all_candidates):
        results.append(run_suite(suite, settings, options.match, lambda one: save([one])))
    if not any(result.rows for result in results):
        raise ShapeError(mismatch("--match", "a part of some row's label", repr(options.match)))
    where["clocks at the end"] = report.clocks() if settings.device == "cuda" else {}
    save([])
    plans = [r for s in results if s.suite.name.split()[0] in PLANNED for r in sound(s.rows)]
    if plans:
        print(f"\nplans of {predictions(plans)}")
    wrong = [text for result in results for text in result.wrong()]
    print(f"\n{len(wrong)} wrong results{': ' * bool(wrong)}{'; '.join(wrong)}")
    print(report.goals(targets_of(results, settings), not where["quick"]))
    return 1 if wrong else 0


def targets_of(results: Sequence[Result], settings: GpuSettings) -> list[Target]:
    """All goals that there are rows for."""
    from bench_gpu_report import database
    from bench_gpu_search import held_out_target, prediction_targets
    from bench_gpu_suites import PLANNED, sound

    targets = [held_out_target(database(settings))]
    plans = []
    for result in results:
        rows = sound(result.rows)
        targets += result.suite.targets(rows)
        if result.suite.name.split()[0] in PLANNED:
            plans += rows
    return targets + prediction_targets(plans)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    options = parse(argv)
    return status_of("bench_gpu", lambda: plot(options.plot) if options.plot else run(options))


if __name__ == "__main__":
    sys.exit(main())
