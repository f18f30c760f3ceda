"""Operators whose kernels run on a CPU, by `cuda_emulation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from pit_tvm import Operator, op
from pit_tvm.reference import ops as reference
from pit_tvm.reference.index import index_lists
from pit_tvm.runtime.bind import told_pattern
from pit_tvm.runtime.cuda_general import GeneralDispatcher
from pit_tvm.runtime.cuda_general_form import banded, general_form
from pit_tvm.runtime.detect_plan import capacity_of
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.runtime.program import analyse
from pit_tvm.structs import Candidate, Plan, SparsitySpec
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.store import TileStore
from tests.api.cases import Case
from tests.runtime.cuda_emulation import Emulator, OnDevice

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
        lives = np.zeros((len(lists[0]), lists[0].shape[1]), bool)
        for line, ids, live in zip(lives, *lists, strict=True):
            line[ids[:live]] = True
        bits = OnDevice(np.packbits(lives, axis=1, bitorder="little").view(np.uint32))
        index: Any = SimpleNamespace(views=tuple(map(OnDevice, lists)), bits=bits)
        # A call whose last kernel is not known.
        call = SimpleNamespace(product=None, layout=SimpleNamespace(sums=out.shape))
        bound: Any = (call, inputs, sparsity, result, None)
        self._product(plan.choice, index, bound)
        return out, plan

    def _turned(self, name: str, array: Any, index: Any) -> Any:
        turned, band = np.ascontiguousarray(array.array.T), banded(self.form)
        if name == self.form.lhs and band and not any(size % 8 for size in turned.shape):
            turned[...] = np.nan
            self.kernels.turn_live(self.form.dtype, band)(array, index.bits, 1, OnDevice(turned))
        return OnDevice(turned)

    def _cleared(self, call: Any, out: Any) -> Any:
        shape = call.layout.sums[:: -1 if self.form.flips else 1]
        return OnDevice(np.zeros(shape, self.program.sums.dtype))

    def _turned_back(self, sums: Any, out: Any) -> Any:
        return OnDevice(np.ascontiguousarray(sums.array.T))

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


def _wide(dtype: str) -> list[Any]:
    return op.matmul(None, 64, 96, dtype=dtype, transpose_rhs=True)


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
