"""Embeddings of a graph as one kernel: what is taken together, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from pit_tvm.model.embeddings import extract_embeddings
from pit_tvm.model.kernels import CpuKernels
from pit_tvm.model.lowering import build
from pit_tvm.target import resolve_target
from tests.model.graphs import B, T, graph, names

op = relax.op
WIDTH, WORDS = 8, 50
RNG = np.random.default_rng(3)


def constant(*shape: int) -> relax.Constant:
    """Small numbers."""
    return relax.const(RNG.uniform(-1, 1, shape).astype("float32"))


SCALE, SHIFT = constant(WIDTH), constant(WIDTH)
TABLES = [constant(WORDS, WIDTH) for _ in range(5)]


def norm(x: Any) -> Any:
    """The layer norm over features."""
    return op.nn.layer_norm(x, SCALE, SHIFT, [-1], 1e-5)


def rows(table: int, ids: Any, mode: str = "fast") -> Any:
    """What an embedding is imported as: rows by flat ids, with the ids' dimensions."""
    flat = op.reshape(ids, relax.ShapeExpr([B * T]))
    taken = op.take(TABLES[table], flat, 0, mode)
    return op.reshape(taken, relax.ShapeExpr([B, T, WIDTH]))


class Recorded(CpuKernels):
    """Notes what is asked for: the number of tables and of arrays."""

    def __init__(self) -> None:
        super().__init__(resolve_target("llvm"))
        self.asked: list[tuple[int, int]] = []

    def embeddings(self, builder: Any, tables: Any, arrays: Any, *rest: Any) -> Any:
        """As `CpuKernels.embeddings`."""
        self.asked.append((len(tables), len(arrays)))
        return super().embeddings(builder, tables, arrays, *rest)


IDS = ("int32", B, T)
LONG = ("int64", B, T)
X = (B, T, WIDTH)


def one(ids: Any) -> Any:
    """Words only."""
    return norm(rows(0, ids))


def three(ids: Any, places: Any, kinds: Any) -> Any:
    """As in BERT."""
    return norm(op.add(op.add(rows(0, ids), rows(1, kinds)), rows(2, places)))


def many(ids: Any, places: Any) -> Any:
    """Any number of tables, and arrays, in any order of sums."""
    left = op.add(rows(0, ids), op.add(rows(1, places), rows(2, places)))
    return norm(op.add(left, op.add(rows(3, ids, "clip"), rows(4, places))))


def with_array(ids: Any, x: Any) -> Any:
    """A sum with what is no row of a table."""
    return norm(op.add(op.nn.relu(x), rows(0, ids)))


def computed_table(ids: Any, table: Any, places: Any) -> Any:
    """Positions as propagation leaves them: rows of a table with a batch of 1."""
    taken = op.take(op.nn.relu(table), places, 1, "fast")
    flat = op.reshape(rows(0, ids), relax.ShapeExpr([1, B * T, WIDTH]))
    return norm(op.add(flat, taken))


def ids_of_two_dimensions(ids: Any) -> Any:
    """Rows without a reshape."""
    return norm(op.take(TABLES[0], ids, 0, "fast"))


def behind_a_reshape(ids: Any) -> Any:
    """The sum as rows."""
    total = op.add(rows(0, ids), rows(1, ids))
    return norm(op.reshape(total, relax.ShapeExpr([B * T, WIDTH])))


def read_again(ids: Any, x: Any) -> Any:
    """A row that is an output as well is read as it is."""
    words = rows(0, ids)
    return relax.Tuple([norm(op.add(words, rows(1, ids))), words])


MATCHES = [
    (one, {"ids": IDS}, (1, 0)),
    (three, {"ids": IDS, "places": LONG, "kinds": LONG}, (3, 0)),
    (many, {"ids": IDS, "places": LONG}, (5, 0)),
    (with_array, {"ids": IDS, "x": X}, (1, 1)),
    (computed_table, {"ids": IDS, "table": (1, T, WIDTH), "places": ("int32", B * T)}, (2, 0)),
    (ids_of_two_dimensions, {"ids": LONG}, (1, 0)),
    (behind_a_reshape, {"ids": IDS}, (2, 0)),
    (read_again, {"ids": IDS, "x": X}, (1, 1)),
]


def extract(make: Callable[..., Any], params: Any) -> tuple[tvm.IRModule, list[tuple[int, int]]]:
    """The module with kernels for its embeddings, and what was asked of each."""
    kernels = Recorded()
    return extract_embeddings(graph(make, **params), kernels), kernels.asked


