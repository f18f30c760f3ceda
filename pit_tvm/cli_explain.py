"""``pit-tvm explain``: candidates of a product for a random pattern, and the one chosen."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .errors import ShapeError, mismatch
from .structs import Lengths, Mask, SparsitySpec

if TYPE_CHECKING:
    import numpy as np

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_EXAMPLES = """\
examples:
  pit-tvm explain --shape 2048,2048,2048 --mask 32x1 --density 0.1
  pit-tvm explain --shape 32768,1536,384 --lengths 128 --density 0.25 --library torch
"""


def add_explain(subparsers: Subparsers) -> None:
    """Arguments of ``pit-tvm explain``."""
    parser = subparsers.add_parser(
        "explain",
        help="print the candidates for a pattern with their predicted costs",
        description="Draw a random pattern for the left operand of a product, and print every "
        "candidate with its predicted cost in microseconds. Nothing is run.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", type=_sizes, required=True, metavar="M,N,K")
    pattern = parser.add_mutually_exclusive_group()
    pattern.add_argument(
        "--mask", type=_extents, default=(32, 1), metavar="AxB", help="blocks (default 32x1)"
    )
    pattern.add_argument(
        "--lengths", type=int, metavar="L", help="rows are sequences padded to L instead"
    )
    parser.add_argument("--density", type=float, default=0.1, help="live share (default 0.1)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--library", choices=("numpy", "torch"), default="numpy")
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--database", help="folder of tuned tiles instead of the shipped one")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=run_explain)


def run_explain(args: argparse.Namespace) -> int:
    """Print the plan."""
    from .api import compile
    from .op.matmul import matmul

    spec, pattern = _pattern(args)
    operator = compile(
        matmul(*args.shape, dtype=args.dtype),
        sparse={"lhs": spec},
        target=args.target,
        database=args.database,
    )
    print(operator.explain(sparsity=pattern, library=args.library))
    return 0


def _pattern(args: argparse.Namespace) -> tuple[SparsitySpec, np.ndarray]:
    """A random pattern of the density that was asked for."""
    import numpy as np

    if not 0.0 <= args.density <= 1.0:
        raise ShapeError(mismatch("--density", "0 to 1", args.density))
    rng = np.random.default_rng(args.seed)
    m, _, k = args.shape
    if args.lengths is not None:
        if args.lengths < 1 or m % args.lengths:
            raise ShapeError(mismatch("--lengths", f"a divisor of {m} rows", args.lengths))
        mean = 2.0 * args.density * args.lengths
        drawn = rng.uniform(0.0, mean, m // args.lengths).round().astype(np.int64)
        return Lengths(), np.minimum(drawn, args.lengths)
    rows, depth = args.mask
    blocks = rng.random((-(-m // rows), -(-k // depth))) < args.density
    mask = np.repeat(np.repeat(blocks, rows, axis=0), depth, axis=1)[:m, :k]
    return Mask(rows, depth), np.ascontiguousarray(mask)


def _sizes(text: str) -> tuple[int, ...]:
    return numbers(text, "M,N,K")


def _extents(text: str) -> tuple[int, ...]:
    return numbers(text, "AxB")


def numbers(text: str, *forms: str) -> tuple[int, ...]:
    """Integers of at least 1, as many as a form such as "M,N,K" or "AxB" has, separated alike.

    Raises
    ------
    argparse.ArgumentTypeError
        The text has none of the forms.
    """
    for form in forms:
        separator = "," if "," in form else "x"
        parts = text.split(separator)
        if len(parts) == len(form.split(separator)) and all(
            part.isdigit() and int(part) > 0 for part in parts
        ):
            return tuple(map(int, parts))
    expected = " or ".join(forms)
    raise argparse.ArgumentTypeError(f"expected {expected}, integers of at least 1, got {text!r}")
