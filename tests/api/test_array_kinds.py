"""numpy, torch and DLPack in, the same kind out, and the memory that was passed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import tvm_ffi
from torch.autograd import forward_ad
from tvm import runtime as tvm_runtime

from pit_tvm.errors import DTypeError
from pit_tvm.reference import ops as reference
from pit_tvm.runtime.arrays import as_numpy
from pit_tvm.structs import Lengths, Mask, Rows, Values
from tests.api.cases import DTYPES, LINEAR, MATMUL
from tests.api.running import assert_close, compiled, poison, random_array, result_dtype

M, N, K = 61, 71, 131


class Capsule:
    """An array that is known by DLPack alone."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def as_tvm(array: np.ndarray) -> Any:
    """The same elements in a TVM tensor."""
    tensor = tvm_runtime.empty(array.shape, array.dtype.name)
    if array.dtype.name == "bfloat16":
        bits = np.from_dlpack(tensor._create_view(array.shape, "uint16"))
        bits[...] = array.view(np.uint16)
        return tensor
    return tensor.copyfrom(array)


def as_torch(array: np.ndarray) -> torch.Tensor:
    """The same elements in a torch tensor."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


WRAPPERS: dict[str, tuple[Callable[[np.ndarray], Any], type]] = {
    "numpy": (np.array, np.ndarray),
    "torch": (as_torch, torch.Tensor),
    "tvm": (as_tvm, tvm_ffi.Tensor),
}


def problem(
    dtype: str, rng: np.random.Generator
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """lhs, rhs, a mask and the truth."""
    mask = rng.random((M, K)) < 0.3
    lhs = random_array((M, K), dtype, rng)
    lhs = np.where(mask, lhs, 0).astype(lhs.dtype)
    rhs = random_array((K, N), dtype, rng)
    return [lhs, rhs], mask, reference.matmul(lhs, rhs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", WRAPPERS)
def test_result_is_of_the_kind_of_the_inputs(
    library: str, dtype: str, rng: np.random.Generator
) -> None:
    wrap, kind = WRAPPERS[library]
    arrays, mask, truth = problem(dtype, rng)
    operator = compiled(MATMUL, dtype, "lhs", Mask())
    out = operator(*map(wrap, arrays), sparsity=wrap(mask))
    assert isinstance(out, kind)
    assert_close(as_numpy(out), truth)
    given = wrap(poison(truth.shape, result_dtype(dtype)))
    assert operator(*map(wrap, arrays), sparsity=wrap(mask), out=given) is given
    assert_close(as_numpy(given), truth)


@pytest.mark.parametrize("library", WRAPPERS)
def test_values_of_every_kind_of_array_are_detected(library: str, rng: np.random.Generator) -> None:
    wrap, _ = WRAPPERS[library]
    for dtype in DTYPES:
        arrays, _, truth = problem(dtype, rng)
        out = compiled(MATMUL, dtype, "lhs", Values())(*map(wrap, arrays))
        assert_close(as_numpy(out), truth, dtype)


def test_objects_known_by_dlpack_alone_are_taken(rng: np.random.Generator) -> None:
    arrays, mask, truth = problem("float32", rng)
    operator = compiled(MATMUL, "float32", "lhs", Mask())
    out = operator(*map(Capsule, arrays), sparsity=Capsule(mask.view(np.uint8)))
    assert isinstance(out, tvm_ffi.Tensor)
    assert_close(as_numpy(out), truth)


def test_libraries_may_be_mixed_and_the_sparse_operand_decides(rng: np.random.Generator) -> None:
    (lhs, rhs), mask, truth = problem("float32", rng)
    operator = compiled(MATMUL, "float32", "lhs", Mask())
    out = operator(lhs, as_torch(rhs), sparsity=as_tvm(mask.view(np.uint8)))
    assert isinstance(out, np.ndarray)
    assert_close(out, truth)
    out = operator(as_torch(lhs), as_tvm(rhs), sparsity=mask)
    assert isinstance(out, torch.Tensor)
    assert_close(out.numpy(), truth)
    held = poison(truth.shape, "float32")
    assert operator(as_torch(lhs), rhs, sparsity=mask, out=held) is held
    assert_close(held, truth)


def test_matrices_of_numpy_tell_patterns_as_other_arrays_do(rng: np.random.Generator) -> None:
    (lhs, rhs), mask, truth = problem("float32", rng)
    operator = compiled(MATMUL, "float32", "lhs", Mask())
    assert_close(operator(lhs, rhs, sparsity=mask.view(np.matrix)), truth)
    out = compiled(MATMUL, "float32", "lhs", Values())(lhs.view(np.matrix), rhs)
    assert_close(out, truth)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_lengths_may_be_any_sequence(kind: Callable[[Any], Any], rng: np.random.Generator) -> None:
    (lhs, rhs), _, _ = problem("float32", rng)
    operator = compiled(MATMUL, "float32", "lhs", Lengths())
    out = operator(lhs, rhs, sparsity=kind([40]), out=poison((M, N), "float32"))
    assert_close(out[:40], reference.matmul(lhs, rhs)[:40])
    assert np.isnan(out[40:]).all()


@pytest.mark.parametrize("offset", [1, 3, 4, 15])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_views_at_odd_offsets_are_taken_and_written(
    library: str, offset: int, rng: np.random.Generator
) -> None:
    """Offsets of 4 to 60 bytes: compiled code must not assume aligned vectors."""

    wrap: Any = np.asarray if library == "numpy" else torch.from_numpy

    def moved(array: np.ndarray) -> Any:
        room = np.full(array.size + 2 * offset, np.nan, array.dtype)
        view = room[offset : offset + array.size].reshape(array.shape)
        view[...] = array
        return wrap(view)

    (lhs, rhs), mask, truth = problem("float32", rng)
    out = moved(poison(truth.shape, "float32"))
    operator = compiled(MATMUL, "float32", "lhs", Mask())
    operator(moved(lhs), moved(rhs), sparsity=mask, out=out)
    assert_close(np.asarray(out), truth)
    linear = compiled(LINEAR, "float32", "lhs", Rows())
    weight, bias = random_array((71, 131), "float32", rng), random_array((71,), "float32", rng)
    out, ids = moved(poison(truth.shape, "float32")), rng.permutation(M)[:40]
    linear(moved(lhs), linear.pack(rhs=moved(weight)), moved(bias), sparsity=wrap(ids), out=out)
    wanted = LINEAR.truth(lhs, weight, bias)
    assert_close(np.asarray(out)[ids], wanted[ids])


def test_results_lie_on_the_cpu_whatever_torch_makes_by_default(rng: np.random.Generator) -> None:
    (lhs, rhs), mask, truth = problem("float32", rng)
    operator = compiled(MATMUL, "float32", "lhs", Mask(), apply_mask=True)
    arrays, live = [as_torch(lhs), as_torch(rhs)], torch.from_numpy(mask)
    for candidate in (None, *operator.explain(*arrays, sparsity=live).candidates):
        call = partial(operator.repeat, candidate) if candidate else operator
        with torch.device("meta"):
            out = call(*arrays, sparsity=live)
        assert_close(out.numpy(), truth, str(candidate))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("made, called", [(True, False), (False, True), (True, True)])
def test_every_candidate_writes_into_tensors_of_inference_mode(
    dtype: str, made: bool, called: bool, rng: np.random.Generator
) -> None:
    operator = compiled(MATMUL, dtype, "lhs", Mask())
    lhs, rhs = (as_torch(random_array(s, dtype, rng)) for s in ((M, K), (K, N)))
    mask = torch.ones((M, K), dtype=torch.bool)
    truth = reference.matmul(lhs.numpy(), rhs.numpy())
    for choice in operator.explain(lhs, rhs, sparsity=mask).candidates:
        with torch.inference_mode(made):
            out = torch.full((M, N), 85, dtype=getattr(torch, result_dtype(dtype)))
        with torch.inference_mode(called):
            assert operator.repeat(choice, lhs, rhs, sparsity=mask, out=out) is out
        assert_close(out.numpy(), truth)


def test_read_only_inputs_are_taken(rng: np.random.Generator) -> None:
    for dtype in DTYPES:
        arrays, mask, truth = problem(dtype, rng)
        for array in (*arrays, mask):
            array.flags.writeable = False
        operator = compiled(MATMUL, dtype, "lhs", Mask())
        assert_close(operator(*arrays, sparsity=mask), truth)


def test_tensors_that_require_a_gradient_are_read(rng: np.random.Generator) -> None:
    (lhs, rhs), mask, truth = problem("float32", rng)
    weight = as_torch(rhs).requires_grad_()
    operator = compiled(MATMUL, "float32", "lhs", Mask())
    given, told = (as_torch(lhs), weight), torch.from_numpy(mask)
    with torch.no_grad():
        assert_close(operator(*given, sparsity=told).numpy(), truth)
        choice = operator.explain(*given, sparsity=told).choice
        assert_close(operator.repeat(choice, *given, sparsity=told).numpy(), truth)
    assert_close(operator(given[0], weight.detach(), sparsity=told).numpy(), truth)


def test_gradients_are_refused_where_torch_records_them(rng: np.random.Generator) -> None:
    (lhs, rhs), mask, _ = problem("float32", rng)
    operator = compiled(MATMUL, "float32", "lhs", Mask())
    given, told = (as_torch(lhs), as_torch(rhs)), torch.from_numpy(mask)
    choice = operator.explain(*given, sparsity=told).choice
    calls = operator, operator.profile, partial(operator.repeat, choice)
    for call in calls:
        call(*given, sparsity=told)
    given[1].requires_grad_()
    for call in calls:  # however like the one before
        with pytest.raises(DTypeError, match=r"^rhs: expected .* no gradient.*torch\.no_grad\(\)"):
            call(*given, sparsity=told)
    other = type("Other", (), {"requires_grad": True})()  # another library's
    with pytest.raises(DTypeError, match="^lhs: expected .* no gradient"):
        operator(other, rhs, sparsity=told)


def test_tangents_are_refused(rng: np.random.Generator) -> None:
    (lhs, rhs), mask, _ = problem("float32", rng)
    operator = compiled(MATMUL, "float32", "lhs", Mask())
    given, told = (as_torch(lhs), as_torch(rhs)), torch.from_numpy(mask)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(given[1], given[1])
        choices = operator.explain(*given, sparsity=told).candidates
        for call in (operator, operator.profile, *(partial(operator.repeat, c) for c in choices)):
            call(*given, sparsity=told)
            with pytest.raises(DTypeError, match="^rhs: expected a tensor without a tangent, got"):
                call(given[0], dual, sparsity=told)


def test_row_ids_of_a_negated_tensor_are_read_as_their_values(rng: np.random.Generator) -> None:
    (lhs, rhs), _, _ = problem("float32", rng)
    operator = compiled(MATMUL, "float32", "lhs", Rows(), dead="zero")
    ids = -torch.arange(3)
    for given in (torch.arange(3), torch._neg_view(ids)):  # the second is like the first
        out = operator(lhs, rhs, sparsity=given)
        assert_close(out[:3], lhs[:3].astype(np.float64) @ rhs)
        assert not out[3:].any()


def test_inputs_are_left_as_they_were(rng: np.random.Generator) -> None:
    arrays, mask, _ = problem("float32", rng)
    copies = [array.copy() for array in (*arrays, mask)]
    operator = compiled(MATMUL, "float32", "lhs", Mask())
    operator(*arrays, sparsity=mask)
    for array, copy in zip((*arrays, mask), copies, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_nothing_of_the_size_of_an_operand_is_allocated(rng: np.random.Generator) -> None:
    """Lengths, a packed weight and an output: after a first call, no memory but an index."""
    rows = 4096
    operator = compiled(LINEAR, "float32", "lhs", Lengths())
    lhs, bias = np.ones((rows, 131), np.float32), np.zeros(71, np.float32)
    packed = operator.pack(rhs=np.ones((71, 131), np.float32))
    out, lengths = poison((rows, 71), "float32"), rng.integers(0, 129, 32)
    operator(lhs, packed, bias, sparsity=lengths, out=out)
    tracemalloc.start()
    operator(lhs, packed, bias, sparsity=lengths, out=out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < out.nbytes / 8
