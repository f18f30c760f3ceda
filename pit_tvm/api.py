"""The public interface: ``compile`` gives an ``Operator``; call it with arrays and a pattern."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import AxisError, DTypeError, ShapeError, UnsupportedTarget, mismatch
from .runtime.bind import PackedOperand
from .runtime.dispatch import Clock, Dispatcher
from .runtime.kernel_cache import CacheStats, KernelCache
from .runtime.program import analyse
from .shared import Shared
from .structs import Candidate, Plan, SparsitySpec, Values, check_flags, integer
from .target import resolve_target
from .threads import start_thread_pool
from .tile_db.store import TileStore

if TYPE_CHECKING:
    from .runtime.cuda_dispatch import CudaDispatcher

__all__ = ["Operator", "PackedOperand", "Profile", "compile"]


@dataclass(frozen=True)
class Profile:
    """Where the time of one call went, in microseconds, and what ran."""

    index_us: float
    select_us: float
    kernel_us: float
    total_us: float
    kernel: str
    plan: Plan | None


class Operator(Shared):
    """A compiled operator. Threads and copies share it; kernels compile when first needed."""

    def __init__(self, dispatcher: Dispatcher | CudaDispatcher, cache: KernelCache) -> None:
        self._dispatcher, self._cache = dispatcher, cache
        program = dispatcher.program
        self._inputs = tuple(p.name for p in program.inputs)
        self._found = program.operand if isinstance(program.spec, Values) else None

    def __repr__(self) -> str:
        """The arrays of a call, what is sparse in which way, and the target."""
        program = self._dispatcher.program
        *inputs, out = (
            f"{p.name} {p.dtype}[{', '.join(map(str, p.shape))}]"
            for p in (*program.inputs, program.output)
        )
        sparse = f"{program.operand} by {program.spec}"
        return f"<Operator {', '.join(inputs)} -> {out}; {sparse}; {self._dispatcher.target.kind}>"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arrays that a call takes, in order."""
        return self._inputs

    @property
    def stats(self) -> CacheStats:
        """Kernels built and loaded so far, and the seconds that took."""
        return self._cache.stats

    def __call__(self, *arrays: Any, sparsity: Any = None, out: Any = None) -> Any:
        """Compute on numpy arrays, torch tensors or DLPack objects; the result is of that kind.

        On a GPU the arrays are CUDA tensors, everything runs on torch's current stream, and the
        host waits for nothing; the result is a torch tensor. Gradients do not go through it.

        Parameters
        ----------
        *arrays
            The inputs in the order of :attr:`inputs`, C-contiguous, never copied. The dense
            operand of a product may be a :class:`PackedOperand`.
        sparsity
            The array that the operand's specification names: a mask, lengths, row ids, group
            ids; None for ``Values``, and for ``Groups`` to use the operand ``group_ids``.
        out
            Where to write; None allocates. Rows that ``Rows``, ``Lengths`` or ``Groups`` do not
            name are left as they are with ``dead="skip"``, and so are dead pieces of a sparse
            output; in a new one they may hold anything.

        Raises
        ------
        ShapeError, DTypeError
            An argument does not fit, or is a torch tensor with a tangent, or one that requires a
            gradient where torch records them, or there is a pattern beside ``Values``; nothing is
            written then.
        """
        self._check(arrays, sparsity)
        return self._dispatcher.run(arrays, sparsity, out)[0]

    def repeat(self, choice: Candidate, *arrays: Any, sparsity: Any = None, out: Any = None) -> Any:
        """As a call, by a candidate of a plan that :meth:`explain` gave: nothing is sampled or
        weighed, and the index is that of this call's pattern.

        Raises
        ------
        ShapeError, DTypeError
            As for a call; or ``choice`` is no candidate of this operator, or the dense one, where
            the pattern has parts that must not be written.
        UnsupportedTarget
            The operator is compiled for a GPU, where no call samples.
        """
        if not isinstance(self._dispatcher, Dispatcher):
            advice = "call the operator: no call samples there"
            raise UnsupportedTarget(mismatch("repeat", "a CPU target", "a GPU's", advice))
        self._check(arrays, sparsity)
        return self._dispatcher.repeat(choice, arrays, sparsity, out)

    def repeated(self, *arrays: Any, sparsity: Any = None) -> Any:
        """The result of a call that is like one before, on a GPU; None where there was none, or it
        cannot be repeated. Nothing else is looked at: gradients, say, end there."""
        dispatcher = self._dispatcher
        if isinstance(dispatcher, Dispatcher):
            return None
        return dispatcher.repeated(arrays, sparsity, None)[0]

    def pack(self, **operand: Any) -> PackedOperand:
        """Pack a weight once, as ``operator.pack(rhs=weight)``, to pass instead of the array.

        On a GPU that is a copy [k, n] of a weight stored [n, k] where the sparse operand is
        `Values`, from which up to 16 rows read what they need; other weights stay as they are.
        On a CPU ``weight`` may be what another operator of the same expression packed for the same
        target: the two share the memory.

        Raises
        ------
        ShapeError
            Another number of operands, or not the dense operand of a product; or packed by an
            operator of another expression or target.
        """
        if len(operand) != 1:
            raise ShapeError(mismatch("pack", "one operand, pack(rhs=weight)", sorted(operand)))
        ((name, array),) = operand.items()
        return self._dispatcher.pack(name, array)

    @property
    def cache_directory(self) -> Path:
        """Folder of the compiled kernels."""
        return self._cache.directory

    def build(self, sizes: Mapping[str, int]) -> None:
        """Compile ahead what calls on a GPU may need, without a GPU; ``sizes`` gives the symbolic
        extents by name, which decide the tiles that are likely. Kernels serve every shape.

        Raises
        ------
        UnsupportedTarget
            The operator is compiled for a CPU, whose kernels need no other compiler.
        BackendUnavailable
            nvcc is not on this machine.
        """
        self._dispatcher.build(dict(sizes))

    def explain(
        self,
        *arrays: Any,
        sparsity: Any = None,
        sizes: Mapping[str, int] | None = None,
        library: str | None = None,
    ) -> Plan:
        """The plan for a pattern with all candidates and their predicted costs; ``print`` it.

        Arrays tell sizes and the library of the dense peer. Without any, ``sizes`` gives the
        symbolic extents by name, a packed weight is assumed, and ``library`` names the dense peer,
        "numpy" (the default) or "torch", which it always is on a GPU.

        Raises
        ------
        ShapeError, DTypeError, BackendUnavailable
            An argument does not fit, or is told twice; an extent is unknown or not symbolic, or
            ``library`` is another one.
        """
        extents = self._extents(sizes)
        told = {"sizes": extents or None, "library": library}
        for name in (name for name, value in told.items() if arrays and value is not None):
            expected = "none beside arrays, which tell it"
            raise ShapeError(mismatch(name, expected, repr(told[name])))
        library = "numpy" if library is None else library
        return self._dispatcher.explain(arrays, sparsity, extents, library)

    def _extents(self, sizes: Mapping[str, int] | None) -> dict[str, Any]:
        """Sizes by names of symbolic extents; integers as Python's, others are refused later."""
        try:
            given = dict(sizes or {})
        except (TypeError, ValueError) as error:
            expected = "a dictionary of extents by name"
            raise ShapeError(mismatch("sizes", expected, repr(sizes))) from error
        known = self._dispatcher.program.extents
        if unknown := [name for name in given if name not in known]:
            expected = f"symbolic extents of this operator ({', '.join(known) or 'it has none'})"
            raise ShapeError(mismatch("sizes", expected, ", ".join(map(str, unknown))))
        numbers = {name: integer(size) for name, size in given.items()}
        return {name: given[name] if n is None else n for name, n in numbers.items()}

    def profile(self, *arrays: Any, sparsity: Any = None, out: Any = None) -> Profile:
        """Run once, as :meth:`__call__` does, and report where the time went."""
        self._check(arrays, sparsity)
        clock = Clock()
        begin = clock.started
        _, plan = self._dispatcher.run(arrays, sparsity, out, clock)
        total = 1e6 * (clock.started - begin)
        kernel = str(plan.choice) if plan else "nothing to do"
        return Profile(clock.index_us, clock.select_us, clock.kernel_us, total, kernel, plan)

    def _check(self, arrays: Sequence[Any], sparsity: Any) -> None:
        """Refuse what a call would pass over without a word: a gradient that a tensor asks for, or
        its tangent (DTypeError), and a pattern of an operand whose values tell it (ShapeError)."""
        torch = sys.modules.get("torch")  # absent: no torch tensor can exist
        if torch is not None and (forward := torch.autograd.forward_ad)._current_level >= 0:
            for name, array in zip(self._inputs, arrays, strict=False):
                if (
                    isinstance(array, torch.Tensor)
                    and forward.unpack_dual(array).tangent is not None
                ):
                    expected, got = "a tensor without a tangent", "one that has one"
                    raise DTypeError(mismatch(name, expected, got, "pass .detach()"))
        if torch is not None and torch.is_grad_enabled():
            for place, array in enumerate(arrays):
                if getattr(array, "requires_grad", False):
                    tensor = isinstance(array, torch.Tensor)
                    if tensor and torch._C._functorch.is_gradtrackingtensor(array):
                        continue  # of torch.func: refused as what it is
                    name = dict(enumerate(self._inputs)).get(place, "arrays")
                    expected, got = "a tensor that requires no gradient", "one that does"
                    advice = (
                        "call under torch.no_grad(), pass .detach(), or use pit_tvm.torch, "
                        "through which gradients go"
                    )
                    raise DTypeError(mismatch(name, expected, got, advice))
        if sparsity is not None and self._found is not None:
            operand = dict(zip(self._inputs, arrays, strict=False)).get(self._found)
            if sparsity is not operand:
                expected, got = f"None: Values finds what lives in {self._found}", "a pattern"
                advice = "compile for Mask() to tell it"
                raise ShapeError(mismatch("sparsity", expected, got, advice))


