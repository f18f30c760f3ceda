"""PIT axes of named operators: every accepted axis, every rejected one with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import tvm
from tvm import te, tirx

from pit_tvm.analysis.pit_axis import pit_axes
from tests.analysis import operators as ops
from tests.analysis.operators import tensor

CONV = {
    "x": ("A[n, c, x + i, y + j]", "x + i"),
    "y": ("A[n, c, x + i, y + j]", "y + j"),
    "i": ("A[n, c, x + i, y + j]", "x + i"),
    "j": ("A[n, c, x + i, y + j]", "y + j"),
}


def compute(inputs: list[Any], shape: tuple[Any, ...], body: Any) -> list[Any]:
    return [*inputs, te.compute(shape, body, name="C")]


def reduced(reducer: Any, dtype: str = "float32") -> list[Any]:
    a, k = tensor("A", 4, 5, dtype=dtype), te.reduce_axis((0, 5), "k")
    return compute([a], (4,), lambda i: reducer(a[i, k], axis=k))


def gather(index: Any) -> list[Any]:
    a, idx = tensor("A", 6, 5), tensor("idx", 6, dtype="int32")
    return compute([a, idx], (4, 5), lambda i, j: index(a, idx, i, j))


def pointwise(value: Any) -> list[Any]:
    a, b = tensor("A", 4, 4), tensor("B", 4, dtype="int32")
    return compute([a, b], (4, 4), lambda i, j: value(a, b, i, j))


def symbolic_matmul() -> list[Any]:
    return ops.matmul(te.var("m"), te.var("n"), te.var("k"))


def with_epilogue() -> list[Any]:
    a, b, c = ops.matmul()
    bias = tensor("bias", 5)
    d = te.compute((4, 5), lambda m, n: c[m, n] + bias[n], name="D")
    return [a, b, bias, te.compute((4, 5), lambda m, n: te.max(d[m, n], 0.0), name="E")]


all_reducer = te.comm_reducer(lambda x, y: tirx.all(x, y), lambda t: tirx.const(True, t))
any_reducer = te.comm_reducer(lambda x, y: tirx.any(x, y), lambda t: tirx.const(False, t))
prod_reducer = te.comm_reducer(lambda x, y: x * y, lambda t: tirx.const(1, t))
last_reducer = te.comm_reducer(lambda x, y: y, lambda t: tirx.const(0, t))

# name -> (operator, block, accepted axes, rejected axes with fragments of their reasons)
CASES: dict[str, tuple[Any, str, set[str], dict[str, tuple[str, ...]]]] = {
    "reduce sum": (ops.reduce_sum, "C", {"p", "l"}, {}),
    "add": (ops.add, "C", {"p"}, {}),
    "matmul": (ops.matmul, "C", {"m", "n", "k"}, {}),
    "transposed matmul": (lambda: ops.matmul(transposed=True), "C", {"m", "n", "k"}, {}),
    "symbolic matmul": (symbolic_matmul, "C", {"m", "n", "k"}, {}),
    "matmul of one row": (lambda: ops.matmul(m=1), "C", {"m", "n", "k"}, {}),
    "outer product": (lambda: ops.matmul(k=1), "C", {"m", "n", "k"}, {}),
    "matmul of extents 1": (lambda: ops.matmul(1, 1, 1), "C", {"m", "n", "k"}, {}),
    "batch matmul": (ops.batch_matmul, "C", {"b_", "m", "n", "k"}, {}),
    "conv2d": (ops.conv2d, "C", {"n", "f", "c"}, CONV),
    "strided conv2d": (
        lambda: ops.conv2d(stride=2),
        "C",
        {"n", "f", "c"},
        {
            "x": ("A[n, c, x * 2 + i, y * 2 + j]", "index x * 2 + i in dimension 2"),
            "y": ("A[n, c, x * 2 + i, y * 2 + j]", "index y * 2 + j in dimension 3"),
            "i": ("A[n, c, x * 2 + i, y * 2 + j]", "index x * 2 + i in dimension 2"),
            "j": ("A[n, c, x * 2 + i, y * 2 + j]", "index y * 2 + j in dimension 3"),
        },
    ),
    "dilated conv2d": (
        lambda: ops.conv2d(dilation=2),
        "C",
        {"n", "f", "c"},
        {
            "x": ("A[n, c, i * 2 + x, j * 2 + y]", "i * 2 + x"),
            "y": ("A[n, c, i * 2 + x, j * 2 + y]", "j * 2 + y"),
            "i": ("A[n, c, i * 2 + x, j * 2 + y]", "i * 2 + x"),
            "j": ("A[n, c, i * 2 + x, j * 2 + y]", "j * 2 + y"),
        },
    ),
    "depth-wise conv, own channel dimension": (
        lambda: ops.depthwise(fused=False),
        "C",
        {"n", "c"},
        {"x": ("A[n, c, x + i]",), "i": ("A[n, c, x + i]",)},
    ),
    "depth-wise conv, fused channel index": (
        lambda: ops.depthwise(fused=True),
        "C",
        {"n"},
        {
            "c": ("W[c // 2, c % 2, i]", "index c // 2 in dimension 0"),
            "x": ("A[n, c, x + i]",),
            "i": ("A[n, c, x + i]",),
        },
    ),
    "causal attention": (
        lambda: ops.attention_scores(lambda i, j: j <= i),
        "C",
        {"b", "h", "d"},
        {"i": ("predicate j <= i", "C[b, h, i, j]"), "j": ("predicate j <= i", "C[b, h, i, j]")},
    ),
    "windowed attention": (
        lambda: ops.attention_scores(lambda i, j: tirx.all(j <= i, i < j + 2)),
        "C",
        {"b", "h", "d"},
        {"i": ("predicate", "C[b, h, i, j]"), "j": ("predicate", "C[b, h, i, j]")},
    ),
    "softmax maximum": (ops.softmax, "high", {"m", "n"}, {}),
    "softmax exponential": (ops.softmax, "e", {"m", "n"}, {}),
    "softmax sum": (ops.softmax, "total", {"m", "n"}, {}),
    "softmax quotient": (ops.softmax, "P", {"m", "n"}, {}),
    "layer norm moments": (ops.layer_norm, "moments", {"t", "h"}, {}),
    "layer norm scale and shift": (ops.layer_norm, "Y", {"t", "h"}, {}),
    "matmul before an epilogue": (with_epilogue, "C", {"m", "n", "k"}, {}),
    "bias of an epilogue": (with_epilogue, "D", {"m", "n"}, {}),
    "activation of an epilogue": (with_epilogue, "E", {"m", "n"}, {}),
    "sum": (lambda: reduced(te.sum), "C", {"i", "k"}, {}),
    "max": (lambda: reduced(te.max), "C", {"i", "k"}, {}),
    "min": (lambda: reduced(te.min), "C", {"i", "k"}, {}),
    "product": (lambda: reduced(prod_reducer), "C", {"i", "k"}, {}),
    "and": (lambda: reduced(all_reducer, "bool"), "C", {"i", "k"}, {}),
    "or": (lambda: reduced(any_reducer, "bool"), "C", {"i", "k"}, {}),
    "reducer that keeps the last": (
        lambda: reduced(last_reducer),
        "C",
        {"i"},
        {"k": ("C[i] is shared by all k and not accumulated",)},
    ),
    "argmax": (
        ops.argmax,
        "best",
        {"i"},
        {"k": ("best.v0[i] is shared by all k and not accumulated",)},
    ),
    "cumulative sum": (
        lambda: ops.cumsum,
        "scan",
        {"b"},
        {"k": ("index k + 1 in dimension 1 of B[b, k + 1]",)},
    ),
    "first element of a cumulative sum": (lambda: ops.cumsum, "first", {"b"}, {}),
    "running sum in one element": (
        lambda: ops.running_sum,
        "scan",
        set(),
        {"t": ("S[0] is shared by all t", "B[t] reads the partial result S[0]")},
    ),
    "recurrence on the first element": (
        lambda: ops.recurrence,
        "B",
        set(),
        {"t": ("reads its output at B[0] while it writes B[t]",)},
    ),
    "recurrence over two blocks, output": (
        lambda: ops.two_block_recurrence,
        "out",
        set(),
        {"t": ("S[0] is also accessed by block carry, as S[0], inside the same loop t",)},
    ),
    "recurrence over two blocks, state": (
        lambda: ops.two_block_recurrence,
        "carry",
        set(),
        {"t": ("S[0] is shared by all t and not accumulated",)},
    ),
    "gather by an index operand": (
        lambda: gather(lambda a, idx, i, j: a[idx[i], j]),
        "C",
        {"i", "j"},
        {},
    ),
    "gather with an offset on the operand": (
        lambda: gather(lambda a, idx, i, j: a[idx[i] + 1, j]),
        "C",
        {"i", "j"},
        {},
    ),
    "gather through a shifted index": (
        lambda: gather(lambda a, idx, i, j: a[idx[i + 1], j]),
        "C",
        {"j"},
        {"i": ("index i + 1 in dimension 0 of idx[i + 1]",)},
    ),
    "gather relative to the axis": (
        lambda: gather(lambda a, idx, i, j: a[idx[i] + i, j]),
        "C",
        {"j"},
        {"i": ("index idx[i] + i in dimension 0 of A[idx[i] + i, j]",)},
    ),
    "overwriting scatter": (
        lambda: ops.scatter,
        "overwrite",
        {"j"},
        {"i": ("B[idx[i], j] is scattered by an index", "not accumulated")},
    ),
    "accumulating scatter": (lambda: ops.scatter, "accumulate", {"i", "j"}, {}),
    "diagonal": (lambda: pointwise(lambda a, b, i, j: a[i, i] * a[j, i]), "C", {"i", "j"}, {}),
    "one element of another operand": (
        lambda: pointwise(lambda a, b, i, j: a[i, j] * a[0, j]),
        "C",
        {"i", "j"},
        {},
    ),
    "explicit mask operand": (
        lambda: pointwise(lambda a, b, i, j: tirx.if_then_else(b[i] > 0, a[i, j], 0.0)),
        "C",
        {"i", "j"},
        {},
    ),
    "Select on one axis": (
        lambda: pointwise(lambda a, b, i, j: tirx.Select(i < 2, a[i, j], 0.0)),
        "C",
        {"j"},
        {"i": ("i occurs in the predicate i < 2 of C[i, j]",)},
    ),
    "one-hot": (
        lambda: pointwise(lambda a, b, i, j: (b[i] == j).astype("float32")),
        "C",
        {"i"},
        {"j": ("j occurs in the predicate B[i] == j of C[i, j]",)},
    ),
    "position encoding": (
        lambda: pointwise(lambda a, b, i, j: a[i, j] + te.sin(i.astype("float32"))),
        "C",
        {"j"},
        {"i": ('i occurs in the value T.Cast("float32", i) of C[i, j]',)},
    ),
    "position as the value": (
        lambda: compute([], (4,), lambda i: i),
        "C",
        set(),
        {"i": ("i occurs in the value i of C[i]",)},
    ),
    "indices of 64 bits": (
        lambda: pointwise(lambda a, b, i, j: a[i.astype("int64"), j] + a[j, i.astype("int64")]),
        "C",
        {"i", "j"},
        {},
    ),
    "reversal": (
        lambda: pointwise(lambda a, b, i, j: a[3 - i, j]),
        "C",
        {"j"},
        {"i": ("index 3 - i in dimension 0 of A[3 - i, j]",)},
    ),
    "pairs of rows": (
        lambda: pointwise(lambda a, b, i, j: a[i // 2, j]),
        "C",
        {"j"},
        {"i": ("index i // 2 in dimension 0 of A[i // 2, j]",)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_axes_and_reasons(name):
    make, block, accepted, rejected = CASES[name]
    report = pit_axes(make())
    assert report.accepted[block] == accepted
    assert report.rejected[block].keys() == rejected.keys()
    for axis, fragments in rejected.items():
        for fragment in fragments:
            assert fragment in report.rejected[block][axis]


def test_a_reading_of_the_argument_gives_the_same_report():
    tensors = ops.conv2d()
    func = te.create_prim_func(tensors)
    module = tvm.IRModule({"main": func})
    assert pit_axes(tensors) == pit_axes(tuple(tensors)) == pit_axes(func) == pit_axes(module)


def test_the_report_of_several_blocks_is_in_program_order():
    assert list(pit_axes(ops.softmax()).accepted) == ["high", "e", "total", "P"]


def test_a_symbolic_argument_among_the_tensors_is_allowed():
    n = te.var("n")
    a = tensor("A", 8)
    report = pit_axes([n, a, te.compute((n,), lambda i: a[i] * 2.0, name="C")])
    assert report.accepted == {"C": frozenset({"i"})}


def test_a_report_that_is_changed_changes_no_other():
    func = te.create_prim_func(ops.conv2d())
    first = pit_axes(func)
    expected = str(first)
    first.accepted.clear()
    first.rejected.clear()
    assert str(pit_axes(func)) == expected
