"""pit-tvm: sparse and padded tensor operators from TVM, by permutation-invariant transformation.

Public names resolve on first use, so that ``import pit_tvm`` loads neither tvm nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .locations import source_root as _source_root

if TYPE_CHECKING:
    from . import errors, op
    from . import model as model
    from . import torch as torch
    from .analysis.pit_axis import pit_axes
    from .api import Operator, PackedOperand, compile
    from .gates import Gate
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
    "Gate",
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

# The last two are not in __all__: a star would hide the reader's own torch.
_SUBMODULES = ("errors", "op", "model", "torch")
# Names that are not listed are defined in structs.
_HOMES = {
    "compile": "api",
    "Operator": "api",
    "PackedOperand": "api",
    "Gate": "gates",
    "pit_axes": "analysis.pit_axis",
}

# In a source tree the folder schedules/ stands beside this package, not inside it.
if (_root := _source_root()) is not None:
    __path__.append(str(_root))


def _resolve(name: str) -> Any:
    """A public name from the module that defines it."""
    if name in _SUBMODULES:
        return import_module(f".{name}", __name__)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES.get(name, 'structs')}", __name__), name)


if not TYPE_CHECKING:  # a type checker would take any name for one of ours
    __getattr__ = _resolve


def __dir__() -> list[str]:
    # help() reads whatever is listed, and torch may not be installed.
    return sorted({*__all__, *_SUBMODULES} - {"torch"})
