"""The ``pit-tvm`` command. Each subcommand is ``add_<name>``, its arguments, and ``run_<name>``.

Modules that need tvm are imported where a subcommand runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .cli_explain import add_explain
from .errors import DatabaseError, PitError
from .locations import tuning_logs_dir
from .target import TargetInfo, resolve_target
from .tile_db.store import TileStore

if TYPE_CHECKING:
    from .structs import TileTask
    from .tuning.calibrate import Library
    from .tuning.job import TuneJob, TuneResult

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_PACKAGES = "apache-tvm apache-tvm-ffi numpy xgboost torch"

_MASK_SIZE = 4096
_DETECT_RUNS = 21

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

_TUNE_EXAMPLES = """\
examples:
  pit-tvm tune --shape 2048,2048,2048 --shape 512,1536,384
  pit-tvm tune --shape 1024,1024,1024 --dtype float32 --dtype float16 --trials 128
  pit-tvm tune --shape 1024,1024,1024 --target 'llvm -mcpu=x86-64-v3' --out my_logs
  pit-tvm tune --shape 1024,1024,1024 --rpc-tracker 10.0.0.1:9190 --rpc-key epyc

Run the same command again to continue an interrupted job. Ctrl-C records what was found so far;
a second Ctrl-C ends at once.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit status: 0, 2 for an error, 130 if interrupted."""
    args = make_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except PitError as error:
        print(f"pit-tvm: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("pit-tvm: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """The command's parser, with every subcommand."""
    parser = argparse.ArgumentParser(
        prog="pit-tvm",
        description="Sparse and padded tensor operators from TVM: tuning and inspection.",
    )
    parser.add_argument("--version", action="version", version=f"pit-tvm {__version__}")
    subparsers = parser.add_subparsers(title="subcommands", metavar="NAME", required=True)
    add_tune(subparsers)
    add_explain(subparsers)
    add_info(subparsers)
    add_cache(subparsers)
    return parser


# --------------------------------------------------------------------------------------------
# tune


