"""Traces as JSON text, replayed on a fresh schedule."""

from __future__ import annotations

import json
from typing import Any

import tvm
from tvm import s_tir


def assert_schedules(sch: s_tir.Schedule, before: Any, after: Any) -> None:
    """``sch``, which started from ``before``, holds ``after``; so does its trace, replayed."""
    expected = after.with_attr("global_symbol", before.attrs["global_symbol"])
    tvm.ir.assert_structural_equal(sch.mod["main"], expected)
    text = json.dumps(sch.trace.as_json(), default=lambda constant: constant.value)
    again = fresh(before)
    s_tir.Trace.apply_json_to_schedule(json.loads(text), again)
    tvm.ir.assert_structural_equal(again.mod["main"], expected)


def fresh(func: Any) -> s_tir.Schedule:
    """A schedule of one function, checked after every primitive.

    Of the function itself: a renamed copy shares its body, which the schedule would then change
    in place.
    """
    return s_tir.Schedule(func, debug_mask="all")
