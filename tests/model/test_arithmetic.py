"""Arithmetic of whole models on NaN, infinity and 0, and quotients rounded down, are torch's."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tvm import relax, tirx  # noqa: E402
from tvm.target import Target  # noqa: E402

from pit_tvm.model.legalize import legalize  # noqa: E402
from pit_tvm.schedules.cuda_elementwise import Vectorised  # noqa: E402
from tests.model.targets import NARROW, ON_CPU, ON_GPU, both  # noqa: E402


class Folded(torch.nn.Module):  # type: ignore[misc]
    """What is 0 if all numbers are finite."""

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        twice, grown = input * 2, input.exp()
        found = [
            input * 0,
            -0.0 * twice,
            0 / input,
            0.0 / (input - 1),
            twice - input * 2,
            grown - input.exp(),
            torch.add(input, input, alpha=0),
            torch.zeros_like(input) * input,
            input / 0.0,
            0.0 % input,
            (input * 0).sum(-1, keepdim=True),
        ]
        return torch.cat(found, -1)


class ByZeros(torch.nn.Module):  # type: ignore[misc]
    """Numbers divided by a tensor of zeros."""

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return input / torch.zeros_like(input)


class Quotients(torch.nn.Module):  # type: ignore[misc]
    """Quotients and what is left of them."""

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        other = input.flip(-1)
        found = [input // number for number in (0.1, -0.3, 0.0, 2.0, float("inf"))]
        found += [input % number for number in (0.25, -0.3, 0.0, 2.0, float("inf"))]
        found += [input // other, input % other, torch.fmod(input, other), torch.fmod(input, 0.25)]
        found += [torch.div(input, number, rounding_mode="trunc") for number in (0.1, -2.5, 0.0)]
        return torch.cat(found, -1)


class Quotient(torch.nn.Module):  # type: ignore[misc]
    """One quotient by a number, in vectors on a GPU."""

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return (input // 0.5) * 2


def numbers(dtype: Any) -> Any:
    x = torch.randn(3, 5, 40).to(dtype) * 2
    x[:, :2, :20] = torch.randint(-6, 7, (3, 2, 20)).to(dtype)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0]).to(dtype)
    chosen = special[torch.randint(0, len(special), x.shape)]
    return torch.where(torch.rand(x.shape) < 0.3, chosen, x)


MODELS = [
    *(pytest.param(m, *each) for m in (Folded, Quotients) for each in ON_CPU),
    *(
        pytest.param(m, *each.values, marks=each.marks)
        for m in (Folded, Quotients, Quotient)
        for each in ON_GPU
    ),
]


@pytest.mark.parametrize(("model", "target", "dtype"), MODELS)
def test_as_torch(model: type[torch.nn.Module], target: str, dtype: Any) -> None:
    got, want = both(model(), target, numbers(dtype), torch.ones(3, 5, dtype=torch.int64))
    assert want.isnan().any()
    off = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-5} if dtype in NARROW else {}
    torch.testing.assert_close(got, want, equal_nan=True, **off)


@pytest.mark.parametrize("make", ["full", "full_like", "zeros", "zeros_like"])
def test_zeros_are_a_tensor_where_kernels_make_them_in_place(make: str) -> None:
    x = relax.Var("x", relax.TensorType((7, 40), "float16"))
    arguments = {
        "full": ((7, 40), relax.const(0.0, "float16"), "float16"),
        "full_like": (x, relax.const(0.0, "float16")),
        "zeros": ((7, 40), "float16"),
        "zeros_like": (x,),
    }
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            zeros = builder.emit(getattr(relax.op, make)(*arguments[make]))
            quotient = builder.emit(relax.op.divide(x, zeros))
            out = builder.emit_output(builder.emit(relax.op.multiply(zeros, quotient)))
        builder.emit_func_output(out)
    mod = legalize()(builder.get())
    passes = (relax.transform.AnnotateTIROpPattern, relax.transform.FuseOps)
    for one in (*passes, relax.transform.FuseTIR):
        mod = one()(mod)
    (fused,) = (func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc))
    scheduled = Vectorised().apply(fused, Target({"kind": "cuda", "arch": "sm_90a"}), False)
    text = scheduled.mod["main"].script()
    assert "param_0[()] * " in text and "/ param_0[()]" in text and "T_full" not in text


@pytest.mark.parametrize(("target", "dtype"), ON_CPU + ON_GPU)
def test_zeros_divide(target: str, dtype: Any) -> None:
    got, want = both(ByZeros(), target, numbers(dtype), torch.ones(3, 5, dtype=torch.int64))
    torch.testing.assert_close(got, want, equal_nan=True)
