"""Calls of layers of experts and of their products on a GPU: checks, and what such calls share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import ShapeError, mismatch
from ..gates import Gate
from ..schedules.cuda_choices import ChoicesTile, product_tile, sum_tile
from ..schedules.hopper_combine import CHUNK, MOST_CHUNKS
from ..schedules.hopper_space import DTYPES, GROUP_STEPS
from ..selection.gpu_choices import by_choices
from ..structs import Tile
from .cuda_arrays import check_devices, check_tensor, dtype_name
from .cuda_columns import MOST_ELEMENTS
from .cuda_detect_ids import Find
from .cuda_modules import Kernel
from .cuda_rows import ROW_STEP
from .cuda_watch import CountWatch
from .torch_arrays import stored_weight

# x, ids, [weights of choices,] biases, weights as they are stored
Given = tuple[Any, ...]
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


class Form(NamedTuple):
    """What calls compute: a layer's gate if it has one; of every product whether there is a bias,
    and how its weights are stored. A layer has two products, others one."""

    activation: str
    gate: Gate | None
    biases: tuple[bool, ...]
    layouts: tuple[str, ...]

    def parts(self, given: Given) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
        """Of what is ``given`` what comes before the biases, and of every product the weights and
        their bias if there is one."""
        number = len(self.layouts)
        weights = given[-number:]
        biases = iter(given[len(given) - number - sum(self.biases) : -number])
        products = [
            (weight, next(biases)) if biased else (weight,)
            for weight, biased in zip(weights, self.biases, strict=True)
        ]
        return given[: number + 1], products


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
        form: Form,
        device: int,
        shape: tuple[int, int],
        *products: GroupedProduct,
        choices: tuple[ChoicesTile, ...] = (),
    ) -> None:
        self.form, self.device, self.watch = form, device, CountWatch(device)
        self.shape, self.products, self.choices = shape, products, choices
        self.small = sum(2 * each.rows * each.n for each in products) <= _SMALL
        self.counts: tuple[int, ...] | None = None
        self.plan: Launches | None = None
        self.find: Find | None = None


def form_of(
    activation: str, gate: Gate | None, *products: tuple[Any, Any]
) -> tuple[Form, tuple[Any, ...]]:
    """The form of calls with such products, weights and a bias or None each, and of what is given
    the last part."""
    stored, layouts = zip(*(stored_weight(weight) for weight, _ in products), strict=True)
    biases = tuple(bias for _, bias in products)
    form = Form(activation, gate, tuple(bias is not None for bias in biases), layouts)
    return form, (*(bias for bias in biases if bias is not None), *stored)


def call_of(form: Form, given: Given, by_choice: bool = True) -> ExpertsCall:
    """What calls like this one share, which may go ``by_choice``; errors as `CudaExperts.run`."""
    (x, ids, *weights), (first, *rest) = form.parts(given)
    _check_product(x, ids, form.layouts[0], *first)
    gate = {} if form.gate is None else {"gate": form.gate}
    options = {"act": form.activation, "share": int(ids.shape[1]), **gate}
    one = _product(x, ids, form.layouts[0], *first, **options)
    if not rest:
        return ExpertsCall(form, x.get_device(), (one.rows, one.n), one)
    _check_layer(form, x, ids, weights[0], one, *rest[0])
    two = _product(x, ids, form.layouts[1], *rest[0])
    tokens, top_k = map(int, ids.shape)
    asked = (dtype_name(ids), tokens, top_k), dtype_name(weights[0])
    choices = choices_tiles(*asked, form, one, two) if by_choice else ()
    return ExpertsCall(form, x.get_device(), tuple(x.shape), one, two, choices=choices)


def choices_tiles(
    ids: tuple[str, int, int],
    factors: str,
    form: Form,
    first: GroupedProduct,
    second: GroupedProduct,
) -> tuple[ChoicesTile, ...]:
    """Tiles of a layer that reads weights choice by choice; none where tiles of rows are faster.
    ``ids``: their type, tokens, and choices of each; ``factors``: the type of their weights."""
    (kind, tokens, top_k), dtype = ids, first.dtype
    size = 2 * (first.n * first.k + second.n * second.k)
    if "kn" in form.layouts or not by_choices(tokens, top_k, first.groups, size):
        return ()
    up_bias, down_bias = form.biases
    return (
        product_tile(dtype, kind, form.activation, form.gate, bias=up_bias),
        sum_tile(dtype, kind, factors, tokens, top_k, bias=down_bias),
    )


def _product(
    x: Any, ids: Any, layout: str, weight: Any, bias: Any = None, **options: Any
) -> GroupedProduct:
    """The product of a row for each of ``ids`` by its group of ``weight``."""
    groups, n, k = map(int, _shape(weight, layout))
    biased = () if bias is None else (("bias", True),)
    turned = (_TURNED,) if layout == "kn" else ()
    chosen = (*options.items(), *biased, *turned)
    return GroupedProduct(dtype_name(x), ids.numel(), groups, n, k, chosen)


def _shape(weight: Any, layout: str) -> tuple[int, int, int]:
    """[groups, n, k] of weights as they are stored."""
    groups, *sizes = weight.shape
    return (groups, *(sizes if layout == "nk" else sizes[::-1]))


def _check_layer(
    form: Form, x: Any, ids: Any, weights: Any, first: GroupedProduct, down: Any, bias: Any = None
) -> None:
    experts, wide, hidden = first.groups, first.n, first.k
    if form.gate is not None and wide % 2:
        raise ShapeError(mismatch("up", "an even number of columns, gates and others", wide))
    inter = wide if form.gate is None else wide // 2
    _check_weight("down", down, form.layouts[1], x, (experts, hidden, inter))
    check_tensor("weights", weights, ("float32", *DTYPES), tuple(ids.shape))
    others = {"weights": weights, "down": down}
    if bias is not None:
        check_tensor("down_bias", bias, (dtype_name(x),), (experts, hidden))
        others["down_bias"] = bias
    _check_sizes(inter=inter)
    check_devices("x", x, others)
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


def _check_product(x: Any, ids: Any, layout: str, rhs: Any, bias: Any = None) -> None:
    check_tensor("x", x, DTYPES)
    if len(x.shape) != 2 or len(rhs.shape) != 3 or len(ids.shape) != 2:
        expected = "x [tokens, k], ids [tokens, top_k], weight [experts, n, k]"
        got = (tuple(x.shape), tuple(ids.shape), tuple(rhs.shape))
        raise ShapeError(mismatch("x, ids, weight", expected, got))
    (tokens, depth), (groups, n, _) = x.shape, _shape(rhs, layout)
    if groups > GROUP_STEPS[-1]:
        raise ShapeError(mismatch("experts", f"at most {GROUP_STEPS[-1]}", groups))
    check_tensor("x", x, (dtype_name(x),), (tokens, depth))
    _check_weight("weight", rhs, layout, x, (groups, n, depth))
    check_tensor("ids", ids, ("int32", "int64"), (tokens, ids.shape[1]))
    others = {"ids": ids, "weight": rhs}
    if bias is not None:
        check_tensor("bias", bias, (dtype_name(x),), (groups, n))
        others["bias"] = bias
    _check_sizes(n=n, k=depth)
    check_devices("x", x, others)


def _check_weight(name: str, stored: Any, layout: str, x: Any, shape: tuple[int, int, int]) -> None:
    groups, n, k = shape
    check_tensor(name, stored, (dtype_name(x),), shape if layout == "nk" else (groups, k, n))


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size % ROW_STEP or not size:
            expected = f"a multiple of {ROW_STEP}, at least {ROW_STEP}"
            raise ShapeError(mismatch(name, expected, size))
