"""What all random cases of ``check_gpu.py`` share: numbers, and a call with what it must give.

Operands are small whole numbers over a power of two: float32 sums of their products are exact in
any order, so without an activation that rounds, a kernel's result has one right value.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from bench_rows import Array

AMOUNTS = ("empty", "one", "few", "half", "most", "full")
PART = "part"  # always as many slices of an axis: calls with the same shapes
SHARES = {"empty": 0.0, "few": 0.05, PART: 0.4, "half": 0.5, "most": 0.95, "full": 1.0}
STEPS = (1, 1, 2, 4, 8, 8, 8, 16)  # extents are multiples of these
SCALE = 2.0**-4
EXACT = (None, "relu")


@dataclass(frozen=True)
class Problem:
    """Arrays of one call. ``written``: elements of the output that the call must write, with
    ``want``, float64. ``call`` is the call without its data, a `check_gpu_patterns.Call`."""

    call: Any
    arrays: tuple[torch.Tensor, ...]
    value: torch.Tensor | None
    out: torch.Tensor
    written: torch.Tensor
    want: torch.Tensor

    def refill(self, other: Problem) -> Problem:
        """The values of ``other``, of the same shapes, in the memory of this problem."""
        for mine, new in zip(self.arrays, other.arrays, strict=True):
            mine.copy_(new)
        if self.value is not None and other.value is not None:
            self.value.copy_(other.value)
        return replace(self, call=other.call, written=other.written, want=other.want)

    def elsewhere(self) -> Problem:
        """The same in memory of its own."""
        value = None if self.value is None else self.value.clone()
        arrays = tuple(array.clone() for array in self.arrays)
        return replace(self, arrays=arrays, value=value, out=self.out.clone())

    def poison(self) -> None:
        """Make the output show what was not written."""
        self.out.fill_(_untold(self.out))

    def fault(self, limit: float) -> str:
        """What is wrong with the output; "" if nothing is. Elements may be off by ``limit``
        roundings of their type; 0 wants them equal."""
        written = self.written
        rest = self.out[~written]
        if self.call.kind.dead == "zero":
            if bool((rest != 0).any()):
                return "a dead element is not zero"
        elif not bool((rest.isnan() | (rest == _untold(self.out))).all()):
            return "a dead element was written"
        wrong = written & ~(self.out == self.want.to(self.out.dtype))
        if limit and self.out.is_floating_point() and bool(wrong.any()):
            scale = self.want.abs() + self.want[written].square().mean().sqrt()
            unit = torch.finfo(self.out.dtype).eps / 2
            wrong &= ~((self.out.double() - self.want).abs() <= limit * unit * scale)
        number = int(wrong.sum())
        if not number:
            return ""
        at = wrong.nonzero()[0].tolist()
        got, right = float(self.out[tuple(at)]), float(self.want[tuple(at)])
        return f"{number} wrong elements, first {at} is {got}, wanted {right}"


def _untold(out: torch.Tensor) -> float:
    """What no result is."""
    return float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).min


def case_rng(seed: int, family: str, number: int) -> np.random.Generator:
    """Random numbers of one case, the same whichever other cases run."""
    return np.random.default_rng([seed, zlib.crc32(family.encode()), number])


def draw_extent(rng: np.random.Generator, most: int) -> int:
    """An extent up to ``most`` that some powers of two divide."""
    step = int(rng.choice(STEPS))
    return step * int(rng.integers(1, max(2, most // step)))


def placed(array: Array, dtype: str, device: str, offset: int) -> torch.Tensor:
    """A tensor of an array that lies ``offset`` elements off its alignment."""
    kind = getattr(torch, dtype)
    room = torch.empty(array.size + offset, dtype=kind, device=device)
    room[offset:] = torch.from_numpy(array.reshape(-1).copy()).to(device)
    return room[offset:].view(array.shape)


def draw_whole(rng: np.random.Generator, sizes: tuple[int, ...]) -> Array:
    """Small whole numbers, float32."""
    return rng.integers(-2, 3, sizes).astype(np.float32)


def activation(name: str | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """torch's activation of one of our names."""
    functional: Any = torch.nn.functional
    if name is None:
        return lambda x: x
    if name.startswith("gelu"):
        approximate = "tanh" if name == "gelu_tanh" else "none"
        return lambda x: functional.gelu(x, approximate=approximate)
    return getattr(functional, name)
