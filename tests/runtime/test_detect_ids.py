"""Detection on row ids, lengths and group ids, and its refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pit_tvm.errors import AxisError, DTypeError, ShapeError
from pit_tvm.runtime.detect import Detector
from pit_tvm.runtime.detect_ids import SliceCall
from pit_tvm.structs import Groups, Lengths, MicroTile, Rows, SparsitySpec
from tests.runtime.detect_check import Guarded, check

ROWS = MicroTile("lhs", "m", 0, (1, 0))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 200),
    wide=st.booleans(),
    ordered=st.booleans(),
    share=st.floats(0.0, 1.0),
)
def test_row_ids_become_one_list(
    detector: Detector, seed: int, rows: int, wide: bool, ordered: bool, share: float
) -> None:
    ids = np.random.default_rng(seed).permutation(rows)[: int(share * rows)]
    ids = ids.astype(np.int64 if wide else np.int32)
    index = check(
        detector,
        Rows(1),
        ids,
        (3, rows),
        MicroTile("lhs", "k", 1, (0, 1)),
        deterministic=ordered,
    )
    expected = np.sort(ids) if ordered else ids
    assert np.array_equal(index.ids[0, : ids.size], expected)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), max_size=12),
    spare=st.integers(0, 9),
    wide=st.booleans(),
    cumulative=st.booleans(),
)
def test_lengths_become_the_rows_of_their_sequences(
    detector: Detector, lengths: list[int], spare: int, wide: bool, cumulative: bool
) -> None:
    padded = max(lengths, default=0) + spare
    given_ = np.cumsum([0, *lengths]) if cumulative else np.array(lengths)
    given_ = given_.astype(np.int64 if wide else np.int32)
    shape = (padded * len(lengths), 7)
    tile = MicroTile("lhs", "m", 0, (1, 0))
    check(detector, Lengths(cumulative=cumulative), given_, shape, tile)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 300),
    groups=st.integers(0, 20),
    wide=st.booleans(),
)
def test_group_ids_become_one_list_per_group(
    detector: Detector, seed: int, rows: int, groups: int, wide: bool
) -> None:
    ids = np.random.default_rng(seed).integers(-1, groups, rows)
    ids = ids.astype(np.int64 if wide else np.int32)
    tile = MicroTile("lhs", "m", 0, (1, 0, 0))
    check(detector, Groups(groups), ids, (rows, 2, 3), tile)


@pytest.mark.parametrize("skewed", [False, True])
def test_many_group_ids_are_split_among_workers(detector: Detector, skewed: bool) -> None:
    rng = np.random.default_rng(4)
    ids = np.full(100_003, 2) if skewed else rng.integers(-1, 5, 100_003)
    check(detector, Groups(5), ids, (ids.size, 8), MicroTile("lhs", "m", 0, (1, 0)))


def test_ids_may_be_strided_and_read_only(detector: Detector) -> None:
    ids = np.arange(40)[::-2]
    ids.flags.writeable = False
    check(detector, Rows(), ids, (40, 3), MicroTile("lhs", "m", 0, (1, 0)))


@pytest.mark.parametrize(
    ("spec", "value", "error", "text"),
    [
        (Rows(), [0, 8], ShapeError, "row ids.*0 to 7.*8 at position 1"),
        (Rows(), [3, -1], ShapeError, "row ids.*-1 at position 1"),
        (Rows(), np.array([2**32 + 1]), ShapeError, "row ids.*4294967297"),
        (Rows(), list(range(9)), ShapeError, "row ids.*at most 8"),
        (Rows(), [[1]], ShapeError, "one dimension"),
        (Rows(), 1, ShapeError, "one dimension"),
        (Rows(), [0.5], DTypeError, "int32 or int64.*float64"),
        (Rows(), np.array([1], np.uint8), DTypeError, "uint8"),
        (Lengths(), [1, 2, 3], ShapeError, "lengths.*divides 8"),
        (Lengths(), np.zeros(0, np.int32), ShapeError, "lengths.*divides 8"),
        (Lengths(), [5, 1], ShapeError, "0 to 4 rows.*5 at position 0"),
        (Lengths(), [1, -2], ShapeError, "-2 at position 1"),
        (Lengths(), [1.0, 2.0], DTypeError, "int32 or int64"),
        (Lengths(cumulative=True), [1, 2, 3], ShapeError, "cu_seqlens.*start at 0.*1"),
        (Lengths(cumulative=True), [0, 5, 6], ShapeError, "0 to 4 rows.*5 at position 0"),
        (Lengths(cumulative=True), [0, 3, 2], ShapeError, "-1 at position 1"),
        (Lengths(cumulative=True), np.zeros(0, np.int32), ShapeError, "cu_seqlens"),
        (Lengths(cumulative=True), np.array([0, 2**31 - 1, -1], np.int32), ShapeError, "0 to 4"),
        (Lengths(), np.array([-(2**63), 1]), ShapeError, "-9223372036854775808 at position 0"),
        (Groups(2), [0] * 7, ShapeError, "group ids.*8 ids.*7"),
        (Groups(0), [0] * 8, ShapeError, r"expected ids of -1 \(none\), of no groups, got 0"),
        (Groups(2), [0] * 7 + [2], ShapeError, "-1 .none. to 1.*2 at position 7"),
        (Groups(2), [-2] + [0] * 7, ShapeError, "-2 at position 0"),
        (Groups(2), [0.0] * 8, DTypeError, "int32 or int64"),
        (SparsitySpec(), [0], AxisError, "spec"),
        (Rows(1), [0], AxisError, "micro_tile.dim"),
    ],
)
def test_bad_ids_are_refused_by_name(
    detector: Detector, spec: SparsitySpec, value: Any, error: type[Exception], text: str
) -> None:
    memory = Guarded()
    with pytest.raises(error, match=f"(?s){text}"):
        detector.detect(spec, value, (8, 6), ROWS, workspace=memory)
    assert memory.intact


PLAIN = {
    Rows(): ([3, 1, 7], [3, 1, 8], [-1], [0] * 9),
    Lengths(): ([4, 1], [5, 1], [1, -1], [1, 2, 3]),
    Lengths(cumulative=True): ([0, 4, 5], [0, 5, 6], [1, 2, 3], [0, 1, 2, 3]),
    Groups(2): ([0, 1, -1, 1, 0, 0, 1, 1], [2] * 8, [-2] * 8, [0] * 7),
}


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("spec", PLAIN, ids=str)
def test_plain_ids_are_taken_as_they_are_and_checked_every_time(
    detector: Detector, spec: SparsitySpec, wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices, memory = detector.slices(spec, (8, 6), ROWS), Guarded()
    good, *bad = (np.array(ids) for ids in PLAIN[spec])
    wanted = slices.index(good).ids.copy()
    slices.index(wrap(good), memory)
    with monkeypatch.context() as short:
        short.delattr(SliceCall, "_long")
        assert np.array_equal(slices.index(wrap(good), memory).ids, wanted)
    for ids in (*bad, good.reshape(1, -1), good.astype(np.int16)):
        with pytest.raises((ShapeError, DTypeError), match="^sparsity of lhs"):
            slices.index(wrap(ids), memory)
        assert memory.intact
    frozen, spread = good.copy(), wrap(np.repeat(good, 2))[::2]
    frozen.flags.writeable = False
    for ids in (frozen, spread, wrap(good.astype(np.int32)), good.tolist(), wrap(good)):
        assert np.array_equal(slices.index(ids, memory).ids, wanted)


def test_repeated_row_ids_are_refused_by_a_checked_detector_only(detector: Detector) -> None:
    ids = np.array([4, 1, 7, 1])
    index = detector.detect(Rows(), ids, (8, 6), ROWS)
    assert index.count.tolist() == [4]
    checked = Detector(detector.target, checked=True)
    with pytest.raises(ShapeError, match="row ids.*1 again at position 3"):
        checked.detect(Rows(), ids, (8, 6), ROWS)
    check(checked, Rows(), ids[:3], (8, 6), ROWS)
