"""Arguments of calls on a GPU, and memory that calls use again."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi

import pit_tvm
from pit_tvm import op
from pit_tvm.errors import DTypeError, PatternError, PitError, ShapeError
from pit_tvm.runtime import cuda_bind, cuda_detect, cuda_detect_ids, cuda_repeat
from pit_tvm.runtime.cuda_bind import CudaBinder
from pit_tvm.runtime.cuda_call import CudaCall
from pit_tvm.runtime.cuda_detect import CudaDetector
from pit_tvm.runtime.cuda_view import CudaView
from pit_tvm.runtime.cuda_watch import CountWatch
from pit_tvm.runtime.dlpack import Header
from pit_tvm.runtime.program import analyse
from pit_tvm.structs import MicroTile

torch = pytest.importorskip("torch")

M, N, K = 300, 64, 40
H200 = "cuda -arch=sm_90a -model=h200"
ROWS = MicroTile("lhs", "m", 0, (1, 0))


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> pit_tvm.Operator:
    tensors = op.linear(None, None, None, dtype="float16", activation="relu")
    folder: Path = tmp_path_factory.mktemp("kernels")
    return pit_tvm.compile(tensors, sparse={"lhs": pit_tvm.Rows()}, target="cuda", cache=folder)


def arrays(m: int = M, n: int = N, k: int = K) -> list[Any]:
    shapes = ((m, k), (n, k), (n,))
    return [torch.randn(shape, device="cuda").half() for shape in shapes]


def wanted(given: list[Any]) -> np.ndarray:
    x, weight, bias = (a.cpu().double().numpy() for a in given)
    return np.maximum(x @ weight.T + bias, 0)


def poisoned(m: int = M, n: int = N) -> Any:
    return torch.full((m, n), torch.nan, dtype=torch.float16, device="cuda")


def right(out: Any, given: list[Any], ids: np.ndarray) -> bool:
    found, truth = out.cpu().double().numpy(), wanted(given)
    dead = np.setdiff1d(np.arange(len(found)), ids)
    return bool(
        np.abs(found[ids] - truth[ids]).max(initial=0) <= 4e-3 * np.abs(truth).max()
        and np.isnan(found[dead]).all()
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda a, ids, out: (a[:2], ids, out), ShapeError, "arguments"),
        (lambda a, ids, out: ([a[0].cpu(), *a[1:]], ids, out), DTypeError, "lhs"),
        (lambda a, ids, out: ([a[0].float(), *a[1:]], ids, out), DTypeError, "lhs"),
        (lambda a, ids, out: ([a[0].to_sparse(), *a[1:]], ids, out), ShapeError, "lhs"),
        (lambda a, ids, out: ([a[0][:, :8].contiguous(), *a[1:]], ids, out), ShapeError, "rhs"),
        (lambda a, ids, out: ([a[0].t().contiguous().t(), *a[1:]], ids, out), ShapeError, "lhs"),
        (lambda a, ids, out: ([[1.0], *a[1:]], ids, out), DTypeError, "lhs"),
        (lambda a, ids, out: ([a[0], a[1], a[2][:1]], ids, out), ShapeError, "bias"),
        (lambda a, ids, out: (a, None, out), ShapeError, "sparsity"),
        (lambda a, ids, out: (a, [1, 2], out), DTypeError, "sparsity"),
        (lambda a, ids, out: (a, ids.cpu(), out), DTypeError, "sparsity"),
        (lambda a, ids, out: (a, ids.half(), out), DTypeError, "int32 or int64"),
        (lambda a, ids, out: (a, ids, out[:, :8]), ShapeError, "out"),
        (lambda a, ids, out: (a, ids, out.float()), DTypeError, "out"),
        (lambda a, ids, out: (a, ids, out.cpu()), DTypeError, "out"),
        (lambda a, ids, out: (a, ids, a[0].flatten()[:0].view(0, N)), ShapeError, "out"),
    ],
)
def test_arguments_that_do_not_fit(
    linear: pit_tvm.Operator, change: Any, error: type[PitError], text: str
) -> None:
    given, out = arrays(), poisoned()
    changed, ids, into = change(given, torch.arange(5, device="cuda"), out)
    with pytest.raises(error, match=text):
        linear(*changed, sparsity=ids, out=into)
    assert out.isnan().all()


@pytest.mark.gpu
def test_an_output_in_the_memory_of_an_input_is_refused(linear: pit_tvm.Operator) -> None:
    memory = torch.randn(M * N + M * N, device="cuda").half()
    given = arrays(k=N)
    given[0] = memory[: M * N].view(M, N)
    ids = torch.arange(5, device="cuda")
    with pytest.raises(ShapeError, match="memory apart from lhs"):
        linear(*given, sparsity=ids, out=memory[8 : 8 + M * N].view(M, N))
    linear(*given, sparsity=ids, out=memory[M * N :].view(M, N))


@pytest.mark.gpu
def test_an_empty_depth_is_refused(linear: pit_tvm.Operator) -> None:
    with pytest.raises(ShapeError, match="at least 1 on a GPU"):
        linear(*arrays(k=0), sparsity=torch.arange(5, device="cuda"))


@pytest.mark.gpu
def test_rows_that_begin_anywhere(linear: pit_tvm.Operator) -> None:
    ids = np.array([3, 299, 0])
    for m, n, k, shift in ((M, 61, 40, 0), (M, 64, 37, 0), (M, 64, 40, 1)):
        given, out = arrays(m, n, k), poisoned(m, n)
        if shift:  # whole rows, at odd addresses
            memory = torch.randn(m * k + shift, device="cuda").half()
            given[0] = memory[shift:].view(m, k)
        linear(*given, sparsity=torch.from_numpy(ids).cuda(), out=out)
        assert right(out, given, ids)


@pytest.mark.gpu
def test_index_memory_is_used_again_in_order(linear: pit_tvm.Operator) -> None:
    given, streams = arrays(), [torch.cuda.Stream() for _ in range(3)]
    lists = [np.random.default_rng(i).permutation(M)[: 7 * i] for i in range(30)]
    told = [torch.from_numpy(ids).cuda() for ids in lists]
    outs = [poisoned() for _ in lists]
    torch.cuda.synchronize()
    for number, (ids, out) in enumerate(zip(told, outs, strict=True)):
        with torch.cuda.stream(streams[number % 3]):
            linear(*given, sparsity=ids, out=out)
    torch.cuda.synchronize()
    assert all(right(out, given, ids) for out, ids in zip(outs, lists, strict=True))


@pytest.mark.gpu
def test_a_graph_keeps_its_own_index_memory(linear: pit_tvm.Operator) -> None:
    given, ids = arrays(), torch.arange(40, device="cuda")
    stream, out = torch.cuda.Stream(), poisoned()
    with torch.cuda.stream(stream):
        linear(*given, sparsity=ids, out=out)  # eager, in the stream that is captured next
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        linear(*given, sparsity=ids, out=out)
    other = poisoned()
    with torch.cuda.stream(stream):
        linear(*given, sparsity=ids + 100, out=other)
    torch.cuda.synchronize()
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert right(out, given, np.arange(40)) and right(other, given, np.arange(100, 140))


@pytest.mark.gpu
def test_what_is_known_of_a_call_is_of_its_own_arguments(linear: pit_tvm.Operator) -> None:
    ids, out = torch.arange(0, M, 3, device="cuda"), poisoned()
    for _ in range(3):  # other addresses each time, of weights too
        given, out = arrays(), poisoned()
        linear(*given, sparsity=ids, out=out)
        assert right(out, given, np.arange(0, M, 3))
    with pytest.raises(ShapeError, match="arguments"):
        linear(*given, ids, sparsity=out)  # in the order of a call that is known
    with pytest.raises(ShapeError, match="sparsity"):
        linear(*given, sparsity=torch.ones_like(ids).to_sparse(), out=out)


@pytest.mark.parametrize(("dtype", "code"), [("float16", 2), ("bfloat16", 4)])
def test_views_are_contiguous_memory_on_the_device(dtype: str, code: int) -> None:
    view = CudaView(1 << 40, (1, 64, 40), dtype, 3)
    header = ctypes.cast(view, ctypes.POINTER(Header)).contents
    assert (header.data, header.device_id, header.byte_offset) == (1 << 40, 3, 0)
    assert header.device_type == tvm_ffi.DLDeviceType.kDLCUDA
    assert (header.code, header.bits, header.lanes) == (code, 16, 1)
    assert header.shape[: header.ndim] == [1, 64, 40] and header.strides is None


def test_views_pass_as_addresses() -> None:
    echo = tvm_ffi.get_global_func("testing.echo")
    view = CudaView(64, (8,), "float16", 0)
    assert echo(view).value == view.value


def test_memory_of_another_device_is_seen_at_its_first_address() -> None:
    program = analyse(op.linear(None, N, K, dtype="float16"), {"lhs": pit_tvm.Rows()})
    binder = CudaBinder(program, None)
    call = CudaCall(binder.layout_of({"m": M}, "torch"), 1, (0, 0), True, True)
    here = [torch.zeros((M, K)), torch.zeros((N, K))]  # on the CPU
    with pytest.raises(DTypeError, match=r"lhs.*cuda:1.*cpu"):
        binder._place(call, here, [tensor.data_ptr() for tensor in here])


# --------------------------------------------------------------------------------------------
# Checks alone, of tensors on the CPU


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes tensors of any device."""
    for module in (cuda_bind, cuda_detect, cuda_detect_ids):
        monkeypatch.setattr(module, "check_tensor", lambda *given, **options: None)
    monkeypatch.setattr(CountWatch, "due", lambda self: False)
    monkeypatch.setattr(cuda_repeat, "is_capturing", lambda device: False)


