"""The CPU benchmark: tiles, masked products, attention, index, selection and calls against peers.

Peers run in the same process, in turn with pit-tvm; times are medians, and speed-ups medians over
the turns. The shapes of ``HELD_OUT`` in bench_cpu_cases.py and all seeds of the benchmark are never
tuned on, and held-out shapes have rows and targets of their own. The text ends with one line of
JSON that says which targets are met.
The exit status is 1 if a result is wrong, and 2 if something is missing; a target that is not met
does not change it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from commands import parser_of, status_of
from needs import limit_threads, require
from out_paths import new_file, picture_folder

from pit_tvm.cli_options import any_seed, at_least
from pit_tvm.threads import MOST_THREADS

if TYPE_CHECKING:
    from bench_report import Result
    from bench_rows import Settings, Suite

SUITES = ("dense", "masks", "attention", "index", "select", "call")
REPEATS, QUICK_REPEATS = 11, 3


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--suite", action="append", choices=SUITES, help="repeat for several (default: all)")
    add("--repeats", type=at_least(1), help=f"turns of each contender (default {REPEATS})")
    add("--seed", type=any_seed, default=0, help="of the benchmark's own random data (default 0)")
    threads = at_least(1, MOST_THREADS)
    add("--threads", type=threads, default=len(os.sched_getaffinity(0)), help="default: all")
    add("--quick", action="store_true", help="small sizes, which are held to no target")
    add("--held-out", action="store_true", help="only the shapes that are never tuned on")
    add("--json", type=new_file, metavar="FILE", help="write everything measured to FILE")
    add("--plot", type=picture_folder, metavar="DIR", help="draw one PNG for each suite into DIR")
    options = parser.parse_args(argv)
    options.suite = [name for name in SUITES if name in (options.suite or SUITES)]
    options.repeats = options.repeats or (QUICK_REPEATS if options.quick else REPEATS)
    return options


def measure(suite: Suite, settings: Settings, held_out_only: bool) -> Result:
    """All cases of one suite, with a progress bar on a terminal."""
    from bench_report import Result
    from tqdm import tqdm

    rows = []
    cases = [case for case in suite.cases(settings.quick) if case.held_out or not held_out_only]
    with tqdm(cases, unit="case", leave=False, disable=None) as bar:
        for case in bar:
            bar.set_description(f"{suite.name} {case.label}")
            rows.append(suite.measure(case, settings))
    return Result(suite, tuple(rows))


def run(options: argparse.Namespace) -> int:
    """Measure, print and write; the exit status."""
    require("bench_cpu", ("torch", "scipy"), "quickstart")
    limit_threads(options.threads)
    import bench_cpu_report
    import bench_report as report
    import torch
    from bench_cpu_attention import ATTENTION
    from bench_cpu_index import INDEX
    from bench_cpu_products import DENSE, MASKS
    from bench_cpu_steps import CALL, SELECT
    from bench_rows import Settings

    from pit_tvm.threads import start_thread_pool

    torch.set_num_threads(options.threads)
    threads = start_thread_pool(options.threads)
    settings = Settings(options.repeats, options.seed, options.quick)
    where = bench_cpu_report.describe(settings, threads)
    print(heading(where))
    results: list[Result] = []
    targets = [bench_cpu_report.held_out_target()]
    for suite in (DENSE, MASKS, ATTENTION, INDEX, SELECT, CALL):
        if suite.name not in options.suite:
            continue
        result = measure(suite, settings, options.held_out)
        results.append(result)
        targets += result.targets()
        print(f"\n{report.table(result)}", flush=True)
        # After every suite, so that an interrupted run leaves what it has.
        if options.json:
            report.write(options.json, report.to_json(where, results, targets))
        if options.plot and result.rows:
            print(bench_cpu_report.plot(options.plot, result))
    outcome = report.summary(results, targets, options.quick)
    print(f"\n{json.dumps(outcome)}")
    return 1 if outcome["wrong"] else 0


def heading(where: dict[str, Any]) -> str:
    """Machine, versions and state, in a few lines."""
    database, versions = where["tile database"], where["versions"]
    tiles = f"tiles of {database['folder']}" if database["folder"] else "no tuned tiles"
    return (
        f"{where['cpu']}, {where['threads']} threads, load {where['load'][0]:.2f}; {tiles}, "
        f"{database['records']} records\n"
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}\n"
        f"{where['repeats']} turns of each contender, seed {where['seeds'][-1]}"
        f"{', quick: small sizes' if where['quick'] else ''}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    options = parse(argv)
    return status_of("bench_cpu", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())
