"""Products with a sparse lhs: what the suites ``granularity`` and ``tensorcore`` measure, and the
goals that the issues set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench_gpu_cases import QUICK, SHORT

Sizes = tuple[int, int, int]

CUBE = (4096, 4096, 4096)
BERT = ((4096, 3072, 768), (4096, 768, 3072))  # tokens, and the two layers of BERT-base's MLP
GRAINS = (
    *((1, 1), (1, 32), (1, 64), (16, 16), (32, 32)),
    *((32, 1), (64, 1), (128, 1), (32, 64), (64, 64)),
)
BERT_GRAINS = ((32, 1), (32, 32), (64, 64))
ZEROS = (0.5, 0.8, 0.9, 0.95, 0.975, 0.99)
GOAL_ZEROS = (0.9, 0.95, 0.99)
# Over dense at those; and every row.
GOALS = {
    (1, 64): (1.0, 1.5, 4.0),
    (32, 1): (2.0, 4.0, 7.0),
    (64, 1): (3.0, 5.5, 8.0),
    (128, 1): (4.5, 6.5, 7.0),
    (32, 64): (2.1, 4.2, 7.5),
    (64, 64): (4.5, 6.5, 7.0),
}
# The same in float32.
SINGLE_GOALS = {
    (1, 64): (3.0, 6.0, 15.0),
    (32, 1): (5.0, 9.0, 25.0),
    (32, 64): (5.0, 9.0, 25.0),
}
# The paper's figure 16: one tensor-core tile, fed by micro-tiles and by whole blocks.
TENSOR_GRAINS = ((32, 1), (32, 64))
TENSOR_ZEROS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.975, 0.99)


@dataclass(frozen=True)
class Grain:
    """One product of ``sizes`` m, n, k whose lhs has the share ``zeros`` of its blocks zero.
    ``tf32``: tensor cores may compute its float32."""

    grain: tuple[int, int]
    zeros: float
    dtype: str = "float16"
    sizes: Sizes = CUBE
    held_out: bool = False
    tf32: bool = False

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        m, n, k = self.sizes
        shape = f"{m}^3" if self.cube else f"{m}x{n}x{k}"
        grain = "x".join(map(str, self.grain))
        return f"{shape} {SHORT[self.kind]} {grain} {100 * self.zeros:g} %"

    @property
    def kind(self) -> str:
        """The type that is computed in."""
        return "tf32" if self.tf32 else self.dtype

    @property
    def cube(self) -> bool:
        """Whether all extents are one; goals are for such products."""
        return len(set(self.sizes)) == 1


def sized(shapes: Sequence[Sizes], quick: bool) -> list[Sizes]:
    """Shapes as they are, or small."""
    less = QUICK if quick else 1
    return [(m // less, n // less, k // less) for m, n, k in shapes]


def list_grains(quick: bool) -> list[Grain]:
    """Cases of the suite ``granularity``."""
    cube, *bert = sized((CUBE, *BERT), quick)
    cases = [Grain(grain, zeros, sizes=cube) for grain in GRAINS for zeros in ZEROS]
    cases += [Grain((32, 1), zeros, "bfloat16", cube) for zeros in GOAL_ZEROS]
    for tf32 in (False, True):
        single = [(g, zeros, "float32", cube) for g in SINGLE_GOALS for zeros in GOAL_ZEROS]
        cases += [Grain(*case, tf32=tf32) for case in single]
    shapes = [(sizes, grain) for sizes in bert for grain in BERT_GRAINS]
    return [*cases, *(Grain(g, zeros, sizes=sizes) for sizes, g in shapes for zeros in ZEROS)]


def list_tensor_cores(quick: bool) -> list[Grain]:
    """Cases of the suite ``tensorcore``."""
    (cube,) = sized((CUBE,), quick)
    return [Grain(grain, zeros, sizes=cube) for grain in TENSOR_GRAINS for zeros in TENSOR_ZEROS]
