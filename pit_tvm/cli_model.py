"""What ``pit-tvm explain`` and ``pit-tvm tune`` do with whole models."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .cli_options import at_least, in_memory, is_there
from .errors import ShapeError, TileNotFound, UnsupportedTarget, mismatch
from .structs import MOST_EXTENT, TileTask
from .target import TargetInfo, resolve_target
from .tile_db.store import TileStore

if TYPE_CHECKING:
    import numpy as np

    from .api import Operator
    from .model.experts import GroupedForm
    from .model.linear import LinearForm
    from .model.report import AxisCount, LinearUse

_FILL, _SEQUENCES, _PADDED = 0.3, 32, 128
_TILE_WIDTH = 36
_MASK_INPUT = "attention_mask"


def add_model(parser: Any) -> None:
    """The argument that names a model."""
    parser.add_argument(
        "--model",
        metavar="NAME|FILE",
        help="an example configuration (bert-base, minilm, opt-125m, resnet-18, switch-base), or "
        "a file of torch.export.save or .onnx",
    )


def add_mask_input(parser: Any) -> None:
    """The argument that names a model's mask."""
    parser.add_argument(
        "--mask-input",
        metavar="NAME",
        help="of a model: its input [batch, tokens] that is 1 where a token is (default: "
        f"{_MASK_INPUT})",
    )


def _find(args: argparse.Namespace, dtype: str) -> Any:
    from .model.examples import find_model

    return find_model(args.model, dtype, _mask(args))


def _mask(args: argparse.Namespace) -> str:
    return _MASK_INPUT if args.mask_input is None else str(args.mask_input)


def add_batch(parser: Any) -> None:
    """The arguments that describe a batch of a model."""
    add_mask_input(parser)
    add = parser.add_argument
    add("--fill", type=float, help=f"of a model: live share of a random batch (default {_FILL})")
    add("--batch", type=int, help=f"of a model: sequences of it (default {_SEQUENCES})")
    add(
        "--padded",
        type=at_least(1),
        help="of a model: tokens that sequences are padded to (default: the longest of --lengths, "
        f"else {_PADDED} or the model's most)",
    )


def random_lengths(
    sequences: int, padded: int, fill: float, rng: np.random.Generator
) -> np.ndarray:
    """int64 ``[sequences]``: uniform from 0 to ``2 * fill * padded``, at most ``padded``."""
    import numpy as np

    drawn = rng.uniform(0.0, 2.0 * fill * padded, sequences).round().astype(np.int64)
    return np.minimum(drawn, padded)


# --------------------------------------------------------------------------------------------
# explain


def explain_model(args: argparse.Namespace) -> int:
    """Print the plan of a batch, what runs on live tokens, and the operators' PIT axes."""
    from .model.examples import as_graph
    from .model.importer import import_model
    from .model.report import count_axes
    from .model.tidy import tidy

    target = _cpu(args.target)
    example = _find(args, args.dtype or "")
    if example.mask:
        imported = import_model(example.model, example.inputs, example.mask)
        _print_plan(args, imported, target)
        module = tidy(imported.module, imported.size_bounds)
    else:
        module = as_graph(example)
        print(f"{args.model}: no input {_mask(args)!r} to skip padding by; PIT axes only")
    _print_axes(count_axes(module))
    return 0


def _cpu(text: str) -> TargetInfo:
    target = resolve_target(text)
    if target.kind != "llvm":
        raise UnsupportedTarget(mismatch("--target with --model", "a CPU", text))
    return target


def _print_plan(args: argparse.Namespace, imported: Any, target: TargetInfo) -> None:
    from .model.experts import GROUPED
    from .model.kernels import CpuKernels
    from .model.linear import LINEAR
    from .model.report import linear_uses, summary
    from .model.rewrite import rewrite
    from .quick_stacks import quick_stacks

    lengths, padded = _batch(args, imported.longest)
    with quick_stacks():
        rewritten = rewrite(imported, CpuKernels(target))
    live, whole = sum(lengths), len(lengths) * padded
    sizes = {imported.batch.name: len(lengths), imported.tokens.name: padded}
    share = live / whole if whole else 0.0
    print(
        f"{args.model}: {len(lengths)} sequences padded to {padded}, "
        f"{live} of {whole} tokens live ({share:.1%})\n"
    )
    uses = linear_uses(rewritten.module, rewritten.layers, LINEAR)
    store = TileStore.over_shipped(args.database, device=target.device, isa=target.isa)
    _print_uses(uses, sizes | {"live": live}, sizes | {"live": whole}, target, store, args.library)
    products = linear_uses(rewritten.module, rewritten.grouped, GROUPED)
    if products:
        _print_products(products, sizes | {"live": live}, target, store)
    print(f"\n{summary(rewritten.decisions)}")


