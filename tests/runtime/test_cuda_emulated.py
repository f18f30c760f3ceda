"""Kernels on CUDA cores, run on a CPU: operators, operands, axes and types against float64."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pit_tvm import Operator, op
from pit_tvm.errors import BackendUnavailable
from pit_tvm.reference import ops as reference
from pit_tvm.reference.index import index_lists
from pit_tvm.runtime import cuda_build, cuda_general_planner
from pit_tvm.runtime.bind import told_pattern
from pit_tvm.runtime.cuda_build import cuda_source
from pit_tvm.runtime.cuda_detect_plan import capacity_of
from pit_tvm.runtime.cuda_general import GeneralDispatcher
from pit_tvm.runtime.cuda_general_form import general_form
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.runtime.program import analyse
from pit_tvm.structs import BlockMask, Candidate, Lengths, Mask, Plan, Rows, SparsitySpec
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.store import TileStore
from tests.api import test_groups as by_group
from tests.api import test_masks as by_mask
from tests.api import test_outputs as by_output
from tests.api import test_slices as by_slice
from tests.api.cases import (
    BATCHED,
    BATCHED_CROSSED,
    CROSSED,
    ELEMENTWISE,
    LINEAR,
    MATMUL,
    PADDED_CONV2D,
    REDUCE_SUM,
    Case,
    Legal,
)
from tests.api.patterns import PATTERNS
from tests.api.running import assert_close, poison, random_array, untouched
from tests.runtime.cuda_emulation import Emulator, OnDevice, missing

NOWHERE = 2**30  # fills lists behind their counts: reading there ends the process


class EmulatedDispatcher(GeneralDispatcher):
    """Launches on numpy arrays, on lists that the reference finds, in any order.

    ``dense``: whether there is a dense candidate too. ``tile`` is the number of the tile among the
    planner's; the one with the smallest block of registers if it is None.
    """

    def __init__(self, *parts: Any, tile: int | None, dense: bool, **options: Any) -> None:
        super().__init__(*parts, deterministic=False, **options)
        tiles = sorted(self.planner.tiles, key=lambda t: t.knob("reg_m") * t.knob("reg_n"))
        self.tile = (tiles[0] if tile is None else self.planner.tiles[tile]) if tiles else None
        self.planner.tiles = (self.tile,) if self.tile else ()
        self.all = dense

    def explain(self, arrays: Any, sparsity: Any, sizes: Any, library: str) -> Plan:
        sparse = Candidate("pit", self.form.route.micro_tile, self.tile, 1.0)
        dense = Candidate("dense", None, self.tile, 2.0)
        return Plan(sparse, (sparse, dense) if self.all else (sparse,))

    def run(
        self, arrays: Sequence[Any], sparsity: Any, out: Any, clock: Any = None, choose: Any = None
    ) -> tuple[Any, Plan]:
        plan = self.explain(arrays, sparsity, {}, "")
        plan = replace(plan, choice=choose(plan))
        inputs, result = [OnDevice(array) for array in arrays], OnDevice(out)
        if plan.choice.kind == "dense":
            self.kernels.dense(self.tile)(*inputs, result)
            return out, plan
        lists = self._lists(arrays, sparsity, out)
        index: Any = SimpleNamespace(views=tuple(map(OnDevice, lists)))
        # A call whose last kernel is not known.
        call = SimpleNamespace(product=None, layout=SimpleNamespace(sums=out.shape))
        bound: Any = (call, inputs, sparsity, result, None)
        self._product(plan.choice, index, bound)
        return out, plan

    def _turned(self, array: Any) -> Any:
        return OnDevice(np.ascontiguousarray(array.array.T))

    def _cleared(self, call: Any, out: Any) -> Any:
        return OnDevice(np.zeros(call.layout.sums, self.program.sums.dtype))

    def _lists(self, arrays: Sequence[Any], sparsity: Any, out: Any) -> tuple[Any, Any]:
        """Positions [slots, capacity] and counts [slots], int32."""
        named = dict(zip([p.name for p in self.program.inputs], arrays, strict=True))
        told = told_pattern(self.program, named, sparsity)
        shape = named.get(self.program.operand, out).shape
        micro_tile = self.form.route.micro_tile
        found = index_lists(self.program.spec, np.asarray(told), shape, micro_tile)
        room = (max(len(found), 1), capacity_of(shape[micro_tile.dim]))
        ids, rng = np.full(room, NOWHERE, np.int32), np.random.default_rng()
        for row, live in zip(ids, found, strict=False):
            row[: len(live)] = rng.permutation(live)
        return ids, np.array([len(live) for live in found] or [0], np.int32)


@dataclass(frozen=True)
class Machine:
    """Where kernels are compiled and kept; ``known`` are the operators compiled so far."""

    emulator: Emulator
    cache: KernelCache
    known: dict[tuple[Any, ...], Operator]

    def compiled(self, tile: int | None, dense: bool, *args: Any, **options: Any) -> Operator:
        """As `tests.api.running.compiled`, for the emulator."""
        key = (tile, dense, args, tuple(sorted(options.items())))
        if key not in self.known:
            made = self.dispatcher(*args, tile=tile, dense=dense, **options)
            self.known[key] = Operator(made, self.cache)
        return self.known[key]

    def dispatcher(
        self,
        case: Case,
        dtype: str,
        operand: str,
        spec: SparsitySpec,
        dead: str = "skip",
        tile: int | None = None,
        dense: bool = False,
    ) -> EmulatedDispatcher:
        """A dispatcher of the case on CUDA cores, also where a Hopper family would compute it."""
        program = analyse(case.tensors(dtype), {operand: spec})
        form: Any = general_form(program)
        parts = (resolve_target("cuda -arch=sm_90a"), TileStore(self.cache.directory), self.cache)
        return EmulatedDispatcher(program, *parts, dead=dead, form=form, tile=tile, dense=dense)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    reason = missing()
    if reason:
        pytest.skip(reason=reason)
    folder = tmp_path_factory.mktemp("emulated")
    return Machine(Emulator(folder), KernelCache(folder / "kernels"), {})


@pytest.fixture
def emulated(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int | None, bool], None]:
    """Lets the tests of `tests.api` run their operators on the emulator."""
    monkeypatch.setattr(cuda_build, "compile_source", machine.emulator.compile_source)

    def use(tile: int | None = None, dense: bool = False) -> None:
        for tests in (by_mask, by_slice, by_group, by_output):
            monkeypatch.setattr(tests, "compiled", partial(machine.compiled, tile, dense))

    return use


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh random numbers; pytest shows the seed of a test that fails."""
    seed = int(np.random.default_rng().integers(2**32))
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def _wide(dtype: str) -> list[Any]:
    return op.matmul(None, 64, 96, dtype=dtype, transpose_rhs=True)


