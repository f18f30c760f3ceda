"""On a GPU: the checks of scripts/check_gpu.py with small counts."""

from __future__ import annotations

from collections.abc import Callable

import check_gpu_runtime as runtime
import pytest
from bench_gpu_build import all_processors, build_all
from check_gpu import ATTENTION, FAMILIES
from check_gpu_attention import attention_kernels, check_attention
from check_gpu_tiles import kernels_of
from check_gpu_values import Checker, check_family

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def checker() -> Checker:
    return Checker("cuda", tiles=1)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != ATTENTION])
def test_random_calls_are_right_with_every_tile(checker: Checker, family: str) -> None:
    build_all(kernels_of([family], checker.tiles), all_processors())
    report = check_family(family, range(60), 11, checker)
    assert report.faults == [] and report.cases == 60


def test_random_attention_is_right(checker: Checker) -> None:
    build_all(attention_kernels(), all_processors())
    report = check_attention(ATTENTION, range(150), 11, checker)
    assert report.faults == [] and report.cases == 150


@pytest.mark.parametrize(
    "check",
    [
        runtime.check_threads,
        runtime.check_no_waiting,
        runtime.check_graphs,
        runtime.check_moves,
        runtime.check_streams,
        runtime.check_memory,
        runtime.check_kernels,
        runtime.check_large,
        runtime.check_many_groups,
    ],
)
def test_calls_keep_their_promises(checker: Checker, check: Callable[[Checker], list[str]]) -> None:
    assert check(checker) == []
