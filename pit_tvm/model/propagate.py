"""Token axis propagation: the operators of a graph on live tokens only, wherever that is proven.

Every value keeps its padded form, which is the model's own computation, and gets a packed one
where the proof holds. What needs the padded form (an operator that mixes tokens in a way nobody
recognised) thus reads what the model would have computed, dead tokens included; the forms that
nothing needs are removed. PIT (SOSP'23) gathers and scatters around every operator; here a chain
of operators that share the permuted axis pays for it once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import tvm
from tvm import relax

from ..analysis.expr import is_zero
from ..errors import UnsupportedModel, mismatch
from .attention import Attention, match_attention, sinks_of
from .by_rows import COLUMNS, ROWS, ByRows
from .grouped import GROUPED
from .kernels import Kernels
from .masks import PARTIAL, mask_kind
from .origins import Origins
from .packing import LiveTokens, Packer, emit_index
from .picks import takes_a_token
from .plane import BATCH, PLAIN, TOKENS, Plane
from .rebuild import (
    attributes_of,
    bindings_of,
    describe,
    finish,
    is_op,
    shape_of,
    substitute,
    values_of,
)
from .tidy import is_scaled, widens
from .token_wise import Judge
from .turned import turned

# Why an operator on padded tensors may take them from packed ones.
PICKS = "picks a token of each sequence"
PICKS_ALL = "picks a token of each sequence, of all tokens: what it picks of dead ones is needed"
READS_ZEROS = "reads tokens that are 0 where dead"
READS_FILLED = "reads tokens that are one number where dead"

BY_TOKEN = "token by token"
EXPERTS = "products of experts, over live tokens"
ALL = "attention on all tokens, of which dead ones are 0 and seen by none"
SEVERAL = "gives several tensors"
TURNED = "regroups tokens in another order than that of sequences"


@dataclass(frozen=True)
class Decision:
    """What became of one operator, and why.

    ``live``: it runs on live tokens only. ``whole``: it runs on all tokens, dead ones included.
    Neither holds for operators on weights, masks of pairs, positions, or pooled values.
    """

    operator: str
    result: str
    live: bool
    whole: bool
    reason: str


def propagate(
    module: tvm.IRModule, plane: Plane, mask_name: str, kernels: Kernels
) -> tuple[tvm.IRModule, list[Decision]]:
    """``main`` on live tokens, and what was decided for every operator that is left.

    Outputs keep their shapes; elements of dead tokens are 0.

    Raises
    ------
    UnsupportedModel
        The shape of an operator's result is unknown: operands have extents that differ in form.
    """
    main = module["main"]
    _check_shapes(main)
    mask = next(p for p in main.params if p.name == mask_name)
    builder = relax.BlockBuilder()
    with builder.function("main", list(main.params), attrs=attributes_of(main)):
        with builder.dataflow():
            work = _Propagation(main, builder, plane, mask, kernels)
            result = builder.emit_output(work.run())
        builder.emit_func_output(result)
    made = finish(builder, module)
    left = {b.var for b in bindings_of(made["main"])}
    return made, [decision for var, decision in work.decisions if var in left]


def _check_shapes(main: relax.Function) -> None:
    for binding in bindings_of(main):
        value, is_tensor = binding.value, isinstance(binding.var.ty, relax.TensorType)
        # How many are not zero only the run tells, and a shape is given to it after that.
        if not is_tensor or shape_of(binding.var) is not None or is_op(value, "nonzero"):
            continue
        operands = ", ".join(str(v.ty) for v in relax.analysis.free_vars(value))
        expected = f"{describe(value)} of operands whose extents can be compared"
        advice = "slices of tokens are not joined with others: pick one by its number"
        raise UnsupportedModel(mismatch("model", expected, operands, advice))


class _Propagation:
    def __init__(
        self,
        main: relax.Function,
        builder: relax.BlockBuilder,
        plane: Plane,
        mask: relax.Var,
        kernels: Kernels,
    ) -> None:
        self.main, self.builder, self.plane, self.mask = main, builder, plane, mask
        self.kernels = kernels
        values = self.values = values_of(main)
        self.turned = turned(main, plane)
        self.origins = Origins(main, plane, mask)
        # Layers share their mask, and are alike: what was proven once is kept.
        self.kind_of = cache(lambda added, *given: mask_kind(added, values.get, mask, given))
        self.judge = Judge(plane)
        self.index: LiveTokens = emit_index(builder, plane, mask)
        self.packer = Packer(builder, plane, self.index)
        self.extent = plane.packed(self.index.live)
        self.padded: dict[relax.Var, relax.Expr] = {}
        # What is pooled, and read by nothing with tokens, where dead tokens' hidden states are 0.
        self.pooled: dict[relax.Var, relax.Expr] = {}
        # What was computed of live tokens, and what was computed of all and gathered then.
        self.packed: dict[relax.Var, relax.Var] = {}
        self.gathered: dict[relax.Var, relax.Var] = {}
        self.unpacked: dict[relax.Var, relax.Var] = {}
        self.decisions: list[tuple[relax.Var, Decision]] = []

    def run(self) -> relax.Expr:
        """Emit every binding; the result over the new variables."""
        for binding in bindings_of(self.main):
            var, value = binding.var, binding.value
            self.padded[var] = self._bind(binding, self.padded)
            read = relax.analysis.free_vars(value)
            if any(v in self.pooled for v in read) and not self.plane.has_tokens(var.ty):
                self.pooled[var] = self._bind(binding, self.padded | self.pooled)
            if isinstance(value, relax.Call):
                self._pack(var, value)
        return self._output(self.main.body.body)

    def _bind(self, binding: relax.Binding, env: Mapping[Any, relax.Expr]) -> relax.Expr:
        """What a binding comes to over other variables."""
        new = substitute(binding.value, env)
        if isinstance(binding, relax.MatchCast):
            return self.builder.match_cast(new, binding.ty)
        return new if isinstance(new, relax.Var) else self._emit(new, binding.var)

    def _emit(self, expr: relax.Expr, var: relax.Var) -> relax.Var:
        return self.builder.emit(expr, var.name)

    def _pack(self, var: relax.Var, value: relax.Call) -> None:
        """Emit the packed form of one operator, if it may have one, and note the decision."""
        packed, reason = self._packed_form(var, value)
        if packed is not None:
            self.packed[var] = packed
            self._note(packed, value, not reason.startswith(ALL), reason)
            reason = BY_TOKEN  # if its padded form is left, then for what reads that
            fill = self.origins.fill(var)
            if fill is not None:
                rows = self._operand(var, None)
                self.padded[var] = self.packer.unpack(rows, self.plane.known(var), fill)
                return
        if var in self.pooled:
            self._note(self.pooled[var], value, False, reason)
            reason = PICKS_ALL if reason == PICKS else reason
        self._note(self.padded[var], value, False, reason)

    def _note(self, var: relax.Expr, value: relax.Call, live: bool, reason: str) -> None:
        values = (value, *relax.analysis.free_vars(value))
        by_token = any(self.plane.is_token_wise(self.plane.roles(v)) for v in values)
        whole = by_token and not live and reason not in (PICKS, READS_ZEROS, READS_FILLED)
        decision = Decision(describe(value), str(value.ty), live, whole, reason)
        self.decisions.append((var, decision))

    def _packed_form(self, var: relax.Var, value: relax.Call) -> tuple[relax.Var | None, str]:
        if not isinstance(var.ty, relax.TensorType):
            return None, SEVERAL
        if var in self.turned:
            return None, TURNED
        # First: of a single head, the last reshape of attention would pass for token-wise.
        found = match_attention(var, self.values, self.plane, self.kind_of)
        if found is not None and not found.problem:
            problem = self._no_kernel(found)
            how = f"{ALL}: {problem}" if problem else f"attention, {found.kind}, over live tokens"
            packed = self._partial(var, found, how) if problem else self._attention(found)
            if packed is not None:
                self.origins.attended(var, found.query)
                return packed, how
            found = replace(found, problem=problem)
        reason = self.judge.why_not(value)
        if reason is None:
            return self._by_token(var, value)
        if found is not None:
            return None, f"attention: {found.problem}"
        how = self._from_packed(value)
        if how == PICKS:
            env = self.padded | {value.args[0]: self._unpacked(value.args[0])}
            self.pooled[var] = self._emit(substitute(value, env), var)
        return None, how or reason

    def _by_token(self, var: relax.Var, value: relax.Call) -> tuple[relax.Var | None, str]:
        result = self.plane.roles(value)
        env: dict[relax.Var, relax.Expr] = {}
        for operand in relax.analysis.free_vars(value):
            if isinstance(operand.ty, relax.TensorType):
                packed = self._operand(operand, result)
                if packed is None:
                    return None, f"{operand.name} is not aligned with the tokens"
                env[operand] = packed
        self.origins.by_token(var, value)
        reason = EXPERTS if is_op(value, GROUPED) else BY_TOKEN
        return self._emit(substitute(value, env, self.extent), var), reason

    def _operand(self, operand: relax.Var, result: Any) -> relax.Expr | None:
        """An operand for live tokens; None where its sequences cannot be told apart."""
        roles = self.plane.known(operand)
        whole = self.padded.get(operand, operand)
        if self.plane.is_token_wise(roles):
            if operand in self.packed:
                return self.packed[operand]
            if operand not in self.gathered:
                self.gathered[operand] = self.packer.pack(whole, roles)
            return self.gathered[operand]
        if TOKENS in roles:
            return self.packer.pack_positions(whole, roles)
        if BATCH in roles:
            return self.packer.pack_sequences(whole, roles, result)
        return whole

    def _no_kernel(self, found: Attention) -> str:
        """Why attention over live tokens has no kernel; empty if it has."""
        if found.kind == PARTIAL:
            return "no kernel has its mask, or what else is done to its scores"
        _, dtype = self._operands_of(found)
        widest = max(found.head_dim, found.value_dim)
        known = self.kernels.attends(widest, dtype)
        return "" if known else f"no kernel has heads of {widest} in {dtype}"

    def _operands_of(self, found: Attention) -> tuple[list[relax.Var], str]:
        """Queries, keys and values, and the type that they are computed in: kernels widen 16-bit
        operands themselves."""
        wide = [found.query, found.keys, found.value]
        casts: list[Any] = [self.values.get(var) for var in wide]
        narrow = [
            cast.args[0] if widens(cast) else var for cast, var in zip(casts, wide, strict=True)
        ]
        types = {str(var.ty.dtype) for var in narrow}
        return (narrow, types.pop()) if len(types) == 1 else (wide, "float32")

    def _attention(self, found: Attention) -> relax.Var:
        """Attention over live tokens, ``[1, heads, live, value_dim]``."""
        builder = self.builder
        keyed = [self.index.live, found.heads, found.head_dim]
        flat = [*keyed[:2], found.value_dim]
        sources, dtype = self._operands_of(found)
        scaled: Any = self.values.get(sources[0])
        if is_scaled(scaled):
            sources[0], factor = scaled.args
            found = replace(found, scale=found.scale * float(factor.value.numpy()))
        operands = []
        orders = [0, 2, 1, 3], [0, 3, 1, 2], [0, 2, 1, 3]
        for var, order, shape in zip(sources, orders, (keyed, keyed, flat), strict=True):
            packed = self._operand(var, None)
            rows = builder.emit(relax.op.permute_dims(packed, order))
            flat_rows = builder.emit(relax.op.reshape(rows, shape))
            operands.append(builder.emit(relax.op.astype(flat_rows, dtype)))
        given = [*operands, self.index.starts, self.index.position, sinks_of(found)]
        ty = relax.TensorType(flat, dtype)
        out = self.kernels.attention(builder, found, given, ty)
        rows = builder.emit(relax.op.reshape(builder.emit(out), [1, *flat]))
        headed = builder.emit(relax.op.permute_dims(rows, [0, 2, 1, 3]))
        return builder.emit(relax.op.astype(headed, found.value.ty.dtype))

    def _partial(self, var: relax.Var, found: Attention, reason: str) -> relax.Var | None:
        """Attention as the model computes it, or by a kernel for all tokens, of tokens that are 0
        where dead: what is added to the scores keeps live queries from seeing those. None if it
        depends on the operands otherwise than row by row, or these are not packed. ``reason``: why
        it is done so."""
        axes = {found.query: ROWS, found.keys: COLUMNS, found.value: ROWS}
        added, roles = relax.analysis.free_vars(found.added), self.plane.roles(found.query)
        for source in self.reads.get(found.keys, ()):
            rows = source in self.packed and self.plane.roles(source) == roles
            if rows and any(self._between([source], v) for v in added):
                axes = {found.query: ROWS, source: ROWS, found.value: ROWS}
        if not all(operand in self.packed for operand in axes):
            return None
        steps = {step: e for v in added for step, e in self._between(list(axes), v).items()}
        if not ByRows(steps, axes).holds(found.added):
            return None
        env = {operand: self._unpacked(operand) for operand in axes}

        def emit(*targets: relax.Var) -> None:
            for target in targets:
                for step, value in self._between(list(axes), target).items():
                    if step not in env:
                        env[step] = self._emit(substitute(value, self.padded | env), step)
                        self._note(env[step], value, False, reason)

        emit(found.keys, *added)
        keys = self.builder.emit(relax.op.permute_dims(env[found.keys], [0, 1, 3, 2]))
        terms = self.builder.emit(substitute(found.added, self.padded | env))
        given = [env[found.query], keys, env[found.value]]
        whole = self.kernels.padded_attention(found, given, terms)
        if whole is None:
            emit(var)
        else:
            env[var] = self._emit(whole, var)
            self._note(env[var], self.values[var], False, reason)
        return self.packer.pack(env[var], self.plane.known(var))

    @cached_property
    def reads(self) -> dict[relax.Var, set[relax.Var]]:
        """What every binding reads."""
        return {v: set(relax.analysis.free_vars(e)) for v, e in self.values.items()}

    def _between(
        self, sources: Sequence[relax.Var], last: relax.Var
    ) -> dict[relax.Var, relax.Expr]:
        """What computes ``last`` from ``sources``, in the order of the graph."""
        found: dict[relax.Var, relax.Expr] = {}
        after, needed = set(sources), {last}
        for var, read in self.reads.items():
            if read & after:
                after.add(var)
        for var in reversed(self.reads):
            if var in needed and var in after and var not in sources:
                needed |= self.reads[var]
                found[var] = self.values[var]
        return dict(reversed(found.items()))

    def _from_packed(self, value: relax.Call) -> str:
        """Why a call on a value that has been computed of live tokens reads it as it does; empty if
        it does as any other.

        It may if dead tokens are one number in the padded form. And it may if it picks a single
        token of each sequence where a dead one has nothing but its hidden state, which is 0 in
        outputs as well; what comes back to tokens is of the model's own pick.
        """
        source, *others = value.args
        if source not in self.packed:
            return ""
        known = [self.plane.roles(o) for o in others if isinstance(o.ty, relax.TensorType)]
        if not all(r is not None and not any(r) for r in known):
            return ""
        fill = self.origins.fill(source)
        if fill is not None:
            return READS_FILLED if fill else READS_ZEROS
        if not takes_a_token(value, self.plane, self.values):
            return ""
        return PICKS if self.origins.is_own(source) else PICKS_ALL

    def _unpacked(self, var: relax.Var) -> relax.Var:
        """The padded form of what live tokens have of a value, zeros where dead; made once."""
        if var not in self.unpacked:
            rows = self._operand(var, None)
            self.unpacked[var] = self.packer.unpack(rows, self.plane.known(var))
        return self.unpacked[var]

    def _output(self, expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._output(f) for f in expr.fields])
        if not isinstance(expr, relax.Var):
            return expr
        made = self.values.get(expr)
        if isinstance(made, relax.Tuple):
            return self._output(made)
        roles = self.plane.roles(expr)
        if roles is None and self._has_rows(expr):
            return self._zeroed(expr)
        if roles is None or not self.plane.is_token_wise(roles):
            return self.pooled.get(expr, self.padded.get(expr, expr))
        in_order = expr not in self.turned or roles[:2] == (BATCH, TOKENS)
        return self._unpacked(expr) if in_order else self.padded[expr]

    def _has_rows(self, expr: relax.Var) -> bool:
        """Whether a tensor is ``[batch, tokens, ...]``, tokens again among the others, too."""
        extents = shape_of(expr) or ()
        rows = [self.plane.role(e) for e in extents[:2]] == [BATCH, TOKENS]
        return rows and not any(map(is_zero, extents))

    def _zeroed(self, expr: relax.Var) -> relax.Var:
        """A tensor ``[batch, tokens, ...]`` of pairs of tokens with zeros for dead ones' rows."""
        roles = (BATCH, TOKENS, *[PLAIN] * (expr.ty.ndim - 2))
        rows = self.packer.pack(self.padded.get(expr, expr), roles)
        return self.packer.unpack(rows, roles)
