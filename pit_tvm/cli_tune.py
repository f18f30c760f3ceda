"""``pit-tvm tune``: measure dense tiles and add the best to a tile database."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .cli_model import add_mask_input, add_model, check_families, missing_tasks
from .cli_options import any_seed, at_least, folder, in_memory, made_folder, sizes
from .errors import UnsupportedTarget, mismatch
from .target import TargetInfo, resolve_target
from .threads import cpus
from .tile_db.store import TileStore

if TYPE_CHECKING:
    import numpy as np

    from .structs import TileTask
    from .tuning.backend import Backend
    from .tuning.calibrate import Library
    from .tuning.job import TuneJob, TuneResult
    from .tuning.task_run import Settings

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EXIT_INTERRUPTED = 130

# Rows that a model's linear layers are tuned for: a batch of short texts, and a large one.
_MODEL_ROWS = [512, 4096]
_MASK_SIZE = 4096
_DETECT_RUNS = 21
_MOST_WORKERS = 2**15  # a pool of far more cannot be made

_TUNE_EXAMPLES = """\
examples:
  pit-tvm tune --shape 2048,2048,2048 --shape 512,1536,384
  pit-tvm tune --shape 1024,1024,1024 --dtype float32 --dtype float16 --trials 128
  pit-tvm tune --shape 1024,1024,1024 --target 'llvm -mcpu=x86-64-v3' --out my_logs
  pit-tvm tune --target cuda --dtype float16 --shape 1000,4096,4096 --shape 8192,3072,768,64
  pit-tvm tune --target cuda --dtype float32 --shape 2048,4096,4096 --family rows-cuda
  pit-tvm tune --shape 1024,1024,1024 --rpc-tracker 10.0.0.1:9190 --rpc-key epyc
  pit-tvm tune --model bert-base --list
  pit-tvm tune --model my_model.pt2 --rows 512 --rows 4096

With --model only what this device has no record of is tuned, neither in --out nor in what is
shipped: compile(..., database=DIR) takes tiles from both.
Run the same command again to continue an interrupted job. Ctrl-C records what was found so far;
a second Ctrl-C ends at once.
"""


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
    _add_products(parser)
    _add_search(parser)
    parser.set_defaults(run=run_tune, parser=parser)


def _add_products(parser: argparse.ArgumentParser) -> None:
    """What is tuned, and for which target."""
    add = parser.add_argument
    add("--op", help="operator (default: matmul, with groups grouped_matmul)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--shape",
        type=_shape,
        action="append",
        metavar="M,N,K[,GROUPS[,SHARE]]",
        help="extents of one product, over how many groups its rows are spread, and how many of "
        "them are of one stored row, as of a token with several experts; repeat for several",
    )
    add_model(what)
    add_mask_input(parser)
    add(
        "--rows",
        type=at_least(1),
        action="append",
        help="live rows that a model's linear layers are tuned for; repeat for several (default: "
        "512 and 4096)",
    )
    add("--list", action="store_true", help="with --model: print what there is and tune nothing")
    add(
        "--dtype",
        action="append",
        help="element type; repeat for several (default: float32, on a GPU float16; of a file "
        "with a model: its own)",
    )
    add(
        "--family",
        action="append",
        metavar="NAME",
        help="tile family; repeat for several (default: the operator's own of the target). Every "
        "product needs one that computes it",
    )
    add("--target", default="llvm", help="TVM target (default: this machine's CPU)")


def _add_search(parser: argparse.ArgumentParser) -> None:
    """How long, where, and with what beside the products."""
    add = parser.add_argument
    add(
        "--workers",
        type=at_least(1, _MOST_WORKERS),
        default=cpus(),
        help="processes that compile GPU candidates (default: one for each CPU)",
    )
    add(
        "--trials",
        type=at_least(1),
        default=64,
        help="candidates per product and tile family (default: 64)",
    )
    add(
        "--out",
        type=folder,
        default=Path("tuning_logs"),
        metavar="DIR",
        help="tile database, made if missing (default: %(default)s)",
    )
    add(
        "--work-dir",
        type=folder,
        default=Path("tuning_work"),
        metavar="DIR",
        help="where the job remembers all candidates (default: %(default)s)",
    )
    add("--rpc-tracker", metavar="HOST:PORT", help="run candidates on a server of this tracker")
    add("--rpc-key", metavar="KEY", help="key of those servers; also names the records' folder")
    add(
        "--seed",
        type=any_seed,
        default=0,
        help="of the search and of the data (default: 0)",
    )
    add(
        "--no-calibrate",
        action="store_true",
        help="do not measure the dense libraries and the device's constants",
    )


def run_tune(args: argparse.Namespace) -> int:
    """Run a tuning job and print what it recorded."""
    if (args.rpc_tracker is None) != (args.rpc_key is None):
        args.parser.error("--rpc-tracker and --rpc-key go together")
    if args.model is None and (args.rows or args.list):
        args.parser.error("--rows and --list go with --model")
    if args.model is None and args.mask_input is not None:
        args.parser.error("--mask-input goes with --model")
    if args.model is not None and args.op is not None:
        args.parser.error("--op goes with --shape")
    target = resolve_target(args.target)
    args.rows = args.rows or _MODEL_ROWS
    if not args.model:
        tasks = _tasks(args, target)
    else:
        tasks = missing_tasks(args, target, _device(args, target))
        print(f"{len(tasks)} products to tune")
        if args.list or not tasks:
            return 0
    with ExitStack() as stack:
        stack.enter_context(made_folder("--out", args.out))
        stack.enter_context(made_folder("--work-dir", args.work_dir))
        make_place = _cuda if target.kind == "cuda" else _host
        place = stack.enter_context(make_place(args, target))
        job = _tune_job(args, tasks, target, place)
        with in_memory("--rows" if args.model else "--shape"):
            result = job.run()
    _print_result(job, result)
    return EXIT_INTERRUPTED if result.interrupted else 0


class _Place(NamedTuple):
    """Where candidates run, how long they are measured, and what they are compared with."""

    backend: Backend
    settings: Settings
    libraries: list[Library]
    constants: dict[str, Callable[[], float]]


@contextmanager
def _host(args: argparse.Namespace, target: TargetInfo) -> Iterator[_Place]:
    """This machine's CPU, or those behind an RPC tracker."""
    from .tuning.backend import host_backend
    from .tuning.runner import OpenSession, local_session
    from .tuning.task_run import Settings

    sessions: OpenSession = local_session
    if args.rpc_tracker is not None:
        from .tuning.rpc import rpc_sessions

        sessions = rpc_sessions(args.rpc_tracker, args.rpc_key)
    settings = Settings(trials=args.trials, seed=args.seed)
    constants = {"detect_gbps": lambda: _detect_gbps(target)}
    yield _Place(host_backend(sessions), settings, _libraries(), constants)


