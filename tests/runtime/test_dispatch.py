"""One call: what is detected when, what is remembered, and that memory is not shared by mistake."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pit_tvm import op
from pit_tvm.errors import PatternError, ShapeError
from pit_tvm.runtime import launch
from pit_tvm.runtime.detect_ids import SliceCall
from pit_tvm.runtime.detect_sample import SampleCall
from pit_tvm.runtime.dispatch import Clock, Dispatcher
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.runtime.program import analyse
from pit_tvm.structs import Groups, Lengths, Mask, Rows, SparsitySpec, Values
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.store import TileStore

M, N, K = 61, 29, 131


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels of this module, and an empty database beside them."""
    return tmp_path_factory.mktemp("dispatch")


@pytest.fixture(autouse=True)
def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that want checks ask for them."""
    monkeypatch.delenv("PIT_TVM_CHECK", raising=False)


def dispatcher(
    folder: Path, spec: SparsitySpec, tensors: Any = None, *, dead: str = "skip"
) -> Dispatcher:
    tensors = tensors or op.matmul(None, N, K)
    operand = str(tensors[0].op.name)
    store = TileStore.create(folder / "database")
    cache = KernelCache(folder / "kernels")
    target = resolve_target("llvm")
    program = analyse(tensors, {operand: spec})
    return Dispatcher(program, target, store, cache, deterministic=False, dead=dead)


def operands(m: int = M, n: int = N, k: int = K) -> list[np.ndarray]:
    rng = np.random.default_rng()
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n))]


class Watched:
    """Counts the calls of one method of an object."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.options: list[dict[str, Any]] = []
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(args)
            self.options.append(kwargs)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)


def close(found: np.ndarray, truth: np.ndarray) -> bool:
    return bool(np.abs(found - truth).max() <= 1e-5 * np.abs(truth).max())


def test_named_rows_are_listed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = dispatcher(folder, Rows())
    listed = Watched(monkeypatch, SliceCall, "index")
    sample = Watched(monkeypatch, SampleCall, "take")
    lhs, rhs = operands()
    out, plan = own.run([lhs, rhs], np.arange(M)[::2], None)
    assert len(listed.calls) == 1 and sample.calls == []
    assert plan is not None and plan.choice.kind == "pit"
    assert close(out[::2], (lhs.astype(np.float64) @ rhs)[::2])


def test_mask_is_sampled_and_only_the_chosen_axis_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = dispatcher(folder, Mask(), op.matmul(None, 256, 256))
    detect = Watched(monkeypatch, own.detector, "detect")
    sample = Watched(monkeypatch, SampleCall, "take")
    lhs, rhs = operands(2048, 256, 256)
    mask = np.zeros(lhs.shape, bool)
    mask[64:96] = True
    lhs *= mask
    out, plan = own.run([lhs, rhs], mask, None)
    assert close(out, lhs.astype(np.float64) @ rhs)
    assert plan is not None and plan.choice.micro_tile is not None
    assert len(sample.calls) == 1
    assert [call[3] for call in detect.calls] == [plan.choice.micro_tile]


def test_dense_choice_builds_no_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = dispatcher(folder, Mask())
    detect = Watched(monkeypatch, own.detector, "detect")
    lhs, rhs = operands(2048)
    out, plan = own.run([lhs, rhs], np.ones(lhs.shape, bool), None)
    assert plan is not None and plan.choice.kind == "dense"
    assert detect.calls == []
    assert close(out, lhs.astype(np.float64) @ rhs)


