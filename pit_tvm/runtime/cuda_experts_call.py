"""Calls of layers of experts and of their products on a GPU: checks, and what such calls share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import ShapeError, mismatch
from ..schedules.cuda_choices import ChoicesTile, product_tile, sum_tile
from ..schedules.hopper_combine import CHUNK, MOST_CHUNKS
from ..schedules.hopper_space import DTYPES, GROUP_STEPS
from ..selection.gpu_choices import by_choices
from ..structs import Tile
from .cuda_arrays import check_devices, check_tensor, dtype_name, signature
from .cuda_columns import MOST_ELEMENTS
from .cuda_detect_ids import Find
from .cuda_modules import Kernel
from .cuda_rows import ROW_STEP
from .cuda_watch import CountWatch
from .torch_arrays import stored_weight

Form = tuple[str, str]  # an activation, and how gates lie, or `GROUPED`: one product
Given = tuple[Any, ...]  # x, ids, weights of choices, up and down; or x, ids, a bias or none, rhs
GROUPED = "grouped"
_TURNED = ("rhs_layout", "kn")  # an option
_SMALL = 1 << 20  # bytes of rows, at most, of calls that are repeated by CUDA graphs


@dataclass(frozen=True)
class GroupedProduct:
    """``rows`` rows by the weights [groups, n, k] of their groups; the kernel's options."""

    dtype: str
    rows: int
    groups: int
    n: int
    k: int
    options: tuple[tuple[str, Any], ...]

    def stored(self, rhs: Any) -> Any:
        """The weights as they lie."""
        return rhs.mT if _TURNED in self.options else rhs


class Launches(NamedTuple):
    """Tiles of the products of a call, and their kernels."""

    tiles: tuple[Tile | ChoicesTile, ...]
    kernels: tuple[Kernel, ...]

    @property
    def way(self) -> tuple[object, ...]:
        """What is launched."""
        return ("pit", *self.tiles)


class ExpertsCall:
    """What calls with the same signature share. ``plan``: that for ``counts``; ``find``: detection;
    ``small``: the rows of all products are so few bytes that the host may take longer than the
    GPU. ``choices``: of a layer of few tokens, tiles that read weights choice by choice."""

    def __init__(
        self,
        device: int,
        shape: tuple[int, int],
        *products: GroupedProduct,
        choices: tuple[ChoicesTile, ...] = (),
    ) -> None:
        self.device, self.watch = device, CountWatch(device)
        self.shape, self.products, self.choices = shape, products, choices
        self.small = sum(2 * each.rows * each.n for each in products) <= _SMALL
        self.counts: tuple[int, ...] | None = None
        self.plan: Launches | None = None
        self.find: Find | None = None


def signature_of(form: Form, given: Given) -> tuple[object, ...]:
    """`signature`, also of how weights are stored."""
    number = 1 if form[1] == GROUPED else 2
    stored, layouts = zip(*map(stored_weight, given[-number:]), strict=True)
    return (*signature((*given[:-number], *stored)), layouts)


def call_of(form: Form, given: Given, by_choice: bool = True) -> ExpertsCall:
    """What calls like this one share, which may go ``by_choice``; errors as `CudaExperts.run`."""
    activation, gated = form
    x, ids, *beside, rhs = given
    if gated == GROUPED:
        _check_product(x, ids, rhs, *beside)
        only = _product(x, ids, rhs, act=activation, share=ids.shape[1], bias=bool(beside))
        return ExpertsCall(x.get_device(), (only.rows, only.n), only)
    weights, up = beside
    _check(x, ids, weights, up, rhs, gated == "halves")
    first = _product(x, ids, up, act=activation, share=ids.shape[1], gated=gated)
    second = _product(x, ids, rhs)
    tokens, top_k = map(int, ids.shape)
    asked = (dtype_name(ids), tokens, top_k), dtype_name(weights)
    choices = choices_tiles(*asked, first, second) if by_choice else ()
    return ExpertsCall(x.get_device(), tuple(x.shape), first, second, choices=choices)


def choices_tiles(
    ids: tuple[str, int, int], factors: str, first: GroupedProduct, second: GroupedProduct
) -> tuple[ChoicesTile, ...]:
    """Tiles of a layer that reads weights choice by choice; none where tiles of rows are faster.
    ``ids``: their type, tokens, and choices of each; ``factors``: the type of their weights."""
    (kind, tokens, top_k), dtype = ids, first.dtype
    size = 2 * (first.n * first.k + second.n * second.k)
    if _TURNED in first.options + second.options:
        return ()
    if not by_choices(tokens, top_k, first.groups, size):
        return ()
    options = dict(first.options)
    return (
        product_tile(dtype, kind, options["act"], options["gated"]),
        sum_tile(dtype, kind, factors, tokens, top_k),
    )


