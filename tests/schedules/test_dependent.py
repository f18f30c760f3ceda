"""Kernels that begin before their predecessor has ended touch nothing before they have waited."""

from __future__ import annotations

import re
from functools import cache

import pytest
import tvm
from tvm.script import tirx as T

from pit_tvm.runtime.cuda_build import cuda_source
from pit_tvm.runtime.cuda_detect_groups import count_groups
from pit_tvm.runtime.cuda_dispatch import all_modules
from pit_tvm.schedules.cuda_turn import turn_kernel
from pit_tvm.schedules.dependent import after_predecessor, as_dependent, waits
from pit_tvm.schedules.hopper_combine import combine_rows
from pit_tvm.schedules.hopper_rows import RowsTile, rows_kernel

ATTRIBUTE = "programmaticStreamSerializationAllowed = 1"
WAIT, LET_IN = "griddepcontrol_wait();", "griddepcontrol_launch_dependents();"
TILES = {
    "rows": (
        RowsTile(tile_m=64, tile_n=64, consumers=1, cluster=2, most_groups=64),
        {"bias": True},
    ),
    "flip": (RowsTile(tile_m=32, tile_n=128, flip=1, most_groups=64), {"row_scale": True}),
    "split": (RowsTile(tile_m=64, tile_n=64, consumers=1, flip=1, cluster=2), {}),
    "dead": (RowsTile(tile_m=64, tile_n=64, consumers=1, cluster=2), {"fills": True}),
    "dead split": (RowsTile(64, 64, consumers=1, flip=1, cluster=2), {"fills": True}),
}


@cache
def product(name: str) -> str:
    """CUDA source."""
    knobs, options = TILES[name]
    module = tvm.IRModule({"main": rows_kernel("float16", knobs, **options)})
    return cuda_source(module, tirx=True)


def bodies(source: str) -> list[str]:
    """The definitions of a source's kernels, from the parameters on."""
    found = re.split(r'extern "C" __global__ void [^;{]*?(?=\w+_kernel\()', source)[1:]
    return [text for text in found if "{" in text.split(";")[0]]


def check(source: str, dependents: int) -> None:
    """So many kernels wait, touch nothing before that, and are launched as dependents."""
    made = [text for text in bodies(source) if WAIT in text]
    assert len(made) == dependents == source.count(ATTRIBUTE)
    for text in made:
        pointers = re.findall(r"\* __restrict__ (\w+)", text.split("{")[0])
        before, after = text[text.index("{") :].split(WAIT, 1)
        assert pointers and not any(pointer in before for pointer in pointers)
        assert not re.search(r"\b(pit|__ldg|tvm_builtin_ptx_(ld|st|red|cp))_?\w*\(", before)
        assert after.lstrip().startswith("tvm_builtin_ptx_" + LET_IN)
        assert LET_IN not in before


@pytest.mark.parametrize("name", TILES)
def test_products_wait_before_they_touch_memory(name: str) -> None:
    check(product(name), 1)


def test_choices_are_combined_behind_their_products() -> None:
    kernel = combine_rows("float16", factors="float32", ids="int64")
    check(cuda_source(tvm.IRModule({"main": kernel}), tirx=True), 1)


@pytest.mark.parametrize(("name", "dependents"), [("cuda-slices", 15), ("cuda-fill", 4)])
def test_kernels_of_a_call_wait_before_they_touch_memory(name: str, dependents: int) -> None:
    check(cuda_source(all_modules()[name](), tirx=True), dependents)


def test_what_turns_beside_its_predecessor_waits_last() -> None:
    source = cuda_source(tvm.IRModule({"main": turn_kernel("float16", beside=True)}), tirx=True)
    (body,) = [text for text in bodies(source) if WAIT in text]
    before, after = body[body.index("{") :].split(WAIT)
    assert source.count(ATTRIBUTE) == 1 and "turned_ptr" in before and LET_IN not in before
    assert not re.search(r"\b(turned|source)_ptr\b", after.split("}")[0])


def test_counting_lets_placing_in() -> None:
    source = cuda_source(tvm.IRModule({"main": count_groups(32)}), tirx=True)
    assert LET_IN in source and WAIT not in source and ATTRIBUTE not in source


def kernel(dependent: bool) -> tvm.tirx.PrimFunc:
    @T.prim_func
    def main(p_out: T.handle):
        n = T.int32()
        out = T.match_buffer(p_out, (n,), "float32", align=4)
        T.device_entry()
        _block = T.cta_id([1])
        thread = T.thread_id([32])
        if dependent:
            after_predecessor()
        if thread < n:
            out[thread] = T.float32(1)

    return main


@pytest.mark.parametrize("dependent", [True, False])
def test_a_kernel_is_launched_as_a_dependent_if_it_waits(dependent: bool) -> None:
    func = kernel(dependent)
    assert waits(func) == dependent
    assert (ATTRIBUTE in cuda_source(tvm.IRModule({"main": func}), tirx=True)) == dependent


def test_launches_of_clusters_keep_their_other_attributes() -> None:
    source = product("rows")
    assert "cudaLaunchAttributeClusterDimension" in source
    assert re.search(r"dynamicSmemBytes = cuda_arg_\d+;", source)
    plain = as_dependent(tvm.IRModule({"main": kernel(False)}))
    assert "tirx.kernel_launch_params" not in plain["main"].attrs
