"""Operators with steps read bfloat16 as it is stored, in whole models on CPUs as in torch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tvm import relax  # noqa: E402

from pit_tvm.model.lowering import stored_before_steps  # noqa: E402
from tests.model.graphs import B, T, graph  # noqa: E402
from tests.model.targets import both  # noqa: E402


class Steps(torch.nn.Module):  # type: ignore[misc]
    """Functions that jump, of numbers that several operators made."""

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        made = (input * 3 + 1) * input
        back = (input / 3) * 3
        found = [
            made.ceil(),
            made.floor(),
            made.round(),
            (made * 4).trunc(),
            (input**2).floor(),
            (back - input).sign(),
            made > input * 3 * input + input,
            back == input,
            (made * 8).long(),
            (made.float() * 2).floor(),
            made // 7,
            made.argmax(-1, keepdim=True),
            (made.softmax(-1) * 4).round(),
            made.topk(3).values,
        ]
        return torch.cat([each.float() for each in found], -1)


def test_as_torch() -> None:
    x = (torch.randn(3, 5, 64) * 2).bfloat16()
    got, want = both(Steps(), "llvm", x, torch.ones(3, 5, dtype=torch.int64))
    torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_only_what_ends_in_a_step_is_stored(dtype: str) -> None:
    def smooth(x: relax.Expr) -> relax.Expr:
        return relax.op.tanh(relax.op.exp(relax.op.sin(x)))

    def stepped(x: relax.Expr) -> relax.Expr:
        return relax.op.exp(relax.op.floor(relax.op.cos(relax.op.sin(x))))

    smooth_one, one = (graph(make, x=(dtype, B, T, 8)) for make in (smooth, stepped))
    assert "match_cast" not in stored_before_steps(smooth_one).script()
    stored = stored_before_steps(one).script().count("match_cast")
    assert stored == (2 if dtype == "bfloat16" else 0)
