"""The ``pit-tvm`` command. Each subcommand is ``add_<name>``, its arguments, and ``run_<name>``.

Modules that need tvm are imported where a subcommand runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .cli_build import add_build
from .cli_explain import add_explain
from .cli_options import add_database, as_typed, cache_faults, kernel_cache
from .cli_tune import EXIT_INTERRUPTED, add_tune
from .errors import DatabaseError, PitError
from .locations import tuning_logs_dir
from .target import TargetInfo, lacking, resolve_target
from .tile_db.store import TileStore

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_PACKAGES = "apache-tvm apache-tvm-ffi numpy xgboost torch"

EXIT_ERROR = 2
EXIT_PIPE = 141  # as of a process that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit status: 0, 2 for an error, 130 if interrupted, 141 if
    nobody reads its output any more."""
    try:
        try:
            return _run(argv)
        finally:
            # Here, because what cannot be written when Python ends is reported with a traceback.
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        quiet = isinstance(error, BrokenPipeError)
        if not quiet:
            print(f"pit-tvm: error: {error}", file=sys.stderr)
        _drop_output()
        return EXIT_PIPE if quiet else EXIT_ERROR


def _run(argv: Sequence[str] | None) -> int:
    """The same, but for output that cannot be written."""
    args = make_parser().parse_args(argv)
    try:
        return int(args.run(args))
    except PitError as error:
        print(f"pit-tvm: error: {as_typed(str(error), args)}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        print("pit-tvm: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _drop_output() -> None:
    """What is left to print goes nowhere if it cannot be written: Python tries again at its end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    add_build(subparsers)
    add_info(subparsers)
    add_cache(subparsers)
    return parser


def add_info(subparsers: Subparsers) -> None:
    """Arguments of ``pit-tvm info``."""
    parser = subparsers.add_parser(
        "info",
        help="print versions, the detected target, tile databases and the kernel cache",
        epilog="examples:\n  pit-tvm info\n  pit-tvm info --database my_logs",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", default="llvm", help="TVM target (default: this machine's CPU)")
    add_database(parser)
    parser.set_defaults(run=run_info)


def run_info(args: argparse.Namespace) -> int:
    """Print what a bug report needs."""
    target = resolve_target(args.target)
    rows = [("python", sys.version.split()[0]), ("pit-tvm", __version__)]
    rows += [(name, _version(name)) for name in _PACKAGES.split()]
    rows += _gpu_rows(target) if target.kind == "cuda" else _cpu_rows(target)
    rows.append(("device", target.device))
    rows += _database_rows(args.database, target)
    rows.append(("kernel cache", _cache_text()))
    for name, value in rows:
        print(f"{name:15} {value}")
    return 0


def _cpu_rows(target: TargetInfo) -> list[tuple[str, str]]:
    return [
        ("target", f"{target.kind} -mcpu={target.mcpu}"),
        ("isa", f"{target.isa}, {target.vector_bits}-bit vectors"),
        ("threads", str(target.threads)),
    ]


def _gpu_rows(target: TargetInfo) -> list[tuple[str, str]]:
    """What the target is, and whether it is this machine's or only what plans are made for."""
    missing = lacking(target)
    return [
        ("target", f"{target.kind} -arch={target.isa}"),
        ("multiprocessors", f"{target.threads}{', assumed' if missing else ''}"),
        ("gpu", f"this machine lacks {missing}" if missing else "the first of this machine"),
    ]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _database_rows(path: Path | None, target: TargetInfo) -> list[tuple[str, str]]:
    """The folders that tiles are from, and per device how many records of each kind they hold."""
    if path is None:
        try:
            tuning_logs_dir()
        except DatabaseError as error:
            return [("database", f"none ({error})")]
    store = TileStore.over_shipped(path, device=target.device, isa=target.isa)
    rows: list[tuple[str, str]] = []
    for root, name in zip(store.roots, ("database", "shipped"), strict=False):
        rows.append((name, str(root)))
        for folder in TileStore.open(root).folders():
            kinds = [record.kind for record in TileStore.open(root / folder).all()]
            counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
            used = " (used here)" if root / folder in store.used_folders else ""
            rows.append(("", f"{folder}: {counts or 'empty'}{used}"))
    if not store.used:
        rows.append(("", f"no records for {target.device}: generic tiles are used, untuned"))
    return rows


def _cache_text() -> str:
    cache = kernel_cache()
    with cache_faults():
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
    cache = kernel_cache()
    with cache_faults():
        files, size = cache.clear()
    print(f"{cache.directory}: deleted {files} files, {size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
