"""What the dense products of a library (cuBLAS) take on a Hopper GPU, in microseconds.

The library is taken to have the best of a few tiles for every shape. Tiles are worked on in waves
over the multiprocessors; their depth may be split into parts that are added up. What tiles, the
chip's power and memory take alone is joined by the cube root of the sum of their cubes. The
constants fit times of one H200 (tuning_logs/h200-sm_90a/dense.json): over 195 shapes in 16-bit
types with a median error of 3 to 4 %, nine of ten within 10 %; over 41 shapes in float32, which is
never short of power, with one of 4 %, nine of ten within 19 %; over 28 in float32 on tensor cores
(TF32) with one of 3 %, nine of ten within 12 %, and within 1 % where 90 to 99 % of an operand of
4096^3 is zero. Under a steady load of such products those in 16 bits take up to 1.13 times as long
as alone; costs of that are within 8 % of fourteen (all rows live, dense.json).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

_SMS, _STEP = 132, 64  # of the depth
_PARTS = (1, 2, 4, 8)
_Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Library:
    """Costs of products of elements of ``itemsize`` bytes.

    ``tiles``: rows and columns. ``start_us``: of a product. A tile's step takes ``step_us`` for
    each element, and ``least_us`` at least; its end ``write_us`` for each, or ``add_us`` where it
    is one of several parts. ``power_tflops``, ``most_tflops``: 1e12 operations per second that the
    chip reaches in a long product, and at most; ``steady``: the share of the former that is left
    where it computes nothing else for long. ``depth_first``: how many times as long a product
    takes where the depth is the first axis of both operands.
    """

    itemsize: int
    tiles: tuple[tuple[int, int], ...]
    start_us: float
    step_us: float
    least_us: float
    write_us: float
    add_us: float
    power_tflops: float
    most_tflops: float
    steady: float = 1.0
    depth_first: float = 1.0

    def product_us(
        self,
        m: int,
        n: int,
        k: int,
        memory_gbps: float,
        zeros: float = 0.0,
        steady: bool = False,
    ) -> tuple[float, float]:
        """Predicted time of a product, and what operations and bytes take at least. ``zeros``: the
        share of an operand that is zero, which draws no power. ``steady``: under a load of such
        products."""
        tall, wide, parts = self._ways
        waves = np.ceil(np.ceil(m / tall) * np.ceil(n / wide) * parts / _SMS)
        steps = np.ceil(k / parts / _STEP)
        step = np.maximum(tall * wide * self.step_us, self.least_us)
        end = tall * wide * np.where(parts > 1, self.add_us, self.write_us)
        compute = float((waves * (steps * step + end)).min())
        flops = 2e-6 * m * n * k
        memory = 1e-3 * self.itemsize * (m * k + n * k + m * n) / memory_gbps
        tflops = self.power_tflops * (self.steady if steady else 1.0)
        cubes = compute**3 + memory**3 + ((1.0 - zeros) * flops / tflops) ** 3
        return self.start_us + cubes ** (1 / 3), max(flops / self.most_tflops, memory)

    @cached_property
    def _ways(self) -> tuple[_Numbers, _Numbers, _Numbers]:
        """Rows, columns and parts of every tile with every number of parts."""
        ways = [(tall, wide, parts) for tall, wide in self.tiles for parts in _PARTS]
        tall, wide, parts = np.array(ways, np.float64).T
        return tall, wide, parts


_HALF = Library(
    itemsize=2,
    tiles=((128, 256), (128, 192), (128, 128), (128, 64), (64, 64)),
    start_us=2.35,
    step_us=1.26e-5,
    least_us=0.0938,
    write_us=5.96e-5,
    add_us=8.32e-4,
    power_tflops=842.0,
    most_tflops=790.0,
    steady=0.86,
)
# float32 on tensor cores, which read such operands along the depth: the median of nine shapes.
_TF32 = Library(
    itemsize=4,
    tiles=((128, 256), (128, 128), (128, 64), (64, 64)),
    start_us=5.24,
    step_us=3.34e-5,
    least_us=0.603,
    write_us=2.51e-4,
    add_us=7.11e-4,
    power_tflops=386.0,
    most_tflops=395.0,
    depth_first=1.6,
)
_SINGLE = Library(
    itemsize=4,
    tiles=((128, 128), (64, 64), (32, 32)),
    start_us=3.2,
    step_us=3.35e-4,
    least_us=0.562,
    write_us=1.48e-4,
    add_us=2.95e-3,
    power_tflops=np.inf,
    most_tflops=60.7,
)


def library_of(dtype: str) -> Library:
    """Costs in a data type, of which tf32 is float32 on tensor cores; those of 16 bits for all but
    float32."""
    return {"float32": _SINGLE, "tf32": _TF32}.get(dtype, _HALF)
