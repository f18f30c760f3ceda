"""Padded rows of buffers that a software pipeline has made several."""

from __future__ import annotations

import tvm_ffi
from tvm import s_tir, tirx

from .rebuild import rebuilt

_PADDED = "buffer_dim_align"  # TVM's own: what `storage_align` asks for


def settle_strides(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Let the wish for padded rows name the dimension that has them.

    A software pipeline puts a dimension in front of a buffer's own, which TVM's last lowering of
    the wish does not know: it would pad another one.
    """

    def settled(block: s_tir.SBlock) -> s_tir.SBlock:
        if _PADDED not in block.annotations:
            return block
        notes = dict(block.annotations)
        ((which, _, factor, offset),) = notes.pop(_PADDED)
        buffer = block.writes[int(which)].source
        whole = [int(s) * int(n) for s, n in zip(buffer.strides, buffer.shape, strict=True)]
        padded = [d for d, size in enumerate(whole[1:]) if int(buffer.strides[d]) != size]
        if padded:
            notes[_PADDED] = [[which, padded[-1], factor, offset]]
        return rebuilt(block, annotations=notes)

    return func.with_body(tvm_ffi.structural_map(func.body, [(s_tir.SBlock, settled)]))