def modules(name: str, build: Any) -> Any:
    """Stands for kernels that nothing launches."""
    names = ("search_groups_32", "cluster_groups_32", "count_groups_32", "place_groups_32")
    return dict.fromkeys(names, print)


@pytest.mark.usefixtures("anywhere")
def test_choices_of_tokens_are_no_groups_of_rows() -> None:
    detector, ids = CudaDetector(modules), torch.zeros((M, 2), dtype=torch.int32)
    asked = (pit_tvm.Groups(4), ids, (M, K), ROWS, False, False)
    assert callable(detector.prepared(*asked, top_k=True))
    with pytest.raises(ShapeError, match=r"lhs \(group ids\): expected one dimension, got .* 2\)"):
        detector.prepared(*asked)
    tensors = op.grouped_matmul(None, N, K, 4, dtype="float16", transpose_rhs=True)
    made = pit_tvm.compile(tensors, sparse={"lhs": pit_tvm.Groups(4)}, target=H200)
    lhs, rhs = torch.zeros((M, K)).half(), torch.zeros((4, N, K)).half()
    given = {"lhs": lhs, "rhs": rhs, "group_ids": ids[:, 0].contiguous()}
    with pytest.raises(ShapeError, match="expected one dimension"):
        made(*(given[name] for name in made.inputs), sparsity=ids)


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("top_k", [1, 8])
def test_places_in_lists_of_groups_fit_32_bits(top_k: int) -> None:
    detector, most = CudaDetector(modules), (2**21 - 64) // top_k

    def prepared(tokens: int) -> Any:
        ids = torch.empty((tokens, top_k), dtype=torch.int32, device="meta")
        asked = (pit_tvm.Groups(1024), ids, (tokens, K), ROWS)
        return detector.prepared(*asked, False, False, top_k=True)

    assert callable(prepared(most))
    with pytest.raises(ShapeError, match=r"lhs \(group ids\).*1024 groups.*several calls"):
        prepared(most + 1)


