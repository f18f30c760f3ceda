"""Times on a machine whose speed changes."""

from __future__ import annotations

from pit_tvm.target import resolve_target
from pit_tvm.threads import start_thread_pool
from pit_tvm.tuning.pace import Pace


def paced(*readings: float) -> Pace:
    """A pace that reads ``readings`` one after the other, on a machine that once took 1 second."""
    pace = Pace.__new__(Pace)
    pace.fastest, left = 1.0, list(readings)
    pace._timer = lambda: left.pop(0)
    return pace


def test_a_slow_machine_is_taken_out() -> None:
    assert paced(3.0, 3.0).correct(lambda: (6.0, 9.0)) == (2.0, 3.0)


def test_a_run_during_which_the_machine_changed_is_repeated() -> None:
    runs = [(6.0,), (7.0,)]
    assert paced(1.0, 2.0, 1.75, 1.75).correct(lambda: runs.pop(0)) == (4.0,)


def test_a_machine_that_never_settles_gives_its_steadiest_run() -> None:
    runs = [(6.0,), (6.0,), (7.5,), (6.0,)]
    readings = (1.0, 2.0, 1.0, 3.0, 1.25, 1.75, 1.0, 2.0)
    assert paced(*readings).correct(lambda: runs.pop(0)) == (5.0,)


def test_a_machine_at_its_best_changes_nothing() -> None:
    assert paced(1.0, 1.0).correct(lambda: (6.0,)) == (6.0,)


def test_readings_that_no_neighbour_explains_are_taken_again() -> None:
    assert paced(50.0, 2.0, 2.0).correct(lambda: (6.0,)) == (3.0,)


def test_a_machine_that_gives_no_other_readings_is_at_its_slowest() -> None:
    assert paced(*[50.0] * 8).correct(lambda: (6.0,)) == (1.0,)


def test_the_fastest_reading_is_remembered() -> None:
    pace = paced(0.5, 0.5)
    assert pace.correct(lambda: (1.0,)) == (1.0,)
    assert pace.fastest == 0.5


def test_a_real_machine_has_a_pace() -> None:
    target = resolve_target("llvm")
    start_thread_pool(target.threads)
    pace = Pace(target)
    now = pace.now()  # before what it may lower is asked
    assert 0.0 < pace.fastest <= now
