"""Products as torch has them, in every floating-point type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the function gives."""
        return self.function(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", MAKE)
def test_products_keep_their_type(name: str, dtype: torch.dtype) -> None:
    x = X.to(dtype)
    program = export(Module(MAKE[name]), (x,), dynamic_shapes=({0: Dim("rows")},))
    module = from_exported_program(program, custom_convert_map=product_converters())
    executable = relax.build(relax.transform.LegalizeOps()(module), "llvm")
    machine = relax.VirtualMachine(executable, tvm.cpu())
    found = torch.from_dlpack(machine["main"](tvm.runtime.tensor(x.numpy()))[0])
    expected = MAKE[name](X.double().to(dtype))
    assert found.dtype == dtype
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit)
