"""Kernels of operators check no arguments: all that they would check is checked before."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from torch._subclasses import FakeTensorMode
from tvm import tirx
from tvm.ir.instrument import pass_instrument

import pit_tvm
from pit_tvm import Operator, op
from pit_tvm.errors import DTypeError, PitError, ShapeError
from pit_tvm.runtime import kernels
from pit_tvm.structs import Candidate, Mask
from tests.api.running import empty_database
from tests.runtime.exported import Exported
from tests.runtime.test_dlpack import HEADERS

M, N, K = 37, 29, 131
NAMES = ["lhs", "rhs", "bias", "out"]

# What compiled functions check, by what TVM says of it, and what checks it before.
CHECKS = {
    "Expected arguments": "the launcher, which passes those that a kernel was made for",
    "args pointer is NULL": "TVM, whose calls have arguments",
    "Mismatched type on argument": "as_tensor; Binder, of packed operands",
    "Mismatched .ndim on argument": "as_tensor, or the gate; Binder",
    "Mismatched .dtype on argument": "as_tensor, or the gate; Binder",
    "Mismatched .shape on argument": "as_tensor, or the gate, by the layout; Binder",
    "Invalid .shape on argument": "as_tensor, or the gate, by the layout; Binder",
    "Mismatched .strides on argument": "as_tensor, or the gate",
    "Invalid .byte_offset on argument": "as_tensor, or the gate",
    "Mismatched .device_type on argument": "as_tensor, or the gate",
    "Mismatched .device_id on argument": "as_tensor, or the gate",
    "data pointer is NULL on argument": "as_tensor, or the gate; empty_like_kind, of new results",
}


def made(**options: bool) -> Operator:
    tensors, database = op.linear(None, None, None), empty_database()
    return pit_tvm.compile(tensors, sparse={"lhs": Mask(32, 1)}, database=database, **options)


@pytest.fixture(scope="module")
def operator() -> Operator:
    return made()


@pytest.fixture(scope="module")
def masked() -> Operator:
    return made(apply_mask=True)


def good(library: Any = torch) -> dict[str, Any]:
    """The arguments of a call that is fine."""
    rng = np.random.default_rng(3)
    shapes = {"lhs": (M, K), "rhs": (N, K), "bias": (N,), "out": (M, N)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["sparsity"] = np.ones((M, K), bool)
    return arrays if library is np else {n: torch.from_numpy(a) for n, a in arrays.items()}


def run(operator: Operator, arguments: dict[str, Any], choice: Candidate | None = None) -> Any:
    """A call, by ``choice`` if that is told."""
    named = dict(arguments)
    arrays = [named.pop(name) for name in operator.inputs]
    if choice is None:
        return operator(*arrays, **named)
    return operator.repeat(choice, *arrays, **named)


def sparse(operator: Operator) -> Candidate:
    """A candidate that runs a kernel of the operator's own."""
    plan = operator.explain(sparsity=np.zeros((M, K), bool), sizes={"m": M, "n": N, "k": K})
    return next(c for c in plan.candidates if c.kind != "dense" and c.tile is not None)


# --------------------------------------------------------------------------------------------
# What is not checked


def told(check: tirx.AssertStmt) -> str:
    """What a check says, without names and numbers."""
    text = "".join(str(part.value) for part in check.message_parts).split(" when calling")[0]
    text = re.sub(r"\b(lhs|rhs|bias|out|ids|count)\b|\[?\d+\]?|#", "", text)
    return " ".join(text.split())


