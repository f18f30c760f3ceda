"""What the manifest of a saved model may hold: one that was edited is refused by its key."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import SavedModelError, mismatch
from ..op.epilogue import ACTIVATIONS
from ..runtime.arrays import NUMPY_DTYPES
from .outputs import DICT, FIELDS, LEAF, LIST, NAMED, TUPLE, Outputs
from .plane import BATCH, TOKENS

# Checks what a key, named first, holds.
_Check = Callable[[str, Any], None]


def check_manifest(path: str, found: Any) -> None:
    """Refuse a manifest of the file ``path``.

    Raises
    ------
    SavedModelError
        A key is missing, unknown, or holds what it cannot, by its name.
    """
    _MANIFEST(f"{path}: manifest", found)


def _refused(key: str, expected: str, got: Any) -> SavedModelError:
    return SavedModelError(mismatch(key, expected, got, "save the model again"))


def _value(expected: str, holds: Callable[[Any], bool]) -> _Check:
    def check(key: str, value: Any) -> None:
        if not holds(value):
            raise _refused(key, expected, repr(value))

    return check


def _one_of(*values: str | None) -> _Check:
    words = ", ".join("null" if value is None else value for value in values)
    return _value(f"one of {words}", lambda value: value in values)


def _object(required: Mapping[str, _Check], **optional: _Check) -> _Check:
    """With these keys and no others."""
    known = {**required, **optional}

    def check(key: str, value: Any) -> None:
        _ANY_OBJECT(key, value)
        for name in [*required, *(name for name in value if name not in required)]:
            if name not in value:
                raise _refused(f"{key}.{name}", "a value", "none")
            if name not in known:
                raise _refused(f"{key}.{name}", "no such key", "one")
            known[name](f"{key}.{name}", value[name])

    return check


def _named(one: _Check) -> _Check:
    """An object of any keys, all for such values."""

    def check(key: str, value: Any) -> None:
        _ANY_OBJECT(key, value)
        for name, part in value.items():
            one(f"{key}.{name}", part)

    return check


def _list(one: _Check) -> _Check:
    def check(key: str, value: Any) -> None:
        _ANY_LIST(key, value)
        for number, part in enumerate(value):
            one(f"{key}[{number}]", part)

    return check


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_limit(value: Any) -> bool:
    return value is None or _is_count(value)


def _is_bound(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and _is_count(value[0]) and _is_limit(value[1])
    )


def _is_threshold(value: Any) -> bool:
    number = type(value) in (int, float)
    return value is None or (number and 0 <= value <= sys.float_info.max)


def _tree(key: str, value: Any) -> None:
    _NODE(key, value)
    for number, part in enumerate(value["parts"]):
        _tree(f"{key}.parts[{number}]", part)


def _outputs(key: str, value: Any) -> None:
    """A tree of containers that can be made."""
    _tree(key, value)
    tree = Outputs.from_json(value)
    try:
        tree.build([None] * tree.leaves)
    except (TypeError, ValueError) as error:
        raise _refused(key, "containers with a name for each of their parts", error) from error


def _graph(key: str, value: Any) -> None:
    """Nothing of a library, or what a program's text names."""
    if value != {}:
        _PROGRAM(key, value)


_ANYTHING = _value("a value", lambda value: True)
_ANY_OBJECT = _value("an object", lambda value: isinstance(value, dict))
_ANY_LIST = _value("a list", lambda value: isinstance(value, list))
_TEXT = _value("a string", lambda value: isinstance(value, str))
_LABEL = _value("a string or null", lambda value: value is None or isinstance(value, str))
_KEY = _value("a string or a whole number", lambda value: isinstance(value, str | int))
_SWITCH = _value("true or false", lambda value: isinstance(value, bool))
_LIMIT = _value("a whole number of at least 0, or null", _is_limit)
_BOUND = _value("the least, and the most or null", _is_bound)
_CHOICES = _value("a whole number of at least 1", lambda value: _is_count(value) and value > 0)
_THRESHOLD = _value("a finite number of at least 0, or null", _is_threshold)
_EXTENT = _value(
    f"{BATCH}, {TOKENS}, a whole number or null",
    lambda value: value in (BATCH, TOKENS) or _is_limit(value),
)
_DTYPE = _one_of("bfloat16", *NUMPY_DTYPES)
_INPUT = _object({"dtype": _DTYPE, "extents": _list(_EXTENT), "rows": _LIMIT})
_NODE = _object(
    {
        "kind": _one_of(LEAF, TUPLE, LIST, DICT, FIELDS, NAMED),
        "name": _TEXT,
        "keys": _list(_KEY),
        "parts": _ANY_LIST,
    }
)
_PROGRAM = _object(
    {
        "constants": _named(_DTYPE),
        "functions": _named(_TEXT),
        "replayable": _SWITCH,
        "libraries": _named(_TEXT),
    }
)
_DECISION = _object(
    {"operator": _TEXT, "result": _TEXT, "live": _SWITCH, "whole": _SWITCH, "reason": _TEXT}
)
_LAYER = {"weight": _TEXT, "activation": _one_of(None, *ACTIVATIONS), "dtype": _DTYPE}
_MANIFEST = _object(
    {
        "format": _ANYTHING,
        "versions": _named(_TEXT),
        "code": _TEXT,
        "target": _ANY_OBJECT,
        "features": _list(_TEXT),
        "graph": _graph,
        "inputs": _object(
            {
                "known": _named(_INPUT),
                "mask": _TEXT,
                "bounds": _object({BATCH: _BOUND, TOKENS: _BOUND}),
                "live": _LIMIT,
            }
        ),
        "outputs": _outputs,
        "decisions": _list(_DECISION),
        "layers": _list(_object({**_LAYER, "after": _LABEL}, bias=_TEXT)),
        "grouped": _list(_object({**_LAYER, "choices": _CHOICES}, bias=_TEXT)),
        "kernels": _list(_TEXT),
        "threshold": _THRESHOLD,
    }
)