def _batch(args: argparse.Namespace, longest: int | None) -> tuple[list[int], int]:
    """Lengths of the sequences of a batch, and what they are padded to."""
    import numpy as np

    if args.lengths is not None:
        if args.fill is not None or args.batch is not None:
            raise ShapeError(mismatch("--lengths", "no --fill or --batch beside it", "both"))
        lengths = list(args.lengths)
        if longest is not None and max(lengths) > longest:
            expected = f"at most {longest} tokens of a sequence, the model's longest"
            raise ShapeError(mismatch("--lengths", expected, max(lengths)))
        padded = args.padded or max(lengths)
    else:
        fill, sequences = args.fill, args.batch
        fill = _FILL if fill is None else fill
        sequences = _SEQUENCES if sequences is None else sequences
        padded = args.padded or min(_PADDED, longest or _PADDED)
        if longest is not None and padded > longest:
            expected = f"1 to {longest}, the model's longest"
            raise ShapeError(mismatch("--padded", expected, padded))
        if not 0.0 <= fill <= 1.0 or sequences < 1:
            expected = "a share of 0 to 1, and at least one sequence"
            raise ShapeError(mismatch("--fill, --batch", expected, (fill, sequences)))
        if sequences * padded > MOST_EXTENT:
            expected = f"at most {MOST_EXTENT} tokens in all"
            raise ShapeError(mismatch("--batch, --padded", expected, sequences * padded))
        rng = np.random.default_rng(args.seed)
        with in_memory("--batch"):
            lengths = [int(n) for n in random_lengths(sequences, padded, fill, rng)]
    if padded < max(lengths) or longest is not None and padded > longest:
        most = f" to {longest}, the model's longest" if longest is not None else " or more"
        raise ShapeError(mismatch("--padded", f"{max(lengths)}{most}", padded))
    return lengths, padded


def _print_uses(
    uses: list[LinearUse],
    sizes: dict[str, int],
    padded_sizes: dict[str, int],
    target: TargetInfo,
    store: TileStore,
    library: str,
) -> None:
    """One line per form and number of rows, the time of all its layers, and the sums."""
    from .model.layers import linear_operator

    head = f"{'linear layers':42} {'number':>6} {'rows':>7} {'live':>6}  {'tile':{_TILE_WIDTH}}"
    head += f" {'ms':>9} {'dense ms':>9}"
    print(f"{head}\n{'-' * len(head)}")
    total = dense_total = 0.0
    for use in uses:
        rows, padded = use.count(sizes), use.count(padded_sizes)
        # As a model has it: its layers run on tiles alone.
        own = linear_operator(use.form, target, store, library=False)
        tile, each = _cost(own, rows, library, dense=False)
        _, dense = _cost(linear_operator(use.form, target, store), padded, library, dense=True)
        total, dense_total = total + use.layers * each, dense_total + use.layers * dense
        print(
            f"{use.form!s:42} {use.layers:6} {rows:7} {rows / max(padded, 1):6.1%}  "
            f"{tile:{_TILE_WIDTH}} {use.layers * each:9.3f} {use.layers * dense:9.3f}"
        )
    gain = f", {dense_total / total:.2f}x" if total else ""
    print(f"{'predicted, all layers':102} {total:9.3f} {dense_total:9.3f}{gain}")


def _print_products(
    uses: list[LinearUse], sizes: dict[str, int], target: TargetInfo, store: TileStore
) -> None:
    """One line per form of products of experts and number of rows, as if all experts had equally
    many, and the sum."""
    import numpy as np

    from .model.experts import grouped_operator

    print(f"\n{'products of experts, of even routing':42} {'number':>6} {'rows':>7}")
    total = 0.0
    for use in uses:
        rows, tile, each = use.count(sizes), "nothing to do", 0.0
        if rows:
            ids = np.arange(rows, dtype=np.int32) % use.form.groups
            operator = grouped_operator(use.form, target, store)
            plan = operator.explain(sparsity=ids, sizes={"m": rows})
            tile, each = str(plan.choice.tile or plan.choice), 1e-3 * plan.choice.cost_us
        total += use.layers * each
        print(
            f"{use.form!s:42} {use.layers:6} {rows:7} {'':6}  {tile:{_TILE_WIDTH}} "
            f"{use.layers * each:9.3f}"
        )
    print(f"{'predicted, all products of experts':102} {total:9.3f}")


