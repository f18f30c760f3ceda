"""What is not a number stays so in whole models, as in torch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.model.targets import NARROW, ON_CPU, ON_GPU, both  # noqa: E402

LIMIT = 0.5


class Limits(torch.nn.Module):  # type: ignore[misc]
    """Functions that choose one of two numbers."""

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        other = torch.tensor([LIMIT, -LIMIT])[:, None, None]
        found = [
            torch.relu(input),
            torch.nn.functional.relu6(input * 9),
            input.clamp(min=LIMIT),
            input.clamp(-LIMIT, LIMIT),
            torch.maximum(input, input.flip(2)),
            torch.minimum(input[..., :1], input),
            torch.maximum(input[..., None, :, None], other).flatten(2),
            torch.minimum((input.float() * 9).nan_to_num().int(), torch.tensor(3)).float(),
            torch.stack([input.isnan(), input.isinf(), input.isfinite()]).any(0).float(),
            input.nan_to_num(),
            torch.round(input),
        ]
        return torch.cat(found, 2)


class Orders(torch.nn.Module):  # type: ignore[misc]
    """Functions that compare numbers."""

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        twice = input * 2
        found = [
            input.amax(-1, keepdim=True),
            input.amin(-1, keepdim=True),
            input.argmax(-1, keepdim=True),
            input.argmin(-1, keepdim=True),
            input != LIMIT,
            input != input,
            input * 2 == twice,
            input * 2 <= twice,
            input * 2 >= twice,
            twice.isfinite(),
            input.sort(-1).values,
            input.sort(-1, descending=True).values,
            input.topk(3).values,
            input.topk(3, largest=False).values,
            *input.max(-1, keepdim=True),
            *input.min(-1, keepdim=True),
            input.median(-1, keepdim=True).values,
            input[..., 1:].median(-1, keepdim=True).values,
            # Equal ones: the first counts, and zeros are equal.
            input.clamp(max=0).round().argmax(-1, keepdim=True),
            input.clamp(min=0).ceil().neg().max(-1, keepdim=True).indices,
        ]
        return torch.cat([each.to(input.dtype) for each in found], -1)


def random(width: int, dtype: Any, share: float, *others: str) -> Any:
    """Random numbers with a share of NaN, and of each of the ``others``."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, width, generator=generator).to(dtype)
    for number in (*others, "nan"):
        x[torch.rand(x.shape, generator=generator) < share] = float(number)
    return x


# Rows of several vectors in every type, and of a part of one.
NUMBERS = [
    *(pytest.param(*each, 64) for each in ON_CPU),
    ("llvm", torch.float32, 4),
    *(pytest.param(*each.values, n, marks=each.marks) for each in ON_GPU for n in (4, 64)),
]


@pytest.mark.parametrize(("target", "dtype", "width"), NUMBERS)
def test_a_choice_of_two_numbers_keeps_nan(target: str, dtype: Any, width: int) -> None:
    live = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    got, want = both(Limits(), target, random(width, dtype, 0.3), live)
    assert want[live > 0].isnan().any()
    # Fused operators round to 16 bits once.
    off = {"rtol": torch.finfo(dtype).eps, "atol": 1e-5} if dtype in NARROW else {}
    torch.testing.assert_close(got[live > 0], want[live > 0], equal_nan=True, **off)


@pytest.mark.parametrize(
    ("target", "dtype", "width"), [*NUMBERS, pytest.param("llvm", torch.float64, 64)]
)
def test_comparisons_know_nan(target: str, dtype: Any, width: int) -> None:
    x = random(width, dtype, 0.2 / width, "inf", "-inf")
    x[:, 2] = float("nan")
    x[:, 3] = -x[:, 1].abs()
    got, want = both(Orders(), target, x, torch.ones(2, 5, dtype=torch.int64))
    torch.testing.assert_close(got, want, equal_nan=True, rtol=0, atol=0)
