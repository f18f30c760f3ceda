"""What is compiled is shared: a copy is the thing itself, as that of a function is."""

from __future__ import annotations

from typing import Any

from .errors import DTypeError, mismatch

_NO_GRAPH = (
    "what pit_tvm compiled is called as it is: leave out fullgraph=True, or take functions of "
    "pit_tvm.torch, which become part of a graph"
)


class Shared:
    """A base of what holds compiled code, which threads and copies share; DTypeError if pickled.

    torch.compile does not trace calls: it would meet pointers and compiled code. The attributes are
    those that its own decorator sets, which would import torch.
    """

    def __init_subclass__(cls) -> None:
        call = cls.__dict__.get("__call__")
        if call is not None:
            call.__dict__ |= {"_torchdynamo_disable": True, "_torchdynamo_disable_msg": _NO_GRAPH}

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        expected, advice = "one that is shared as it is", "compile it again where it is needed"
        raise DTypeError(mismatch(type(self).__name__, expected, "a pickle", advice))
