"""Products as torch has them, in every floating-point type."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import tvm
from torch.export import Dim, export
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program

from pit_tvm.model.products import product_converters

X, Y = torch.randn(5, 8), torch.randn(8, 6)
MAKE: dict[str, Callable[..., torch.Tensor]] = {
    "mm": lambda x: x @ Y.to(x.dtype),
    "addmm": lambda x: torch.addmm(torch.ones(6, dtype=x.dtype), x, Y.to(x.dtype)),
    "scaled": lambda x: torch.addmm(x[:, :6], x, Y.to(x.dtype), beta=0.5, alpha=2),
    "alone": lambda x: torch.addmm(x[:, :6] * float("nan"), x, Y.to(x.dtype), beta=0),
    "bmm": lambda x: torch.bmm(x[None].expand(3, -1, -1), Y.to(x.dtype).expand(3, 8, 6)),
    "baddbmm": lambda x: torch.baddbmm(
        x[None, :, :6].expand(3, -1, -1), x.expand(3, -1, -1), Y.to(x.dtype).expand(3, 8, 6)
    ),
    "linear": lambda x: torch.nn.functional.linear(x, Y.to(x.dtype).T.contiguous()),
}


class Module(torch.nn.Module):
    """All functions as a module."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the functions give."""
        return tuple(function(x) for function in MAKE.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_keep_their_type(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    program = export(Module(), (x,), dynamic_shapes=({0: Dim("rows")},))
    module = from_exported_program(program, custom_convert_map=product_converters())
    executable = relax.build(relax.transform.LegalizeOps()(module), "llvm")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    results = machine["main"](tvm.runtime.tensor(x.numpy()))
    for name, made, expected in zip(MAKE, results, Module()(X.double().to(dtype)), strict=True):
        found = torch.from_dlpack(made)
        assert found.dtype == dtype, name
        torch.testing.assert_close(
            found, expected, rtol=limit, atol=limit, msg=lambda said, name=name: f"{name}: {said}"
        )
