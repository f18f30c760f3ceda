"""Arrays of every library in and out of compiled functions, and what bad ones get."""

from __future__ import annotations

import mmap
import sys

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import te

from pit_tvm.errors import BackendUnavailable, DTypeError, ShapeError
from pit_tvm.memory import numpy_dtype
from pit_tvm.runtime.arrays import (
    as_numpy,
    as_tensor,
    as_torch,
    check_overlap,
    empty_like_kind,
    kind,
)
from pit_tvm.transform.unalign import unalign

torch = pytest.importorskip("torch")
ml_dtypes = pytest.importorskip("ml_dtypes")

FLOATS = ["float32", "float16", "bfloat16"]


@pytest.fixture(scope="module")
def plus_one():
    """Compiled ``out[p, q] = data[p, q] + 1`` for one type; built once each."""
    built = {}

    def get(dtype):
        if dtype not in built:
            data = te.placeholder((te.var("p"), te.var("q")), dtype, "data")
            out = te.compute(data.shape, lambda p, q: data[p, q] + tvm.tirx.const(1, dtype))
            func = unalign(te.create_prim_func([data, out]))
            built[dtype] = tvm.compile(func, target="llvm").mod["main"]
        return built[dtype]

    return get


class Foreign:
    """An array of some other library: nothing but DLPack."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        return self.array.__dlpack__(max_version=max_version)

    def __dlpack_device__(self):
        return self.device


def make(library, values, dtype):
    """An array of ``library`` with ``values``."""
    array = values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if library == "numpy":
        return array
    if library == "torch":
        return as_torch(array)
    tensor = as_tensor("array", array, dtype=dtype, shape=array.shape)
    return tensor if isinstance(tensor, tvm_ffi.Tensor) else tvm_ffi.from_dlpack(tensor)


# --------------------------------------------------------------------------------------------
# Arrays that are good


@pytest.mark.parametrize("dtype", [*FLOATS, "int8", "int32", "int64"])
@pytest.mark.parametrize("library", ["numpy", "torch", "dlpack"])
def test_a_call_reads_and_writes_the_callers_memory(rng, plus_one, library, dtype):
    values = rng.integers(-100, 100, (3, 5))
    data = make(library, values, dtype)
    out = make(library, np.zeros((3, 5)), dtype)
    assert kind(data) == library
    plus_one(dtype)(
        as_tensor("data", data, dtype=dtype, shape=(None, 5)),
        as_tensor("out", out, dtype=dtype, shape=(3, 5), writable=True),
    )
    np.testing.assert_array_equal(as_numpy(out).astype(np.float64), values + 1)


@pytest.mark.parametrize("library", ["numpy", "torch", "dlpack"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_views_in_other_libraries_share_memory(rng, library, dtype):
    array = make(library, rng.standard_normal((3, 4)), dtype)
    as_numpy(array)[1, 2] = 7
    assert float(as_torch(array)[1, 2]) == 7
    as_torch(array)[0, 0] = 9
    assert float(as_numpy(array)[0, 0]) == 9


@pytest.mark.parametrize("dtype", FLOATS)
def test_strides_of_single_elements_say_nothing_to_other_libraries(dtype):
    array = make("numpy", np.arange(4.0).reshape(1, 4), dtype)[::-1]
    assert array.strides[0] < 0 and array.flags.c_contiguous
    as_torch(array)[0, 1] = 9
    assert float(array[0, 1]) == 9


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("source", ["buffer", "flag", "mmap"])
def test_read_only_numpy_is_an_input(rng, plus_one, tmp_path, source, dtype):
    array = make("numpy", rng.integers(-100, 100, (64, 4)), dtype)
    if source == "buffer":
        frozen = np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)
    elif source == "flag":
        frozen = array.view()
        frozen.flags.writeable = False
    else:
        (tmp_path / "weights").write_bytes(array.tobytes())
        with open(tmp_path / "weights", "rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        frozen = np.frombuffer(pages, array.dtype).reshape(array.shape)
    out = empty_like_kind(array, array.shape, dtype)
    tensor = as_tensor("data", frozen, dtype=dtype, shape=array.shape)
    plus_one(dtype)(tensor, as_tensor("out", out, dtype=dtype, shape=out.shape, writable=True))
    np.testing.assert_array_equal(out.astype(float), array.astype(float) + 1)
    np.testing.assert_array_equal(as_torch(frozen).float().numpy(), array.astype(np.float32))


def test_a_read_only_tensor_keeps_its_memory_alive():
    frozen = np.frombuffer(np.arange(1000, dtype=np.float32).tobytes(), np.float32)
    tensor = as_tensor("data", frozen, dtype="float32", shape=(1000,))
    del frozen
    np.testing.assert_array_equal(np.from_dlpack(tensor), np.arange(1000))


def test_read_only_dlpack_is_an_input():
    frozen = np.arange(6.0, dtype=np.float32)
    frozen.flags.writeable = False
    tensor = as_tensor("data", Foreign(frozen), dtype="float32", shape=(6,))
    np.testing.assert_array_equal(np.from_dlpack(tensor), frozen)


def test_a_tensor_that_requires_grad_is_an_input(plus_one):
    data = torch.nn.Parameter(torch.ones(3, 5))
    out = torch.full((3, 5), torch.nan)
    plus_one("float32")(as_tensor("data", data, dtype="float32", shape=(3, 5)), out)
    assert (out == 2).all() and data.requires_grad


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
@pytest.mark.parametrize("library", ["numpy", "torch", "dlpack"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_empty_arrays_are_arguments(plus_one, library, shape, dtype):
    data, out = (make(library, np.zeros(shape), dtype) for _ in range(2))
    plus_one(dtype)(
        as_tensor("data", data, dtype=dtype, shape=shape),
        as_tensor("out", out, dtype=dtype, shape=shape, writable=True),
    )


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy, tvm_ffi.from_dlpack, Foreign])
def test_booleans_are_read_as_bytes(rng, wrap):
    mask = rng.random((4, 3)) < 0.5
    tensor = as_tensor("mask", wrap(mask), dtype="uint8", shape=(4, None))
    assert str(tensor.dtype).endswith("uint8")
    np.testing.assert_array_equal(as_numpy(tensor), mask)
    mask[0, 0] = not mask[0, 0]
    assert as_numpy(tensor)[0, 0] == mask[0, 0]
    assert str(as_tensor("mask", wrap(mask), dtype="bool", shape=(4, 3)).dtype).endswith("bool")


@pytest.mark.parametrize("offset", range(1, 16))
def test_offset_views_are_arguments_as_they_are(plus_one, offset):
    base, out = np.arange(60, dtype=np.float32), np.zeros(60, np.float32)
    data, result = (array[offset : offset + 40].reshape(5, 8) for array in (base, out))
    assert as_tensor("data", data, dtype="float32", shape=(5, 8)) is data
    plus_one("float32")(data, result)
    np.testing.assert_array_equal(result, data + 1)
    tensors = torch.from_numpy(data), torch.from_numpy(result)
    assert as_tensor("data", tensors[0], dtype="float32", shape=(5, 8)) is tensors[0]
    result[...] = np.nan
    plus_one("float32")(*tensors)
    np.testing.assert_array_equal(result, data + 1)
    assert not out[:offset].any() and not out[offset + 40 :].any()


def test_a_memory_map_of_numpy_is_an_array(tmp_path):
    np.save(tmp_path / "weights.npy", np.ones((8, 8), np.float32))
    weights = np.load(tmp_path / "weights.npy", mmap_mode="r")
    tensor = as_tensor("rhs", weights, dtype="float32", shape=(8, 8))
    np.testing.assert_array_equal(as_numpy(tensor), weights)


@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "bool"])
@pytest.mark.parametrize("library", ["numpy", "torch", "dlpack"])
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (70000,), ()])
def test_results_are_of_the_library_asked_for(library, dtype, shape):
    like = make(library, np.zeros(2), "float32")
    out = empty_like_kind(like, shape, dtype)
    assert kind(out) == library
    assert str(out.dtype).removeprefix("torch.") == dtype
    assert tuple(out.shape) == shape
    as_tensor("out", out, dtype=dtype, shape=shape, writable=True)
    if library == "numpy" and out.size:
        assert out.ctypes.data % 64 == 0


def test_numpy_bfloat16_needs_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    numpy_dtype.cache_clear()
    try:
        with pytest.raises(BackendUnavailable, match="^bfloat16: expected the package ml_dtypes"):
            empty_like_kind(np.zeros(1), (3,), "bfloat16")
    finally:
        numpy_dtype.cache_clear()


# --------------------------------------------------------------------------------------------
# Arrays that are not


def refuse(error, message, array, dtype="float32", shape=(4, 6), writable=False):
    with pytest.raises(error, match=message):
        as_tensor("lhs", array, dtype=dtype, shape=shape, writable=writable)


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy, tvm_ffi.from_dlpack, Foreign])
def test_wrong_rank_extent_and_type_are_refused(wrap):
    refuse(ShapeError, r"^lhs: expected shape \[4, 6\], got shape \[4\]", wrap(np.zeros(4, "f4")))
    array = wrap(np.zeros((4, 7), np.float32))
    refuse(ShapeError, r"expected shape \[any, 6\], got shape \[4, 7\]", array, shape=(None, 6))
    refuse(DTypeError, "^lhs: expected float32, got float64", wrap(np.zeros((4, 6))))
    refuse(DTypeError, "expected uint8, got int8", wrap(np.zeros((4, 6), np.int8)), "uint8")
    refuse(DTypeError, "expected bool, got uint8", wrap(np.zeros((4, 6), np.uint8)), "bool")
    refuse(DTypeError, "expected bfloat16, got uint16", wrap(np.zeros((4, 6), "u2")), "bfloat16")


def test_another_byte_order_is_refused():
    refuse(DTypeError, r"expected float32, got >f4; convert", np.zeros((4, 6), ">f4"))


@pytest.mark.parametrize("array", [[[1.0]], 3, None, "lhs"])
def test_what_is_no_array_is_refused(array):
    refuse(DTypeError, "^lhs: expected a numpy array, a torch tensor or an object", array)
    with pytest.raises(DTypeError, match="__dlpack__"):
        kind(array)


def test_what_the_library_of_an_array_refuses_is_told_by_name():
    for error in (BufferError, RuntimeError, NotImplementedError):

        class Refusing(Foreign):
            def __dlpack__(self, error=error, **_):
                raise error("not today")

        refuse(DTypeError, f"^lhs: .*got {error.__name__}: not today", Refusing(None))


@pytest.mark.parametrize(
    ("shape", "advice"),
    [((6, 4), "its transpose$"), ((2, 2, 6), r"\.reshape\(-1, 6\)$"), ((6, 6), r"\[6, 6\]$")],
)
def test_a_shape_that_is_nearly_right_is_refused_with_advice(shape, advice):
    refuse(ShapeError, advice, np.zeros(shape, np.float32))
    refuse(ShapeError, advice, torch.zeros(shape))


def test_a_masked_array_is_refused():
    masked = np.ma.masked_array(np.zeros((4, 6), np.float32), mask=True)
    refuse(DTypeError, "expected a plain array", masked)


@pytest.mark.parametrize("change", [lambda a: a.T, lambda a: a[:, ::2], lambda a: a[::2]])
def test_strided_arrays_are_refused_with_advice(change):
    view = change(np.zeros((8, 12), np.float32))
    refuse(ShapeError, r"pass np\.ascontiguousarray", view, shape=view.shape)
    refuse(ShapeError, r"pass \.contiguous\(\)", torch.from_numpy(view), shape=view.shape)
    refuse(ShapeError, "pass a copy", Foreign(view), shape=view.shape)


def test_negative_strides_and_broadcasts_are_refused():
    refuse(ShapeError, r"strides \(-24, 4\) bytes", np.zeros((4, 6), np.float32)[::-1])
    refuse(ShapeError, "strides", np.broadcast_to(np.float32(1), (4, 6)))
    refuse(ShapeError, "strides", torch.zeros(1, 6).expand(4, 6))


def test_unaligned_elements_are_refused():
    raw = np.zeros(4 * 6 * 4 + 1, np.uint8)
    refuse(ShapeError, "aligned elements", raw[1:].view(np.float32).reshape(4, 6))
    buffer = bytearray(4 * 6 * 4 + 1)
    unaligned = torch.frombuffer(buffer, dtype=torch.float32, offset=1).reshape(4, 6)
    refuse(ShapeError, "aligned elements", unaligned)


def test_other_devices_and_layouts_are_refused():
    refuse(DTypeError, "expected a tensor on the CPU, got meta", torch.zeros(4, 6, device="meta"))
    cuda = Foreign(np.zeros((4, 6), np.float32), device=(2, 0))
    refuse(DTypeError, r"^lhs: expected an array on the CPU, got DLPack device \(2, 0\)", cuda)
    refuse(ShapeError, "to_dense", torch.eye(4, 6).to_sparse())
    refuse(ShapeError, "resolve_neg", torch._neg_view(torch.ones(4, 6)))
    refuse(DTypeError, "zeros without memory; pass .clone", torch._efficientzerotensor((4, 6)))


def test_read_only_results_are_refused():
    frozen = np.zeros((4, 6), np.float32)
    frozen.flags.writeable = False
    refuse(ShapeError, "expected a writable array", frozen, writable=True)
    refuse(ShapeError, "a TVM tensor to write to, got Foreign", Foreign(frozen), writable=True)
    as_tensor("out", Foreign(frozen.copy()), dtype="float32", shape=(4, 6), writable=True)


def test_a_result_that_requires_grad_is_refused():
    refuse(ShapeError, r"pass \.detach\(\)", torch.zeros(4, 6, requires_grad=True), writable=True)


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy, tvm_ffi.from_dlpack])
@pytest.mark.parametrize("other", [np.asarray, torch.from_numpy, tvm_ffi.from_dlpack])
def test_a_result_over_an_input_is_refused(wrap, other):
    base = np.zeros(100, np.float32)
    inputs = {"lhs": other(base[:40]), "rhs": other(base[60:])}
    check_overlap("out", wrap(base[40:60]), inputs)
    check_overlap("out", wrap(base[50:50]), inputs)
    with pytest.raises(ShapeError, match="^out: expected memory of its own, got memory of rhs"):
        check_overlap("out", wrap(base[41:61]), inputs)
    with pytest.raises(ShapeError, match="got memory of lhs"):
        check_overlap("out", wrap(base[39:45]), inputs)