@pytest.mark.parametrize("spec", [Rows(), Mask()])
def test_only_small_products_are_left_to_the_calling_thread(
    spec: SparsitySpec, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lhs, rhs = operands()
    live = np.zeros(M, bool)
    live[::3] = True
    told = np.flatnonzero(live) if isinstance(spec, Rows) else np.repeat(live[:, None], K, axis=1)
    lhs *= live[:, None]
    truth = lhs.astype(np.float64) @ rhs
    for limit, alone in ((1e9, True), (0.0, False)):
        monkeypatch.setattr(launch, "ALONE_US", limit)
        own = dispatcher(folder, spec)
        asked = Watched(monkeypatch, own.kernels, "sparse")
        plan = own.explain([lhs, rhs], told, {}, "numpy")
        tiles = [number for number, c in enumerate(plan.candidates) if c.tile is not None]
        for number in tiles:
            out = np.full((M, N), np.nan, np.float32)
            own.run([lhs, rhs], told, out, choose=lambda p, n=number: p.candidates[n])
            assert close(out[live], truth[live])
        assert [options["alone"] for options in asked.options] == [alone] * len(tiles)


def test_caller_may_choose_the_candidate(folder: Path) -> None:
    own = dispatcher(folder, Mask())
    lhs, rhs = operands()
    mask = np.ones(lhs.shape, bool)
    cheapest = own.run([lhs, rhs], mask, None)[1]
    assert cheapest is not None
    for number, candidate in enumerate(cheapest.candidates):
        out, plan = own.run([lhs, rhs], mask, None, choose=lambda p, n=number: p.candidates[n])
        assert plan is not None and plan.choice is candidate
        assert close(out, lhs.astype(np.float64) @ rhs)
    assert own.run([lhs, rhs], mask, None)[1] is cheapest


def test_results_of_two_calls_do_not_share_memory(folder: Path) -> None:
    own = dispatcher(folder, Lengths())
    lhs, rhs = operands()
    first, _ = own.run([lhs, rhs], [M], None)
    kept = first.copy()
    second, _ = own.run([lhs + 1, rhs], [M], None)
    assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(first, kept)


def test_sizes_may_change_from_call_to_call(folder: Path) -> None:
    own = dispatcher(folder, Values())
    for rows in (61, 1, 300, 2, 128, 61):
        lhs, rhs = operands(rows)
        lhs[::3] = 0
        out, _ = own.run([lhs, rhs], None, None)
        assert close(out, lhs.astype(np.float64) @ rhs)


def test_workspaces_of_threads_are_apart(folder: Path) -> None:
    own = dispatcher(folder, Rows())
    found = [own.launcher.workspace()]
    thread = threading.Thread(target=lambda: found.append(own.launcher.workspace()))
    thread.start()
    thread.join()
    assert found[0] is own.launcher.workspace() and found[0] is not found[1]


def test_empty_result_plans_nothing(folder: Path) -> None:
    own = dispatcher(folder, Rows())
    out, plan = own.run([np.empty((0, K), np.float32), operands()[1]], np.empty(0, int), None)
    assert out.shape == (0, N) and plan is None


def test_pattern_of_an_empty_operand_is_checked_too(folder: Path) -> None:
    own = dispatcher(folder, Mask())
    lhs, rhs = np.empty((0, K), np.float32), operands()[1]
    with pytest.raises(ShapeError, match="^sparsity.*Mask"):
        own.run([lhs, rhs], np.ones((3, K), bool), None)


def test_group_ids_default_to_the_operand(folder: Path) -> None:
    tensors = op.grouped_matmul(None, N, K, 3)
    own = dispatcher(folder, Groups(3), tensors)
    rng = np.random.default_rng()
    lhs, rhs = operands()[0], rng.standard_normal((3, K, N)).astype(np.float32)
    ids = rng.integers(0, 3, M).astype(np.int32)
    out, _ = own.run([lhs, rhs, ids], None, None)
    assert close(out, np.einsum("mk,mkn->mn", lhs.astype(np.float64), rhs[ids]))


def test_checks_run_only_when_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = dispatcher(folder, Mask())
    lhs, rhs = operands()
    nothing = np.zeros(lhs.shape, bool)
    own.run([lhs, rhs], nothing, None)
    monkeypatch.setenv("PIT_TVM_CHECK", "1")
    own.run([lhs, rhs], nothing, None)  # what was compiled before stays as it is
    own = dispatcher(folder, Mask())
    with pytest.raises(PatternError, match=f"^lhs outside its pattern.*{lhs.size} other"):
        own.run([lhs, rhs], nothing, None)


def test_packed_weight_is_shared_by_calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = dispatcher(folder, Lengths())
    lhs, rhs = operands()
    packed = own.pack("rhs", rhs)
    pack = Watched(monkeypatch, own.kernels, "pack")
    for length in (5, 50):
        out, _ = own.run([lhs, packed], [length], None)
        assert close(out[:length], (lhs.astype(np.float64) @ rhs)[:length])
    assert pack.calls == []
    own.run([lhs, rhs], [5], None)
    assert len(pack.calls) == 1


def test_clock_laps_are_microseconds_since_the_last_one() -> None:
    clock = Clock()
    time.sleep(0.002)
    assert 2e3 <= clock.lap() < 1e6
    assert 0 <= clock.lap() < 2e3


def test_steps_of_a_call_are_timed(folder: Path) -> None:
    own = dispatcher(folder, Lengths())
    clock = Clock()
    own.run(operands(), [M // 2], None, clock)
    assert min(clock.index_us, clock.select_us, clock.kernel_us) > 0