def checks_of(mod: tvm.IRModule) -> set[str]:
    """All that the functions of a module check."""
    found: set[str] = set()

    @pass_instrument
    class Watch:
        def run_after_pass(self, mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
            if info.name == "tirx.MakePackedAPI":
                visit = (tirx.AssertStmt, lambda check: found.add(told(check)))
                for func in mod.functions.values():
                    tvm_ffi.structural_walk(func.body, [visit])

    with tvm.transform.PassContext(instruments=[Watch()]):
        tvm.compile(mod, target="llvm")
    return found


def test_all_that_kernels_would_check_is_known(operator: Operator) -> None:
    choice, own = sparse(operator), operator._dispatcher.kernels
    assert isinstance(own, kernels.Kernels)
    assert checks_of(own._sparse_module(choice.micro_tile, choice.tile, 1)) == set(CHECKS)


# --------------------------------------------------------------------------------------------
# What is checked before


def refused(
    operator: Operator, change: dict[str, Any], error: type[PitError], says: str, library: Any
) -> None:
    """In the first call, behind one that was fine, and by a candidate."""
    for choice in (None, None, sparse(operator)):
        arguments = good(library)
        before = np.asarray(arguments["out"]).copy()
        with pytest.raises(error, match=f"^{says}"):
            run(operator, arguments | change, choice)
        np.testing.assert_array_equal(np.asarray(arguments["out"]), before)
        run(operator, good(library), choice)


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("place", NAMES)
@pytest.mark.parametrize("name", [n for n, (f, *_) in HEADERS.items() if "shape" not in f])
def test_headers_of_dlpack_are_checked(
    operator: Operator, name: str, place: str, library: Any
) -> None:
    fields, error, _ = HEADERS[name]
    array = good(np)[place]
    if "strides" in fields:
        fields = {"strides": [2 * n // array.itemsize for n in array.strides]}
    bad = tvm_ffi.from_dlpack(Exported(array, **(fields if name != "rank" else {"ndim": 0})))
    refused(operator, {place: bad}, error, f"{place}: expected", library)


def unaligned(array: np.ndarray) -> np.ndarray:
    memory = np.zeros(array.nbytes + 1, np.uint8)[1:]
    return memory.view(array.dtype).reshape(array.shape)


def turned(array: np.ndarray) -> np.ndarray:
    return array[::-1]


def twice(array: np.ndarray) -> np.ndarray:
    return np.repeat(array, 2, -1)[..., ::2]


def same(array: np.ndarray) -> np.ndarray:
    return np.broadcast_to(array.dtype.type(0), array.shape)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.clone()
    made.untyped_storage().resize_(0)
    return made


@pytest.mark.parametrize("place", NAMES)
@pytest.mark.parametrize("make", [unaligned, turned, twice, same])
def test_memory_of_arrays_is_checked(
    operator: Operator, make: Callable[[np.ndarray], np.ndarray], place: str
) -> None:
    refused(operator, {place: make(good(np)[place])}, ShapeError, f"{place}: expected", np)
    if make not in (turned, same):  # torch has no such strides, or no such memory
        tensor = torch.from_dlpack(make(good(np)[place]))
        refused(operator, {place: tensor}, ShapeError, f"{place}: expected", torch)


@pytest.mark.parametrize("place", [*NAMES, "sparsity"])
def test_memory_that_was_freed_is_not_read(
    operator: Operator, masked: Operator, place: str
) -> None:
    for each in (operator, masked):
        change = {place: freed(good()[place])}
        refused(each, change, DTypeError, f"{place}: expected .* zeros without memory", torch)


def test_masks_are_read_once(masked: Operator) -> None:
    """Another array at the second time would not be checked."""

    class Once(Exported):
        def __dlpack__(self, **options: Any) -> Any:
            made = super().__dlpack__(**options)
            self.at = (2, 0)
            return made

    arguments = good(np)
    truth = np.array(run(masked, arguments))
    for choice in (None, sparse(masked)):
        arguments["sparsity"] = Once(good(np)["sparsity"])
        np.testing.assert_allclose(run(masked, arguments, choice), truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
def test_packed_operands_of_another_shape_are_refused(operator: Operator, library: Any) -> None:
    choice, small = sparse(operator), good(library)
    wide = {"rhs": good(library)["rhs"].repeat(3, 0)} if library is np else {}
    wide = wide or {"rhs": torch.cat([good()["rhs"]] * 3)}
    weight, other = (operator.pack(rhs=array["rhs"]) for array in (small, wide))
    for _ in range(2):
        run(operator, small | {"rhs": weight}, choice)
        for wrong in (
            replace(weight, packed=other.packed),
            replace(weight, packed=42),
            replace(weight, packed=torch.empty(weight.packed.shape, device="meta")),
        ):
            with pytest.raises((ShapeError, DTypeError), match="^rhs"):
                run(operator, small | {"rhs": wrong}, choice)


def test_weights_that_grow_once_packed_are_refused(operator: Operator) -> None:
    """Also where a layout of the new shape is known."""
    choice, wide = sparse(operator), torch.ones(5 * N, K)
    arguments = good() | {"bias": torch.ones(5 * N), "out": torch.zeros(M, 5 * N)}
    run(operator, arguments | {"rhs": wide}, choice)
    tensor = good()["rhs"]
    weight = operator.pack(rhs=tensor)
    run(operator, good() | {"rhs": weight}, choice)
    tensor.data = wide
    for _ in range(2):
        with pytest.raises(ShapeError, match=r"^rhs: packed operand: .* pack it again"):
            run(operator, arguments | {"rhs": weight}, choice)


@pytest.mark.parametrize("apply_mask", [False, True])
def test_new_results_have_memory(operator: Operator, masked: Operator, apply_mask: bool) -> None:
    each = masked if apply_mask else operator
    arguments = good() | {"out": None}
    for choice in (None, sparse(each)):
        run(each, arguments, choice)
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(DTypeError, match="^out"):
            run(each, arguments, choice)
        with pytest.raises(DTypeError, match="^out: expected a new tensor with memory"):
            torch.func.functionalize(lambda x, c=choice: run(each, arguments, c) + x)(torch.ones(N))
