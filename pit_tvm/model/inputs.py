"""What a model's inputs must be, and the check of what a call brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import prim

from ..errors import ShapeError, mismatch
from ..runtime.arrays import as_numpy, as_tensor, kind
from .lookups import Lookups
from .picks import least_sizes
from .plane import BATCH, TOKENS, Bound, Plane
from .rebuild import extents_of

if TYPE_CHECKING:
    from .importer import Imported


@dataclass(frozen=True)
class Input:
    """One input: its type, its extents (a role of the plane, a number, or None for any), and how
    many rows the smallest table has that its values are looked up in, if any."""

    dtype: str
    extents: tuple[str | int | None, ...]
    rows: int | None


@dataclass(frozen=True)
class Inputs:
    """The inputs of a model by name, in its order; the name of the mask among them; the least and
    the most that the model admits of batch and tokens; and the most live tokens of one sequence
    (None: any)."""

    known: Mapping[str, Input]
    mask: str
    bounds: Mapping[str, Bound]
    live: int | None = None

    @classmethod
    def of(cls, imported: Imported, module: tvm.IRModule) -> Inputs:
        """The inputs of ``imported``, whose graph is now ``module``."""
        plane = Plane(imported.batch, imported.tokens)
        tables = Lookups.of(module, plane, imported.mask)
        known = {
            p.name: Input(str(p.ty.dtype), _extents(p, plane), tables.rows.get(p.name))
            for p in module["main"].params
        }
        least, limits = least_sizes(module, plane), {BATCH: None, TOKENS: tables.tokens}
        bounds = {
            role: (max(first, least[role]), _smaller(most, limits[role]))
            for role, (first, most) in imported.bounds.items()
        }
        return cls(known, imported.mask, bounds, tables.live)

    @property
    def tables(self) -> dict[str, int]:
        """Rows of the tables that inputs of ids name rows of, by the names of these inputs."""
        return {name: one.rows for name, one in self.known.items() if one.rows is not None}

    def check(self, given: Mapping[str, Any]) -> list[Any]:
        """The inputs of a call in order, in the form that a compiled function takes.

        Raises
        ------
        ShapeError, DTypeError
            An input is missing, unknown, of another type or shape, or has ids outside its table;
            the mask has other values than 0 and 1; the model does not admit so many, or so few,
            sequences, tokens or live tokens.
        """
        self.check_names(given)
        mask = as_numpy(given[self.mask], self.mask)
        sizes = self.sizes(mask.shape)
        if not ((mask == 0) | (mask == 1)).all():
            raise ShapeError(mismatch(self.mask, "only 0 and 1", "other values"))
        if self.live is not None:
            live = int(np.count_nonzero(mask, axis=1).max(initial=0))
            if live > self.live:
                raise ShapeError(self.too_many(live))
        return [_checked(name, given[name], one, sizes) for name, one in self.known.items()]

    def too_many(self, live: Any) -> str:
        """What to say of a sequence with ``live`` tokens, more than the model admits."""
        return mismatch(self.mask, f"at most {self.live} live tokens of a sequence", live)

    def check_names(self, given: Mapping[str, Any]) -> None:
        """ShapeError if an input is missing or unknown."""
        if set(given) != set(self.known):
            raise ShapeError(mismatch("inputs", sorted(self.known), sorted(given)))

    def sizes(self, plane: Sequence[int]) -> dict[Any, Any]:
        """The sizes of the roles of the plane, for a mask of this shape; ShapeError if the model
        does not admit it."""
        if len(plane) != 2:
            raise ShapeError(mismatch(self.mask, "[batch, tokens]", tuple(plane)))
        found: dict[Any, Any] = dict(zip((BATCH, TOKENS), plane, strict=True))
        for role, name in ((BATCH, "sequences"), (TOKENS, "tokens")):
            least, most = self.bounds[role]
            if found[role] < least:
                raise ShapeError(mismatch(self.mask, f"at least {least} {name}", found[role]))
            if most is not None and found[role] > most:
                raise ShapeError(mismatch(self.mask, f"at most {most} {name}", found[role]))
        return found

    def to_json(self) -> dict[str, Any]:
        """As JSON holds it."""
        known = {name: vars(one) for name, one in self.known.items()}
        return {
            "known": known,
            "mask": self.mask,
            "bounds": dict(self.bounds),
            "live": self.live,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Inputs:
        """What `to_json` gave; ValueError if its mask is no input."""
        known = {
            name: Input(one["dtype"], tuple(one["extents"]), one["rows"])
            for name, one in found["known"].items()
        }
        if found["mask"] not in known:
            raise ValueError(mismatch("mask", f"one of {sorted(known)}", repr(found["mask"])))
        bounds = {role: (least, most) for role, (least, most) in found["bounds"].items()}
        return cls(known, found["mask"], bounds, found["live"])


def _smaller(*limits: int | None) -> int | None:
    return min((number for number in limits if number is not None), default=None)


def _checked(name: str, value: Any, one: Input, sizes: Mapping[Any, Any]) -> Any:
    shape = [sizes.get(e, e) for e in one.extents]
    ids = as_numpy(value, name)
    array = as_tensor(name, _contiguous(value), dtype=one.dtype, shape=shape)
    if one.rows is not None:
        least, most = (ids.min().item(), ids.max().item()) if ids.size else (0, 0)
        if not (least >= 0 and most < one.rows):  # nor NaN
            raise ShapeError(mismatch(name, f"ids of 0 to {one.rows - 1}", (least, most)))
    return array


def _contiguous(value: Any) -> Any:
    library = kind(value)
    if library == "numpy":
        return value if value.flags.c_contiguous else np.ascontiguousarray(value)
    return value.contiguous() if library == "torch" else value


def _extents(param: relax.Var, plane: Plane) -> tuple[str | int | None, ...]:
    """ShapeError if an extent mixes batch or tokens with others, or one of them comes twice."""
    found: list[str | int | None] = []
    roles = plane.roles(param)
    if roles is None:
        expected = "batch and tokens once at most, each as a dimension of its own"
        got = [str(extent) for extent in extents_of(param)]
        raise ShapeError(mismatch(param.name, expected, got, "let the model compute such an input"))
    for extent, role in zip(extents_of(param), roles, strict=True):
        fixed = int(extent) if isinstance(extent, prim.IntImm) else None
        found.append(role if role in (BATCH, TOKENS) else fixed)
    return tuple(found)
