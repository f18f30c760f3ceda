"""Graphs as Python functions on torch tensors, with kernels compiled for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from tvm import relax, tirx

from pit_tvm.errors import UnsupportedTarget
from pit_tvm.model.lowering import fused
from pit_tvm.model.program_parts import VIEWS
from pit_tvm.model.torch_program import OF_TORCH, TorchProgram, program_text
from tests.model.graphs import B, T, graph

op = relax.op
CPU = torch.device("cpu")
DRAWN = [relax.const(np.zeros((4, 1), dtype)) for dtype in ("float32", "int64")]


def program(module: tvm.IRModule, **packed: Callable[..., Any]) -> TorchProgram:
    """The program of a graph, its kernels compiled for this machine."""
    target = tvm.target.Target("llvm")
    module = fused(module, target, [*VIEWS, *OF_TORCH])
    kernels = {
        var.name_hint: func.with_attr("global_symbol", var.name_hint)
        for var, func in module.functions_items()
        if isinstance(func, tirx.PrimFunc)
    }
    library = tvm.compile(tvm.IRModule(kernels), target=target) if kernels else {}
    functions = {name: library[name] for name in kernels}
    return TorchProgram(program_text(module["main"]), {**functions, **packed}, CPU)


def random(*shape: int) -> torch.Tensor:
    """Normal numbers, others at every call."""
    return torch.randn(*shape)


@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (0, 4), (2, 0)])
def test_kernels_views_and_constants(shape: tuple[int, int]) -> None:
    weight = np.random.default_rng().uniform(-1, 1, (6, 8)).astype("float32")

    def make(x: Any) -> Any:
        rows = op.reshape(op.exp(x), [B * T, 8])
        back = op.reshape(op.matmul(rows, op.permute_dims(relax.const(weight))), [B, T, 6])
        return op.strided_slice(back, [2], [1], [5], assume_inbound=True)

    run = program(graph(make, x=(B, T, 8)))
    x = random(*shape, 8)
    (found,) = run(x)
    expected = (x.double().exp() @ torch.from_numpy(weight).double().T)[..., 1:5]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_results_that_are_constants_are_the_callers() -> None:
    given = np.arange(6, dtype="float32").reshape(2, 3)

    def make(x: Any) -> Any:
        return relax.Tuple([relax.const(given), x, relax.const(np.float32(3))])

    run = program(graph(make, x=(B, T, 2)))
    for _ in range(2):
        table, _, number = run(random(2, 3, 2))
        assert np.array_equal(table.numpy(), given) and float(number) == 3
        for found in (table, number):
            found.add_(1)


def test_torch_runs_what_has_no_loop_nest() -> None:
    run = program(graph(lambda x: op.cumsum(x, axis=1), x=("int64", B, T)))
    assert "torch.cumsum" in run.graph.source
    x = torch.randint(0, 9, (3, 7))
    assert torch.equal(run(x)[0], x.cumsum(1))


@pytest.mark.parametrize("dtype", ["int32", "int64", "float16"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_what_torch_runs_has_the_types_of_the_graph(dtype: str, axis: int) -> None:
    """Also where what follows is a kernel, which reads no gaps."""

    def make(x: Any) -> Any:
        emit = relax.BlockBuilder.current().emit
        best = emit(op.topk(x, 2, axis, "both", dtype="int32"))
        least = emit(op.topk(x, 1, axis, "values", largest=False))
        found = [op.cumsum(x, axis), op.sort(x, axis, True), op.argsort(x, axis), least]
        found += [best[0], best[1]]
        return relax.Tuple([*found, *(op.add(emit(one), emit(one)) for one in found)])

    x = torch.randint(0, 1000, (4, 5, 6)).to(getattr(torch, dtype))
    found = program(graph(make, x=(dtype, 4, 5, 6)))(x)
    ordered, places = torch.sort(x, dim=axis, descending=True)
    backwards = torch.sort(x, dim=axis, stable=True).indices
    first = [slice(None)] * axis + [slice(2)]
    least = x.amin(axis, keepdim=True)
    expected = [x.cumsum(axis), ordered, backwards, least, ordered[first], places[first]]
    for number, (one, twice, other) in enumerate(zip(found, found[6:], expected, strict=False)):
        if number < 5:
            assert torch.equal(one.long(), other.long()) and torch.equal(twice, one + one)
        else:  # of equal elements either may come first
            assert torch.equal(x.gather(axis, one.long()), ordered[first])
    kinds = [str(one.dtype).removeprefix("torch.") for one in found[:6]]
    assert kinds == [dtype, dtype, "int32", dtype, dtype, "int32"]


def test_slices_are_read_without_gaps() -> None:
    def make(x: Any) -> Any:
        halves = [op.strided_slice(x, [2], [a], [a + 4], assume_inbound=True) for a in (0, 4)]
        return op.add(halves[0], op.negative(op.reshape(halves[1], [B, T, 4])))

    x = random(2, 3, 8)
    torch.testing.assert_close(program(graph(make, x=(B, T, 8)))(x)[0], x[..., :4] - x[..., 4:])


def test_packed_functions_take_tensors_and_numbers() -> None:
    given: list[Any] = []

    def scale(x: torch.Tensor, tokens: int, factor: float) -> torch.Tensor:
        given.append((tokens, factor))
        return x * factor + tokens

    def add(number: int, x: torch.Tensor, out: torch.Tensor) -> None:
        torch.add(x, number, out=out)

    def make(x: Any) -> Any:
        ty = relax.TensorType([B, T], "float32")
        builder = relax.BlockBuilder.current()
        scaled = builder.emit(
            op.call_pure_packed("scale", x, T, relax.prim_value(0.5), ty_args=[ty])
        )
        return op.call_dps_packed("add", [relax.prim_value(3), scaled], ty)

    run = program(graph(make, x=(B, T)), scale=scale, add=add)
    x = random(2, 6)
    torch.testing.assert_close(run(x)[0], x * 0.5 + 9)
    assert given == [(6, 0.5)]


def test_extents_come_from_results_as_well() -> None:
    live = tirx.Var("live", "int64")

    def make(x: Any) -> Any:
        builder = relax.BlockBuilder.current()
        ty = relax.TensorType(dtype="float32", ndim=1)
        found = builder.emit(op.call_pure_packed("positive", x, ty_args=[ty]))
        known = builder.match_cast(found, relax.TensorType([live], "float32"))
        return op.reshape(op.sqrt(known), [1, live])

    run = program(graph(make, x=(T,)), positive=lambda x: x[x > 0])
    x = torch.tensor([4.0, -1.0, 9.0])
    assert run(x)[0].tolist() == [[2.0, 3.0]]


def test_equal_constants_are_one_tensor_and_others_are_not() -> None:
    first, second = (relax.const(np.full(4, v, "float32")) for v in (1.0, 2.0))
    run = program(graph(lambda x: op.add(op.add(op.add(x, first), second), first), x=(T, 4)))
    torch.testing.assert_close(run(torch.zeros(3, 4))[0], torch.full((3, 4), 4.0))


def test_memory_is_given_back_after_the_last_use() -> None:
    def make(x: Any) -> Any:
        builder = relax.BlockBuilder.current()
        ty = relax.TensorType([B, T], "float32")
        one = builder.emit(op.call_pure_packed("step", x, ty_args=[ty]), "one")
        two = builder.emit(op.call_pure_packed("step", one, ty_args=[ty]), "two")
        three = builder.emit(op.call_pure_packed("step", two, ty_args=[ty]), "three")
        return op.call_pure_packed("step", three, ty_args=[ty])

    lines = program(graph(make, x=(B, T)), step=torch.clone).graph.source.splitlines()
    freed = [line.split()[1].split("_")[0] for line in lines if line.strip().startswith("del")]
    assert freed == ["one", "two"]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda x: op.multinomial_from_uniform(x, *DRAWN), "multinomial_from_uniform"),
        (lambda x: op.nonzero(x), "got nonzero"),
    ],
    ids=["multinomial", "nonzero"],
)
def test_an_operator_without_loops_is_refused_by_name(make: Any, name: str) -> None:
    with pytest.raises(UnsupportedTarget, match=name):
        program(graph(make, x=(4, 8)))