@contextmanager
def _cuda(args: argparse.Namespace, target: TargetInfo) -> Iterator[_Place]:
    """This machine's GPU; candidates are compiled by ``--workers`` processes."""
    from .runtime.cuda_build import compile_source, kernel_source
    from .tuning.cuda_backend import cuda_backend, cuda_settings
    from .tuning.cuda_builder import Toolchain, worker_pool

    if args.rpc_tracker is not None:
        raise UnsupportedTarget(mismatch("--target with --rpc-tracker", "a CPU", args.target))
    toolchain = Toolchain(
        kernel_source, compile_source, target.isa, args.work_dir / "kernels", args.workers
    )
    with worker_pool(args.workers) as pool:
        settings = cuda_settings(args.trials, args.seed)
        yield _Place(cuda_backend(toolchain, pool), settings, _cuda_libraries(), {})


def _device(args: argparse.Namespace, target: TargetInfo) -> str:
    """Folder of the records: this machine's, or one for all servers of the key."""
    return target.device if args.rpc_key is None else f"{args.rpc_key}-{target.isa}"


def _tune_job(
    args: argparse.Namespace, tasks: list[TileTask], target: TargetInfo, place: _Place
) -> TuneJob:
    from .tuning.job import TuneJob

    device = _device(args, target)
    return TuneJob(
        tasks=tasks,
        target=target,
        work_dir=args.work_dir,
        store=TileStore.create(args.out, device=device, isa=target.isa),
        settings=place.settings,
        backend=place.backend,
        device=device,
        # The libraries and constants of this machine say nothing about the servers'.
        calibrate=not args.no_calibrate and args.rpc_tracker is None,
        libraries=place.libraries,
        constants=place.constants,
    )


def _tasks(args: argparse.Namespace, target: TargetInfo) -> list[TileTask]:
    """Every shape in every dtype and family, without repetitions."""
    from .tuning.tasks import make_tasks

    tasks: list[TileTask] = []
    for dtype in args.dtype or ["float16" if target.kind == "cuda" else "float32"]:
        for m, n, k, groups, share in args.shape:
            op = args.op or ("matmul" if groups == 1 else "grouped_matmul")
            made = make_tasks(op, (m, n, k), dtype, target.isa, groups, share, args.family)
            check_families(args.family, made, (m, n, k, groups), dtype)
            tasks += made
    return list(dict.fromkeys(tasks))


def _libraries() -> list[Library]:
    """Dense products to measure: numpy's, and torch's where it is installed."""
    import numpy as np

    from .runtime.arrays import as_torch
    from .runtime.library import library_matmul
    from .tuning.calibrate import NUMPY, Library

    try:
        tensor = as_torch(np.zeros((1, 1), np.float32))
    except ImportError:
        return [NUMPY]
    return [NUMPY, Library(type(tensor).__module__, library_matmul, as_torch)]


def _cuda_libraries() -> list[Library]:
    """torch's product on the GPU, where torch is installed; ``rhs`` as nn.Linear stores it."""
    import numpy as np

    from .runtime.arrays import as_torch
    from .runtime.library import library_matmul
    from .tuning.calibrate import Library
    from .tuning.cuda_backend import cuda_times

    try:
        name = type(as_torch(np.zeros((1, 1), np.float32))).__module__
    except ImportError:
        return []

    def product(lhs: Any, rhs: Any, out: Any) -> None:
        library_matmul(lhs, rhs, out, transpose_rhs=True)

    def fetch(out: Any) -> np.ndarray:
        return np.asarray(out.float().cpu())

    def prepare(array: np.ndarray) -> Any:
        return as_torch(array).cuda()

    return [Library(name, product, prepare, fetch, transposed=True, times=cuda_times)]


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
        extents = _extents(task)
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
            print(f"no right tile: {task.family} {task.dtype} {_extents(task)}")
    if result.errors:
        print(f"most frequent failure: {result.errors[0]}")
    if result.interrupted:
        print("interrupted: run the same command again to continue")


def _shape(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.replace("x", ",").split(",")]
    found = sizes(",".join(parts), "m,n,k", "m,n,k,groups", "m,n,k,groups,share")
    return (*found, 1, 1)[:5]


def _extents(task: TileTask) -> str:
    more = [str(number) for number in (task.groups, task.share) if number > 1]
    return "/".join([f"{task.m}x{task.n}x{task.k}", *more])
