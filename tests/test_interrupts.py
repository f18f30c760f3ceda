"""Ctrl-C comes out of TVM as what it is, wherever work in it begins."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tvm_ffi
from tvm import ir, tirx

import pit_tvm
from pit_tvm.errors import PitError
from pit_tvm.model.importer import import_model
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.store import TileStore
from pit_tvm.tuning.job import TuneJob

BEGINNINGS: dict[str, Callable[[Path], Any]] = {
    "analysis": lambda _: pit_tvm.pit_axes(None),
    "kernels": KernelCache,
    "models": lambda path: import_model(path / "none.onnx", None, "attention_mask"),
    "tuning": lambda path: TuneJob((), resolve_target(), path, TileStore(path)).run(),
}


@pytest.mark.parametrize("begin", BEGINNINGS)
def test_an_interrupt_is_no_other_error(
    begin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(tvm_ffi.core.ERROR_NAME_TO_TYPE, "KeyboardInterrupt", raising=False)
    monkeypatch.delitem(tvm_ffi.core.ERROR_TYPE_TO_NAME, KeyboardInterrupt, raising=False)
    with contextlib.suppress(PitError):
        BEGINNINGS[begin](tmp_path)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tvm_ffi.structural_walk(tirx.Var("x", "int32") + 1, (ir.Var, interrupt))