def _wide_plain(dtype: str) -> list[Any]:
    return op.matmul(None, 64, 192, dtype=dtype)


def _wide_crossed(dtype: str) -> list[Any]:
    return op.matmul(64, 64, None, dtype=dtype, transpose_lhs=True)


def _wide_pieces(dtype: str) -> list[Any]:
    options = {"bias": True, "activation": "relu", "transpose_lhs": True}
    return op.matmul(70, 128, None, dtype=dtype, **options)


def named(value: object) -> str:
    """What a test's identifier says of a parameter."""
    return str(getattr(value, "name", getattr(value, "__name__", value)))


# Rows of whole vectors, which are copied at once.
WIDE = Case(
    "matmul in vectors",
    _wide,
    {"lhs": ("m", "k"), "rhs": ("n", "k")},
    ("m", "n"),
    partial(reference.matmul, transpose_rhs=True),
    reduced=("k",),
    fixed={"n": 64, "k": 96},
)
WIDE_PLAIN = Case(
    "matmul of plain operands, in vectors",
    _wide_plain,
    {"lhs": ("m", "k"), "rhs": ("k", "n")},
    ("m", "n"),
    reference.matmul,
    reduced=("k",),
    fixed={"n": 64, "k": 192},
)
WIDE_CROSSED = Case(
    "matmul transposed, in vectors",
    _wide_crossed,
    {"lhs": ("k", "m"), "rhs": ("k", "n")},
    ("m", "n"),
    partial(reference.matmul, transpose_lhs=True),
    reduced=("k",),
    fixed={"m": 64, "n": 64},
)
WIDE_PIECES = Case(
    "matmul transposed, bias and relu, in vectors",
    _wide_pieces,
    {"lhs": ("k", "m"), "rhs": ("k", "n"), "bias": ("n",)},
    ("m", "n"),
    partial(reference.matmul, transpose_lhs=True, activation="relu"),
    reduced=("k",),
    fixed={"m": 70, "n": 128},
)


