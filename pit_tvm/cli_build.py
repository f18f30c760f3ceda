"""``pit-tvm build``: compiles GPU kernels ahead, for a machine without a compiler."""

from __future__ import annotations

import argparse
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .cli_options import add_database, folder, sizes, writable_cache
from .errors import BackendUnavailable, ShapeError, UnsupportedTarget, mismatch

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_EXAMPLES = """\
examples:
  pit-tvm build --shape 32768,3072,768 --dtype float16 --bias --activation gelu
  pit-tvm build --op grouped_matmul --shape 8192,3072,768,64 --dtype bfloat16 --out kernels

Copy the folder to the machine with the GPU, and set PIT_TVM_CACHE to it there.
"""
OPERATORS = ("linear", "matmul", "grouped_matmul")
_EVERY = 0.5  # seconds


def add_build(subparsers: Subparsers) -> None:
    """Arguments of ``pit-tvm build``."""
    parser = subparsers.add_parser(
        "build",
        help="compile the GPU kernels of an operator into the kernel cache",
        description="Compile what calls of a GPU operator may need, at any density, into the "
        "kernel cache. Needs nvcc, and no GPU; kernels serve every shape, and the one given only "
        "decides which tiles are likely.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--op", choices=OPERATORS, default="linear", help="default: linear")
    parser.add_argument("--shape", type=_sizes, required=True, metavar="M,N,K[,GROUPS]")
    parser.add_argument("--dtype", default="float16", help="default: float16")
    parser.add_argument("--bias", action="store_true", help="with a bias")
    parser.add_argument("--activation", help="relu, relu2, gelu, gelu_tanh or silu")
    parser.add_argument("--target", default="cuda", help="default: cuda")
    add_database(parser)
    parser.add_argument("--out", type=folder, help="folder (default: the kernel cache)")
    parser.set_defaults(run=run_build)


def run_build(args: argparse.Namespace) -> int:
    """Compile, and say how much."""
    from .api import compile
    from .runtime.kernel_cache import KernelCacheWarning
    from .target import resolve_target

    if resolve_target(args.target).kind != "cuda":
        advice = "CPU kernels need no compiler but TVM's own"
        raise UnsupportedTarget(mismatch("--target", "a GPU", args.target, advice))
    tensors, spec = _operator(args)
    cache = writable_cache("--out", args.out)
    operator = compile(
        tensors, sparse={"lhs": spec}, target=args.target, database=args.database, cache=cache
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", KernelCacheWarning)
        try:
            with _counting(operator):
                operator.build(dict(zip("mnk", args.shape, strict=False)))
        except KernelCacheWarning as error:
            name = "kernel cache" if args.out is None else "--out"
            text = mismatch(name, "a folder that can be written", str(error))
            raise BackendUnavailable(text) from error
    stats = operator.stats
    print(f"{stats.builds} libraries compiled in {stats.build_seconds:.0f} s")
    print(f"{stats.disk_hits} were there; all are in {operator.cache_directory}")
    return 0


@contextmanager
def _counting(operator: Any, hidden: bool | None = None) -> Iterator[None]:
    """Show on a terminal how many libraries are there; ``hidden`` says whether not to, at all."""
    from tqdm import tqdm

    done = threading.Event()
    shown = "{n_fmt} libraries, {elapsed}"

    def show() -> None:
        with tqdm(bar_format=shown, disable=hidden, leave=False) as bar:
            while not done.wait(_EVERY):
                stats = operator.stats
                bar.n = stats.builds + stats.disk_hits
                bar.refresh()

    watcher = threading.Thread(target=show, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _sizes(text: str) -> tuple[int, ...]:
    return sizes(text, "M,N,K", "M,N,K,GROUPS")


def _operator(args: argparse.Namespace) -> tuple[list[Any], Any]:
    from . import op
    from .structs import Groups, Lengths

    options = {"dtype": args.dtype, "bias": args.bias, "activation": args.activation}
    grouped = args.op == "grouped_matmul"
    if len(args.shape) != (4 if grouped else 3):
        expected = "M,N,K,GROUPS" if grouped else "M,N,K"
        raise ShapeError(mismatch(f"--shape of {args.op}", expected, args.shape))
    if grouped:
        groups = args.shape[3]
        made = op.grouped_matmul(None, None, None, groups, transpose_rhs=True, **options)
        return made, Groups(groups)
    return getattr(op, args.op)(None, None, None, **options), Lengths()
