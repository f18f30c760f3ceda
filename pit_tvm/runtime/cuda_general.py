"""Operators on a GPU through SRead, SWrite and TensorIR schedules, as on a CPU.

Contractions of any type and with either operand sparse run in tiles; any other expression that has
a PIT axis takes one thread to a result. What Hopper's own families compute goes there instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.tirx import stmt

from ..errors import UnsupportedTarget, mismatch
from ..schedules import cuda_generic
from ..schedules.cuda_contraction import scheduled
from ..structs import Candidate, MicroTile, Tile
from ..tile_db.store import TileStore
from ..transform.insert_sread_swrite import SparseForm, insert_sread_swrite
from ..transform.pipeline import lower
from ..transform.read_inside import read_inside
from ..transform.split_epilogue import dead_value, split_epilogue
from ..transform.unalign import unalign
from .cuda_arrays import dense_product, empty_of, zero
from .cuda_bind import CudaBound, aligned
from .cuda_build import build_cuda
from .cuda_call import CudaCall
from .cuda_detect_plan import grain_of
from .cuda_dispatch import CudaDispatcher
from .cuda_general_form import GeneralForm, banded, turned
from .cuda_general_planner import GeneralPlanner
from .cuda_modules import Kernel
from .cuda_repeat import Repeat
from .cuda_rows import FamilyKernels, in_vectors
from .cuda_workspace import CudaIndex
from .kernel_cache import KernelCache
from .program import Program


class GeneralKernels(FamilyKernels):
    """Kernels of one program."""

    def __init__(self, program: Program, form: GeneralForm, cache: KernelCache, arch: str) -> None:
        super().__init__(cache, arch)
        # A call does not wait to see what index operands hold: kernels must stay inside.
        lookups = {(each.ids, each.operand, each.dim) for each in program.lookups}
        func = read_inside(program.func, lookups)
        self.program, self.form = replace(program, func=func), form
        self._own = ("cuda-general", func.script(), program.operand)

    def product(self, tile: Tile | None, groups: int = 0) -> Kernel:
        """Live positions only: inputs, ids, count, output; of a form that flips the sparse
        operand, the dense one, ids, count, sums. ``tile`` None: no contraction."""
        micro_tile = self.form.route.micro_tile
        key = (*self._own, "sparse", micro_tile, tile, groups, self.form.turns, self.form.flips)
        return self._get(key, lambda: self._made(micro_tile, tile))

    def dense(self, tile: Tile | None) -> Kernel:
        """All positions: inputs, output."""
        return self._get((*self._own, "dense", tile), lambda: self._made(None, tile))

    def dead(self) -> Kernel | None:
        """The output where the operand is zero: inputs that it reads, output. None if zero."""
        func = self._dead_func
        return None if func is None else self._get((*self._own, "dead"), lambda: _plain(func))

    def epilogue(self) -> Kernel | None:
        """What follows the sums: sums, inputs that it reads, output. None if nothing does."""
        func = self._epilogue_func
        return None if func is None else self._get((*self._own, "epilogue"), lambda: _plain(func))

    @cached_property
    def dead_inputs(self) -> list[int]:
        """Places of the inputs that `dead` reads, in order."""
        return self._places(self._dead_func, 0)

    @cached_property
    def epilogue_inputs(self) -> list[int]:
        """Places of the inputs that `epilogue` reads, in order."""
        return self._places(self._epilogue_func, 1)

    def _places(self, func: tirx.PrimFunc | None, first: int) -> list[int]:
        names = [p.name for p in self.program.inputs]
        read = [] if func is None else func.params[first:-1]
        return [names.index(str(p.name)) for p in read]

    @cached_property
    def _epilogue_func(self) -> tirx.PrimFunc | None:
        return split_epilogue(self.program.func, self.program.main)

    @cached_property
    def _dead_func(self) -> tirx.PrimFunc | None:
        if self.program.writes:
            return None
        return dead_value(self.program.func, self.program.main, self.program.operand)

    def _build(self, func: tvm.IRModule | tirx.PrimFunc) -> Any:
        if isinstance(func, tirx.PrimFunc):
            return super()._build(func)
        return build_cuda(func, self.arch, pipelined=True)

    def _made(self, micro_tile: MicroTile | None, tile: Tile | None) -> tvm.IRModule:
        program = self.program
        if micro_tile is not None and (self.form.turns or self.form.flips):
            program, micro_tile = turned(program, self.form)
        func, con = program.func, program.contraction
        if tile is not None and con is not None:
            return lower(scheduled(func, con, tile, micro_tile, program.num_groups).mod)
        if micro_tile is not None:
            func = insert_sread_swrite(func, micro_tile, SparseForm(1))
        return _plain(func)


class GeneralDispatcher(CudaDispatcher):
    """Runs one program on one GPU target; threads may share it."""

    form: GeneralForm  # type: ignore[assignment]
    planner: GeneralPlanner
    kernels: GeneralKernels

    def _prepare(self, store: TileStore, cache: KernelCache) -> None:
        self.planner = GeneralPlanner(self.program, self.form, self.target, store, self.dead)
        self.kernels = GeneralKernels(self.program, self.form, cache, self.target.isa)

    def build(self, sizes: dict[str, int]) -> None:
        """Compile what calls may need, however much is live; needs no GPU."""
        super().build(sizes)
        self.kernels.dead()
        if self.form.apart:
            self.kernels.epilogue()
        if not self.form.library and not self.form.groups:
            self.kernels.dense(self.planner.likely_tiles(self.binder.layout_of(sizes, "torch"))[0])

    def build_moving(self) -> None:
        """Compile what turns operands, and a product back."""
        form, band = self.form, banded(self.form)
        if band:
            self.kernels.turn_live(form.dtype, band)
        if form.flips or len(form.turns) > (band > 0):
            self.kernels.turn(form.dtype)

    def _dense_again(self, repeat: Repeat, inputs: Sequence[Any], out: Any) -> Any:
        return self._dense(inputs, repeat.output() if out is None else out)

    def _dense(self, inputs: Sequence[Any], out: Any) -> Any:
        product = self.program.product
        if product is None or not self.form.library:
            tiles = self.planner.tiles
            target = aligned(out)
            self.kernels.dense(tiles[0] if tiles else None)(*map(aligned, inputs), target)
            if target is not out:
                out.copy_(target)
            return out
        named = dict(zip((p.name for p in self.program.inputs), inputs, strict=True))
        left, right = named[product.left], named[product.right]
        return dense_product(
            left.mT if product.transpose_left else left,
            right,
            named.get(self.form.bias),
            self.form.act,
            out,
            transpose_rhs=product.transpose_right,
        )

    def _product(
        self, choice: Candidate, index: CudaIndex, bound: CudaBound, dead: CudaIndex | None = None
    ) -> None:
        call, inputs, _, out, _ = bound
        kernel = self._known_kernel(call, choice)
        operands = [aligned(inputs[place]) for place in self._read]
        for name, at in self._turns:
            operands[at] = self._turned(name, operands[at], index)
        # Tiles write, or add, in vectors.
        target = self._cleared(call, out) if self.form.apart else aligned(out)
        if self.planner.overwrites:
            self._write_dead(inputs, target)
        kernel(*operands, *index.views, target)
        epilogue = self.kernels.epilogue() if self.form.apart else None
        if self.form.flips:
            target = self._turned_back(target, None if epilogue else out)
        if epilogue is not None:
            rest = (inputs[place] for place in self.kernels.epilogue_inputs)
            epilogue(target, *rest, out)
        elif target is not out:
            out.copy_(target)

    def _turned(self, name: str, array: Any, index: CudaIndex) -> Any:
        form, band = self.form, banded(self.form)
        if name != form.lhs or not band or not in_vectors(array, form.dtype):
            return self.kernels.turned(array, form.dtype)
        grain = grain_of(self.program.spec, form.route.micro_tile)
        return self.kernels.turned_live(array, form.dtype, band, index.bits, grain)

    def _cleared(self, call: CudaCall, out: Any) -> Any:
        """New sums, all 0."""
        shape = call.layout.sums[:: -1 if self.form.flips else 1]
        sums = empty_of(self.program.sums.dtype, out, shape)
        zero(sums)
        return sums

    def _turned_back(self, sums: Any, out: Any) -> Any:
        """The sums of a product that was computed turned; in ``out`` where that can be."""
        dtype = self.form.dtype
        if out is None or not (in_vectors(out, dtype) and in_vectors(sums, dtype)):
            return self.kernels.turned(sums, dtype)
        self.kernels.turn(dtype)(sums, out)
        return out

    def _kernel(self, choice: Candidate) -> Kernel:
        return self.kernels.product(choice.tile, self.form.groups)

    @cached_property
    def _read(self) -> list[int]:
        """Places of the inputs that products read: in tiles a list stands for its group, and those
        that add up leave the rest to the epilogue."""
        names, con = [p.name for p in self.program.inputs], self.program.contraction
        if con is None or not self.planner.tiles:
            return list(range(len(names)))
        operands = (con.sparse, con.dense)
        if self.form.flips:
            return [names.index(name) for name in operands]
        adds = self.form.axis == "pieces"
        left = [name for name in names if (name in operands if adds else name != con.group)]
        return [names.index(name) for name in left]

    @cached_property
    def _turns(self) -> list[tuple[str, int]]:
        """Operands that are turned first, and their places among what products read."""
        names = [self.program.inputs[place].name for place in self._read]
        return [(name, names.index(name)) for name in self.form.turns]

    def _write_dead(self, inputs: Any, out: Any) -> None:
        """The output as the pattern promises it where nothing lives, before the rest."""
        kernel = self.kernels.dead() if self.program.zero_outside else None
        if kernel is None:
            zero(out)
            return
        kernel(*(inputs[place] for place in self.kernels.dead_inputs), out)


def _plain(func: tirx.PrimFunc) -> tvm.IRModule:
    """A function under the generic schedule, lowered, as ``main``."""
    sch = s_tir.Schedule(unalign(func).with_attr("global_symbol", "main"))
    cuda_generic.apply(sch)
    mod = lower(sch.mod)
    _check_local(mod["main"])
    return mod


def _check_local(func: tirx.PrimFunc) -> None:
    """UnsupportedTarget if a thread must hold sums of which only a call knows the number."""
    found: list[stmt.AllocBuffer] = []
    tvm_ffi.structural_walk(func.body, (stmt.AllocBuffer, found.append))
    for buffer in (alloc.buffer for alloc in found):
        if not all(isinstance(extent, tirx.IntImm) for extent in buffer.shape):
            got = ", ".join(str(extent) for extent in buffer.shape)
            expected = "extents that are numbers, as each thread holds what it sums up of it"
            advice = "make an operator of each sum, or give extents as numbers"
            raise UnsupportedTarget(mismatch(f"the sums {buffer.name}", expected, got, advice))
