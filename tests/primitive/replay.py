"""What tests of primitives share: traces as JSON text, replayed on a fresh schedule, and errors."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import tvm
from tvm import s_tir

from pit_tvm.errors import ScheduleError


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


def refused(text: str) -> Any:
    """Where a primitive must raise an error with this text."""
    return pytest.raises(ScheduleError, match=re.escape(text))
