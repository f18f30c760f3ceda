"""What a model returns: its tensors in order, and the containers that hold them."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SavedModelError, mismatch

LEAF, TUPLE, LIST, DICT, FIELDS, NAMED = "leaf", "tuple", "list", "dict", "fields", "named"


class NamedOutputs(dict[str, Any]):
    """Outputs by name, also as attributes and by position, as transformers' own have them."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"no output {name!r} among {list(self)}")
        return self[name]

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """The outputs in order."""
        return tuple(self.values())


@dataclass(frozen=True)
class Outputs:
    """A tree of containers: a leaf is a tensor, and ``keys`` name the parts that have names."""

    kind: str = LEAF
    name: str = ""
    keys: tuple[str | int, ...] = ()
    parts: tuple[Outputs, ...] = ()

    @classmethod
    def of(cls, spec: Any) -> Outputs:
        """The tree that torch's ``TreeSpec`` describes.

        Raises
        ------
        SavedModelError
            It holds a container that is no tuple, list, dictionary or named tuple, and no
            dictionary with names, such as transformers' outputs are.
        """
        if spec.is_leaf():
            return cls()
        kind, keys = _form(spec.type, spec.context)
        name = getattr(spec.context if kind == FIELDS else spec.type, "__name__", "")
        return cls(kind, name, keys, tuple(map(cls.of, spec.children())))

    def build(self, leaves: Sequence[Any]) -> Any:
        """The containers with these tensors in them, in order; SavedModelError if there are more
        or fewer than leaves."""
        if len(leaves) != self.leaves:
            raise SavedModelError(mismatch("outputs", f"{self.leaves} tensors", len(leaves)))
        return self._build(iter(leaves))

    @property
    def leaves(self) -> int:
        """How many tensors there are."""
        return 1 if self.kind == LEAF else sum(part.leaves for part in self.parts)

    def _build(self, leaves: Iterator[Any]) -> Any:
        if self.kind == LEAF:
            return next(leaves)
        parts = [part._build(leaves) for part in self.parts]
        if self.kind == LIST:
            return parts
        if self.kind == TUPLE:
            return tuple(parts)
        if self.kind == FIELDS:
            return namedtuple(self.name, self.keys)(*parts)  # type: ignore[misc,arg-type]
        named = dict(zip(self.keys, parts, strict=True))
        return NamedOutputs(named) if self.kind == NAMED else named  # type: ignore[arg-type]

    def to_json(self) -> dict[str, Any]:
        """As JSON holds it."""
        parts = [part.to_json() for part in self.parts]
        return {"kind": self.kind, "name": self.name, "keys": list(self.keys), "parts": parts}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Outputs:
        """What `to_json` gave."""
        parts = tuple(map(cls.from_json, found["parts"]))
        return cls(found["kind"], found["name"], tuple(found["keys"]), parts)


def _form(kind: Any, context: Any) -> tuple[str, tuple[str | int, ...]]:
    """The kind of a container, and the names of its parts."""
    if kind is tuple:
        return TUPLE, ()
    if kind is list:
        return LIST, ()
    if kind is namedtuple:
        return FIELDS, tuple(context._fields)
    if isinstance(kind, type) and issubclass(kind, dict) and isinstance(context, list):
        if all(isinstance(key, str | int) for key in context):
            return DICT if kind in (dict, OrderedDict) else NAMED, tuple(context)
    expected = "tuples, lists, dictionaries and named outputs"
    raise SavedModelError(mismatch("outputs", expected, getattr(kind, "__name__", kind)))
