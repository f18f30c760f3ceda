"""`atomic_adds`: indexed stores are marked to add while others do."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.script import tirx as T

from pit_tvm.errors import ScheduleError
from pit_tvm.primitive.atomic_adds import atomic_adds
from tests.primitive.replay import assert_schedules, fresh


def added(notes: dict[str, int], factor: int = 1) -> Any:
    """A function that stores ``factor`` times its target and more, with annotations ``notes``."""

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4,), "float32"), ids: T.Buffer((4,), "int32"), out: T.Buffer((9,))):
        acc = T.sblock_alloc_buffer((4,))
        for i in range(4):
            with T.sblock("acc"):
                v = T.axis.spatial(4, i)
                acc[v] = A[v] * T.float32(2)
        for i in range(4):
            with T.sblock("out"):
                v = T.axis.spatial(4, i)
                T.reads(acc[v], ids[v])
                T.writes(out[ids[v]])
                T.sblock_attr(notes)
                out[ids[v]] = out[ids[v]] * T.float32(factor) + acc[v]

    return func


STORE = {"pit.swrite": 1}


def test_store_is_annotated_and_nothing_else_changes() -> None:
    sch = fresh(added(STORE))
    atomic_adds(sch, sch.get_sblock("out"))
    assert_schedules(sch, added(STORE), added({**STORE, "pit.atomic_adds": 1}))


def test_block_that_is_no_indexed_store() -> None:
    sch = fresh(added(STORE))
    with pytest.raises(ScheduleError, match="atomic_adds: block acc: expected annotation pit.swr"):
        atomic_adds(sch, sch.get_sblock("acc"))


def test_store_that_does_not_add() -> None:
    sch = fresh(added(STORE, factor=2))
    text = "atomic_adds: block out: expected a store that adds to its target, got "
    with pytest.raises(ScheduleError, match=text):
        atomic_adds(sch, sch.get_sblock("out"))
