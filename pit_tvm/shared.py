"""What is compiled is shared: a copy is the thing itself, as that of a function is."""

from __future__ import annotations

from typing import Any

from .errors import DTypeError, mismatch


class Shared:
    """A base of what holds compiled code, which threads and copies share; DTypeError if pickled."""

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        expected, advice = "one that is shared as it is", "compile it again where it is needed"
        raise DTypeError(mismatch(type(self).__name__, expected, "a pickle", advice))
