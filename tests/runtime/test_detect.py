"""Detection against the slow reference, on every kind of pattern, and its refusals."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pit_tvm.errors import DTypeError, ShapeError
from pit_tvm.reference.index import index_lists
from pit_tvm.runtime import detect_compact, detect_plan
from pit_tvm.runtime.detect import Detector, compile_kernel
from pit_tvm.runtime.detect_workspace import Workspace
from pit_tvm.structs import (
    BitMask,
    BlockMask,
    Mask,
    MicroTile,
    Rows,
    SparsitySpec,
    Values,
)
from pit_tvm.target import resolve_target
from tests.runtime.detect_check import FLOATS, INTEGERS, as_values, check


@dataclass(frozen=True)
class Case:
    """One pattern as the user passes it."""

    spec: SparsitySpec
    value: np.ndarray
    shape: tuple[int, ...]
    micro_tile: MicroTile


@st.composite
def masks(draw: st.DrawFn) -> Case:
    rank = draw(st.integers(1, 4))
    sides = st.integers(1, {1: 300, 2: 90, 3: 24, 4: 11}[rank])
    shape = tuple(draw(st.lists(sides, min_size=rank, max_size=rank)))
    dim = draw(st.integers(0, rank - 1))
    sizes = st.sampled_from([0, 1, 2, 3, 5, 8, 16, 32, 64, 100])
    extents = [1 if d == dim else draw(sizes) for d in range(rank)]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    density = draw(st.sampled_from([0.0, 0.01, 0.1, 0.7, 1.0]))
    kind = draw(st.sampled_from(["mask", "bytes", "bits", "blocks", "values"]))
    live = rng.random(shape) < density
    spec: SparsitySpec = Mask()
    value: np.ndarray = live
    if kind == "bytes":
        value = live * rng.integers(1, 256, shape).astype(np.uint8)
    elif kind == "bits":
        spec, value = BitMask(), np.packbits(live, axis=-1, bitorder="little")
    elif kind == "blocks":
        grains = [draw(st.sampled_from([1, 2, 3, 8, 32])) for _ in shape]
        blocks = tuple(-(-n // g) for n, g in zip(shape, grains, strict=True))
        spec, value = BlockMask(*grains), rng.random(blocks) < density
    elif kind == "values":
        spec, value = Values(), as_values(live, draw(st.sampled_from(FLOATS + INTEGERS)), rng)
    return Case(spec, value, shape, MicroTile("lhs", "k", dim, tuple(extents)))


@settings(max_examples=250, deadline=None)
@given(case=masks())
def test_mask_of_any_rank_kind_and_micro_tile(detector: Detector, case: Case) -> None:
    check(detector, case.spec, case.value, case.shape, case.micro_tile)


@st.composite
def folded_rows(draw: st.DrawFn) -> Case:
    """Micro-tiles of rows whose lists one pass makes, PIT last or before whole dimensions."""
    # widths on either side of what is folded at once, of every type
    wide = draw(st.integers(1, 1300) | st.integers(2000, 2100) | st.integers(4090, 4200))
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 90)), wide)
    extents = (1, draw(st.sampled_from([2, 3, 8, 32, 64])), 1)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    live = rng.random(shape) < draw(st.sampled_from([0.0, 0.003, 0.1, 1.0]))
    spec: SparsitySpec = Mask()
    value: np.ndarray = live
    kind = draw(st.sampled_from(["mask", "bytes", "blocks", *FLOATS, "int8", "int64"]))
    if kind == "bytes":
        value = live * rng.integers(1, 256, shape).astype(np.uint8)
    elif kind == "blocks":
        grains = (draw(st.integers(1, 2)), draw(st.integers(1, 9)), 1)
        blocks = tuple(-(-n // g) for n, g in zip(shape, grains, strict=True))
        spec, value = BlockMask(*grains), rng.random(blocks) < 0.05
    elif kind != "mask":
        spec, value = Values(), as_values(live, kind, rng)
    return Case(spec, value, shape, MicroTile("lhs", "k", 2, extents))


@settings(max_examples=120, deadline=None)
@given(case=folded_rows(), workers=st.booleans())
def test_one_pass_and_two_passes_give_the_same_lists(case: Case, workers: bool) -> None:
    arguments = (case.spec, case.value, case.shape, case.micro_tile)
    found = []
    for slots in (1, 10**9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(detect_plan, "ONE_PASS_SLOTS", slots)
            if workers:
                patch.setattr(detect_plan, "PARALLEL_BYTES", 1)
            fresh = Detector(COMPILED.target, COMPILED.for_detection)
            found.append(check(fresh, *arguments))
    np.testing.assert_array_equal(found[0].count, found[1].count)


class Compiled:
    """Kernels that several detectors share."""

    def __init__(self) -> None:
        self.target: Any = resolve_target("llvm").tvm_target
        self.kernels: dict[str, Callable[..., Any]] = {}

    def for_detection(self, name: str, build: Callable[[], Any], target: Any) -> Callable[..., Any]:
        if name not in self.kernels:
            self.kernels[name] = compile_kernel(name, build, target)
        return self.kernels[name]


COMPILED = Compiled()


def test_one_pass_serves_large_masks_of_row_micro_tiles() -> None:
    tile = MicroTile("lhs", "k", 1, (32, 1))
    large, small = (
        detect_plan.plan_mask((rows, 4096), tile, detect_plan.FLAGS) for rows in (4096, 256)
    )
    assert large.folds == () and large.last is not None and len(small.folds) == 1
    assert large.last.needs_table and large.last.build.func is detect_compact.fold_compact


@pytest.mark.parametrize("density", [0.0, 0.003, 1.0])
@pytest.mark.parametrize(
    ("dim", "extents"),
    [
        (1, (32, 1)),
        (0, (1, 64)),
        (1, (0, 1)),
        (0, (1, 0)),
        (1, (256, 1)),
        (0, (1, 16)),
        (1, (1, 1)),
    ],
)
@pytest.mark.parametrize("kind", ["mask", "bits", "blocks", "values"])
def test_large_operand_is_split_among_workers(
    detector: Detector, kind: str, dim: int, extents: tuple[int, int], density: float
) -> None:
    rng = np.random.default_rng(11)
    live = rng.random((1030, 805)) < density
    spec, value = {
        "mask": lambda: (Mask(), live),
        "bits": lambda: (BitMask(), np.packbits(live, axis=-1, bitorder="little")),
        "blocks": lambda: (BlockMask(2, 3), live[:515, :269]),
        "values": lambda: (Values(), as_values(live, "float32", rng)),
    }[kind]()
    value = np.ascontiguousarray(value)
    check(detector, spec, value, live.shape, MicroTile("lhs", "k", dim, extents))


@pytest.mark.parametrize("mcpu", ["x86-64-v3", "x86-64"])
def test_code_for_other_cpus_of_the_family_agrees(mcpu: str) -> None:
    other = Detector({"kind": "llvm", "mcpu": mcpu})
    live = np.random.default_rng(2).random((70, 201)) < 0.05
    for dim, extents in ((1, (8, 1)), (0, (1, 64)), (0, (1, 8))):
        check(other, Mask(), live, live.shape, MicroTile("lhs", "k", dim, extents))
    sample = other.sampling(Mask(), live.shape).take(live)
    assert sample.densities[0] == pytest.approx(live.mean())


# -- memory


def by_views(live: np.ndarray) -> dict[str, np.ndarray]:
    """The same mask in memory that is harder to pass on."""
    frozen = live.copy()
    frozen.flags.writeable = False
    odd = np.zeros(live.size + 3, np.uint8)[3:].view(np.bool_).reshape(live.shape)
    odd[...] = live
    inside = np.zeros((3, *live.shape), np.bool_)
    inside[1] = live
    return {"read-only": frozen, "odd offset": odd, "slice": inside[1]}


@pytest.mark.parametrize("view", ["read-only", "odd offset", "slice"])
def test_mask_is_read_where_it_lies(detector: Detector, view: str) -> None:
    live = np.random.default_rng(6).random((67, 129)) < 0.1
    value = by_views(live)[view]
    check(detector, Mask(), value, live.shape, MicroTile("lhs", "k", 1, (32, 1)))
    check(detector, Mask(), value, live.shape, MicroTile("lhs", "m", 0, (1, 64)))
    assert np.array_equal(value, live)


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_are_read_from_unaligned_and_read_only_memory(
    detector: Detector, dtype: str
) -> None:
    rng = np.random.default_rng(8)
    values = as_values(rng.random((33, 70)) < 0.1, dtype, rng)
    raw = b"\0" + values.tobytes()
    unaligned = np.frombuffer(raw, values.dtype, offset=1).reshape(values.shape)
    assert not unaligned.flags.aligned and not unaligned.flags.writeable
    check(detector, Values(), unaligned, values.shape, MicroTile("lhs", "k", 1, (8, 1)))


@pytest.mark.parametrize("kind", [Mask(), BitMask(), BlockMask(4, 4), Values()], ids=str)
@pytest.mark.parametrize("shape", [(0, 9), (9, 0), (0, 0)])
@pytest.mark.parametrize(("dim", "extents"), [(1, (4, 1)), (0, (1, 0)), (1, (0, 1))])
def test_empty_operand_gives_empty_lists(
    detector: Detector,
    kind: SparsitySpec,
    shape: tuple[int, int],
    dim: int,
    extents: tuple[int, int],
) -> None:
    grain = 8 if isinstance(kind, BitMask) else 4 if isinstance(kind, BlockMask) else 1
    columns = -(-shape[1] // grain)
    rows = -(-shape[0] // 4) if isinstance(kind, BlockMask) else shape[0]
    index = detector.detect(
        kind, np.zeros((rows, columns), np.uint8), shape, MicroTile("lhs", "k", dim, extents)
    )
    slots = [
        -(-n // e) for d, (n, e) in enumerate(zip(shape, extents, strict=True)) if d != dim and e
    ]
    assert index.count.shape == (tuple(slots) or (1,))
    assert not index.count.any()
    assert index.ids.shape[-1] == 64
    assert (
        not detector.sampling(kind, shape).take(np.zeros((rows, columns), np.uint8)).live[:-2].any()
    )


def test_workspace_memory_is_used_again_for_the_same_operand_only(detector: Detector) -> None:
    memory = Workspace()
    live = np.ones((64, 64), np.bool_)
    tile, other = (MicroTile(name, "k", 1, (32, 1)) for name in ("lhs", "rhs"))
    first = detector.detect(Mask(), live, live.shape, tile, workspace=memory)
    kept = detector.detect(Mask(), live, live.shape, other, workspace=memory)
    again = detector.detect(Mask(), ~live, live.shape, tile, workspace=memory)
    assert np.shares_memory(first.ids, again.ids)
    assert not np.shares_memory(first.ids, kept.ids)
    assert first.count.tolist() == [0, 0]
    assert kept.count.tolist() == [64, 64]
    alone = detector.detect(Mask(), live, live.shape, tile)
    assert not np.shares_memory(alone.ids, detector.detect(Mask(), live, (64, 64), tile).ids)


def test_workspace_grows_by_doubling_and_keeps_its_memory() -> None:
    memory = Workspace()
    small = memory.take("a", (10,), np.int32)
    assert memory.take("a", (10,), np.int32) is small
    large = memory.take("a", (3, 40), np.int64)
    assert large.shape == (3, 40) and large.dtype == np.int64 and large.ctypes.data % 64 == 0
    assert np.shares_memory(large, memory.take("a", (5,), np.int8))
    assert not np.shares_memory(large, memory.take("b", (5,), np.int8))


def test_threads_with_their_own_workspaces_do_not_disturb_each_other(detector: Detector) -> None:
    rng = np.random.default_rng(9)
    tile = MicroTile("lhs", "k", 1, (16, 1))
    masks_ = [rng.random((500, 300)) < density for density in (0.002, 0.1)]
    truth = [index_lists(Mask(), live, live.shape, tile) for live in masks_]
    wrong: list[int] = []

    def work(number: int) -> None:
        memory = Workspace()
        for _ in range(30):
            index = detector.detect(
                Mask(), masks_[number], masks_[number].shape, tile, workspace=memory
            )
            for found, count, ids in zip(index.ids, index.count, truth[number], strict=True):
                if not np.array_equal(found[:count], ids):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# -- kernels


def test_kernels_come_from_the_callers_cache_once_and_serve_every_shape() -> None:
    asked: Counter[str] = Counter()

    def get_kernel(name: str, build: Callable[[], Any], target: Any) -> Callable[..., Any]:
        asked[name] += 1
        return compile_kernel(name, build, target)

    detector = Detector("llvm", get_kernel)
    rng = np.random.default_rng(10)
    for number in range(40):
        shape = (7 + 13 * number, 9 + 11 * number)
        live = rng.random(shape) < 0.1
        for dim, extents in ((1, (32, 1)), (0, (1, 64))):
            detector.detect(Mask(), live, shape, MicroTile("lhs", "k", dim, extents))
    assert set(asked.values()) == {1}
    # two folds, one compaction and one pass of both, each for one and for several workers
    assert len(asked) <= 8


# -- refusals

TILE = MicroTile("lhs", "k", 1, (4, 1))
LIVE = np.ones((8, 6), np.bool_)


@pytest.mark.parametrize(
    ("spec", "value", "error", "text"),
    [
        (Mask(), LIVE.astype(np.float32), DTypeError, "bool or uint8.*float32"),
        (Mask(), np.full((8, 6), np.nan), DTypeError, "bool or uint8.*float64"),
        (Mask(), LIVE.astype(np.int32), DTypeError, "bool or uint8.*int32"),
        (Mask(), LIVE[:, :5].copy(), ShapeError, r"\(8, 6\).*\(8, 5\)"),
        (Mask(), LIVE.T, ShapeError, r"\(8, 6\).*\(6, 8\)"),
        (Mask(), LIVE.repeat(2, 1)[:, ::2], ShapeError, "contiguous"),
        (Mask(), None, DTypeError, "bool or uint8"),
        (BitMask(), np.ones((8, 1), np.bool_), DTypeError, "uint8.*bool"),
        (BitMask(), np.ones((8, 6), np.uint8), ShapeError, r"\(8, 1\).*\(8, 6\)"),
        (BlockMask(4, 4), np.ones((2, 1), np.bool_), ShapeError, r"\(2, 2\).*\(2, 1\)"),
        (BlockMask(4), np.ones(2, np.bool_), ShapeError, "BlockMask"),
        (Values(), LIVE.astype(">f4"), DTypeError, "byte-swapped"),
        (Values(), LIVE.astype(np.complex64), DTypeError, "complex64"),
    ],
)
def test_bad_mask_is_refused_by_name(
    detector: Detector, spec: SparsitySpec, value: Any, error: type[Exception], text: str
) -> None:
    name = "BlockMask" if text == "BlockMask" else "sparsity of lhs"
    with pytest.raises(error, match=f"(?s){name}.*{text}" if name != text else text):
        detector.detect(spec, value, (8, 6), TILE)


@pytest.mark.parametrize(
    ("spec", "shape", "tile", "text"),
    [
        (Mask(), (8, 6), MicroTile("lhs", "k", 0, (1,)), "micro_tile.extents"),
        (Mask(), (8, 2**31), MicroTile("lhs", "k", 1, (1, 1)), "shape"),
        (Rows(), (8, 6), MicroTile("lhs", "m", 0, (1, 4)), "micro_tile.extents.*whole slices"),
    ],
)
def test_micro_tile_that_does_not_fit_is_refused(
    detector: Detector, spec: SparsitySpec, shape: tuple[int, ...], tile: MicroTile, text: str
) -> None:
    with pytest.raises(ShapeError, match=text):
        detector.detect(spec, LIVE, shape, tile)