@pytest.mark.parametrize(
    ("case", "operand", "dtype", "spec", "tile", "dense"),
    [
        (MATMUL, "lhs", "float32", Mask(), None, True),
        (MATMUL, "rhs", "float32", BlockMask(1, 32), None, False),  # lhs is turned
        (CROSSED, "lhs", "bfloat16", Mask(), None, True),
        (LINEAR, "rhs", "int8", Mask(32, 1), None, False),
        (WIDE_CROSSED, "lhs", "float32", Mask(1, 64), None, True),
        (WIDE_CROSSED, "lhs", "float16", BlockMask(8, 128), 0, False),
        (WIDE_PLAIN, "lhs", "int8", Mask(1, 64), None, False),
        (ELEMENTWISE, "rhs", "int8", Mask(), None, False),
        (WIDE_PIECES, "lhs", "float32", Mask(32, 1), None, False),
        (WIDE, "lhs", "float16", Mask(1, 32), None, False),  # two steps of a piece
    ],
    ids=named,
)
def test_zeros_give_the_dense_result(
    case: Case,
    operand: str,
    dtype: str,
    spec: SparsitySpec,
    tile: int | None,
    dense: bool,
    emulated: Callable[..., None],
    rng: np.random.Generator,
) -> None:
    emulated(tile, dense)
    legal = Legal(case, operand, case.inputs[operand])
    for pattern in PATTERNS:
        by_mask.check(legal, spec, dtype, pattern, rng)


@pytest.mark.parametrize(
    ("case", "operand", "axis", "dtype", "kind", "dead"),
    [
        (WIDE, "lhs", "m", "bfloat16", Rows, "zero"),
        (WIDE, "lhs", "m", "int8", Rows, "skip"),
        (WIDE, "rhs", "n", "float32", Rows, "skip"),
        (LINEAR, "lhs", "m", "float32", Rows, "zero"),
        (CROSSED, "lhs", "k", "int8", Lengths, "skip"),
        (BATCHED, "lhs", "b", "float16", Rows, "skip"),
        (BATCHED_CROSSED, "rhs", "n", "float32", Lengths, "zero"),
        (PADDED_CONV2D, "weight", "c", "float16", Rows, "zero"),
        (REDUCE_SUM, "data", "q", "bfloat16", Rows, "skip"),
    ],
    ids=named,
)
def test_named_slices_are_right_and_the_others_as_they_should_be(
    case: Case,
    operand: str,
    axis: str,
    dtype: str,
    kind: Callable[[int], SparsitySpec],
    dead: str,
    emulated: Callable[..., None],
    rng: np.random.Generator,
) -> None:
    emulated()
    spec = kind(case.inputs[operand].index(axis))
    for pattern in PATTERNS:
        by_slice.check(Legal(case, operand, (axis,)), axis, spec, dtype, pattern, dead, rng)


def test_live_pieces_of_an_output_are_computed_and_no_others_written(
    emulated: Callable[..., None], rng: np.random.Generator
) -> None:
    emulated()
    for pattern in PATTERNS:
        by_output.check(CROSSED, BlockMask(5, 64), "float32", pattern, rng, "zero", new=False)


def test_every_group_meets_its_matrix(
    emulated: Callable[..., None], rng: np.random.Generator
) -> None:
    emulated()
    for kind in by_group.ASSIGNMENTS:
        by_group.test_live_slices_meet_their_group_and_dead_ones_are_untouched("float32", kind, rng)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("skip", [0, 1, 2])
