"""The public interface: ``compile`` gives an ``Operator``; call it with arrays and a pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import AxisError, ShapeError, mismatch
from .runtime.bind import PackedOperand
from .runtime.dispatch import Clock, Dispatcher
from .runtime.kernel_cache import CacheStats, KernelCache
from .runtime.program import analyse
from .structs import Plan, SparsitySpec
from .target import resolve_target, start_thread_pool
from .tile_db.store import TileStore

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


class Operator:
    """A compiled operator. Threads may share it; kernels compile when they are first needed."""

    def __init__(self, dispatcher: Dispatcher, cache: KernelCache) -> None:
        self._dispatcher, self._cache = dispatcher, cache

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the arrays that a call takes, in order."""
        return tuple(p.name for p in self._dispatcher.program.inputs)

    @property
    def stats(self) -> CacheStats:
        """Kernels built and loaded so far, and the seconds that took."""
        return self._cache.stats

    def __call__(self, *arrays: Any, sparsity: Any = None, out: Any = None) -> Any:
        """Compute on numpy arrays, torch CPU tensors or DLPack objects; the result is of that kind.

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
            name are left as they are with ``dead="skip"``.

        Raises
        ------
        ShapeError, DTypeError
            An argument does not fit; nothing is written then.
        """
        return self._dispatcher.run(arrays, sparsity, out)[0]

    def pack(self, **operand: Any) -> PackedOperand:
        """Pack a weight once, as ``operator.pack(rhs=weight)``, to pass instead of the array.

        Raises
        ------
        ShapeError
            Another number of operands, or not the dense operand of a product.
        """
        if len(operand) != 1:
            raise ShapeError(mismatch("pack", "one operand, pack(rhs=weight)", sorted(operand)))
        ((name, array),) = operand.items()
        return self._dispatcher.pack(name, array)

    def explain(
        self,
        *arrays: Any,
        sparsity: Any = None,
        sizes: Mapping[str, int] | None = None,
        library: str = "numpy",
    ) -> Plan:
        """The plan for a pattern with all candidates and their predicted costs; ``print`` it.

        Without arrays, ``sizes`` gives the symbolic extents by name, a packed weight is assumed,
        and ``library`` names the dense peer, "numpy" or "torch".
        """
        return self._dispatcher.explain(arrays, sparsity, dict(sizes or {}), library)

    def profile(self, *arrays: Any, sparsity: Any = None, out: Any = None) -> Profile:
        """Run once, as :meth:`__call__` does, and report where the time went."""
        clock = Clock()
        begin = clock.started
        _, plan = self._dispatcher.run(arrays, sparsity, out, clock)
        total = 1e6 * (clock.started - begin)
        kernel = str(plan.choice) if plan else "nothing to do"
        return Profile(clock.index_us, clock.select_us, clock.kernel_us, total, kernel, plan)


def compile(  # noqa: A001  (the name users know from TVM and torch)
    tensors: Sequence[Any] | Any,
    *,
    sparse: Mapping[str, SparsitySpec],
    target: Any = "llvm",
    deterministic: bool = False,
    dead: str = "skip",
    database: str | Path | None = None,
) -> Operator:
    """Compile an operator for dynamic sparsity of one operand.

    Parameters
    ----------
    tensors
        TE tensors, inputs then output, as :mod:`pit_tvm.op` and ``te.create_prim_func`` have them.
    sparse
        The sparse operand's name and how its live part is told at run time.
    target
        ``"llvm"``, ``"llvm -mcpu=x86-64-v3"``, a dictionary or a TVM target.
    deterministic
        Sorted indices: the same sums in the same order at every call. Only row ids pay for it.
    dead
        "skip": output rows that are not named are not written; "zero": they become zero.
    database
        A folder of tuned tiles instead of the shipped one.

    Raises
    ------
    AxisError
        The operand or its axes do not admit the pattern; the message says why.
    UnsupportedTarget, DatabaseError
        The target has no tile family; ``database`` is missing. A corrupt one is found by the
        first plan.
    """
    if dead not in ("skip", "zero"):
        raise AxisError(mismatch("dead", "'skip' or 'zero'", repr(dead)))
    info = resolve_target(target)
    program = analyse(tensors, dict(sparse))
    store = TileStore.open(database, device=info.device, isa=info.isa)
    start_thread_pool(info.threads)
    cache = KernelCache()
    dispatcher = Dispatcher(program, info, store, cache, deterministic=deterministic, dead=dead)
    return Operator(dispatcher, cache)