def compile(  # noqa: A001  (the name users know from TVM and torch)
    tensors: Sequence[Any] | Any,
    *,
    sparse: Mapping[str, SparsitySpec],
    target: Any = "llvm",
    deterministic: bool = False,
    dead: str = "skip",
    apply_mask: bool = False,
    library: bool = True,
    database: str | Path | TileStore | None = None,
    cache: str | Path | KernelCache | None = None,
) -> Operator:
    """Compile an operator for dynamic sparsity of one operand.

    Parameters
    ----------
    tensors
        TE tensors, inputs then output, as :mod:`pit_tvm.op` and ``te.create_prim_func`` have them,
        or a PrimFunc with blocks such as the latter gives.
    sparse
        The sparse operand's name and how its live part is told at run time. For the output of a
        product a mask tells which elements are needed: pieces of one row and 64 columns (or the
        other way round, or as the mask's blocks) that have any are computed whole.
    target
        ``"llvm"``, ``"llvm -mcpu=x86-64-v3"``, ``"cuda"``, a dictionary or a TVM target.
    deterministic
        Sorted indices: the same sums in the same order at every call. Only row ids pay for it.
    dead
        "skip": output rows that are not named, and pieces of a sparse output that are not needed,
        are not written; "zero": they become zero.
    apply_mask
        Masks promise an operand that is zero outside. With True it may hold anything there, NaN
        included: kernels read it through the mask. For Mask, BitMask and BlockMask.
    library
        Whether the dense product of numpy or torch is a candidate on a CPU. Between kernels of
        pit-tvm it takes longer than by itself: its threads and theirs wake in turns.
    database
        A folder of tuned tiles over the shipped ones: of a product that it has tiles for, the
        shipped tiles do not count. One of its device folders is used alone, and so is a store,
        which operators may share.
    cache
        A folder of compiled kernels instead of ``$PIT_TVM_CACHE`` or the user's, or a cache that
        operators share.

    Raises
    ------
    AxisError
        The operand or its axes do not admit the pattern, there is no mask to apply, or a block is
        none of ``te.compute``; the message says why.
    ShapeError
        The specification does not fit the operand's rank; an option is neither True nor False, or
        PIT_TVM_CHECK neither 1 nor 0; or an extent is not of 32 bits, on a CPU.
    DTypeError
        An array's elements are of a type that arrays on a CPU have not, on a CPU.
    UnsupportedTarget, DatabaseError
        The target has no tile family, or applies no masks; ``database`` is missing. A corrupt one
        is found by the first plan.
    """
    if dead not in ("skip", "zero"):
        raise AxisError(mismatch("dead", "'skip' or 'zero'", repr(dead)))
    check_flags(deterministic=deterministic, apply_mask=apply_mask, library=library)
    if not isinstance(sparse, Mapping):
        expected = "a dictionary from the operand's name to its pattern"
        raise AxisError(mismatch("sparse", expected, type(sparse).__name__))
    info = resolve_target(target)
    if apply_mask and info.kind != "llvm":
        advice = "make the operand zero outside its mask"
        raise UnsupportedTarget(
            mismatch("apply_mask", "a target of kind 'llvm'", repr(info.kind), advice)
        )
    program = analyse(tensors, dict(sparse), apply_mask=apply_mask)
    store = TileStore.over_shipped(database, device=info.device, isa=info.isa)
    kernels = cache if isinstance(cache, KernelCache) else KernelCache(cache)
    options: dict[str, Any] = {"deterministic": deterministic, "dead": dead}
    if info.kind == "cuda":
        from .runtime.cuda_families import dispatcher_of

        return Operator(dispatcher_of(program, info, store, kernels, **options), kernels)
    start_thread_pool(info.threads)
    made = Dispatcher(program, info, store, kernels, library=library, **options)
    return Operator(made, kernels)