def _product(x: Any, ids: Any, rhs: Any, **options: Any) -> GroupedProduct:
    """The product of a row for each of ``ids`` by its group of ``rhs``."""
    turned = () if stored_weight(rhs)[1] == "nk" else (_TURNED,)
    groups, n, k = map(int, rhs.shape)
    chosen = (*options.items(), *turned)
    return GroupedProduct(dtype_name(x), ids.numel(), groups, n, k, chosen)


def _check(x: Any, ids: Any, weights: Any, up: Any, down: Any, gated: bool) -> None:
    _check_product(x, ids, up)
    experts, wide, hidden = up.shape
    if gated and wide % 2:
        raise ShapeError(mismatch("up", "an even number of columns, gates and others", wide))
    inter = wide // 2 if gated else wide
    _check_weight("down", down, x, (experts, hidden, inter))
    check_tensor("weights", weights, ("float32", *DTYPES), tuple(ids.shape))
    _check_sizes(inter=inter)
    check_devices("x", x, {"weights": weights, "down": down})
    if x.numel() // CHUNK > MOST_CHUNKS:
        expected = f"at most {MOST_CHUNKS} pieces of {CHUNK} elements"
        raise ShapeError(mismatch("x", expected, f"shape {list(x.shape)}"))


def check_outer(left: Any, right: Any, ids: Any, groups: int) -> None:
    """ShapeError or DTypeError for arguments that do not fit `CudaExperts.outer`."""
    if [len(each.shape) for each in (left, right, ids)] != [2, 2, 2]:
        expected = "left [tokens * top_k, n], right [tokens, k], ids [tokens, top_k]"
        got = (tuple(left.shape), tuple(right.shape), tuple(ids.shape))
        raise ShapeError(mismatch("left, right, ids", expected, got))
    if not 0 <= groups <= GROUP_STEPS[-1]:
        raise ShapeError(mismatch("groups", f"at most {GROUP_STEPS[-1]}", groups))
    (tokens, k), top_k = right.shape, ids.shape[1]
    check_tensor("right", right, DTYPES, (tokens, k))
    check_tensor("left", left, (dtype_name(right),), (tokens * top_k, left.shape[1]))
    check_tensor("ids", ids, ("int32", "int64"), (tokens, top_k))
    _check_sizes(n=left.shape[1], k=k)
    for name, each in (("left", left), ("right", right)):
        if each.numel() >= MOST_ELEMENTS:
            expected = f"fewer than {MOST_ELEMENTS} elements"
            raise ShapeError(mismatch(name, expected, f"shape {list(each.shape)}"))
    check_devices("right", right, {"left": left, "ids": ids})


def _check_product(x: Any, ids: Any, rhs: Any, bias: Any = None) -> None:
    check_tensor("x", x, DTYPES)
    if len(x.shape) != 2 or len(rhs.shape) != 3 or len(ids.shape) != 2:
        expected = "x [tokens, k], ids [tokens, top_k], weight [experts, n, k]"
        got = (tuple(x.shape), tuple(ids.shape), tuple(rhs.shape))
        raise ShapeError(mismatch("x, ids, weight", expected, got))
    tokens, depth = x.shape
    if rhs.shape[0] > GROUP_STEPS[-1]:
        raise ShapeError(mismatch("experts", f"at most {GROUP_STEPS[-1]}", rhs.shape[0]))
    check_tensor("x", x, (dtype_name(x),), (tokens, depth))
    _check_weight("weight", rhs, x, (rhs.shape[0], rhs.shape[1], depth))
    check_tensor("ids", ids, ("int32", "int64"), (tokens, ids.shape[1]))
    others = {"ids": ids, "weight": rhs}
    if bias is not None:
        check_tensor("bias", bias, (dtype_name(x),), tuple(rhs.shape[:2]))
        others["bias"] = bias
    _check_sizes(n=rhs.shape[1], k=depth)
    check_devices("x", x, others)


def _check_weight(name: str, weight: Any, x: Any, shape: tuple[int, int, int]) -> None:
    stored, layout = stored_weight(weight)
    groups, n, k = shape
    check_tensor(name, stored, (dtype_name(x),), shape if layout == "nk" else (groups, k, n))


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size % ROW_STEP or not size:
            expected = f"a multiple of {ROW_STEP}, at least {ROW_STEP}"
            raise ShapeError(mismatch(name, expected, size))
