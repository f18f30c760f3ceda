"""Recurrent networks over the tokens of sequences on CPUs: a few sequences at a time.

What a step multiplies, the states of ``ROWS`` sequences by one weight, is read from memory once for
all of them, and stays in the cache from step to step.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.ir import Expr
from tvm.script import tirx as T

from pit_tvm.errors import ShapeError, mismatch
from pit_tvm.op.arguments import at_least
from pit_tvm.op.elementary import sigmoid, tanh
from pit_tvm.op.epilogue import relu

#: Gates of a cell by its kind, and what it keeps for each column: a state, or one and a memory.
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
KEPT = {"lstm": 2, "gru": 1, "rnn_tanh": 1, "rnn_relu": 1}
#: Columns of weights come in so many, filled up with zeros.
COLUMNS = 32
ROWS = 4


def columns_of(kind: str, width: int) -> int:
    """Columns of the weight of a cell of ``width`` states, with those that fill it up."""
    return -(-GATES[kind] * width // COLUMNS) * COLUMNS


def recurrence(kind: str, width: int, backwards: bool) -> tirx.PrimFunc:
    """The states of torch's cells, token after token; ``main(gates, weight, bias, state, memory,
    lengths, out)``.

    All are float32 but one. ``gates`` [b, t, GATES * width]: what tokens give to every gate, in
    torch's order, biases of inputs included; ``weight`` [width, columns] and ``bias`` [columns]:
    what states give, with as many columns as `columns_of` says; ``state`` and ``memory`` [b,
    width]: those before the first token (``memory``: of LSTM only). ``lengths``, int64 [b]: how
    many tokens a sequence has, the first ones of t. ``out`` [b, t, KEPT * width]: the state after
    every token, and behind it its memory; zeros where no token is. ``backwards``: from the last
    token to the first.

    Raises
    ------
    ShapeError
        ``width`` is below 1, or there is no such ``kind``.
    """
    if kind not in GATES:
        raise ShapeError(mismatch("kind", f"one of {', '.join(GATES)}", repr(kind)))
    width = at_least("width", width, 1)
    given, columns, kept = GATES[kind] * width, columns_of(kind, width), KEPT[kind] * width

    @T.prim_func(s_tir=True, check_well_formed=False)
    def main(
        p_gates: T.handle,
        p_weight: T.handle,
        p_bias: T.handle,
        p_state: T.handle,
        p_memory: T.handle,
        p_lengths: T.handle,
        p_out: T.handle,
    ):
        b = T.int64()
        t = T.int64()
        gates = T.match_buffer(p_gates, (b, t, given), "float32", align=4)
        weight = T.match_buffer(p_weight, (width, columns), "float32", align=4)
        bias = T.match_buffer(p_bias, (columns,), "float32", align=4)
        state = T.match_buffer(p_state, (b, width), "float32", align=4)
        memory = T.match_buffer(p_memory, (b, width), "float32", align=4)
        lengths = T.match_buffer(p_lengths, (b,), "int64", align=8)
        out = T.match_buffer(p_out, (b, t, kept), "float32", align=4)
        for tile in T.parallel((b + (ROWS - 1)) // ROWS):
            cell = Cell(kind, width)
            cell.begin(state, memory, tile * ROWS, b)
            for step in range(t):
                token: T.let = t - 1 - step if backwards else step
                cell.multiply(weight, bias)
                for r in range(ROWS):
                    row: T.let = tile * ROWS + r
                    if row < b:
                        if token < lengths[row]:
                            cell.step(gates, out, row, token, r)
                        else:
                            for c in range(kept):
                                out[row, token, c] = T.float32(0)

    return main


@T.meta_class
class Cell:
    """The states of ``ROWS`` sequences, and what they give to the gates."""

    def __init__(self, kind: str, width: int) -> None:
        self.kind, self.width = kind, width
        self.columns = columns_of(kind, width)
        self.state = T.alloc_buffer((ROWS, width), "float32")
        self.memory = T.alloc_buffer((ROWS, width), "float32")
        self.given = T.alloc_buffer((ROWS, self.columns), "float32")
        self.sums = T.alloc_buffer((ROWS * COLUMNS,), "float32")

    @T.inline
    def begin(self, state, memory, first, b):
        for r, c in T.grid(ROWS, self.width):
            self.state[r, c] = state[T.min(first + r, b - 1), c]
            self.memory[r, c] = memory[T.min(first + r, b - 1), c]

    @T.inline
    def multiply(self, weight, bias):
        for block in range(self.columns // COLUMNS):
            for r in T.unroll(ROWS):
                for w in T.vectorized(COLUMNS):
                    self.sums[r * COLUMNS + w] = bias[block * COLUMNS + w]
            for k in range(self.width):
                for r in T.unroll(ROWS):
                    for w in T.vectorized(COLUMNS):
                        self.sums[r * COLUMNS + w] = (
                            self.sums[r * COLUMNS + w]
                            + self.state[r, k] * weight[k, block * COLUMNS + w]
                        )
            for r in T.unroll(ROWS):
                for w in T.vectorized(COLUMNS):
                    self.given[r, block * COLUMNS + w] = self.sums[r * COLUMNS + w]

    @T.inline
    def step(self, gates, out, row, token, r):
        for c in range(self.width):
            if self.kind == "lstm":
                self.memory[r, c] = self.remembered(gates, row, token, r, c)
                self.state[r, c] = sigmoid(self.gate(gates, row, token, r, c, 3)) * tanh(
                    self.memory[r, c]
                )
                out[row, token, self.width + c] = self.memory[r, c]
            elif self.kind == "gru":
                # In scratch, not `T.Bind`: TVM's analyzer sees what that binds twice, before and
                # after it is simplified, and refuses names inside that came to stand for others.
                new: T.let = 2 * self.width + c
                self.given[r, new] = gates[row, token, new] + self.given[r, new] * sigmoid(
                    self.gate(gates, row, token, r, c, 0)
                )
                self.given[r, new] = tanh(self.given[r, new])
                self.state[r, c] = self.given[r, new] + (
                    self.state[r, c] - self.given[r, new]
                ) * sigmoid(self.gate(gates, row, token, r, c, 1))
            elif self.kind == "rnn_tanh":
                self.state[r, c] = tanh(self.gate(gates, row, token, r, c, 0))
            else:
                self.state[r, c] = relu(self.gate(gates, row, token, r, c, 0))
            out[row, token, c] = self.state[r, c]

    def gate(self, gates: Expr, row: Any, token: Any, r: Any, c: Any, number: int) -> Expr:
        """What the token and the state give to a gate."""
        at = number * self.width + c
        return gates[row, token, at] + self.given[r, at]

    def remembered(self, gates: Expr, row: Any, token: Any, r: Any, c: Any) -> Expr:
        """The memory of LSTM after a token: gates are of the input, the memory, and what is new."""
        entry, kept, new = (self.gate(gates, row, token, r, c, number) for number in range(3))
        return sigmoid(kept) * self.memory[r, c] + sigmoid(entry) * tanh(new)
