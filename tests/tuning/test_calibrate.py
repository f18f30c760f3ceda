"""Measured libraries and device constants."""

from __future__ import annotations

import numpy as np
import pytest

from pit_tvm.errors import TuningError
from pit_tvm.structs import TileTask
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.record import make_provenance, record_from_json
from pit_tvm.tuning.calibrate import NUMPY, Library, measure_library, measure_profile

PROVENANCE = make_provenance("any-avx2", "x86-64-v3", 2)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_numpy_is_measured_in_every_dtype(dtype: str) -> None:
    task = TileTask("contraction", "avx2", dtype, 17, 33, 65)
    record = measure_library(task, PROVENANCE, seed=3)
    assert (record.kind, record.note, record.task) == ("library", "numpy", task)
    assert len(record.run_secs) == 3 and record.secs > 0
    assert record_from_json(record.to_json()) == record


def test_library_gets_what_it_prepared() -> None:
    seen = set()

    def product(lhs, rhs, out) -> None:
        seen.update(type(array) for array in (lhs, rhs, out))
        NUMPY.product(np.asarray(lhs), np.asarray(rhs), np.asarray(out))

    task = TileTask("contraction", "avx2", "float32", 4, 4, 4)
    record = measure_library(task, PROVENANCE, Library("views", product, memoryview))
    assert seen == {memoryview} and record.note == "views"


def test_wrong_library_is_refused() -> None:
    task = TileTask("contraction", "avx2", "float32", 8, 8, 8)
    broken = Library("broken", lambda lhs, rhs, out: out.fill(3.0))
    with pytest.raises(TuningError, match="product of broken"):
        measure_library(task, PROVENANCE, broken)


def test_profile_holds_plausible_constants() -> None:
    target = resolve_target("llvm")
    record = measure_profile(target, {"other_gbps": lambda: 3.0})
    profile = dict(record.profile)
    own = {"gather_gbps", "gather_cached_gbps", "store_gbps", "launch_us"}
    assert set(profile) == {*own, "other_gbps"}
    assert all(0.01 < profile[name] < 1e5 for name in own - {"launch_us"}), profile
    assert 0 < profile["launch_us"] < 1e4  # next to nothing where there is one thread
    assert profile["other_gbps"] == 3.0
    assert (record.provenance.device, record.provenance.arch) == (target.device, target.mcpu)
    assert record_from_json(record.to_json()) == record
