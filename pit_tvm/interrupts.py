"""Ctrl-C in Python code that TVM calls."""

from __future__ import annotations

import tvm_ffi


def pass_interrupts() -> None:
    """From here on an interrupt comes out of TVM as what it is. It came as a `RuntimeError`, as
    what TVM does not know does: that is what a model's odd operator raises, or a failed build."""
    tvm_ffi.register_error("KeyboardInterrupt", KeyboardInterrupt)