def add_tune(subparsers: Subparsers) -> None:
    """Arguments of ``pit-tvm tune``."""
    parser = subparsers.add_parser(
        "tune",
        help="measure dense tiles and add the best to a tile database",
        description="Searches dense tiles with MetaSchedule, checks each result against numpy, "
        "and adds the fastest tiles to a tile database.",
        epilog=_TUNE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--op", default="matmul", help="operator (default: %(default)s)")
    add(
        "--shape",
        type=_shape,
        action="append",
        required=True,
        metavar="M,N,K",
        help="extents of one product; repeat for several",
    )
    add(
        "--dtype",
        action="append",
        help="element type; repeat for several (default: float32)",
    )
    add(
        "--family",
        action="append",
        metavar="NAME",
        help="tile family; repeat for several (default: all of the operator's)",
    )
    add("--target", default="llvm", help="TVM target (default: this machine's CPU)")
    add(
        "--trials",
        type=_positive,
        default=64,
        help="candidates per product and tile family (default: 64)",
    )
    add(
        "--out",
        type=Path,
        default=Path("tuning_logs"),
        metavar="DIR",
        help="tile database, made if missing (default: %(default)s)",
    )
    add(
        "--work-dir",
        type=Path,
        default=Path("tuning_work"),
        metavar="DIR",
        help="where the job remembers all candidates (default: %(default)s)",
    )
    add("--rpc-tracker", metavar="HOST:PORT", help="run candidates on a server of this tracker")
    add("--rpc-key", metavar="KEY", help="key of those servers; also names the records' folder")
    add("--seed", type=int, default=0, help="seed of the search and of the data (default: 0)")
    add(
        "--no-calibrate",
        action="store_true",
        help="do not measure the dense libraries and the device's constants",
    )
    parser.set_defaults(run=run_tune, parser=parser)


def run_tune(args: argparse.Namespace) -> int:
    """Run a tuning job and print what it recorded."""
    if (args.rpc_tracker is None) != (args.rpc_key is None):
        args.parser.error("--rpc-tracker and --rpc-key go together")
    job = _tune_job(args)
    result = job.run()
    _print_result(job, result)
    return EXIT_INTERRUPTED if result.interrupted else 0


def _tune_job(args: argparse.Namespace) -> TuneJob:
    target = resolve_target(args.target)
    from .tuning.job import TuneJob
    from .tuning.runner import OpenSession, local_session
    from .tuning.task_run import Settings

    remote = args.rpc_tracker is not None
    sessions: OpenSession = local_session
    if remote:
        from .tuning.rpc import rpc_sessions

        sessions = rpc_sessions(args.rpc_tracker, args.rpc_key)
    device = f"{args.rpc_key}-{target.isa}" if remote else target.device
    return TuneJob(
        tasks=_tasks(args, target),
        target=target,
        work_dir=args.work_dir,
        store=TileStore.create(args.out, device=device, isa=target.isa),
        settings=Settings(trials=args.trials, seed=args.seed),
        sessions=sessions,
        device=device,
        # The libraries and constants of this machine say nothing about the servers'.
        calibrate=not args.no_calibrate and not remote,
        libraries=_libraries(),
        constants={"detect_gbps": lambda: _detect_gbps(target)},
    )


def _tasks(args: argparse.Namespace, target: TargetInfo) -> list[TileTask]:
    """Every shape in every dtype and family, without repetitions."""
    from .tuning.tasks import make_tasks

    tasks = [
        task
        for dtype in args.dtype or ["float32"]
        for shape in args.shape
        for task in make_tasks(args.op, shape, dtype, target.isa)
        if not args.family or task.family in args.family
    ]
    return list(dict.fromkeys(tasks))


def _libraries() -> list[Library]:
    """Dense products to measure: numpy's, and torch's where it is installed."""
    import numpy as np

    from .runtime.arrays import as_torch, library_matmul
    from .tuning.calibrate import NUMPY, Library

    try:
        tensor = as_torch(np.zeros((1, 1), np.float32))
    except ImportError:
        return [NUMPY]
    return [NUMPY, Library(type(tensor).__module__, library_matmul, as_torch)]


def _detect_gbps(target: TargetInfo) -> float:
    """Bytes of a boolean mask that are indexed per second (1e9): micro-tiles 32x1, 10 % live."""
    import time
    from statistics import median

    import numpy as np

    from .runtime.detect import Detector
    from .structs import Mask, MicroTile

    blocks = np.random.default_rng(0).random((_MASK_SIZE // 32, _MASK_SIZE)) < 0.1
    mask = np.repeat(blocks, 32, axis=0)
    detector = Detector(target.tvm_target)
    secs = []
    for _ in range(_DETECT_RUNS):
        start = time.perf_counter()
        detector.detect(Mask(32, 1), mask, mask.shape, MicroTile("lhs", "k", 1, (32, 1)))
        secs.append(time.perf_counter() - start)
    return 1e-9 * mask.size / median(secs)


def _print_result(job: TuneJob, result: TuneResult) -> None:
    print(f"{'kind':8} {'dtype':9} {'m x n x k':>18} {'GFLOP/s':>9}  {'family':18}  what")
    for record in result.records:
        if record.task is None:
            constants = ", ".join(f"{name} {value:.3g}" for name, value in record.profile)
            print(f"{record.kind:8} {'':9} {'':18} {'':9}  {'':18}  {constants}")
            continue
        task = record.task
        extents = f"{task.m}x{task.n}x{task.k}"
        family = record.tile.family if record.tile else "dense"
        what = record.note or str(record.tile)
        rate = f"{record.gflops:9.1f}"
        print(f"{record.kind:8} {task.dtype:9} {extents:>18} {rate}  {family:18}  {what}")
    print(
        f"{result.measured} candidates measured ({result.failed} failed, {result.wrong} of them "
        f"wrong), {result.reused} known before; records in {job.store.root / job.store.device}"
    )
    with_tile = {record.task for record in result.records if record.kind == "pit"}
    for task in job.tasks:
        if task not in with_tile:
            print(f"no right tile: {task.family} {task.dtype} {task.m}x{task.n}x{task.k}")
    if result.errors:
        print(f"most frequent failure: {result.errors[0]}")
    if result.interrupted:
        print("interrupted: run the same command again to continue")


# --------------------------------------------------------------------------------------------
# info and cache


def add_info(subparsers: Subparsers) -> None:
    """Arguments of ``pit-tvm info``."""
    parser = subparsers.add_parser(
        "info",
        help="print versions, the detected target, tile databases and the kernel cache",
        epilog="examples:\n  pit-tvm info\n  pit-tvm info --database my_logs",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", default="llvm", help="TVM target (default: this machine's CPU)")
    parser.add_argument(
        "--database", type=Path, metavar="DIR", help="tile database (default: the one shipped)"
    )
    parser.set_defaults(run=run_info)


def run_info(args: argparse.Namespace) -> int:
    """Print what a bug report needs."""
    target = resolve_target(args.target)
    rows = [("python", sys.version.split()[0]), ("pit-tvm", __version__)]
    rows += [(name, _version(name)) for name in _PACKAGES.split()]
    rows += [
        ("target", f"{target.kind} -mcpu={target.mcpu}"),
        ("isa", f"{target.isa}, {target.vector_bits}-bit vectors"),
        ("threads", str(target.threads)),
        ("device", target.device),
    ]
    rows += _database_rows(args.database, target)
    rows.append(("kernel cache", _cache_text()))
    for name, value in rows:
        print(f"{name:15} {value}")
    return 0


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _database_rows(path: Path | None, target: TargetInfo) -> list[tuple[str, str]]:
    """The database's folder, and per device how many records of each kind it holds."""
    if path is None:
        try:
            path = tuning_logs_dir()
        except DatabaseError as error:
            return [("database", f"none ({error})")]
    store = TileStore.open(path, device=target.device, isa=target.isa)
    rows = [("database", str(store.root))]
    for folder in store.folders():
        kinds = [record.kind for record in TileStore.open(store.root / folder).all()]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        used = store.path is not None and store.path.parent.name == folder
        rows.append(("", f"{folder}: {counts or 'empty'}{' (used here)' if used else ''}"))
    if store.path is None:
        rows.append(("", f"no records for {target.device}: generic tiles are used, untuned"))
    return rows


def _cache_text() -> str:
    from .runtime.kernel_cache import KernelCache

    cache = KernelCache()
    files, size = cache.disk_usage()
    return f"{cache.directory}: {files} files, {size / 2**20:.1f} MiB"


def add_cache(subparsers: Subparsers) -> None:
    """Arguments of ``pit-tvm cache``."""
    parser = subparsers.add_parser(
        "cache",
        help="show or empty the cache of compiled kernels",
        epilog="examples:\n  pit-tvm cache info\n  pit-tvm cache clear",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("info", "clear"))
    parser.set_defaults(run=run_cache)


def run_cache(args: argparse.Namespace) -> int:
    """Print the cache's folder and size, or delete its files."""
    if args.action == "info":
        print(_cache_text())
        return 0
    from .runtime.kernel_cache import KernelCache

    cache = KernelCache()
    files, size = cache.clear()
    print(f"{cache.directory}: deleted {files} files, {size / 2**20:.1f} MiB")
    return 0


# --------------------------------------------------------------------------------------------


def _shape(text: str) -> tuple[int, ...]:
    parts = text.replace("x", ",").split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"expected m,n,k, integers of at least 1, got {text!r}")
    return tuple(int(part) for part in parts)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
