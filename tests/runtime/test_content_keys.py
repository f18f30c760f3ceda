"""Keys of kernels: what they differ by, what they agree in, and what has none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import tvm
from tvm import te

from pit_tvm.errors import BackendUnavailable, DTypeError
from pit_tvm.op import matmul
from pit_tvm.runtime import content_keys
from pit_tvm.runtime.content_keys import content_key
from pit_tvm.structs import Mask, Tile


@dataclass(frozen=True)
class Knobs:
    unroll: int = 1


PARTS = [
    (),
    (None,),
    (True,),
    (1,),
    (1.0,),
    ("1",),
    (b"1",),
    ("a", "b"),
    ("ab",),
    (("a", "b"),),
    ({"a": 1, "b": 2},),
    ({"a": 1, "b": 3},),
    (Knobs(1),),
    (Knobs(2),),
    (Mask(32, 1),),
    (Tile("contraction", "avx512", "float32", 8, 48, 64, (("unroll", 4),)),),
    (tvm.target.Target("llvm"),),
    (tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"}),),
    (te.create_prim_func(matmul(None, 4, 8)),),
    (te.create_prim_func(matmul(None, 4, 9)),),
]


def test_keys_differ_where_parts_differ():
    keys = {content_key(*parts) for parts in PARTS}
    assert len(keys) == len(PARTS)
    assert all(len(key) == 64 for key in keys)


def test_keys_agree_where_parts_agree():
    assert content_key({"a": 1, "b": (2, 3)}) == content_key({"b": [2, 3], "a": 1})
    assert content_key(Knobs(2)) == content_key(Knobs(2))
    build = lambda: te.create_prim_func(matmul(None, 4, 8, activation="gelu"))  # noqa: E731
    assert content_key(build()) == content_key(build())


def test_keys_follow_versions_and_source(monkeypatch, tmp_path):
    before = content_key("a")
    (tmp_path / "schedules").mkdir()
    (tmp_path / "schedules" / "contraction.py").write_text("changed = True\n")
    original = content_keys._generator_folder
    with monkeypatch.context() as patch:
        moved = lambda n: tmp_path / n if n == "schedules" else original(n)  # noqa: E731
        patch.setattr(content_keys, "_generator_folder", moved)
        content_keys._fingerprint.cache_clear()
        source = content_key("a")
    with monkeypatch.context() as patch:
        patch.setattr(content_keys, "__version__", "0.0.0")
        content_keys._fingerprint.cache_clear()
        version = content_key("a")
    content_keys._fingerprint.cache_clear()
    assert len({before, source, version}) == 3
    assert content_key("a") == before


def test_missing_source_is_an_error():
    with pytest.raises(BackendUnavailable, match="install the package again"):
        content_keys._generator_folder("nonexistent")


@pytest.mark.parametrize("part", [object(), {1, 2}, np.float32(1), lambda: 1, Knobs])
def test_a_part_without_a_canonical_form_is_refused(part):
    with pytest.raises(DTypeError, match="^content_key: expected plain values"):
        content_key("a", part)
