"""Random programs: permuting an accepted axis in every access leaves the output equal.

The programs are built from IR nodes, so that they include what TE refuses: stencils, scans,
recurrences, scatters, predicates, blocks that share loops, initial values in odd places. All data
are integers, so that reordered sums are equal bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, find, given, note, settings
from hypothesis import strategies as hs
from tvm import ir, te, tirx
from tvm.s_tir import SBlock, SBlockRealize
from tvm.tirx import stmt as st

from pit_tvm.analysis.access import block_infos
from pit_tvm.analysis.pit_axis import pit_axes
from tests.analysis.interpreter import Permutation, run

SIZE = 8  # every dimension of every buffer; indices stay below
SETTINGS = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
DATA, SPATIAL, REDUCE = "int32", tirx.IterVar.DataPar, tirx.IterVar.CommReduce


@dataclass
class Program:
    """One random PrimFunc under construction."""

    draw: Any
    buffers: dict[str, Any] = field(default_factory=dict)

    def buffer(self, name: str, rank: int) -> Any:
        name = f"{name}{rank}"
        if name not in self.buffers:
            self.buffers[name] = tirx.decl_buffer((SIZE,) * rank, DATA, name=name)
        return self.buffers[name]

    def pick(self, *options: Any) -> Any:
        return self.draw(hs.sampled_from(options))

    def index(self, axes: list[Any], plain: bool) -> Any:
        """An index below SIZE over ``axes`` (values below 4); mostly a bare axis."""
        a, b = self.pick(*axes), self.pick(*axes)
        if plain or self.pick(True, True, True, False):
            return a
        options = [a + b, a * 2, a // 2, a + 1, tirx.const(0, "int32"), 7 - a]
        return self.pick(*options, self.buffer("idx", 1)[a], self.buffer("idx", 1)[a])

    def load(self, axes: list[Any], plain: bool, names: tuple[str, ...] = ("A", "B")) -> Any:
        buffer = self.buffer(self.pick(*names), self.pick(1, 2, 2))
        indices = [self.index(axes, plain) for _ in buffer.shape]
        return tirx.BufferLoad(buffer, indices)

    def predicate(self, axes: list[Any], plain: bool) -> Any:
        mask = self.load(axes, plain, ("mask",)) > 0
        if plain:
            return mask
        return self.pick(mask, mask, self.pick(*axes) <= self.pick(*axes), self.pick(*axes) < 2)

    def term(self, axes: list[Any], plain: bool) -> Any:
        if not plain and self.pick(True, *(False,) * 19):
            return self.pick(*axes)
        value = self.load(axes, plain)
        for _ in range(self.pick(0, 1, 2)):
            other = self.load(axes, plain)
            value = self.pick(value * other, value + other, value - other)
        if self.pick(True, False, False):
            value = tirx.if_then_else(self.predicate(axes, plain), value, 0)
        if not plain and self.pick(True, False, False, False, False, False):
            value = value + self.pick(*axes)
        return value

    def store(self, axes: list[Any], inputs: list[Any], plain: bool) -> Any:
        """A store to out; its accumulator is the same element, seldom another one."""
        out = self.buffer(self.pick("out", "out", "out", "alt"), 2)
        indices = [self.index(axes, plain) for _ in out.shape]
        term = self.term(inputs, plain)
        kind = self.pick("plain", "sum", "sum", "sum", "max", "difference", "mixed")
        where = (
            indices
            if plain or self.pick(True, True, False)
            else [self.index(inputs, False) for _ in indices]
        )
        old = tirx.BufferLoad(out, where)
        values = {
            "plain": lambda: term,
            "sum": lambda: old + term,
            "max": lambda: tirx.max(term, old),
            "difference": lambda: old - term,
            "mixed": lambda: old * 2 + term,
        }
        store = st.BufferStore(out, values[kind](), indices)
        if self.pick(True, False, False, False):
            return st.IfThenElse(self.predicate(inputs, plain), store, None)
        if not plain and self.pick(True, *(False,) * 9):
            steps = self.pick(2, self.pick(*inputs))
            return st.For(tirx.Var("r", "int32"), 0, steps, st.ForKind.SERIAL, store)
        return store


@hs.composite
def programs(draw: Any, plain: bool) -> tirx.PrimFunc:
    """PrimFuncs of one or two blocks; ``plain`` ones have bare indices and full loops only."""
    program = Program(draw)
    loops = [tirx.Var(f"l{i}", "int32") for i in range(program.pick(1, 2, 3))]
    extents = {i: program.pick(1, 2, 3, 4, 4) for i in range(len(loops))}
    shared = program.pick(True, False)
    nests = [_block(program, f"b{i}", loops, extents, plain) for i in range(program.pick(1, 2))]
    if shared:
        body = _nest(loops, extents, _sequence(nests))
    else:
        body = _sequence([_nest(loops, extents, nest) for nest in nests])
    root = SBlock([], [], [], "root", body)
    params = list(program.buffers.values())
    return tirx.PrimFunc(params, SBlockRealize([], True, root))


def _sequence(parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else st.SeqStmt(parts)


def _nest(loops: list[Any], extents: dict[int, Any], body: Any) -> Any:
    for i, loop in reversed(list(enumerate(loops))):
        body = st.For(loop, 0, extents[i], st.ForKind.SERIAL, body)
    return body


def _block(
    program: Program, name: str, loops: list[Any], extents: dict[int, Any], plain: bool
) -> Any:
    iter_vars, values = [], []
    kinds = [program.pick(SPATIAL, SPATIAL, REDUCE) for _ in loops]
    for i, (loop, kind) in enumerate(zip(loops, kinds, strict=True)):
        var = tirx.Var(f"v_l{i}", "int32")
        value, extent = loop, extents[i]
        if not plain and program.pick(True, *(False,) * 9):
            value, extent = program.pick((loop // 2, extent), (loops[0], extents[0]))
        iter_vars.append(tirx.IterVar(ir.Range.from_min_extent(0, extent), var, kind))
        values.append(value)
    axes = [iv.var for iv in iter_vars]
    spatial = [iv.var for iv in iter_vars if iv.iter_type == SPATIAL]
    targets = spatial if spatial and program.pick(True, True, True, False) else axes
    stores = [program.store(targets, axes, plain) for _ in range(program.pick(1, 1, 1, 2))]
    init = None
    if any(kind == REDUCE for kind in kinds) and program.pick(True, True, False):
        inner = [_innermost(s) for s in stores]
        init = _sequence([st.BufferStore(s.buffer, 0, s.indices) for s in inner])
    predicate = True
    if program.pick(True, False, False):
        predicate = program.predicate(loops, plain)
    block = SBlock(iter_vars, [], [], name, _sequence(stores), init)
    return SBlockRealize(values, predicate, block)


def _innermost(stmt: Any) -> Any:
    if isinstance(stmt, st.IfThenElse):
        return stmt.then_case
    return stmt.body if isinstance(stmt, st.For) else stmt


def arrays_for(func: tirx.PrimFunc, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = {}
    for param in func.params:
        low, high = (0, SIZE) if param.name.startswith("idx") else (-4, 5)
        shape = [int(s) for s in param.shape]
        arrays[param.name] = rng.integers(low, high, shape).astype(np.int32)
    return arrays


def check_accepted_axes(func: tirx.PrimFunc, seed: int) -> int:
    """Asserts the property for every accepted axis of every block; returns their number."""
    arrays = arrays_for(func, seed)
    expected = run(func, arrays)
    report = pit_axes(func)
    checked = 0
    for info in block_infos(func):
        for axis in sorted(report.accepted[info.name]):
            extent = int(info.block.iter_vars[info.axes.index(axis)].dom.extent)
            order = np.random.default_rng(seed + checked).permutation(extent).tolist()
            got = run(func, arrays, Permutation(info.var(axis), order))
            for name in expected:
                np.testing.assert_array_equal(
                    got[name], expected[name], f"{name}: {axis} of {info.name} as {order}\n{func}"
                )
            checked += extent > 1
    return checked


@SETTINGS
@given(func=programs(plain=False), seed=hs.integers(0, 2**16))
def test_permuting_an_accepted_axis_of_any_program_changes_nothing(func, seed):
    note(str(func))
    check_accepted_axes(func, seed)


@SETTINGS
@given(func=programs(plain=True), seed=hs.integers(0, 2**16))
def test_permuting_an_accepted_axis_of_bare_programs_changes_nothing(func, seed):
    note(str(func))
    check_accepted_axes(func, seed)


@pytest.mark.parametrize("plain", [True, False])
def test_the_random_programs_hold_accepted_and_rejected_axes(plain):
    def mixed(func: tirx.PrimFunc) -> bool:
        report = pit_axes(func)
        return any(report.accepted.values()) and any(report.rejected.values())

    report = pit_axes(find(programs(plain=plain), mixed, settings=SETTINGS))
    assert report.accepted and report.rejected


# --------------------------------------------------------------------------------------------
# Einsums in TE: every axis is a PIT axis, and permuting whole arrays shows it


@hs.composite
def einsums(draw: Any) -> tuple[list[str], str]:
    """Subscripts of one to three operands and of the output, over the axes a to e."""
    axes = "abcde"[: draw(hs.integers(1, 5))]
    subscripts = hs.lists(hs.sampled_from(axes), min_size=1, max_size=3, unique=True)
    operands = ["".join(draw(subscripts)) for _ in range(draw(hs.integers(1, 3)))]
    used = sorted(set("".join(operands)))
    out = "".join(draw(hs.permutations(used))[: draw(hs.integers(1, len(used)))])
    return operands, out


def einsum_tensors(operands: list[str], out: str, extents: dict[str, int]) -> list[Any]:
    inputs = [
        te.placeholder([extents[a] for a in axes], DATA, name=f"X{i}")
        for i, axes in enumerate(operands)
    ]
    summed = {
        a: te.reduce_axis((0, e), a)
        for a, e in extents.items()
        if a not in out and any(a in o for o in operands)
    }

    def body(*position: Any) -> Any:
        at = {**dict(zip(out, position, strict=True)), **summed}
        product = tirx.const(1, DATA)
        for x, axes in zip(inputs, operands, strict=True):
            product = product * x(*(at[a] for a in axes))
        return te.sum(product, axis=list(summed.values())) if summed else product

    shape = [extents[a] for a in out]
    return [*inputs, te.compute(shape, body, name="Y", varargs_names=list(out))]


@SETTINGS
@given(einsum=einsums(), data=hs.data())
def test_every_axis_of_an_einsum_is_accepted_and_keeps_the_result(einsum, data):
    operands, out = einsum
    extents = {a: data.draw(hs.integers(1, 4), label=a) for a in "abcde"}
    used = sorted(set("".join(operands)))
    func = te.create_prim_func(einsum_tensors(operands, out, extents))
    assert pit_axes(func).accepted == {"Y": frozenset(used)}

    rng = np.random.default_rng(data.draw(hs.integers(0, 2**16)))
    arrays = {
        f"X{i}": rng.integers(-4, 5, [extents[a] for a in axes]).astype(np.int32)
        for i, axes in enumerate(operands)
    }
    poison = np.full([extents[a] for a in out], 12345, np.int32)
    truth = np.einsum(f"{','.join(operands)}->{out}", *(a.astype("int64") for a in arrays.values()))

    orders = {a: rng.permutation(extents[a]) for a in used}
    permuted = {
        name: array[np.ix_(*(orders[a] for a in axes))]
        for (name, array), axes in zip(arrays.items(), operands, strict=True)
    }
    got = run(func, {**permuted, "Y": poison})["Y"]
    undo = np.ix_(*(np.argsort(orders[a]) for a in out))
    np.testing.assert_array_equal(got[undo], truth)
