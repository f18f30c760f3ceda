"""The operators under test: their tensors, the axes of their operands, and their float64 truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pit_tvm import op
from pit_tvm.reference import ops as reference

DTYPES = ("float32", "float16", "bfloat16", "int8")
GROUPS = 5

# Primes, so that no tile, panel or micro-tile divides them.
SIZES = {
    "b": (3,),
    "m": (37, 61, 97),
    "n": (13, 29, 71),
    "k": (53, 131, 211),
    "g": (GROUPS,),
    "p": (41, 83),
    "q": (19, 67),
    "batch": (3, 5),
    "c": (7, 11),
    "f": (5, 13),
    "x": (13,),
    "y": (11,),
    "i": (3,),
    "j": (2,),
}


@dataclass(frozen=True, eq=False)
class Case:
    """One operator of `pit_tvm.op`.

    ``tensors(dtype)`` builds it. ``inputs`` has the axis of every dimension of every input,
    ``output`` that of the result's; axes of ``reduced`` are summed over. ``fixed`` are the
    extents that are numbers in the expression; all others are symbolic. ``truth`` takes the
    inputs in order. ``shift``: mean of random numbers, so that a lone sum of them does not cancel.
    """

    name: str
    tensors: Callable[[str], list[Any]]
    inputs: Mapping[str, tuple[str, ...]]
    output: tuple[str, ...]
    truth: Callable[..., np.ndarray]
    reduced: tuple[str, ...] = ()
    fixed: Mapping[str, int] | None = None
    shift: float = 0.0

    def shapes(self, rng: np.random.Generator) -> dict[str, tuple[int, ...]]:
        """Random shapes of the inputs, by name."""
        drawn = {axis: int(rng.choice(sizes)) for axis, sizes in SIZES.items()}
        drawn |= self.fixed or {}
        return {name: tuple(drawn[a] for a in axes) for name, axes in self.inputs.items()}


def _smooth(dtype: str, activation: str) -> str:
    """The activation, or relu for whole numbers."""
    return "relu" if dtype == "int8" else activation


def _matmul(dtype: str) -> list[Any]:
    return op.matmul(None, None, None, dtype=dtype)


def _crossed(dtype: str) -> list[Any]:
    return op.matmul(
        None,
        29,
        131,
        dtype=dtype,
        transpose_lhs=True,
        transpose_rhs=True,
        bias=True,
        activation="relu",
    )


def _linear(dtype: str) -> list[Any]:
    return op.linear(None, 71, 131, dtype=dtype, activation=_smooth(dtype, "gelu"))


def _batched(dtype: str) -> list[Any]:
    return op.batch_matmul(None, None, None, None, dtype=dtype)


def _batched_crossed(dtype: str) -> list[Any]:
    return op.batch_matmul(
        3,
        None,
        29,
        53,
        dtype=dtype,
        transpose_lhs=True,
        transpose_rhs=True,
        activation=_smooth(dtype, "silu"),
    )


def _grouped(dtype: str) -> list[Any]:
    activation = _smooth(dtype, "silu")
    return op.grouped_matmul(None, 29, 53, GROUPS, dtype=dtype, bias=True, activation=activation)


def _reduce_sum(dtype: str) -> list[Any]:
    return op.reduce_sum(None, None, dtype=dtype)


def _elementwise(dtype: str) -> list[Any]:
    return op.elementwise((None, None), ["add", "relu", ("mul", 3), ("add", 2)], dtype=dtype)


def _conv2d(dtype: str) -> list[Any]:
    return op.conv2d(None, None, None, None, None, (3, 2), dtype=dtype)


def _padded_conv2d(dtype: str) -> list[Any]:
    return op.conv2d(
        None,
        None,
        None,
        13,
        11,
        (3, 2),
        stride=(2, 1),
        dilation=(1, 2),
        padding=(1, 0),
        dtype=dtype,
        bias=True,
        activation="relu",
    )


def _activated(truth: Callable[..., np.ndarray], activation: str, **options: Any) -> Any:
    """``truth`` with an activation, which whole numbers replace by relu."""

    def call(*arrays: np.ndarray) -> np.ndarray:
        chosen = _smooth(str(arrays[0].dtype), activation)
        return truth(*arrays, activation=chosen, **options)

    return call


MATMUL = Case(
    "matmul",
    _matmul,
    {"lhs": ("m", "k"), "rhs": ("k", "n")},
    ("m", "n"),
    reference.matmul,
    reduced=("k",),
)
CROSSED = Case(
    "matmul transposed",
    _crossed,
    {"lhs": ("k", "m"), "rhs": ("n", "k"), "bias": ("n",)},
    ("m", "n"),
    partial(reference.matmul, transpose_lhs=True, transpose_rhs=True, activation="relu"),
    reduced=("k",),
    fixed={"n": 29, "k": 131},
)
LINEAR = Case(
    "linear",
    _linear,
    {"lhs": ("m", "k"), "rhs": ("n", "k"), "bias": ("n",)},
    ("m", "n"),
    _activated(reference.linear, "gelu"),
    reduced=("k",),
    fixed={"n": 71, "k": 131},
)
BATCHED = Case(
    "batch_matmul",
    _batched,
    {"lhs": ("b", "m", "k"), "rhs": ("b", "k", "n")},
    ("b", "m", "n"),
    reference.batch_matmul,
    reduced=("k",),
)
BATCHED_CROSSED = Case(
    "batch_matmul transposed",
    _batched_crossed,
    {"lhs": ("b", "k", "m"), "rhs": ("b", "n", "k")},
    ("b", "m", "n"),
    _activated(reference.batch_matmul, "silu", transpose_lhs=True, transpose_rhs=True),
    reduced=("k",),
    fixed={"b": 3, "n": 29, "k": 53},
)
GROUPED = Case(
    "grouped_matmul",
    _grouped,
    {"lhs": ("m", "k"), "rhs": ("g", "k", "n"), "bias": ("g", "n"), "group_ids": ("m",)},
    ("m", "n"),
    _activated(reference.grouped_matmul, "silu"),
    reduced=("k",),
    fixed={"n": 29, "k": 53, "g": GROUPS},
)
REDUCE_SUM = Case(
    "reduce_sum",
    _reduce_sum,
    {"data": ("p", "q")},
    ("p",),
    reference.reduce_sum,
    reduced=("q",),
    shift=2.0,
)
ELEMENTWISE = Case(
    "elementwise",
    _elementwise,
    {"data": ("p", "q"), "rhs": ("p", "q")},
    ("p", "q"),
    partial(reference.elementwise, ["add", "relu", ("mul", 3), ("add", 2)]),
)
CONV2D = Case(
    "conv2d",
    _conv2d,
    {"data": ("batch", "c", "x", "y"), "weight": ("f", "c", "i", "j")},
    ("batch", "f", "", ""),
    reference.conv2d,
    reduced=("c",),
)
PADDED_CONV2D = Case(
    "conv2d padded",
    _padded_conv2d,
    {"data": ("batch", "c", "x", "y"), "weight": ("f", "c", "i", "j"), "bias": ("f",)},
    ("batch", "f", "", ""),
    partial(
        reference.conv2d,
        stride=(2, 1),
        dilation=(1, 2),
        padding=(1, 0),
        activation="relu",
    ),
    reduced=("c",),
)


@dataclass(frozen=True, eq=False)
class Legal:
    """An operand that a pattern may name, its PIT axes, and the types that are tried on it.

    Types differ in how kernels load and store, which the axes and the two ways to store an operand
    share: `matmul` meets all of them on one operand, and every operator meets float32, a 16-bit
    type and int8. Kernels of GPUs are made for a type and a way to store it: types that are tried
    there alone are ``on_gpus``.
    """

    case: Case
    operand: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...] = DTYPES
    on_gpus: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.case.name} {self.operand}"


LEGAL = (
    Legal(MATMUL, "lhs", ("m", "k")),
    Legal(MATMUL, "rhs", ("k", "n"), ("float32",)),
    Legal(CROSSED, "lhs", ("k", "m"), ("float32",), ("int8",)),
    Legal(CROSSED, "rhs", ("n", "k"), ("float32",)),
    Legal(LINEAR, "lhs", ("m", "k"), ("float32", "bfloat16", "int8")),
    Legal(LINEAR, "rhs", ("n", "k"), ("float32",), ("float16",)),
    Legal(BATCHED, "lhs", ("b", "m", "k"), ("float32", "bfloat16", "int8")),
    Legal(BATCHED, "rhs", ("b", "k", "n"), ("float32",)),
    Legal(BATCHED_CROSSED, "lhs", ("b", "k", "m"), ("float32",)),
    Legal(BATCHED_CROSSED, "rhs", ("b", "n", "k"), ("float32",)),
    Legal(GROUPED, "lhs", ("m", "k"), ("float32", "float16")),
    Legal(GROUPED, "rhs", ("k", "n"), ("float32", "int8")),
    Legal(REDUCE_SUM, "data", ("p", "q"), ("float32", "float16", "int8")),
    Legal(ELEMENTWISE, "data", ("p", "q"), ("float32", "bfloat16", "int8")),
    Legal(ELEMENTWISE, "rhs", ("p", "q"), ("float32",)),
    Legal(CONV2D, "data", ("batch", "c"), ("float32", "bfloat16")),
    Legal(CONV2D, "weight", ("f", "c"), ("float32", "int8")),
    Legal(PADDED_CONV2D, "data", ("batch", "c"), ("float32",)),
    Legal(PADDED_CONV2D, "weight", ("f", "c"), ("float32",)),
)