@pytest.mark.parametrize(
    ("make", "params", "wanted"), MATCHES, ids=lambda p: getattr(p, "__name__", "")
)
def test_rows_of_tables_and_their_norm_are_one_kernel(make: Any, params: Any, wanted: Any) -> None:
    after, asked = extract(make, params)
    assert asked == [wanted]
    assert "nn.layer_norm" not in names(after)
    assert names(after).count("take") == (make is read_again)


@pytest.mark.parametrize(("make", "params", "_"), MATCHES, ids=lambda p: getattr(p, "__name__", ""))
def test_results_stay(make: Any, params: Any, _: Any) -> None:
    given = [random(param) for param in params.values()]
    before, after = (
        evaluate(module, given) for module in (graph(make, **params), extract(make, params)[0])
    )
    for old, new in zip(before, after, strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5)


def random(param: Any, batch: int = 2, tokens: int = 5) -> np.ndarray:
    """An input: ids that every table has, or numbers."""
    sizes = {str(B): batch, str(T): tokens, str(B * T): batch * tokens}
    typed = isinstance(param[0], str)
    shape = [sizes.get(str(extent), extent) for extent in (param[1:] if typed else param)]
    if typed:
        return RNG.integers(0, tokens, shape).astype(param[0])
    return RNG.uniform(-1, 1, shape).astype("float32")


def evaluate(module: tvm.IRModule, given: list[np.ndarray]) -> list[np.ndarray]:
    """The results of ``main``."""
    machine = relax.VirtualMachine(build(module, resolve_target("llvm")), tvm.cpu())
    found = machine["main"](*[tvm.runtime.tensor(array) for array in given])
    return [found.numpy()] if hasattr(found, "numpy") else [each.numpy() for each in found]


def read_twice(ids: Any) -> Any:
    """The sum is the residual of what follows, as in OPT."""
    total = op.add(rows(0, ids), rows(1, ids))
    return op.add(norm(total), total)


def only_arrays(x: Any, y: Any) -> Any:
    """A residual."""
    return norm(op.add(x, y))


def wrapped(ids: Any) -> Any:
    """Ids outside of the table mean something."""
    return norm(rows(0, ids, "wrap"))


def turned(ids: Any) -> Any:
    """Columns of a table: its rows are the norm's only after a transposition."""
    taken = op.take(constant(WIDTH, WORDS), op.reshape(ids, relax.ShapeExpr([B * T])), 1, "fast")
    return norm(op.permute_dims(taken))


def cut(ids: Any) -> Any:
    """Rows that are cut into others."""
    taken = op.take(
        constant(WORDS, 2 * WIDTH), op.reshape(ids, relax.ShapeExpr([B * T])), 0, "fast"
    )
    return norm(op.reshape(taken, relax.ShapeExpr([B * T * 2, WIDTH])))


def per_sequence(ids: Any, x: Any) -> Any:
    """A row for each sequence, repeated for its tokens."""
    taken = op.take(TABLES[0], ids, 0, "fast")
    return norm(op.add(x, op.reshape(taken, relax.ShapeExpr([B, 1, WIDTH]))))


def other_scale(ids: Any, scale: Any) -> Any:
    """A scale that only the run knows."""
    return op.nn.layer_norm(rows(0, ids), scale, SHIFT, [-1], 1e-5)


def table_of_matrices(ids: Any, table: Any) -> Any:
    """Rows of several tables at once."""
    return norm(op.take(table, op.reshape(ids, relax.ShapeExpr([B * T])), 1, "fast"))


@pytest.mark.parametrize(
    ("make", "params"),
    [
        (read_twice, {"ids": IDS}),
        (only_arrays, {"x": X, "y": X}),
        (wrapped, {"ids": IDS}),
        (turned, {"ids": IDS}),
        (cut, {"ids": IDS}),
        (per_sequence, {"ids": ("int32", B), "x": X}),
        (other_scale, {"ids": IDS, "scale": (WIDTH,)}),
        (table_of_matrices, {"ids": IDS, "table": (3, WORDS, WIDTH)}),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_what_is_no_sum_of_such_rows_is_left_alone(make: Any, params: Any) -> None:
    after, asked = extract(make, params)
    assert asked == []
    assert names(after) == names(graph(make, **params))


class Without(Recorded):
    """A backend that has no such kernel."""

    def embeddings(self, builder: Any, tables: Any, arrays: Any, *rest: Any) -> Any:
        """None."""
        return None


def test_graph_stays_as_it_is_where_no_kernel_is_offered() -> None:
    before = graph(three, ids=IDS, places=LONG, kinds=LONG)
    after = extract_embeddings(before, Without())
    assert names(after) == names(before)
