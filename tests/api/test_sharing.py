"""One operator among threads, calls and processes: the same results, and nothing built twice."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import pit_tvm
from pit_tvm import op
from pit_tvm.errors import DTypeError
from pit_tvm.reference import ops as reference
from pit_tvm.runtime import launch
from pit_tvm.structs import Lengths, Mask, Rows, SparsitySpec, Values
from pit_tvm.tile_db.store import TileStore
from tests.api.cases import CONV2D, LINEAR, MATMUL, REDUCE_SUM, Case
from tests.api.patterns import slice_pattern, zero_pattern
from tests.api.running import (
    assert_close,
    compiled,
    every_candidate,
    poison,
    random_array,
    random_inputs,
    truth_of,
)

THREADS = 4
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("case", "operand", "spec"),
    [
        (LINEAR, "lhs", Mask()),
        (LINEAR, "lhs", Lengths()),
        (REDUCE_SUM, "data", Values()),
        (CONV2D, "data", Mask()),
    ],
    ids=["masks", "lengths", "values", "generic"],
)
def test_threads_share_one_operator_on_patterns_of_their_own(
    case: Case, operand: str, spec: SparsitySpec, rng: np.random.Generator
) -> None:
    # Of its own, so that the threads also meet while kernels are built.
    operator = pit_tvm.compile(case.tensors("float32"), sparse={operand: spec})
    start = threading.Barrier(THREADS, timeout=60)

    def work(seed: int) -> int:
        own = np.random.default_rng(seed)
        start.wait()
        for _ in range(15):
            arrays = random_inputs(case, "float32", own)
            shape = arrays[operand].shape
            live = np.ones(shape[0], bool)
            if isinstance(spec, Lengths):
                live, given = slice_pattern(spec, "random", shape[0], own)
            else:
                mask, given = zero_pattern(spec, "random", shape, own)
                arrays[operand] = np.where(mask, arrays[operand], 0).astype(np.float32)
            truth = truth_of(case, arrays)
            out = poison(truth.shape, "float32")
            operator(*arrays.values(), sparsity=given, out=out)
            assert_close(out[live], truth[live], f"thread {seed}")
            assert np.isnan(out[~live]).all()
        return seed

    seeds = [int(s) for s in rng.integers(2**32, size=THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(work, seeds)) == seeds


@pytest.mark.parametrize("axis", ["m", "k"])
def test_deterministic_results_do_not_depend_on_the_order_of_row_ids(
    axis: str, rng: np.random.Generator
) -> None:
    dim = MATMUL.inputs["lhs"].index(axis)
    operator = compiled(MATMUL, "float32", "lhs", Rows(dim), deterministic=True)
    shape = (97, 211)
    lhs, rhs = random_array(shape, "float32", rng), random_array((211, 71), "float32", rng)
    ids = np.flatnonzero(rng.random(shape[dim]) < 0.6)
    first = operator(lhs, rhs, sparsity=ids, out=poison((97, 71), "float32"))
    for _ in range(5):
        again = operator(lhs, rhs, sparsity=rng.permutation(ids), out=poison((97, 71), "float32"))
        assert again.tobytes() == first.tobytes()


def test_sums_may_depend_on_the_order_of_row_ids_otherwise(rng: np.random.Generator) -> None:
    """What ``deterministic`` is for: along the summed axis order shows in the last bits."""
    operator = compiled(MATMUL, "float32", "lhs", Rows(1))
    lhs, rhs = random_array((97, 211), "float32", rng), random_array((211, 71), "float32", rng)
    ids = rng.permutation(211)[:200]
    results = [operator(lhs, rhs, sparsity=rng.permutation(ids)) for _ in range(5)]
    assert len({out.tobytes() for out in results}) > 1
    truth = reference.matmul(lhs[:, ids], rhs[ids])
    for out in results:
        assert_close(out, truth)


@pytest.mark.parametrize("spec", [Mask(), Values(), Lengths(), Rows()], ids=str)
def test_equal_calls_give_equal_bits(spec: SparsitySpec, rng: np.random.Generator) -> None:
    operator = compiled(LINEAR, "float32", "lhs", spec)
    arrays = random_inputs(LINEAR, "float32", rng)
    rows = arrays["lhs"].shape[0]
    pattern = {
        Mask: np.ones(arrays["lhs"].shape, bool),
        Lengths: np.array([rows]),
        Rows: np.arange(rows)[::2],
    }.get(type(spec))
    live = pattern if isinstance(spec, Rows) else slice(None)
    results = {operator(*arrays.values(), sparsity=pattern)[live].tobytes() for _ in range(4)}
    assert len(results) == 1


def test_kernels_are_built_once_and_plans_decided_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setenv("PIT_TVM_CACHE", str(tmp_path))
    store = TileStore.open(tmp_path)
    operator = pit_tvm.compile(op.matmul(None, 29, 131), sparse={"lhs": Mask()}, database=store)
    lhs, rhs = random_array((37, 131), "float32", rng), random_array((131, 29), "float32", rng)
    mask = np.ones((37, 131), bool)
    assert operator.stats.builds == operator.stats.disk_hits == 0
    for _ in every_candidate(operator, (lhs, rhs), mask, (37, 29), "float32"):
        pass
    built = operator.stats
    assert built.builds > 3 and built.build_seconds > 0
    assert len(list(tmp_path.glob("*.so"))) == built.builds
    plan = operator.profile(lhs, rhs, sparsity=mask).plan
    assert operator.profile(lhs[:29], rhs, sparsity=mask[:29]).plan is not plan
    assert operator.profile(lhs + 1, rhs, sparsity=mask.copy()).plan is plan
    assert operator.profile(lhs, rhs, sparsity=~mask).plan is not plan
    assert operator.profile(lhs, rhs, sparsity=mask).plan is plan
    assert operator.stats.builds == built.builds


def test_copies_share_operators_and_pickles_are_refused() -> None:
    operator = compiled(MATMUL, "float32", "lhs", Rows())
    for thing in (operator, operator.pack(rhs=np.ones((131, 29), np.float32))):
        assert copy.copy(thing) is copy.deepcopy(thing) is thing
        with pytest.raises(DTypeError, match=f"^{type(thing).__name__}: .*, got a pickle; compile"):
            pickle.dumps(thing)


SHIPPED_ALONE_US = launch.ALONE_US
ONE_CALL = """
import numpy as np
import pit_tvm
from pit_tvm import op

operator = pit_tvm.compile(op.matmul(None, 29, 131, bias=True), sparse={"lhs": pit_tvm.Rows()})
lhs, rhs = np.full((37, 131), 2, np.float32), np.full((131, 29), 3, np.float32)
out = operator(lhs, rhs, np.full(29, 5, np.float32), sparsity=[3, 1])
assert (out[[1, 3]] == 791).all()
print(operator.stats.builds, operator.stats.disk_hits, operator.stats.corrupt)
"""


def test_second_process_loads_what_the_first_one_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIT_TVM_CACHE", str(tmp_path / "kernels"))
    monkeypatch.setattr(launch, "ALONE_US", SHIPPED_ALONE_US)  # as the second process has it
    capsys.readouterr()
    exec(ONE_CALL, {})  # the first process is this one
    builds, hits, _ = (int(word) for word in capsys.readouterr().out.split())
    assert builds > 0 and hits == 0
    done = subprocess.run(
        [sys.executable, "-c", ONE_CALL],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [int(word) for word in done.stdout.split()] == [0, builds, 0]
