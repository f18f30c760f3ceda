"""``pit-tvm explain``: candidates of a product for a random pattern, and the one chosen."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .cli_model import add_batch, add_model, explain_model, random_lengths
from .cli_options import add_database, any_seed, at_least, in_memory, kernel_cache, numbers, sizes
from .errors import ShapeError, mismatch
from .structs import Lengths, Mask, SparsitySpec

if TYPE_CHECKING:
    import numpy as np

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_EXAMPLES = """\
examples:
  pit-tvm explain --shape 2048,2048,2048 --mask 32x1 --density 0.1
  pit-tvm explain --shape 32768,1536,384 --lengths 128 --density 0.25 --library torch
  pit-tvm explain --model bert-base --lengths 12,80,3
  pit-tvm explain --model minilm --fill 0.3 --batch 32 --padded 128 --library torch
  pit-tvm explain --model my_model.pt2 --mask-input attention_mask
"""
# Options that mean something for one of the two only.
_OF_PRODUCTS, _OF_MODELS = ("mask", "density"), ("fill", "batch", "padded", "mask_input")


def add_explain(subparsers: Subparsers) -> None:
    """Arguments of ``pit-tvm explain``."""
    parser = subparsers.add_parser(
        "explain",
        help="print the candidates for a pattern, or a model's plan, with predicted costs",
        description="Draw a random pattern for the left operand of a product, and print every "
        "candidate with its predicted cost in microseconds; or print the plan of every linear "
        "layer of a model, what of it runs on live tokens only, and the permutation-invariant "
        "axes of its operators. Nothing is run.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", type=_sizes, metavar="M,N,K", help="a product")
    add_model(what)
    pattern = parser.add_mutually_exclusive_group()
    pattern.add_argument(
        "--mask", type=_extents, metavar="AxB", help="of a product: blocks (default 32x1)"
    )
    pattern.add_argument(
        "--lengths",
        type=_lengths,
        metavar="L[,L...]",
        help="of a product: rows are sequences padded to L instead; of a model: the length of each "
        "sequence of a batch",
    )
    parser.add_argument("--density", type=float, help="of a product: live share (default 0.1)")
    add_batch(parser)
    parser.add_argument("--dtype", help="element type (default: float32, or what a file has)")
    parser.add_argument("--library", choices=("numpy", "torch"), default="numpy")
    parser.add_argument("--target", default="llvm")
    add_database(parser)
    parser.add_argument("--seed", type=any_seed, default=0)
    parser.set_defaults(run=run_explain, parser=parser)


def run_explain(args: argparse.Namespace) -> int:
    """Print the plan."""
    of_model = args.model is not None
    others = _OF_PRODUCTS if of_model else _OF_MODELS
    given = [f"--{name.replace('_', '-')}" for name in others if getattr(args, name) is not None]
    if given:
        args.parser.error(f"{', '.join(given)} with {'--model' if of_model else '--shape'}")
    cache = kernel_cache()
    if of_model:
        return explain_model(args)
    from .api import compile
    from .op.matmul import matmul

    with in_memory("--shape"):
        spec, pattern = _pattern(args)
    operator = compile(
        matmul(*args.shape, dtype=args.dtype or "float32"),
        sparse={"lhs": spec},
        target=args.target,
        database=args.database,
        cache=cache,
    )
    print(operator.explain(sparsity=pattern, library=args.library))
    return 0


def _pattern(args: argparse.Namespace) -> tuple[SparsitySpec, np.ndarray]:
    """A random pattern of the density that was asked for."""
    import numpy as np

    density = 0.1 if args.density is None else args.density
    if not 0.0 <= density <= 1.0:
        raise ShapeError(mismatch("--density", "0 to 1", density))
    rng = np.random.default_rng(args.seed)
    m, _, k = args.shape
    if args.lengths is not None:
        padded = args.lengths[0]
        if len(args.lengths) > 1 or padded < 1 or m % padded:
            text = ",".join(map(str, args.lengths))
            raise ShapeError(mismatch("--lengths", f"one divisor of {m} rows", text))
        return Lengths(), random_lengths(m // padded, padded, density, rng)
    rows, depth = args.mask or (32, 1)
    blocks = rng.random((-(-m // rows), -(-k // depth))) < density
    # Blocks may be much larger than the matrix.
    whole = np.repeat(np.repeat(blocks, min(rows, m), axis=0), min(depth, k), axis=1)
    return Mask(rows, depth), np.ascontiguousarray(whole[:m, :k])


def _sizes(text: str) -> tuple[int, ...]:
    return sizes(text, "M,N,K")


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(at_least(0), text.split(",")))
    except argparse.ArgumentTypeError as error:
        expected = f"expected lengths such as 12,80,3, got {text!r}"
        raise argparse.ArgumentTypeError(expected) from error


def _extents(text: str) -> tuple[int, ...]:
    return numbers(text, "AxB")
