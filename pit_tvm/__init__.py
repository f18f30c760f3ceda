"""pit-tvm: sparse and padded tensor operators from TVM, by permutation-invariant transformation.

Public names resolve on first use, so that ``import pit_tvm`` loads neither tvm nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .locations import source_root as _source_root

if TYPE_CHECKING:
    from . import errors, op
    from .analysis.pit_axis import pit_axes
    from .api import Operator, PackedOperand, compile
    from .structs import (
        AxisReport,
        BitMask,
        BlockMask,
        Grid,
        Groups,
        Lengths,
        Mask,
        MicroTile,
        Plan,
        Rows,
        Tile,
        Values,
    )

__version__ = "0.1.0"

__all__ = [
    "AxisReport",
    "BitMask",
    "BlockMask",
    "Grid",
    "Groups",
    "Lengths",
    "Mask",
    "MicroTile",
    "Operator",
    "PackedOperand",
    "Plan",
    "Rows",
    "Tile",
    "Values",
    "__version__",
    "compile",
    "errors",
    "op",
    "pit_axes",
]

_SUBMODULES = ("errors", "op")
# Names that are not listed are defined in structs.
_HOMES = {
    "compile": "api",
    "Operator": "api",
    "PackedOperand": "api",
    "pit_axes": "analysis.pit_axis",
}

# In a source tree the folder schedules/ stands beside this package, not inside it.
if (_root := _source_root()) is not None:
    __path__.append(str(_root))


def __getattr__(name: str) -> Any:
    """Resolve a public name from the module that defines it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    return getattr(import_module(f".{_HOMES.get(name, 'structs')}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