def _cost(operator: Operator, rows: int, library: str, *, dense: bool) -> tuple[str, float]:
    """The choice for so many rows, or the dense product of them, and its milliseconds."""
    from .model.report import linear_plan

    if not rows:
        return "nothing to do", 0.0
    plan = linear_plan(operator, rows, library)
    choice = plan.choice
    if dense:
        choice = next(c for c in plan.candidates if c.kind == "dense")
    return str(choice.tile or choice), 1e-3 * choice.cost_us


def _print_axes(counts: list[AxisCount]) -> None:
    number = sum(count.number for count in counts)
    some = sum(count.number for count in counts if count.axes)
    unknown = sum(count.number for count in counts if count.axes is None)
    others = f"; {unknown} are not analysed" if unknown else ""
    print(f"\n{some} of {number} operators have PIT axes, by the analysis of their loops{others}:")
    for count in counts:
        axes = "not analysed" if count.axes is None else ", ".join(count.axes) or "none"
        print(f"  {count.number:5} {count.operator:24} {axes}")


# --------------------------------------------------------------------------------------------
# tune


def missing_tasks(args: argparse.Namespace, target: TargetInfo, device: str) -> list[TileTask]:
    """What ``--out`` over the shipped records lacks for a model's linear layers and products of
    experts; prints these and what is there.

    Only records of ``device`` itself count: those of others are left out as soon as there are any
    of its own for a family of tiles.
    """
    forms: dict[LinearForm | GroupedForm, int] = {}
    for dtype in args.dtype or [""]:
        forms |= _forms(_find(args, dtype))
    store = TileStore.over_shipped(args.out if is_there("--out", args.out) else None, device=device)
    head = f"{'linear layers, products of experts':42} {'number':>6}"
    print(f"{head}  rows with tuned tiles; without")
    missing: dict[TileTask, None] = {}
    for form, number in forms.items():
        there: list[int] = []
        lacking: list[int] = []
        for rows in args.rows:
            tasks = _tasks(form, rows, target, args.family)
            left = [task for task in tasks if not store.best(task)]
            missing |= dict.fromkeys(left)
            (lacking if left else there).append(rows)
        texts = [", ".join(map(str, rows)) or "none" for rows in (there, lacking)]
        print(f"{form!s:42} {number:6}  {'; '.join(texts)}")
    return list(missing)


def _forms(example: Any) -> dict[LinearForm | GroupedForm, int]:
    """The forms of a model's linear layers and products of experts, without any other pass over
    its graph."""
    from .model.examples import as_graph
    from .model.experts import extract_grouped
    from .model.importer import import_model
    from .model.linear import extract_linear
    from .model.report import linear_forms
    from .model.tidy import tidy

    if example.mask:
        imported = import_model(example.model, example.inputs, example.mask)
        module, bounds = imported.module, imported.size_bounds
    else:
        module, bounds = as_graph(example), {}
    module, products = extract_grouped(tidy(module, bounds), shares=True)
    return linear_forms(extract_linear(module)[1]) | Counter(p.form for p in products)


def _tasks(
    form: LinearForm | GroupedForm, rows: int, target: TargetInfo, families: list[str] | None
) -> list[TileTask]:
    """The tasks of a form: live rows are gathered, so that only tiles for rows are used. Where
    groups have no tiles of their own, those of products count that are as high as one group."""
    from .tuning.tasks import has_groups, make_tasks

    groups, choices = getattr(form, "groups", 1), getattr(form, "choices", 1)
    op, shape, shares = "matmul", (max(1, rows * choices // groups), form.n, form.k), (1, 1)
    if groups > 1 and has_groups(form.dtype, target.isa):
        op, shape, shares = "grouped_matmul", (rows * choices, form.n, form.k), (groups, choices)
    made = make_tasks(op, shape, form.dtype, target.isa, *shares, families)
    check_families(families, made, shape, form.dtype)
    own = ("rows", "groups")
    return [task for task in made if families or any(name in task.family for name in own)]


def check_families(
    families: list[str] | None, tasks: Sequence[TileTask], shape: Sequence[int], dtype: str
) -> None:
    """Refuse families that made no tasks of a product.

    Raises
    ------
    TileNotFound
        Some were named, and there are no tasks.
    """
    if families and not tasks:
        expected, advice = "tile families that compute it on the target", "leave the option out"
        got = f"{', '.join(families)} for {','.join(map(str, shape))} in {dtype}"
        raise TileNotFound(mismatch("--family", expected, got, advice))
