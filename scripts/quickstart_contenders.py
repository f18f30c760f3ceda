"""What the quickstart runs: the encoder's linear layers, by numpy, by torch and by pit-tvm.

Every contender writes into outputs that exist already, as a model that reuses memory does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import quickstart_data as data
import torch
from scipy.special import erf

import pit_tvm

PROJECTIONS = ("query", "key", "value", "out", "fc1", "fc2")


@dataclass(frozen=True)
class Case:
    """One linear layer of the encoder; ``slot`` is its position in the model."""

    slot: int
    name: str
    linear: data.Linear
    gelu: bool


@dataclass(frozen=True)
class Batch:
    """One padded batch.

    ``inputs[slot]`` is what layer ``slot`` reads, float32 ``[batch * 128, width]``; ``lengths`` is
    int32 ``[batch]``; ``live`` holds the positions of the rows that exist.
    """

    inputs: dict[int, np.ndarray]
    lengths: np.ndarray
    live: np.ndarray


# One call of one contender: a layer and a batch in, the padded output back.
Run = Callable[[Case, Batch], np.ndarray]


def list_cases(encoder: data.Encoder) -> list[Case]:
    """The six products of every encoder layer, in the order in which the model runs them."""
    cases: list[Case] = []
    for number, layer in enumerate(encoder.layers):
        for name in PROJECTIONS:
            label = f"layer {number} {name}"
            cases.append(Case(len(cases), label, getattr(layer, name), gelu=name == "fc1"))
    return cases


def make_batch(encoder: data.Encoder, ids: np.ndarray, lengths: np.ndarray) -> Batch:
    """Inputs of all layers for one batch of sentences."""
    inputs: dict[int, np.ndarray] = {}
    for kept in data.layer_inputs(encoder, ids, lengths):
        rows = (kept.hidden, kept.hidden, kept.hidden, kept.context, kept.attended, kept.inner)
        inputs.update(enumerate(rows, start=len(inputs)))
    live = np.flatnonzero(np.arange(ids.shape[1]) < lengths[:, None])
    return Batch(inputs, lengths, live)


def exact(case: Case, batch: Batch) -> np.ndarray:
    """The live rows of the layer's output, computed in float64."""
    x = batch.inputs[case.slot][batch.live].astype(np.float64)
    y = x @ case.linear.weight.T.astype(np.float64) + case.linear.bias
    return 0.5 * y * (1.0 + erf(y / np.sqrt(2.0))) if case.gelu else y


class Outputs:
    """One reusable float32 output per width, ``[rows, width]``, poisoned with NaN at first."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.buffers: dict[int, np.ndarray] = {}

    def of(self, case: Case) -> np.ndarray:
        """The output of one layer."""
        width = case.linear.weight.shape[0]
        if width not in self.buffers:
            self.buffers[width] = np.full((self.rows, width), np.nan, np.float32)
        return self.buffers[width]


def numpy_dense(rows: int) -> Run:
    """numpy's BLAS on all rows, padding included; the GELU with scipy's erf."""
    outputs, scratch = Outputs(rows), Outputs(rows)

    def run(case: Case, batch: Batch) -> np.ndarray:
        out = outputs.of(case)
        np.matmul(batch.inputs[case.slot], case.linear.weight.T, out=out)
        out += case.linear.bias
        if case.gelu:
            gate = np.multiply(out, np.float32(0.5**0.5), out=scratch.of(case))
            erf(gate, out=gate)
            gate += np.float32(1.0)
            gate *= np.float32(0.5)
            out *= gate
        return out

    return run


def torch_padded(rows: int) -> Run:
    """torch on all rows, padding included."""
    outputs = Outputs(rows)

    def run(case: Case, batch: Batch) -> np.ndarray:
        out = torch.from_numpy(outputs.of(case))
        weight, bias = torch.from_numpy(case.linear.weight), torch.from_numpy(case.linear.bias)
        with torch.inference_mode():
            torch.addmm(bias, torch.from_numpy(batch.inputs[case.slot]), weight.t(), out=out)
            if case.gelu:
                torch.ops.aten.gelu_(out)
        return out.numpy()

    return run


def torch_gather(rows: int) -> Run:
    """torch on the live rows: row ids from the lengths, gather, product, scatter."""
    outputs, products = Outputs(rows), Outputs(rows)

    def run(case: Case, batch: Batch) -> np.ndarray:
        out, product = (torch.from_numpy(each.of(case)) for each in (outputs, products))
        weight, bias = torch.from_numpy(case.linear.weight), torch.from_numpy(case.linear.bias)
        x, lengths = torch.from_numpy(batch.inputs[case.slot]), torch.from_numpy(batch.lengths)
        with torch.inference_mode():
            mask = torch.arange(rows // len(lengths)) < lengths[:, None]
            ids = mask.flatten().nonzero().squeeze(1)
            product = product[: len(ids)]
            torch.addmm(bias, x.index_select(0, ids), weight.t(), out=product)
            if case.gelu:
                torch.ops.aten.gelu_(product)
            out.index_copy_(0, ids, product)
        return out.numpy()

    return run


class Pit:
    """pit-tvm: one operator per shape, weights packed once, index and selection in every call."""

    def __init__(self, rows: int, cases: Sequence[Case]) -> None:
        self.outputs = Outputs(rows)
        self.operators: dict[tuple[int, int, bool], Any] = {}
        for case in cases:
            if self._key(case) not in self.operators:
                n, k, gelu = self._key(case)
                activation = "gelu" if gelu else None
                tensors = pit_tvm.op.linear(None, n, k, bias=True, activation=activation)
                self.operators[n, k, gelu] = pit_tvm.compile(
                    tensors, sparse={"lhs": pit_tvm.Lengths()}, target="llvm"
                )
        self.packed = {c.slot: self._operator(c).pack(rhs=c.linear.weight) for c in cases}

    def _key(self, case: Case) -> tuple[int, int, bool]:
        n, k = case.linear.weight.shape
        return n, k, case.gelu

    def _operator(self, case: Case) -> Any:
        return self.operators[self._key(case)]

    def _arguments(self, case: Case, batch: Batch) -> tuple[Any, ...]:
        return batch.inputs[case.slot], self.packed[case.slot], case.linear.bias

    def run(self, case: Case, batch: Batch) -> np.ndarray:
        """One call."""
        out = self.outputs.of(case)
        arguments = self._arguments(case, batch)
        self._operator(case)(*arguments, sparsity=batch.lengths, out=out)
        return out

    def profile(self, case: Case, batch: Batch) -> Any:
        """One call taken apart: ``index_us``, ``select_us`` and ``kernel``."""
        arguments = self._arguments(case, batch)
        return self._operator(case).profile(*arguments, sparsity=batch.lengths)
