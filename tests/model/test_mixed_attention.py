"""Attention whose queries, keys and values have different types, and what has no kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pit_tvm.model import compile
from pit_tvm.model.cuda_kernels import CudaKernels
from pit_tvm.model.importer import import_model
from pit_tvm.model.kernels import CpuKernels
from pit_tvm.model.plane import Plane
from pit_tvm.model.propagate import ALL
from pit_tvm.model.rewrite import rewrite
from pit_tvm.target import resolve_target
from tests.model.together import Together

WIDTH, WORDS = 32, 50


class Attention(nn.Module):
    """One layer; those of ``wide`` (of q, k, v) in float32, after tanh where ``bounded``."""

    def __init__(self, wide: str, bounded: bool, head: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.parts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "qkv"})
        self.out = nn.Linear(WIDTH, WIDTH)
        self.wide, self.bounded, self.head = wide, bounded, head

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens, width]`` of ids."""
        x = self.table(x)
        q, k, v = (self.headed(name, x) for name in "qkv")
        scores = q @ k.mT / self.head**0.5
        least = torch.finfo(scores.dtype).min
        seen = attention_mask[:, None, None, :].bool()
        added = torch.where(seen, 0.0, least).to(scores.dtype)
        weights = torch.softmax(scores + added, -1, dtype=torch.float32).to(v.dtype)
        mixed = (weights @ v).to(x.dtype).transpose(1, 2)
        return self.out(mixed.reshape(*x.shape[:2], self.out.in_features))

    def headed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """``[batch, heads, tokens, head]``."""
        found = self.parts[name](x).view(*x.shape[:2], -1, self.head).transpose(1, 2)
        found = found.float() if name in self.wide else found
        return torch.tanh(found) if self.bounded else found


class Latent(Attention):
    """Keys are written, in two parts, behind each other into new memory, and values are of another
    width than they are."""

    def __init__(self, value: int, head: int = 8) -> None:
        super().__init__("", bounded=False, head=head)
        heads = WIDTH // head
        self.parts["v"] = nn.Linear(WIDTH, heads * value)
        self.shared = nn.Linear(WIDTH, 3)
        self.out = nn.Linear(heads * value, WIDTH)
        self.value = value

    def headed(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """`Attention.headed`."""
        if name == "v":
            return self.parts["v"](x).view(*x.shape[:2], -1, self.value).transpose(1, 2)
        found = super().headed(name, x)
        if name != "k":
            return found
        whole = found.new_empty(*found.shape[:-1], self.head)
        whole[..., :-3].copy_(found[..., 3:])
        whole[..., -3:].copy_(self.shared(x)[:, None].expand(-1, found.shape[1], -1, -1))
        return whole


def batch(device: str = "cpu") -> dict[str, torch.Tensor]:
    """A sequence with dead tokens at its end, an empty one and a full one."""
    ids, mask = torch.randint(WORDS, (3, 13)), torch.ones(3, 13, dtype=torch.int64)
    mask[0, 5:], mask[1] = 0, 0
    return {"x": ids.to(device), "attention_mask": mask.to(device)}


def check(model: nn.Module, compiled: Any, inputs: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        expected = model(**inputs).float()
    live = inputs["attention_mask"].bool()
    found = compiled(**inputs).float()
    bound = 2e-2 * float(expected[live].abs().max())
    torch.testing.assert_close(found[live], expected[live], rtol=0, atol=bound)
    assert not found[~live].any()


# Products alone are but cast to float32; what is bounded is computed in it.
OPERANDS = [("", False), ("qkv", False), ("qk", True), ("qkv", True), ("v", True)]


def test_operands_of_several_types() -> None:
    model = Together(*(Attention(*each) for each in OPERANDS)).eval().half()
    inputs = batch()
    compiled = compile(model, inputs)
    assert f"{len(OPERANDS)} of them attention, full, over live tokens" in compiled.explain()
    for number, part in enumerate(model.parts):
        check(part, lambda n=number, **given: compiled(**given)[..., n], inputs)


@pytest.mark.parametrize(("dtype", "value"), [(torch.bfloat16, 1), (torch.float32, 20)])
def test_values_of_another_width_than_keys(dtype: torch.dtype, value: int) -> None:
    model = Latent(value).eval().to(dtype)
    inputs = batch()
    compiled = compile(model, inputs)
    assert "1 of them attention, full, over live tokens" in compiled.explain()
    assert "0 operators on all tokens" in compiled.explain()
    check(model, compiled, inputs)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Attention("qkv", True), "no kernel has heads of 8 in float32"),
        (Attention("qk", True), "no kernel has heads of 8 in float32"),
        (Attention("qkv", False), ""),  # the kernels widen 16 bits themselves
        (Attention("", True, head=4), ""),
    ],
    ids=["float32", "some float32", "widened", "narrow heads"],
)
def test_what_a_gpu_has_no_kernel_for_is_the_models_own(model: nn.Module, said: str) -> None:
    imported = import_model(model.eval().half(), batch(), "attention_mask")
    kernels = CudaKernels(Plane(imported.batch, imported.tokens))
    reasons = {d.reason for d in rewrite(imported, kernels).decisions if "attention" in d.reason}
    assert reasons == {f"{ALL}: {said}" if said else "attention, full, over live tokens"}
    assert not kernels.attends(264, "float16") and kernels.attends(256, "bfloat16")


def test_attention_of_doubles_on_a_cpu_is_the_models_own() -> None:
    attends = CpuKernels(resolve_target("llvm")).attends
    assert [attends(8, dtype) for dtype in ("float16", "float32", "float64")] == [True, True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("head", [4, 8, 32])
@pytest.mark.parametrize("wide", ["", "qk", "qkv"])
@pytest.mark.parametrize("bounded", [False, True])
def test_operands_of_several_types_on_a_gpu(wide: str, bounded: bool, head: int) -> None:
    model = Attention(wide, bounded, head).eval().half()
    compiled = compile(model, batch(), target="cuda")
    model = model.cuda()
    for _ in range(3):
        check(model, compiled, batch("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("value", [1, 8, 20])
def test_values_of_another_width_than_keys_on_a_gpu(value: int) -> None:
    model = Latent(value).eval().half()
    compiled = compile(model, batch(), target="cuda")
    assert "1 of them attention, full, over live tokens" in compiled.explain()
    model = model.cuda()
    for _ in range(3):
        check(model, compiled, batch("cuda"))
