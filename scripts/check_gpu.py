"""Checks the GPU backend: random patterns and shapes against float64, and what calls promise.

Thousands of random calls of each kernel family through the public interface, every tile in turn:
products of live rows (linear with weights [n, k], matmul with weights [k, n], turned with an lhs
[k, m] besides, grouped); of either operand in blocks along k, in pieces of one row and in bands; of
operands whose zeros fill whole rows and whole columns (grid); of outputs that are needed in part;
over ranges of k that exist; of a few rows (decode); anything else (general: expressions of fixed n
and k, each with many patterns); and attention by masks, with its gradients. Then no
synchronisation, CUDA graphs, tensors that lie elsewhere at every call, streams, threads, memory and
the number of kernels. One line for each check, a summary at the end; the exit status is 1 if
anything is wrong, and 2 if something is missing.

A set small enough for compute-sanitizer, with memory that it can watch, and none of the library's
own kernels, which racecheck complains of:

    python scripts/check_gpu.py --reduced --build-only
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    watch="compute-sanitizer --target-processes application-only"
    $watch --tool memcheck python scripts/check_gpu.py --reduced
    $watch --tool racecheck python scripts/check_gpu.py --reduced
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from commands import parser_of, status_of
from needs import require, require_gpu
from out_paths import new_file

from pit_tvm.cli_options import any_seed, at_least
from pit_tvm.errors import PitError

if TYPE_CHECKING:
    from check_gpu_values import Checker, Report

ATTENTION = "attention"
ROWS = ("linear", "matmul", "turned", "grouped")
FAMILIES = (
    *ROWS,
    "blocks",
    "pieces",
    "bands",
    "grid",
    "outputs",
    "ranges",
    "decode",
    "general",
    "tf32",
    ATTENTION,
)
COUNT = 2000
# Every kind once, of live rows every type and epilogue; without an epilogue all tiles run. Then
# these with other patterns.
REDUCED = (*range(16), 48, 96, 144)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--count", type=at_least(1), default=COUNT, help=f"cases of a family (default {COUNT})")
    add("--seed", type=any_seed, help="of the random cases (default: a new one, which is printed)")
    add("--family", action="append", choices=FAMILIES, help="repeat for several (default: all)")
    add("--case", type=int, metavar="NUMBER", help="one case of a seed again, and nothing else")
    tiles = "tiles of operators over rows with an epilogue, of grids and general ones (default 2)"
    add("--tiles", type=at_least(1), default=2, help=tiles)
    add("--reduced", action="store_true", help="few cases, and streams: for compute-sanitizer")
    add("--only", choices=("values", "runtime"), help="half of the checks")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: the CPU's operators")
    add("--build-only", action="store_true", help="compile the kernels; needs nvcc, and no GPU")
    add("--json", type=new_file, help="write the cases of every family to this file too")
    add("--jobs", type=at_least(1), help="processes that compile kernels (default: all processors)")
    options = parser.parse_args(argv)
    if options.case is not None and options.seed is None:
        parser.error("--case needs the --seed that it was found with")
    if options.reduced:
        options.tiles = 1
    options.seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    options.family = [name for name in FAMILIES if name in (options.family or FAMILIES)]
    return options


def run(options: argparse.Namespace) -> int:
    """Compile and check; the exit status."""
    require("check_gpu", ("torch",), "quickstart")
    from check_gpu_values import Checker

    cuda = options.device == "cuda"
    if cuda and not options.build_only:
        require_gpu("check_gpu", "--device cpu checks the CPU's operators")
    checker = Checker(options.device, options.tiles, library=not options.reduced)
    print(f"seed {options.seed}", flush=True)
    if cuda or options.build_only:
        build(options, checker)
    if options.build_only:
        return 0
    faults: list[str] = []
    if options.only != "runtime":
        reports = check_values(options, checker)
        faults += [fault for report in reports.values() for fault in report.faults]
        if options.json is not None:
            save(options, reports)
    if options.only != "values" and options.case is None:
        faults += check_runtime(checker, options.reduced)
    print(f"\n{len(faults)} faults, seed {options.seed}")
    return 1 if faults else 0


def build(options: argparse.Namespace, checker: Checker) -> None:
    """Compile what the checks run, many kernels at once."""
    from bench_gpu_build import all_processors, build_all
    from check_gpu_attention import attention_kernels
    from check_gpu_tiles import kernels_of

    start = time.perf_counter()
    families = [] if options.only == "runtime" else list(options.family)
    if options.only != "values":
        families += [family for family in ROWS if family not in families]
    products = [family for family in families if family != ATTENTION]
    kernels = kernels_of(products, checker.tiles)
    kernels += attention_kernels() if ATTENTION in families else []
    number = build_all(kernels, options.jobs or all_processors())
    print(f"{number} libraries of kernels in {time.perf_counter() - start:.0f} s", flush=True)


def check_values(options: argparse.Namespace, checker: Checker) -> dict[str, Report]:
    """Random cases, by family."""
    from check_gpu_attention import check_attention
    from check_gpu_values import check_family

    numbers: Sequence[int] = REDUCED if options.reduced else range(options.count)
    if options.case is not None:
        numbers = [options.case]
    reports = {}
    for family in options.family:
        start = time.perf_counter()
        check = check_attention if family == ATTENTION else check_family
        report = reports[family] = check(family, numbers, options.seed, checker)
        print(
            f"{family}: {report.cases} cases, {report.calls} calls, {len(report.tiles)} tiles, "
            f"{len(report.faults)} faults, {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    return reports


def save(options: argparse.Namespace, reports: dict[str, Report]) -> None:
    """Write what was run, where, and what was wrong."""
    from bench_gpu_report import machine
    from bench_report import write

    run = {"seed": options.seed, "reduced": options.reduced}
    families = {name: asdict(report) for name, report in reports.items()}
    document = {**machine(options.device == "cuda"), **run, "families": families}
    write(options.json, json.dumps(document, indent=1, default=sorted) + "\n")


def check_runtime(checker: Checker, reduced: bool) -> list[str]:
    """Everything but values, one line each; on a CPU only what it has."""
    import check_gpu_runtime as runtime

    checks: dict[str, Callable[[Checker], list[str]]] = {}
    if not reduced:
        checks["threads"] = runtime.check_threads
    if checker.device == "cuda":
        checks["streams"] = runtime.check_streams
    if checker.device == "cuda" and not reduced:
        checks |= {
            "no synchronisation": runtime.check_no_waiting,
            "CUDA graphs": runtime.check_graphs,
            "tensors elsewhere": runtime.check_moves,
            "memory": runtime.check_memory,
            "number of kernels": runtime.check_kernels,
            "more than 2**31 elements": runtime.check_large,
            "many groups": runtime.check_many_groups,
        }
    faults = []
    for name, check in checks.items():
        start = time.perf_counter()
        try:
            found = check(checker)
        except (PitError, RuntimeError) as error:
            found = [f"{type(error).__name__}: {error}"]
        for fault in found:
            print(f"{name}: {fault}")
        state = f"{len(found)} faults" if found else "right"
        print(f"{name}: {state}, {time.perf_counter() - start:.0f} s", flush=True)
        faults += found
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; the exit status."""
    options = parse(argv)
    return status_of("check_gpu", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
