"""What a model's inputs must be, and the check of what a call brings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import tvm
from tvm import ir, relax
from tvm.ir import prim

from ..errors import ShapeError, mismatch
from ..runtime.arrays import as_tensor
from .importer import Imported
from .plane import BATCH, TOKENS, Plane
from .rebuild import bindings_of, extents_of, is_op

# Operators that hand ids on unchanged to the table they are looked up in.
_SAME_IDS = ("astype", "reshape")


@dataclass(frozen=True)
class Input:
    """One input: its type, its extents (a role of the plane, a number, or None for any), and how
    many rows the smallest table has that its values are looked up in, if any."""

    dtype: str
    extents: tuple[str | int | None, ...]
    rows: int | None


class Inputs:
    """The inputs of a model, in its order."""

    def __init__(self, imported: Imported, module: tvm.IRModule) -> None:
        plane = Plane(imported.batch, imported.tokens)
        tables = _tables(module)
        self.mask, self.longest = imported.mask, imported.longest
        self.known = {
            p.name: Input(str(p.ty.dtype), _extents(p, plane), tables.get(p.name))
            for p in module["main"].params
        }

    def check(self, given: Mapping[str, torch.Tensor]) -> list[Any]:
        """The inputs of a call in order, in the form that a compiled function takes.

        Raises
        ------
        ShapeError, DTypeError
            An input is missing, unknown, of another type or shape, or has ids outside its table;
            the mask has other values than 0 and 1; there are more tokens than the model admits.
        """
        if set(given) != set(self.known):
            raise ShapeError(mismatch("inputs", sorted(self.known), sorted(given)))
        mask = given[self.mask]
        if mask.dim() != 2:
            raise ShapeError(mismatch(self.mask, "[batch, tokens]", tuple(mask.shape)))
        if self.longest is not None and mask.shape[1] > self.longest:
            raise ShapeError(mismatch(self.mask, f"at most {self.longest} tokens", mask.shape[1]))
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ShapeError(mismatch(self.mask, "only 0 and 1", "other values"))
        sizes: dict[Any, Any] = {BATCH: mask.shape[0], TOKENS: mask.shape[1]}
        return [
            self._checked(name, given[name].contiguous(), one, sizes)
            for name, one in self.known.items()
        ]

    def _checked(self, name: str, value: torch.Tensor, one: Input, sizes: Mapping[Any, Any]) -> Any:
        shape = [sizes.get(e, e) for e in one.extents]
        array = as_tensor(name, value, dtype=one.dtype, shape=shape)
        if one.rows is not None and value.numel():
            least, most = (int(v) for v in torch.aminmax(value))
            if least < 0 or most >= one.rows:
                raise ShapeError(mismatch(name, f"ids of 0 to {one.rows - 1}", (least, most)))
        return array


def _extents(param: relax.Var, plane: Plane) -> tuple[str | int | None, ...]:
    found: list[str | int | None] = []
    for extent, role in zip(extents_of(param), plane.known(param), strict=True):
        fixed = int(extent) if isinstance(extent, prim.IntImm) else None
        found.append(role if role in (BATCH, TOKENS) else fixed)
    return tuple(found)


def _tables(module: tvm.IRModule) -> dict[str, int]:
    """The smallest number of rows of the constant tables that each input's values pick from."""
    main = module["main"]
    source: dict[relax.Var, relax.Var] = {p: p for p in main.params}
    rows: dict[str, int] = {}
    for binding in bindings_of(main):
        value = binding.value
        if is_op(value, *_SAME_IDS) and value.args[0] in source:
            source[binding.var] = source[value.args[0]]
        if is_op(value, "take") and isinstance(value.args[0], ir.GenericConst):
            table, ids = value.args
            if ids in source and int(value.attrs.axis) == 0:
                name = source[ids].name
                extent = int(extents_of(table)[0])
                rows[name] = min(rows.get(name, extent), extent)
    return rows
