"""Runs a chosen candidate: the library's product or a kernel, and what surrounds it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import tvm_ffi

from ..errors import ShapeError, mismatch
from ..remember import remember
from ..schedules.contraction_space import BLOCKS
from ..structs import Candidate, Groups, Index, MicroTile
from .arrays import as_tensor, empty_like_kind, itemsize
from .bind import Bound
from .detect_workspace import Workspace
from .kernels import Kernels
from .library import library_matmul
from .program import Program
from .routes import GENERIC

ALONE_US = 20.0  # time of one thread below which it does a product alone


class Launcher:
    """Launches candidates of one program; threads may share it, each has its own workspace."""

    def __init__(self, program: Program, kernels: Kernels, dead: str) -> None:
        self.program, self.kernels, self.dead = program, kernels, dead
        self._memory = threading.local()
        # By identity: plans are kept, and hashing a tile at every call costs as much as a launch.
        self._ready: dict[int, tuple[Candidate, Callable[..., None]]] = {}

    def workspace(self) -> Workspace:
        """Memory of the calling thread."""
        try:
            return self._memory.workspace
        except AttributeError:
            self._memory.workspace = Workspace()
            return self._memory.workspace

    def launch(self, choice: Candidate, index: Index | None, bound: Bound, out: Any) -> None:
        """Compute ``out`` (what compiled functions take) by ``choice``."""
        if index is None or choice.micro_tile is None:
            self._dense(bound, out)
            return
        known, ready = self._ready.get(id(choice), (None, None))
        if ready is None or known is not choice:
            ready = self._prepare(choice, choice.micro_tile)
            remember(self._ready, id(choice), (choice, ready))
        ready(index, bound, out)

    def is_small(self, choice: Candidate) -> bool:
        """Whether waking other threads for a candidate takes longer than their help saves."""
        product = dict(choice.parts).get("product", ALONE_US)
        return product * self.kernels.target.threads < ALONE_US

    def check(self, choice: Candidate) -> None:
        """Refuse what no plan of this program has as a candidate.

        Raises ShapeError.
        """
        if self._ready.get(id(choice), (None, None))[0] is choice is not None:
            return
        expected = "a candidate of a plan of this operator"
        if not isinstance(choice, Candidate):
            raise ShapeError(mismatch("choice", expected, type(choice).__name__))
        family = choice.tile.family if choice.tile else GENERIC
        known = [(r.micro_tile, r.family) for r in self.program.routes]
        dense = choice.kind == "dense" and self.program.has_dense
        if not dense and (choice.micro_tile, family) not in known:
            raise ShapeError(mismatch("choice", expected, choice))

    # -- candidates

    @cached_property
    def _dense(self) -> Callable[[Bound, Any], None]:
        """The product on the whole operand, with everything looked up that no call changes."""
        program, product = self.program, self.program.product
        if product is None:
            kernel, names = self.kernels.dense(None), self._arguments(None, packed=False)
            return lambda bound, out: kernel(*map(bound.tensors.__getitem__, names), out)
        epilogue, left, right = self.kernels.epilogue(), product.left, product.right
        turned = (product.transpose_left, product.transpose_right)

        def run(bound: Bound, out: Any) -> None:
            arrays = self._masked(bound) if program.mask else bound.arrays
            sums = out if epilogue is None else self._sums(bound)
            library_matmul(arrays[left], arrays[right], sums, *turned)
            self._finish(epilogue, sums, bound, out)

        return run

    def _prepare(self, choice: Candidate, micro_tile: MicroTile) -> Callable[..., None]:
        """The launch of one kernel, with everything looked up that no call changes."""
        spec, tile = self.program.spec, choice.tile
        if isinstance(spec, Groups) and not spec.num_groups:  # no kernel has no groups
            fill = self._dead_fill()
            return lambda _, bound, out: fill(bound, out) if fill else None
        kernel = self.kernels.sparse(micro_tile, tile, alone=self.is_small(choice))
        if tile is not None and tile.family == BLOCKS:
            return self._blocks(kernel, self._arguments(micro_tile, packed=True))
        names = self._arguments(micro_tile, packed=tile is not None)
        dense = self.program.contraction.dense if tile and self.program.contraction else None
        reduces = next(r.reduces for r in self.program.routes if r.micro_tile == micro_tile)
        fill = None if reduces else self._dead_fill()

        def run(index: Index, bound: Bound, out: Any) -> None:
            if fill is not None:
                fill(bound, out)
            tensors = bound.tensors
            if dense is not None:
                tensors = {**tensors, dense: self._packed(bound, dense)}
            kernel(*map(tensors.__getitem__, names), *index.arguments, out)

        return run

    def _blocks(self, kernel: Callable[..., Any], inputs_of: list[str]) -> Callable[..., None]:
        con, epilogue = self.program.contraction, self.kernels.epilogue()
        operands = (con.sparse, self.program.mask, con.dense) if con else ()
        names = [name for name in inputs_of if name in operands]

        def run(index: Index, bound: Bound, out: Any) -> None:
            sums = out if epilogue is None else self._sums(bound)
            self._clear(sums)
            inputs = [
                self._packed(bound, n) if con and n == con.dense else bound.tensors[n]
                for n in names
            ]
            kernel(*inputs, *index.arguments, sums)
            self._finish(epilogue, sums, bound, out)

        return run

    def _dead_fill(self) -> Callable[[Bound, Any], None] | None:
        """Gives the output's dead slices what the pattern promises, before live ones overwrite."""
        if not self.program.zero_outside:
            return (lambda _, out: self._clear(out)) if self.dead == "zero" else None
        kernel = self.kernels.dead()
        if kernel is None:
            return lambda _, out: self._clear(out)
        reads = self.kernels.dead_inputs()
        return lambda bound, out: kernel(*(bound.tensors[name] for name in reads), out)

    # -- pieces

    def _finish(
        self, epilogue: Callable[..., Any] | None, sums: Any, bound: Bound, out: Any
    ) -> None:
        if epilogue is not None:
            reads = self.kernels.epilogue_inputs()
            epilogue(sums, *(bound.tensors[name] for name in reads), out)

    def _arguments(self, micro_tile: MicroTile | None, *, packed: bool) -> list[str]:
        """Names of a kernel's inputs in order; packed kernels read no group operand."""
        program, con = self.program, self.program.contraction
        names = [p.name for p in program.inputs]
        if program.reads_mask(micro_tile):
            names.insert(names.index(program.operand) + 1, program.mask)
        return [n for n in names if not (packed and con is not None and n == con.group)]

    def _masked(self, bound: Bound) -> dict[str, Any]:
        """The arrays of a call, with zeros outside the mask in a copy of the operand."""
        program, shape = self.program, bound.layout.operand
        name, dtype = program.operand, program.input(program.operand).dtype
        copy = empty_like_kind(bound.arrays[name], shape, dtype)
        target = as_tensor(name, copy, dtype=dtype, shape=shape, writable=True)
        self.kernels.masked_copy()(bound.tensors[name], bound.tensors[program.mask], target)
        return {**bound.arrays, name: copy}

    def _packed(self, bound: Bound, name: str) -> Any:
        found = bound.packed.get(name)
        if found is None:
            tensor = bound.tensors[name]
            form = self.kernels.packed(tensor.shape)
            found = self.workspace().take("packed", form.shape, form.dtype)
            if not form.filled:  # sums of no terms: numpy's strides of it are none to kernels
                found = form.take(found)
            self.kernels.pack()(tensor, found)
        return found

    def _sums(self, bound: Bound) -> np.ndarray:
        sums = self.program.sums
        return self.workspace().take("sums", bound.layout.sums, sums.dtype)

    def _clear(self, array: Any) -> None:
        tensor: Any = tvm_ffi.from_dlpack(array)
        size = math.prod(tensor.shape) * itemsize(str(tensor.dtype))
        self.kernels.clear()(tensor._create_view((size,), "uint8"))
