"""The compiled functions of one operator, each built when it is first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NoReturn

import tvm
from tvm import s_tir, te, tirx
from tvm.target import Target

from ..analysis.access import block_infos, check_extents
from ..analysis.contraction import Contraction
from ..errors import AxisError, UnsupportedTarget, mismatch
from ..pools import pooled
from ..schedules import contraction, generic
from ..schedules.contraction_forms import contraction_form, pack_func, packed_shape
from ..schedules.contraction_space import lanes_of
from ..structs import BlockMask, MicroTile, Tile
from ..target import TargetInfo, lacking, resolve_target
from ..threads import refuse_fork
from ..transform.apply_mask import apply_mask
from ..transform.insert_sread_swrite import SparseForm, insert_sread_swrite
from ..transform.pipeline import as_allocated, lower, unchecked
from ..transform.spell_functions import spell_functions
from ..transform.split_epilogue import dead_value, split_epilogue
from ..transform.unalign import unalign
from .argument import Argument, check_number, check_type
from .bind import Layout
from .content_keys import content_key
from .detect_plan import Kernel, kernel_name
from .gate import look_at
from .kernel_cache import KernelCache
from .program import Program

_GENERIC_TILE = 16  # positions to a parallel step of the generic schedule


def plain(func: tirx.PrimFunc) -> tvm.IRModule:
    """A function under the generic schedule, lowered, as ``main``."""
    sch = s_tir.Schedule(spell_functions(unalign(func)).with_attr("global_symbol", "main"))
    generic.apply(sch)
    return lower(sch.mod)


def _compile(mod: tvm.IRModule, target: dict[str, Any]) -> Any:
    return tvm.compile(mod, target=Target(target))


def _compile_unchecked(mod: tvm.IRModule, target: dict[str, Any]) -> Any:
    with unchecked(), as_allocated():
        return _compile(mod, target)


class Kernels:
    """Kernels of one program on one target; threads may share it.

    If the program applies a mask, the mask follows the operand among the inputs of the kernels
    that read the operand: see ``Program.reads_mask``. ShapeError if an extent is not of 32 bits,
    DTypeError if an array's elements are of a type that arrays on CPUs have not.
    """

    def __init__(self, program: Program, target: TargetInfo, cache: KernelCache) -> None:
        for info in block_infos(program.func):
            check_extents(info)
        for param in (*program.inputs, program.output):
            check_type(param.name, param.dtype)
        self.program, self.target, self.cache = program, target, cache
        self.lacks = lacking(target)
        # Patterns are looked at here, also to explain what another machine would do.
        self._native = resolve_target() if self.lacks else target
        self._known: dict[object, Kernel] = {}
        self._lock = threading.Lock()

    def refuse(self) -> NoReturn:
        """Say what this machine lacks to run kernels of the target, or this process."""
        if not self.lacks:
            refuse_fork()
        advice = "compile for 'llvm', or run it on a machine that has all of it"
        expected = "one that this machine runs"
        raise UnsupportedTarget(
            mismatch("target", expected, f"one that needs {self.lacks}", advice)
        )

    def sparse(self, micro_tile: MicroTile, tile: Tile | None, *, alone: bool = False) -> Kernel:
        """Kernel of one micro-tile: inputs, ids, count, output. ``tile`` None: generic.

        A tile that works ``alone`` uses the calling thread only.
        """
        threads = 1 if alone and tile is not None else self.target.threads
        name = (micro_tile, tile, threads, *self._mask_part(micro_tile))
        module = partial(self._sparse_module, micro_tile, tile, threads)
        return self._get(name, module, parallel=tile is None or threads > 1)

    def dense(self, tile: Tile | None) -> Kernel:
        """Dense kernel by our own tile, or by the generic schedule: inputs, output."""
        name, threads = ("dense", tile, *self._mask_part(None)), self.target.threads
        return self._get(name, lambda: self._sparse_module(None, tile, threads))

    def masked_copy(self) -> Kernel:
        """The operand with zeros outside its mask, for a library: operand, mask, copy."""
        return self._get(("masked copy", *self._mask_part(None)), self._copy_module)

    def pack(self) -> Kernel:
        """Packs the dense operand of a contraction: operand, packed."""
        return self._get("pack", self._pack_module)

    def epilogue(self) -> Kernel | None:
        """What follows the sums: sums, inputs that it reads, output. None if nothing does."""
        if self._epilogue_func is None:
            return None
        return self._get("epilogue", lambda: plain(self._epilogue_func))

    def dead(self) -> Kernel | None:
        """The output where the operand is zero: inputs that it reads, output. None if zero."""
        if self._dead_func is None:
            return None
        masked = self.program.mask and self.program.mask in self.dead_inputs()
        name = ("dead", *(self._mask_part(None) if masked else ()))
        return self._get(name, lambda: plain(self._dead_func))

    @cached_property
    def _epilogue_func(self) -> tirx.PrimFunc | None:
        return split_epilogue(self.program.func, self.program.main)

    @cached_property
    def _dead_func(self) -> tirx.PrimFunc | None:
        func = dead_value(self.program.func, self.program.main, self.program.operand)
        return None if func is None else self._masked(func)

    def epilogue_inputs(self) -> list[str]:
        """Names of the inputs that the epilogue reads, in order."""
        return self._names(self._epilogue_func)[1:]

    def dead_inputs(self) -> list[str]:
        """Names of the inputs that :meth:`dead` reads, in order."""
        return self._names(self._dead_func)

    def _names(self, func: tirx.PrimFunc | None) -> list[str]:
        return [] if func is None else [str(p.name) for p in func.params[:-1]]

    def clear(self) -> Kernel:
        """Clears a vector of bytes with all threads."""
        return self._get("clear", self._clear_module, shared=True)

    @cached_property
    def pack_key(self) -> tuple[object, ...]:
        """Kernels with equal keys pack an operand in the same form, for any number of threads."""
        return self.program.func.script(), self._contraction().dense, self.target.isa

    def packed(self, shape: Sequence[int]) -> Argument:
        """The packed form of a dense operand of ``shape``; ShapeError if it is too large."""
        con = self._contraction()
        extents = tuple(int(e) for e in packed_shape(con, list(shape), lanes_of(self.target.isa)))
        packed = Argument(f"{con.dense} packed", con.accumulator, extents)
        check_number(packed.name, packed.shape)
        return packed

    def check(self, layout: Layout) -> None:
        """Refuse a layout with an array that kernels cannot count; ShapeError names it."""
        program, con = self.program, self.program.contraction
        shapes = {a.name: a.shape for a in (*layout.inputs, layout.result)}
        for name, shape in shapes.items():
            check_number(name, shape)
        check_number(f"sums of {program.output.name}", layout.sums)
        if con is not None:
            self.packed(shapes[con.dense])

    @cached_property
    def look(self) -> Kernel:
        """The kernel of gates: see `gate.look_at`."""
        build = partial(look_at)
        return self.for_detection(kernel_name(build), build, None)

    def for_detection(self, name: str, build: Callable[[], tvm.IRModule], _: Any) -> Kernel:
        """A detection kernel as it was compiled, kept in the same cache."""
        return self._get(("detect", name), build, shared=True, parallel=False, checks=True)

    # -- building

    def _get(
        self,
        name: object,
        module: Callable[[], tvm.IRModule],
        *,
        shared: bool = False,
        parallel: bool = True,
        checks: bool = False,
    ) -> Kernel:
        """The kernel ``name``; a ``shared`` one is the same for all programs of the target, one
        that is not ``parallel`` wakes no other threads, and one that ``checks`` its arguments is
        called with what nobody has looked at."""
        if name in self._known:
            return self._known[name]
        with self._lock:
            if name not in self._known:
                target = (self._native if shared else self.target).tvm_target
                key = content_key(name, target, *([] if shared else self._own()))
                compile_ = _compile if checks else _compile_unchecked
                kernel = self.cache.get(key, lambda: compile_(module(), target))
                self._known[name] = pooled(kernel) if parallel else kernel
        return self._known[name]

    def _own(self) -> tuple[object, ...]:
        """What kernels of this program depend on beside their names."""
        return self.program.func.script(), self.program.gathered, self.program.num_groups

    def _mask_part(self, micro_tile: MicroTile | None) -> tuple[object, ...]:
        """What the kernels of a micro-tile depend on if they read a mask: how they read it."""
        spec = self.program.spec
        if not self.program.reads_mask(micro_tile):
            return ()
        return type(spec).__name__, spec.extents if isinstance(spec, BlockMask) else ()

    def _masked(self, func: tirx.PrimFunc) -> tirx.PrimFunc:
        """``func`` reading the operand through the mask, if the program applies one."""
        program = self.program
        if not program.mask:
            return func
        return apply_mask(func, program.operand, program.spec, program.mask)

    def _pack_module(self) -> tvm.IRModule:
        con = self._contraction()
        return plain(pack_func(self.program.func, con, lanes_of(self.target.isa)))

    def _contraction(self) -> Contraction:
        con = self.program.contraction
        if con is None:
            raise AxisError(mismatch("operator", "a contraction to pack for", "another expression"))
        return con

    def _clear_module(self) -> tvm.IRModule:
        size = te.var("size", "int64")
        zeros = te.compute((size,), lambda _: tirx.const(0, "uint8"), name="cleared")
        return plain(te.create_prim_func([zeros]))

    def _copy_module(self) -> tvm.IRModule:
        operand = next(p for p in self.program.func.params if p.name == self.program.operand)
        source = te.placeholder(operand.shape, operand.dtype, operand.name)
        copy = te.compute(operand.shape, lambda *where: source(*where), name="copy")
        return plain(self._masked(te.create_prim_func([source, copy])))

    def _sparse_module(
        self, micro_tile: MicroTile | None, tile: Tile | None, threads: int
    ) -> tvm.IRModule:
        func, con = self.program.func, self.program.contraction
        if tile is None or con is None:
            if micro_tile is not None:
                func = insert_sread_swrite(func, micro_tile, SparseForm(_GENERIC_TILE))
            return plain(self._masked(func))
        lanes = lanes_of(self.target.isa)
        groups = self.program.num_groups
        form, roles = contraction_form(func, con, tile, lanes, micro_tile, groups)
        if self.program.reads_mask(micro_tile):
            form = self._masked(form)
        sch = s_tir.Schedule(form.with_attr("global_symbol", "main"))
        contraction.apply(sch, roles, reg_m=tile.knob("reg_m"), lanes=lanes, threads=threads)
        return lower(sch.mod)