def test_outputs_begin_anywhere_and_keep_what_is_dead(
    dtype: str,
    skip: int,
    machine: Machine,
    emulated: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    emulated()
    monkeypatch.setattr(cuda_general_planner, "tf32_allowed", lambda: True)  # stores in pairs
    case = replace(WIDE, tensors=lambda dtype: op.matmul(None, 128, 96, dtype=dtype))
    made = machine.dispatcher(case, dtype, "lhs", Rows())
    made.form = replace(made.form, library=False)
    lhs, rhs = random_array((70, 96), dtype, rng), random_array((96, 128), dtype, rng)
    live = rng.random(70) < 0.5
    sparse, whole = (poison((70 * 128 + skip,), dtype)[skip:].reshape(70, 128) for _ in range(2))
    made.run((lhs, rhs), np.flatnonzero(live), sparse, choose=lambda plan: plan.choice)
    made._dense([OnDevice(lhs), OnDevice(rhs)], OnDevice(whole))
    np.testing.assert_allclose(whole, reference.matmul(lhs, rhs), atol=0.1)
    assert np.array_equal(sparse[live], whole[live]) and untouched(sparse[~live])


# --------------------------------------------------------------------------------------------
# The emulator itself


@pytest.fixture(scope="module")
def wide(machine: Machine) -> str:
    """Source of a kernel that gathers rows: vectors, three stages in flight."""
    dispatcher = machine.dispatcher(WIDE, "float32", "lhs", Rows())
    micro_tile = dispatcher.form.route.micro_tile
    return cuda_source(dispatcher.kernels._made(micro_tile, dispatcher.tile), pipelined=True)


def run_wide(machine: Machine, source: str, rng: np.random.Generator) -> None:
    """A kernel like `wide` on all of 70 rows, against the truth."""
    lhs, rhs = random_array((70, 96), "float32", rng), random_array((64, 96), "float32", rng)
    ids, count = np.arange(128, dtype=np.int32)[None], np.array([70], np.int32)
    out = poison((70, 64), "float32")
    kernel = machine.emulator.compile_source(source).mod["main"]
    kernel(*map(OnDevice, (lhs, rhs, ids, count, out)))
    assert_close(out, reference.matmul(lhs, rhs, transpose_rhs=True))


@pytest.mark.parametrize(
    ("sound", "broken", "number", "seen"),
    [
        (r'asm volatile\("cp\.async\.wait_group[^\n]*', "", 0, "NaN in the result"),
        (r"__syncthreads\(\);", "", 1, "error .*, allowed"),  # before a stage is used again
        (r"__syncthreads\(\);", "if (threadIdx.x) __syncthreads();", 1, "not all threads reach"),
        (r"\*\(float4\*\)\(", "*(float4*)(1 + ", 1, "misaligned"),
        (r"acc_local_ptr\[15\] =", "acc_local_ptr[threadIdx.x + 15] =", 1, "outside an array"),
    ],
)
def test_a_broken_kernel_is_noticed(
    sound: str,
    broken: str,
    number: int,
    seen: str,
    machine: Machine,
    wide: str,
    rng: np.random.Generator,
) -> None:
    source, changed = re.subn(sound, broken, wide, count=number)
    assert changed
    with pytest.raises((AssertionError, RuntimeError), match=seen):
        run_wide(machine, source, rng)


@pytest.mark.parametrize(
    ("unknown", "seen"),
    [
        ('asm volatile("barrier.cluster.wait;" ::: "memory");\n', "PTX that is known"),
        ("__shared__ float tile[32];\n", "dynamic shared memory"),
        ("auto lane = __shfl_sync(~0u, threadIdx.x, 0);\n", "__shfl_sync"),
    ],
)
def test_what_the_emulator_does_not_know_is_refused(
    unknown: str, seen: str, machine: Machine
) -> None:
    with pytest.raises(BackendUnavailable, match=seen):
        machine.emulator.compile_source(f"void kernel() {{\n{unknown}}}\n")