@pytest.mark.usefixtures("anywhere")
def test_parameters_are_operands_of_dense_plans() -> None:
    spec, kind = pit_tvm.Lengths(), {"dtype": "float16", "activation": "relu"}
    made = pit_tvm.compile(op.linear(None, N, K, **kind), sparse={"lhs": spec}, target=H200)
    x, layer = torch.randn(M, K).half(), torch.nn.Linear(K, N).half()
    told = torch.full((10,), M // 10, dtype=torch.int32)
    assert made.explain(sparsity=told, sizes={"m": M}).choice.kind == "dense"
    given = (x.requires_grad_(), layer.weight, layer.bias)
    with torch.no_grad():
        torch.testing.assert_close(made(*given, sparsity=told), layer(x).relu())
    with pytest.raises(DTypeError, match="lhs: expected a tensor that requires no gradient"):
        made(*given, sparsity=told)
    both = pit_tvm.compile(op.matmul(M, N, K, dtype="float16"), sparse={"lhs": spec}, target=H200)
    with torch.no_grad():
        found = both(x, layer.weight.t().contiguous(), sparsity=told)
        torch.testing.assert_close(found, x @ layer.weight.t())


@pytest.mark.usefixtures("anywhere")
def test_zeros_of_parameters_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIT_TVM_CHECK", "1")
    tensors, spec = op.matmul(M, N, K, dtype="float16"), pit_tvm.Values()
    made = pit_tvm.compile(tensors, sparse={"lhs": spec}, target=H200)._dispatcher
    lhs = torch.zeros((M, K)).half()
    lhs[3] = 1
    given, told = [lhs.clone().requires_grad_(), torch.zeros((K, N))], lhs.clone().requires_grad_()
    made._check_zeros(given, told)
    lhs[4] = 1
    with pytest.raises(PatternError, match="lhs outside its pattern"):
        made._check_zeros([lhs.requires_grad_(), given[1]], told)


class Repeated:
    """Stands for calls that are all like one before."""

    def run(self, given: Any, sparsity: Any, out: Any) -> Any:
        raise AssertionError("the output was not looked at")


@pytest.mark.usefixtures("anywhere")
def test_an_output_that_requires_grad_is_refused_after_others_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors, told = op.linear(None, N, K, dtype="float16", bias=False), torch.arange(5)
    made = pit_tvm.compile(tensors, sparse={"lhs": pit_tvm.Rows()}, target=H200)
    arrays, out = [torch.randn(M, K).half(), torch.randn(N, K).half()], torch.zeros(M, N).half()
    made._dispatcher.binder.bind_cuda(arrays, told, out)
    monkeypatch.setattr(made._dispatcher, "_repeats", Repeated())
    with pytest.raises(ShapeError, match="expected a tensor to write to, got one that requires"):
        made(*arrays, sparsity=told, out=out.requires_grad_())


@pytest.mark.parametrize(
    ("spec", "sparse", "dense"),
    [
        (pit_tvm.Mask(64, 64), "rhs", "lhs"),
        (pit_tvm.Mask(64, 1), "rhs", "lhs"),
        (pit_tvm.Mask(1, 32), "rhs", "lhs"),
        (pit_tvm.Mask(1, 1), "rhs", "lhs"),
        (pit_tvm.Mask(64, 64), "lhs", "rhs"),
        (pit_tvm.Rows(), "lhs", "rhs"),
    ],
)
def test_only_the_dense_operand_is_packed(spec: Any, sparse: str, dense: str) -> None:
    tensors, weight = op.matmul(128, 128, 128, dtype="float16"), torch.zeros(128, 128).half()
    for target in ("llvm", H200):
        made = pit_tvm.compile(tensors, sparse={sparse: spec}, target=target)
        assert made.pack(**{dense: weight}) is not None
        with pytest.raises(ShapeError, match=rf"the dense operand \({dense}\), got {sparse}"):
            made.pack(**{sparse: weight})
