"""Attention of sequences with holes on a GPU: the kernel, run by a CPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pit_tvm.errors import DTypeError
from pit_tvm.reference import attention as reference
from pit_tvm.runtime.cuda_build import cuda_source
from pit_tvm.runtime.cuda_modules import named_module
from pit_tvm.schedules.cuda_attention import attention_of_holed
from pit_tvm.windows import Window
from tests.runtime.cuda_emulation import Emulator, OnDevice
from tests.schedules.cuda_text import cuda_text

ANY = 1 << 30


def test_whoever_sees_by_order_leaves_at_once() -> None:
    text = cuda_text(attention_of_holed("bfloat16"))
    assert "nv_bfloat16* __restrict__ q_ptr" in text and "griddepcontrol.wait" in text


def test_refuses_wide_types() -> None:
    with pytest.raises(DTypeError, match="dtype"):
        attention_of_holed("float32")


@pytest.mark.parametrize("window", [Window(3, 0), Window(2, 2), Window(None, 1), Window(9, None)])
@pytest.mark.parametrize("sunk", [False, True])
def test_sequences_with_holes_alone_are_written(
    emulator: Emulator, rng: np.random.Generator, window: Window, sunk: bool
) -> None:
    heads, dim, lengths = 2, 40, [5, 0, 70, 1, 11, 20]
    holed = [False, False, True, False, False, True]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    steps = [
        rng.permutation([1] * (length // 2) + [1 + hole] * (length - length // 2))
        for length, hole in zip(lengths, holed, strict=True)
    ]
    position = np.concatenate([np.cumsum(step) for step in steps]).astype(np.int32)
    whole = rng.standard_normal((starts[-1], heads, 3 * dim)).astype(np.float16)
    sinks = rng.standard_normal(heads * sunk).astype(np.float32)
    out = np.full((starts[-1], heads, dim), np.nan, np.float16)
    source = cuda_source(named_module({"main": attention_of_holed("float16")}), tirx=True)
    kernel = emulator.compile_source(source).mod["main"]
    flat = [OnDevice(whole.reshape(-1)[part * dim :].copy()) for part in range(3)]
    index = [OnDevice(one) for one in (starts, position, sinks)]
    far = [ANY if far is None else far for far in (window.before, window.after)]
    written = OnDevice(out)
    kernel(*flat, *index, written, *[heads * 3 * dim, 3 * dim] * 3, *far, 0.25, 2)
    q, k, v = np.split(whole, 3, axis=-1)
    more = {"sinks": sinks} if sunk else {}
    wanted = reference.attention(q, k, v, starts, 0.25, window=window, position=position, **more)
    for sequence, (begin, end) in enumerate(itertools.pairwise(starts)):
        found = written.array[begin:end].astype(np.float64)
        if holed[sequence]:
            np.testing.assert_allclose(found, wanted[begin:end], atol=4e-3)
        else:
            assert np.isnan(found).all()
