"""Bad arrays and outputs: a typed error that names the argument, and nothing is written."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import pit_tvm
from pit_tvm import Operator, op
from pit_tvm.errors import DTypeError, PitError, ShapeError
from pit_tvm.structs import Lengths, Mask, Rows
from tests.api.cases import LINEAR, MATMUL
from tests.api.running import compiled, poison, untouched

M, N, K = 37, 29, 131


def good() -> list[Any]:
    """lhs, rhs and a mask that `matmul` takes."""
    rng = np.random.default_rng()
    lhs = rng.standard_normal((M, K)).astype(np.float32)
    rhs = rng.standard_normal((K, N)).astype(np.float32)
    return [lhs, rhs, np.ones((M, K), bool)]


@pytest.fixture
def matmul() -> Operator:
    return compiled(MATMUL, "float32", "lhs", Mask())


def refused(
    operator: Operator,
    arrays: Any,
    sparsity: Any,
    error: type[PitError],
    argument: str,
    says: str = "",
    out: Any = None,
) -> None:
    """The call raises ``error``, whose text begins with the argument; ``out`` stays as it was."""
    out = poison((M, N), "float32") if out is None else out
    before = np.array(out)
    with pytest.raises(error, match=rf"^{argument}.*expected .*, got ") as caught:
        operator(*arrays, sparsity=sparsity, out=out)
    assert says in str(caught.value)
    np.testing.assert_array_equal(np.array(out), before)


class ForeignDevice:
    """An array that says it lies on a GPU."""

    shape = (M, K)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("memory of another device must not be asked for")


# --------------------------------------------------------------------------------------------
# Inputs


@pytest.mark.parametrize("count", [0, 1, 3])
def test_number_of_arrays_is_checked(matmul: Operator, count: int) -> None:
    lhs, rhs, mask = good()
    refused(matmul, [lhs, rhs, rhs][:count], mask, ShapeError, "arguments", "lhs, rhs")


def test_a_pattern_among_the_arrays_is_refused_with_advice(matmul: Operator) -> None:
    lhs, rhs, mask = good()
    refused(matmul, [lhs, rhs, mask], None, ShapeError, "arguments", "sparsity=...")


def test_cu_seqlens_taken_for_lengths_are_refused_with_advice() -> None:
    operator = pit_tvm.compile(op.matmul(6, 8, 8), sparse={"lhs": Lengths()})
    plain, out = np.ones((8, 8), np.float32), poison((6, 8), "float32")
    refused(
        operator, [plain[:6], plain], [0, 1, 3, 6], ShapeError, "sparsity", "cumulative=True", out
    )


def test_extents_must_agree(matmul: Operator) -> None:
    lhs, rhs, mask = good()
    refused(matmul, [lhs, rhs[1:]], mask, ShapeError, "rhs")


def test_known_extents_must_be_those_of_the_expression() -> None:
    linear = compiled(LINEAR, "float32", "lhs", Mask())
    lhs, weight, bias = (np.ones(s, np.float32) for s in ((M, 130), (71, 131), (71,)))
    refused(linear, [lhs, weight, bias], np.ones((M, 130), bool), ShapeError, "lhs")


@pytest.mark.parametrize("shape", [(K,), (1, M, K), ()])
def test_rank_is_checked(matmul: Operator, shape: tuple[int, ...]) -> None:
    _, rhs, mask = good()
    refused(matmul, [np.ones(shape, np.float32), rhs], mask, ShapeError, "lhs")


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", ">f4", "complex64", "object"])
def test_element_type_of_numpy_arrays_is_checked(matmul: Operator, dtype: str) -> None:
    lhs, rhs, mask = good()
    refused(matmul, [lhs, rhs.astype(dtype)], mask, DTypeError, "rhs")


def test_element_type_of_torch_tensors_is_checked(matmul: Operator) -> None:
    lhs, rhs, mask = good()
    refused(matmul, [torch.from_numpy(lhs).double(), rhs], mask, DTypeError, "lhs")


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_input_must_be_contiguous(matmul: Operator, library: str) -> None:
    lhs, rhs, mask = good()
    turned = np.ascontiguousarray(rhs.T).T
    given = turned if library == "numpy" else torch.from_numpy(turned)
    refused(matmul, [lhs, given], mask, ShapeError, "rhs", "contiguous")
    wide = np.ones((M, 2 * K), np.float32)[:, ::2]
    given = wide if library == "numpy" else torch.from_numpy(wide)
    refused(matmul, [given, rhs], mask, ShapeError, "lhs", "contiguous")


def test_elements_must_be_aligned(matmul: Operator) -> None:
    lhs, rhs, mask = good()
    raw = np.zeros(lhs.nbytes + 1, np.uint8)
    odd = raw[1:].view(np.float32).reshape(lhs.shape)
    refused(matmul, [odd, rhs], mask, ShapeError, "lhs", "aligned")


def test_masked_array_is_no_plain_array(matmul: Operator) -> None:
    lhs, rhs, mask = good()
    refused(matmul, [np.ma.masked_array(lhs, ~mask), rhs], mask, DTypeError, "lhs")


@pytest.mark.parametrize("thing", [None, 3.0, "lhs", [[1.0, 2.0]], object()])
def test_other_things_are_no_arrays(matmul: Operator, thing: Any) -> None:
    _, rhs, mask = good()
    refused(matmul, [thing, rhs], mask, DTypeError, "lhs")


def test_array_of_another_device_is_refused_unread(matmul: Operator) -> None:
    lhs, rhs, mask = good()
    refused(matmul, [ForeignDevice(), rhs], mask, DTypeError, "lhs", "CPU")
    meta = torch.empty(K, N, device="meta")
    refused(matmul, [lhs, meta], mask, DTypeError, "rhs", "CPU")


def test_pattern_of_another_device_is_refused_unread(matmul: Operator) -> None:
    lhs, rhs, _ = good()
    refused(matmul, [lhs, rhs], ForeignDevice(), DTypeError, "sparsity", "CPU")


@pytest.mark.parametrize(
    ("argument", "tensors", "sizes"),
    [
        ("data", op.reduce_sum(None, None, dtype="int8"), {"p": 2**16, "l": 2**15}),
        ("rhs", op.matmul(None, None, None), {"m": 1, "n": 2**16, "k": 2**15}),
        ("rhs packed", op.matmul(None, None, None), {"m": 1, "n": 1, "k": 2**30}),
        ("out", op.matmul(None, None, None), {"m": 2**16, "n": 2**15, "k": 1}),
    ],
    ids=str,
)
def test_elements_must_be_countable_in_32_bits(
    argument: str, tensors: Any, sizes: dict[str, int]
) -> None:
    operator = pit_tvm.compile(tensors, sparse={str(tensors[0].op.name): Rows()})
    with pytest.raises(ShapeError, match=f"^{argument}: expected fewer than 2147483648 elements"):
        operator.explain(sparsity=[0], sizes=sizes)


def test_arrays_that_kernels_cannot_count_are_refused_unread(matmul: Operator) -> None:
    operator = pit_tvm.compile(op.reduce_sum(None, None, dtype="int8"), sparse={"data": Rows()})
    with pytest.raises(ShapeError, match="^data: expected fewer than 2147483648 elements"):
        operator(np.zeros((2**16, 2**15 + 1), np.int8), sparsity=[0])
    with pytest.raises(ShapeError, match="^rhs packed: expected fewer than 2147483648 elements"):
        matmul.pack(rhs=np.zeros((2**29, 1), np.float32))


# --------------------------------------------------------------------------------------------
# Outputs


@pytest.mark.parametrize("shape", [(M, N + 1), (M * N,), (N, M), (0, N)])
def test_shape_of_the_output_is_checked(matmul: Operator, shape: tuple[int, ...]) -> None:
    lhs, rhs, mask = good()
    refused(matmul, [lhs, rhs], mask, ShapeError, "out", "", poison(shape, "float32"))


def test_element_type_of_the_output_is_checked(matmul: Operator) -> None:
    lhs, rhs, mask = good()
    refused(matmul, [lhs, rhs], mask, DTypeError, "out", "", np.full((M, N), np.nan))


def test_output_must_be_contiguous(matmul: Operator) -> None:
    lhs, rhs, mask = good()
    out = poison((M, 2 * N), "float32")[:, ::2]
    refused(matmul, [lhs, rhs], mask, ShapeError, "out", "contiguous", out)


def test_output_must_be_writable(matmul: Operator) -> None:
    lhs, rhs, mask = good()
    out = poison((M, N), "float32")
    out.flags.writeable = False
    refused(matmul, [lhs, rhs], mask, ShapeError, "out", "writable", out)


def test_output_must_not_require_a_gradient(matmul: Operator) -> None:
    lhs, rhs, mask = good()
    out = torch.full((M, N), torch.nan, requires_grad=True)
    with pytest.raises(ShapeError, match="^out.*grad"):
        matmul(lhs, rhs, sparsity=mask, out=out)
    assert untouched(out.detach().numpy())


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_output_must_not_share_memory_with_an_input(library: str) -> None:
    operator = pit_tvm.compile(op.matmul(None, 8, 8), sparse={"lhs": Mask()})
    memory = np.ones((40, 8), np.float32)
    rhs, mask = np.ones((8, 8), np.float32), np.ones((20, 8), bool)
    wrap = torch.from_numpy if library == "torch" else np.asarray
    for begin in (0, 19):
        lhs, out = wrap(memory[:20]), wrap(memory[begin : begin + 20])
        with pytest.raises(ShapeError, match="^out.*memory of lhs"):
            operator(lhs, rhs, sparsity=mask, out=out)
    with pytest.raises(ShapeError, match="^out.*memory of rhs"):
        operator(wrap(memory[:8]), wrap(memory[8:16]), sparsity=mask[:8], out=wrap(memory[8:16]))
    assert (memory == 1).all()
    out = operator(wrap(memory[:20]), rhs, sparsity=mask, out=wrap(memory[20:]))
    assert (np.asarray(out) == 8).all()  # neighbours do not overlap


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_output_must_not_share_memory_with_a_mask_that_kernels_read(library: str) -> None:
    operator = compiled(MATMUL, "float32", "lhs", Mask(), apply_mask=True)
    memory = np.ones((20, 8), np.float32)
    wrap = torch.from_numpy if library == "torch" else np.asarray
    mask = wrap(memory.reshape(-1).view(bool)[-160:].reshape(20, 8))
    lhs, rhs, out = wrap(np.ones((20, 8), np.float32)), wrap(np.ones((8, 8), np.float32)), memory
    apart = wrap(np.ones((20, 8), bool))
    plan = operator.explain(lhs, rhs, sparsity=apart)
    operator(lhs, rhs, sparsity=apart, out=np.empty_like(memory))  # calls like it are checked less
    for choice in (None, *plan.candidates):
        call = partial(operator.repeat, choice) if choice else operator
        with pytest.raises(ShapeError, match="^out.*memory of sparsity"):
            call(lhs, rhs, sparsity=mask, out=wrap(out))
    assert (memory == 1).all()


def test_output_must_not_share_memory_with_a_packed_weight(matmul: Operator) -> None:
    memory = np.ones((N + K, N), np.float32)
    rhs = memory[:K]
    packed = matmul.pack(rhs=rhs)
    lhs, out = np.ones((M, K), np.float32), memory[K - M : K]
    with pytest.raises(ShapeError, match="^out.*memory of rhs"):
        matmul(lhs, packed, sparsity=np.ones((M, K), bool), out=out)
    assert (memory == 1).all()


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (np.ones((M, K + 1), bool), ShapeError),
        (np.ones((K, M), bool).T, ShapeError),
        (np.ones((M, K)), DTypeError),
    ],
)
def test_faults_of_a_mask_name_the_operand(
    matmul: Operator, value: np.ndarray, error: type[PitError]
) -> None:
    lhs, rhs, _ = good()
    refused(matmul, [lhs, rhs], value, error, r"sparsity of lhs \(Mask\)")


# --------------------------------------------------------------------------------------------
# Packed operands


def test_packed_operand_of_another_operator_is_refused(matmul: Operator) -> None:
    lhs, rhs, mask = good()
    other = pit_tvm.compile(op.matmul(None, N, K), sparse={"lhs": Rows()})
    refused(matmul, [lhs, other.pack(rhs=rhs)], mask, ShapeError, "rhs", "packed")


def test_packed_operand_in_another_place_is_refused() -> None:
    square = pit_tvm.compile(op.matmul(8, 8, 8), sparse={"lhs": Lengths()})
    packed = square.pack(rhs=np.ones((8, 8), np.float32))
    plain = np.ones((8, 8), np.float32)
    refused(square, [packed, plain], [8], ShapeError, "lhs", "packed", poison((8, 8), "float32"))


@pytest.mark.parametrize(
    ("operand", "array", "error", "match"),
    [
        ("lhs", np.ones((M, K), np.float32), ShapeError, "pack.*rhs"),
        ("weight", np.ones((K, N), np.float32), ShapeError, "pack.*rhs"),
        ("rhs", np.ones((K, N)), DTypeError, "rhs"),
        ("rhs", np.ones(K, np.float32), ShapeError, "rhs"),
        ("rhs", np.ones((N, K), np.float32).T, ShapeError, "rhs.*contiguous"),
        ("rhs", None, DTypeError, "rhs"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    matmul: Operator, operand: str, array: Any, error: type[PitError], match: str
) -> None:
    with pytest.raises(error, match=rf"^{match}"):
        matmul.pack(**{operand: array})


@pytest.mark.parametrize("number", [0, 2])
def test_one_operand_is_packed_at_a_time(matmul: Operator, number: int) -> None:
    _, rhs, _ = good()
    with pytest.raises(ShapeError, match="^pack.*one operand"):
        matmul.pack(**dict.fromkeys(["rhs", "lhs"][:number], rhs))


def test_operator_without_a_product_packs_nothing() -> None:
    operator = pit_tvm.compile(op.reduce_sum(None, None), sparse={"data": Mask()})
    with pytest.raises(ShapeError, match="^pack.*no contraction"):
        operator.pack(data=np.ones((3, 4), np.float32))


@pytest.mark.parametrize("kind", ["database", "cache"])
@pytest.mark.parametrize("path", [5, "a\0b"])
def test_what_is_no_path_is_refused_by_name(kind: str, path: Any) -> None:
    options: dict[str, Any] = {kind: path}
    with pytest.raises(PitError, match=f"^{kind}: expected"):
        pit_tvm.compile(op.matmul(None, 4, 4), sparse={"lhs": Mask()}, **options)


def test_sizes_are_a_dictionary(matmul: Operator) -> None:
    with pytest.raises(ShapeError, match="^sizes: expected a dictionary"):
        matmul.explain(sizes=[3], sparsity=good()[2])  # type: ignore[arg-type]
