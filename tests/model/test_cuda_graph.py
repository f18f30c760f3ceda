"""The rewritings that a GPU's graph goes through, run as Python on the CPU with stand-ins for the
kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

from pit_tvm.model.cuda_kernels import CudaKernels
from pit_tvm.model.linear import LINEAR, extract_linear
from pit_tvm.model.norms import extract_norms
from pit_tvm.model.packing import Packer, emit_index, is_unpack
from pit_tvm.model.program_parts import split
from pit_tvm.model.rebuild import without_weights
from pit_tvm.model.swrite import PLACED, store_in_place
from pit_tvm.model.tidy import tidy, tidy_reshapes
from tests.model.cuda_stand_ins import index_of, layers_of, norm_of, placed_by
from tests.model.graphs import PLANE, B, T, calls, graph, names
from tests.model.test_torch_program import program

op = relax.op


def drawn(batch: int, tokens: int, share: float) -> torch.Tensor:
    """A random mask."""
    return (torch.rand(batch, tokens) < share).long()


# -- Norms with the sum before them ---------------------------------------------------------------


@pytest.mark.parametrize("reshaped", [False, True])
def test_a_residual_and_its_norm_are_one_kernel(reshaped: bool) -> None:
    scale, shift = (relax.const(np.linspace(-1, s, 8).astype("float16")) for s in (1, 2))

    def make(x: Any, y: Any) -> Any:
        builder = relax.BlockBuilder.current()
        whole = builder.emit(op.add(x, y))
        rows = builder.emit(op.reshape(whole, [B * T, 8])) if reshaped else whole
        normed = builder.emit(op.nn.layer_norm(rows, scale, shift, [-1], 1e-5))
        return op.add(whole, builder.emit(op.reshape(normed, [B, T, 8])))

    kernels = CudaKernels(PLANE)
    shape = ("float16", B, T, 8)
    after = extract_norms(tidy_reshapes(graph(make, x=shape, y=shape)), kernels)
    assert names(after).count("add") == 1 and "nn.layer_norm" not in names(after)
    assert [name.name_hint for name in kernels.module.get_global_vars()] == ["norm_0"]
    x, y = (torch.randn(3, 5, 8).half() for _ in range(2))
    (found,) = program(after, norm_0=norm_of(1e-5, 2, True))(x, y)
    whole = x.double() + y.double()
    expected = whole + torch.nn.functional.layer_norm(
        whole,
        (8,),
        *(torch.from_numpy(part.value.numpy()).double() for part in (scale, shift)),
        1e-5,
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


def test_a_sum_that_only_its_norm_reads_is_not_stored() -> None:
    scale = relax.const(np.ones(8, "float16"))

    def make(x: Any, y: Any) -> Any:
        rows = op.reshape(op.add(x, y), [B * T, 8])
        return op.nn.layer_norm(rows, scale, scale, [-1], 1e-5)

    shape = ("float16", B, T, 8)
    after = extract_norms(graph(make, x=shape, y=shape), CudaKernels(PLANE))
    (norm,) = [call for call in calls(after) if "call_dps_packed" in str(call.op)]
    assert isinstance(norm.ty, relax.TensorType) and "add" not in names(after)


# -- Layers that store their rows in place, and the parts of a program ----------------------------


def scattered(weight: np.ndarray, twice: bool = False) -> tvm.IRModule:
    """Live tokens of x by a layer, scattered; ``twice``: its rows are read elsewhere too."""
    mask_ty = relax.TensorType([B, T], "int64")
    mask, x = (
        relax.Var("mask", mask_ty),
        relax.Var("x", relax.TensorType([B, T, weight.shape[1]], "float32")),
    )
    builder = relax.BlockBuilder()
    with builder.function("main", [mask, x]):
        with builder.dataflow():
            index = emit_index(builder, PLANE, mask)
            packer = Packer(builder, PLANE, index)
            rows = packer.pack(x, PLANE.roles(x))
            doubled = builder.emit(op.add(rows, rows))
            product = builder.emit(
                op.matmul(doubled, builder.emit(op.permute_dims(relax.const(weight))))
            )
            flat = packer._permute(product, [0, 1, 2])
            out: Any = packer.unpack(flat, PLANE.roles(x))
            starts = builder.emit(op.add(index.starts, index.starts))
            extra = [op.sum(product)] if twice else []
            result = builder.emit_output(relax.Tuple([out, starts, *map(builder.emit, extra)]))
        builder.emit_func_output(result)
    return tidy_reshapes(tidy(builder.finalize(), {}))


@pytest.mark.parametrize("n", [4, 16])
def test_a_layer_stores_rows_where_their_tokens_stand(n: int) -> None:
    weight = np.random.default_rng().uniform(-1, 1, (n, 8)).astype("float32")
    module, layers = extract_linear(scattered(weight))
    after = store_in_place(module, layers, lambda layer: True)
    assert f'"{LINEAR}"' not in str(after) and PLACED in str(after)
    assert not any(is_unpack(call, after) for call in calls(after))
    run = program(
        after, **{"pit_tvm.model.live_tokens": index_of, PLACED: placed_by(layers_of(layers))}
    )
    for shape, share in (((4, 6), 0.5), ((1, 3), 1.0), ((3, 5), 0.0)):
        mask, x = drawn(*shape, share), torch.randn(*shape, 8)
        found, starts = run(mask, x)
        expected = 2 * x @ torch.from_numpy(weight).T * mask[..., None]
        torch.testing.assert_close(found, expected)
        assert starts.tolist() == [0, *(2 * mask.sum(1).cumsum(0)).tolist()]


@pytest.mark.parametrize(("twice", "fits"), [(True, True), (False, False)])
def test_layers_that_scatter_as_before(twice: bool, fits: bool) -> None:
    weight = np.ones((16, 8), "float32")
    module, layers = extract_linear(scattered(weight, twice))
    after = store_in_place(module, layers, lambda layer: fits)
    assert f'"{LINEAR}"' in str(after) and PLACED not in str(after)
    assert sum(is_unpack(call, after) for call in calls(after)) == 1


def test_the_tail_is_what_makes_the_results() -> None:
    module, _ = extract_linear(scattered(np.ones((16, 8), "float32")))
    parts = split(module["main"])
    assert parts.index is not None
    body, tail = ([b.value for b in part] for part in (parts.body, parts.tail))
    assert LINEAR in str(body) and LINEAR not in str(tail)
    assert not any(is_unpack(v, module) for v in body)
    assert sum(is_unpack(v, module) for v in tail) == 1
    made = {binding.var for binding in parts.body}
    assert parts.kept and set(parts.kept) <= made


def test_results_and_what_follows_them_are_the_tail() -> None:
    def make(x: Any) -> Any:
        builder = relax.BlockBuilder.current()
        first = builder.emit(op.exp(x), "first")
        shown = builder.emit(op.sqrt(first), "shown")
        seen = builder.emit(op.reshape(shown, [B * T]), "seen")
        after = builder.emit(op.sin(seen), "after")
        return relax.Tuple([seen, after])

    parts = split(graph(make, x=(B, T))["main"])
    assert parts.index is None and not parts.names
    assert [binding.var.name for binding in parts.body] == ["first"]
    assert [var.name for var in parts.kept] == ["first"]
    assert [b.var.name for b in parts.tail][:3] == ["shown", "seen", "after"]


def test_tuples_of_kernels_stay_in_the_body() -> None:
    def make(x: Any) -> Any:
        builder = relax.BlockBuilder.current()
        ty = relax.TensorType([B, T], "float32")
        both = builder.emit(op.call_dps_packed("two", [x], [ty, ty]), "both")
        left, right = (builder.emit(relax.TupleGetItem(both, i)) for i in (0, 1))
        return op.add(left, right)

    def two(x: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        torch.mul(x, 2, out=left)
        torch.mul(x, 3, out=right)

    module = graph(make, x=(B, T))
    parts = split(module["main"])
    assert len(parts.body) == 3 and len(parts.tail) == 1
    run = program(module, two=two)
    x = torch.randn(4, 3)
    torch.testing.assert_close(run(x)[0], 5 * x)
    lines = [line.strip() for line in run.graph.source.splitlines()]
    assert any(line.startswith("del both") and "," in line for line in lines)


def test_matrices_are_inputs_while_passes_run() -> None:
    seen: list[Any] = []

    @tvm.transform.module_pass(opt_level=0)
    def look(module: tvm.IRModule, _: Any) -> tvm.IRModule:
        relax.analysis.post_order_visit(module["main"].body, lambda node: seen.append(type(node)))
        return module

    matrix = relax.const(np.arange(6, dtype="float32").reshape(2, 3))
    before = graph(lambda x: op.matmul(op.add(x, x), matrix), x=(B, 2))
    after = without_weights(before, look)
    assert type(matrix) not in seen
    assert [p.name for p in after["main"].params] == ["x"]
    assert names(after) == names(before)
    assert calls(after)[-1].args[1].same_as(matrix)
