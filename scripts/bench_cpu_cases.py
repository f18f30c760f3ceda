"""What the benchmark measures: shapes and patterns, and which shapes are never tuned on.

``index``, ``select`` and ``call`` have no held-out shapes: nothing about them is tuned. The data
of every case come from seeds that tuning cannot use, see `bench_rows.Settings.rng`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """Sizes of one product ``out[m, n] = lhs[m, k] * rhs[k, n]``."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    def small(self) -> Shape:
        """An eighth of every extent, at least 8: for ``--quick``."""
        return Shape(*(max(8, extent // 8) for extent in (self.m, self.n, self.k)))


# Never tune on these, nor let `pit-tvm tune` calibrate on them: they show what tiles tuned on
# other shapes are worth. The run fails its target if the tile database knows one of them.
HELD_OUT = (Shape(1536, 2304, 1152), Shape(1300, 1000, 900))

DENSE = (
    *(Shape(extent, extent, extent) for extent in (512, 1000, 1024, 2048)),
    *(Shape(4096, 768, 768), Shape(4096, 3072, 768), Shape(4096, 768, 3072)),
    *(Shape(4096, 384, 384), Shape(4096, 1536, 384), Shape(4096, 384, 1536)),
    *(Shape(512, 4096, 4096), Shape(128, 4096, 1024)),
)
MASKED = Shape(2048, 2048, 2048)
GRAINS = ((32, 1), (1, 64), (32, 64))
ZEROS = (0.5, 0.9, 0.95, 0.99)

INDEXED = (4096, 4096)
INDEX_GRAINS = ((32, 1), (1, 64))
INDEX_ZEROS = (0.5, 0.9, 0.99)

# Batch and padded length of the tiny problem, and its n and k.
TINY = (2, 8, 32, 32)
PATTERNS = ("lengths", "rows", "mask")
LIBRARIES = ("numpy", "torch")


@dataclass(frozen=True)
class Product:
    """A dense product with every row live."""

    shape: Shape
    held_out: bool = False

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        return str(self.shape)


@dataclass(frozen=True)
class Masked:
    """A product whose lhs has zeros in blocks of ``grain``; ``zeros`` is their share."""

    shape: Shape
    grain: tuple[int, int]
    zeros: float
    held_out: bool = False

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        return f"{self.shape} {self.grain[0]}x{self.grain[1]} {100 * self.zeros:g} %"


@dataclass(frozen=True)
class Indexed:
    """A boolean mask of ``shape`` with zeros in blocks of ``grain``, indexed at that grain."""

    shape: tuple[int, int]
    grain: tuple[int, int]
    zeros: float
    held_out: bool = False

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        size, grain = "x".join(map(str, self.shape)), "x".join(map(str, self.grain))
        return f"{size} {grain} {100 * self.zeros:g} %"


@dataclass(frozen=True)
class Selected:
    """A decision for one product: a mask of ``grain``, or lengths if that is empty."""

    shape: Shape
    grain: tuple[int, ...]
    held_out: bool = False

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        return f"{self.shape} {'x'.join(map(str, self.grain)) or 'lengths'}"


@dataclass(frozen=True)
class Called:
    """A tiny product called with a pattern and arrays of a library."""

    pattern: str
    library: str
    held_out: bool = False

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        return f"{self.pattern} {self.library}"


def list_products(quick: bool) -> list[Product]:
    """Cases of the suite ``dense``, held-out ones last."""
    cases = [Product(shape) for shape in DENSE] + [Product(shape, True) for shape in HELD_OUT]
    return [replace(case, shape=case.shape.small()) if quick else case for case in cases]


def list_masked(quick: bool) -> list[Masked]:
    """Cases of the suite ``masks``, held-out ones last."""
    shapes = ((MASKED, False), (HELD_OUT[0], True))
    return [
        Masked(shape.small() if quick else shape, grain, zeros, held_out)
        for shape, held_out in shapes
        for grain in GRAINS
        for zeros in ZEROS
    ]


def list_indexed(quick: bool) -> list[Indexed]:
    """Cases of the suite ``index``."""
    rows, columns = INDEXED
    shape = (rows // 16, columns // 16) if quick else INDEXED
    return [Indexed(shape, grain, zeros) for grain in INDEX_GRAINS for zeros in INDEX_ZEROS]


def list_selected(quick: bool) -> list[Selected]:
    """Cases of the suite ``select``; a decision takes as long for small sizes."""
    return [Selected(MASKED, grain) for grain in (*GRAINS, ())]


def list_called(quick: bool) -> list[Called]:
    """Cases of the suite ``call``, which are tiny anyway."""
    return [Called(pattern, library) for pattern in PATTERNS for library in LIBRARIES]
