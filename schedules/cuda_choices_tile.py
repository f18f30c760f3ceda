"""How products of few tokens by the weights of their experts are built: tiles of `cuda_choices`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError, mismatch
from pit_tvm.gates import Gate

from .hopper_combine import UNPACK
from .hopper_knobs import ACTS

LANES = 32
CHUNK = 8  # elements of 16 bits in the 16 bytes that a lane reads at once
STEP = LANES * CHUNK
FACTORS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class ChoicesTile:
    """What a kernel computes, and how.

    ``layout``: "nk" for weights (groups, n, k), "kn" for (groups, k, n). ``gate``: half of their
    columns are gates. ``factors``: the type of the factors of a sum; "" leaves every choice its own
    row. ``deep``: so many lots of the warps take choices of the same columns of a sum in turn.
    ``ahead``: times that a warp reads before it uses the first: of "nk" `STEP` elements of ``rows``
    rows of the weights, of "kn" 16 bytes of LANES / ``lanes`` rows in each of so many lanes.
    """

    dtype: str
    ids: str
    act: str = "none"
    gate: Gate | None = None
    factors: str = ""
    layout: str = "nk"
    bias: bool = False
    rows: int = 8
    ahead: int = 2
    deep: int = 1
    lanes: int = 8
    warps: int = 8

    @property
    def halves(self) -> int:
        """Columns of the weights that make one of out."""
        return 1 if self.gate is None else 2

    @property
    def across(self) -> int:
        """Warps that share a choice."""
        return self.warps // self.deep

    @property
    def columns(self) -> int:
        """Of out, that a warp makes."""
        read = self.rows if self.layout == "nk" else self.lanes * CHUNK
        return read // self.halves

    @property
    def owned(self) -> int:
        """Columns of out that a CTA makes: warps of "kn" share the depth."""
        return self.columns * (self.across if self.layout == "nk" else 1)

    def place(self, column: Any, side: int, n: Any) -> Any:
        """The column of the weights that makes a ``side`` of a column of out, gates being 0."""
        if self.gate is None:
            return column
        return column * 2 + side if self.gate.interleaved else column + side * n

    def source(self, first: Any, lane: Any, n: Any) -> tuple[Any, Any]:
        """Where the columns begin that a lane of "kn" reads, and where they end at the latest; its
        CTA makes columns of out from ``first`` on."""
        place = lane * CHUNK
        if self.gate is None:
            return first + place, n
        if self.gate.interleaved:
            return first * 2 + place, n * 2
        side = T.truncdiv(place, self.owned)
        return first + T.truncmod(place, self.owned) + side * n, (side + 1) * n

    def check(self) -> None:
        """Raise ScheduleError (a ValueError) for what the template cannot build."""
        rules = {
            "dtype float16 or bfloat16": self.dtype in UNPACK,
            "ids int32 or int64": self.ids in ("int32", "int64"),
            f"act one of {', '.join(ACTS)}": self.act in ACTS,
            "act that takes the gate's alpha": self.gate is None or self.gate.fits(self.act),
            f"factors one of {', '.join(FACTORS)}, or none": self.factors in ("", *FACTORS),
            "layout nk or kn": self.layout in ("nk", "kn"),
            "sums without act": not self.factors or self.act == "none",
            "sums without gates": not self.factors or self.gate is None,
            "rows 2, 4 or 8": self.rows in (2, 4, 8),
            "lanes 2, 4, 8, 16 or 32": self.lanes in (2, 4, 8, 16, 32),
            "warps 4, 8, 16 or 32": self.warps in (4, 8, 16, 32),
            "ahead at least 1": self.ahead > 0,
            "deep 1, 2, 4 or 8, at most warps": self.deep in (1, 2, 4, 8)
            and self.deep <= self.warps,
            "deep 1 without sums": self.deep == 1 or bool(self.factors),
        }
        for rule, holds in rules.items():
            if not holds:
                raise ScheduleError(mismatch("choices_kernel", rule, self))


def product_tile(
    dtype: str,
    ids: str,
    act: str,
    gate: Gate | None = None,
    *,
    layout: str = "nk",
    bias: bool = False,
) -> ChoicesTile:
    """The fastest of those measured on an H200 for products of every choice."""
    ahead = 2 if layout == "nk" else 8
    return ChoicesTile(dtype, ids, act, gate, layout=layout, bias=bias, ahead=ahead)


def sum_tile(
    dtype: str,
    ids: str,
    factors: str,
    tokens: int,
    top_k: int,
    *,
    layout: str = "nk",
    bias: bool = False,
) -> ChoicesTile:
    """The fastest of those measured on an H200 for sums: one token's are few, so that more warps
    share them."""
    how: dict[str, Any] = {"factors": factors, "layout": layout, "bias": bias}
    if layout == "kn":
        return ChoicesTile(dtype, ids, **how, ahead=8, lanes=4, deep=1, warps=8)
    if tokens == 1 and top_k >= 4:
        return ChoicesTile(dtype, ids, **how, rows=4, ahead=2, deep=4)
    return ChoicesTile(dtype, ids, **how, rows=4, ahead=4, deep=min(top_k, 2))
