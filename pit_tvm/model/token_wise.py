"""Whether an operator treats every token by itself, proven on the loops that compute it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi
from tvm import ir, relax

from ..analysis.access import Access, BlockInfo, block_infos, is_bare
from ..analysis.expr import is_one, is_zero
from ..analysis.pit_axis import pit_axes
from ..structs import AxisReport
from .faults import faults_as_unsupported
from .lowered import Lowered, lower
from .plane import PLAIN, Plane, Roles, segments, tokens_place
from .rebuild import describe, extents_of, is_number, is_op, same_extents, substitute
from .recurrence import RECURRENCE

# They order the elements along one axis.
_IN_ORDER = ("sort", "argsort", "topk")


def why_not_token_wise(call: relax.Call, plane: Plane) -> str | None:
    """Why a call may not run on the live tokens alone; None if it may.

    It may when every element of its result belongs to one token, is computed from elements of that
    token (and of its position, its sequence, or of none), and the axes of batch and tokens are PIT
    axes of every block of its loops: then dropping and reordering tokens changes nothing but
    which of them are there. Copies that only regroup dimensions are judged by their shapes.
    """
    roles = plane.roles(call)
    if roles is None or not plane.is_token_wise(roles):
        return f"{describe(call)} gives no value of single tokens: {call.ty}"
    if any(plane.occurs_in(e) for e in _numbers(call.args)):
        return f"{describe(call)} computes with the number of tokens or sequences"
    if is_op(call, "reshape"):
        return _why_not_regrouped(call, plane)
    if is_op(call, RECURRENCE):
        return f"{describe(call)} takes a state from token to token, dead ones too"
    if is_op(call, *_IN_ORDER):
        return _why_not_ordered(call, plane, roles)
    return _why_not_proven(call, plane, roles) or _why_not_repeated(call, plane, roles)


def _why_not_ordered(call: relax.Call, plane: Plane, roles: Roles) -> str | None:
    """What is said against a call that orders the elements along an axis, by a library that has no
    loops to look at: other axes only tell one list from another."""
    source, axis = call.args[0], int(call.attrs.axis) % call.ty.ndim
    if plane.roles(source) != roles or roles[axis] != PLAIN:
        return f"{describe(call)} of {source.ty} orders tokens"
    return None


def _why_not_proven(call: relax.Call, plane: Plane, roles: Roles) -> str | None:
    """What the loops of a call, whose result has ``roles``, say against it."""
    with faults_as_unsupported(f"{describe(call)} in a form that TVM can lower"):
        lowered = lower(call)
    if lowered is None:
        return f"{describe(call)} is not lowered to one loop nest"
    operands: list[Roles] = []
    for operand in lowered.operands:
        found = plane.roles(operand)
        if found is None:
            return f"{describe(call)} reads all tokens of a sequence: {operand.ty}"
        operands.append(found)
    return _Proof(lowered, [*operands, roles]).reason()


def _why_not_repeated(call: relax.Call, plane: Plane, roles: Roles) -> str | None:
    """What is said against a call whose values of sequences are repeated for their tokens, as they
    are when they are packed: an index into an extent of 1 is 0, whatever it is in a longer one."""
    env: dict[relax.Expr, relax.Expr] = {}
    for operand in relax.analysis.free_vars(call):
        place = tokens_place(plane.roles(operand) or (), roles)
        if place is not None and is_one(extents_of(operand)[place]):
            extents = list(extents_of(operand))
            extents[place] = plane.tokens
            env[operand] = relax.Var(operand.name, relax.TensorType(extents, operand.ty.dtype))
    return _why_not_proven(substitute(call, env), plane, roles) if env else None


class Judge:
    """`why_not_token_wise` in one plane. Operators that are alike but for the tensors they read, as
    those of a model's layers are, are judged once: their loops are the same."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self._known: dict[tvm_ffi.StructuralKey, str | None] = {}

    def why_not(self, call: relax.Call) -> str | None:
        """Why ``call`` may not run on the live tokens alone; None if it may."""
        parts = [call.op, call.attrs, list(call.ty_args), call.ty, [_form(a) for a in call.args]]
        key = tvm_ffi.StructuralKey(parts)  # type: ignore[call-arg]  # its stub is of the object
        if key not in self._known:
            self._known[key] = why_not_token_wise(call, self.plane)
        return self._known[key]


def _form(arg: relax.Expr) -> Any:
    """What of an argument its operator's loops depend on: of a tensor its type; numbers whole."""
    if isinstance(arg, relax.Tuple):
        return [_form(f) for f in arg.fields]
    number = is_number(arg) or not isinstance(arg.ty, relax.TensorType)
    return arg if number else arg.ty


def _numbers(args: Iterable[relax.Expr]) -> Iterator[relax.Expr]:
    """The scalar arguments among ``args``; extents of a shape are none."""
    for arg in args:
        if isinstance(arg, relax.Tuple):
            yield from _numbers(arg.fields)
        elif isinstance(arg.ty, ir.PrimType):
            yield arg


def _why_not_regrouped(call: relax.Call, plane: Plane) -> str | None:
    source = call.args[0]
    if not plane.is_token_wise(plane.roles(source)):
        return f"reshape of {source.ty} gathers tokens"
    before, after = (segments(extents_of(e), plane.known(e)) for e in (source, call))
    if before is None or after is None or not same_extents(before, after):
        return f"reshape of {source.ty} to {call.ty} mixes tokens with other dimensions"
    return None


@dataclass
class _Proof:
    """Follows the roles of dimensions from the operands to the result, block by block."""

    lowered: Lowered
    roles: Sequence[Roles]
    known: dict[ir.Var, Roles] = field(default_factory=dict)

    def reason(self) -> str | None:
        blocks = block_infos(self.lowered.func)
        if not blocks:
            return "its loops are no blocks"
        report = pit_axes(self.lowered.func)
        params = list(self.lowered.func.params)
        for param, roles in zip(params, self.roles, strict=False):
            self.known[param] = roles
        for info in blocks:
            why = self._block(info, report)
            if why is not None:
                return why
        result = params[len(self.roles) - 1]
        if not any(w.buffer.same_as(result) for info in blocks for w in info.writes):
            return "no block of its loops writes its result"
        return None

    def _block(self, info: BlockInfo, report: AxisReport) -> str | None:
        if info.opaque:
            return f"{info.name} is no tensor expression: {info.opaque[0]}"
        if "*" in report.rejected[info.name]:
            return report.rejected[info.name]["*"]
        axes: dict[str, str] = {}
        for access in (*info.writes, *info.reads):
            why = self._bind(info, access, axes)
            if why is not None:
                return why
            if not self._is_spread(access):
                return f"{info.access_text(access)} is not the same for the tokens of a sequence"
        for axis, role in axes.items():
            if axis not in report.accepted[info.name]:
                return f"{role}: {report.rejected[info.name].get(axis, 'no PIT axis')}"
            if info.kinds[axis] != "spatial":
                return f"{info.name} reduces over the {role}"
        for access in info.writes:
            self.known.setdefault(access.buffer, self._of(info, access, axes))
        return self._stray(info, axes)

    def _bind(self, info: BlockInfo, access: Access, axes: dict[str, str]) -> str | None:
        """Note which axes walk the plane's dimensions of one access."""
        for dim, role in enumerate(self.known.get(access.buffer, ())):
            if role == PLAIN:
                continue
            axis = next((a for a in info.axes if is_bare(access, dim, info.var(a))), None)
            if axis is None or axes.setdefault(axis, role) != role:
                return f"dimension {dim} of {info.access_text(access)} does not follow the {role}"
        return None

    def _is_spread(self, access: Access) -> bool:
        """Whether every token of a sequence reads the same, where that is how the operand is
        packed: an extent of 1 may be another axis', as that of a product's depth."""
        place = tokens_place(self.known.get(access.buffer, ()), self.roles[-1])
        if place is None:
            return True
        return is_zero(access.indices[place])

    def _of(self, info: BlockInfo, access: Access, axes: dict[str, str]) -> Roles:
        found = []
        for dim in range(len(access.indices)):
            axis = next((a for a in info.axes if is_bare(access, dim, info.var(a))), None)
            found.append(axes.get(axis or "", PLAIN))
        return tuple(found)

    def _stray(self, info: BlockInfo, axes: dict[str, str]) -> str | None:
        """An axis of the plane must not walk a dimension that is none of the plane's."""
        for access in (*info.reads, *info.writes):
            if access.buffer not in self.known:
                return f"{access.buffer_name} is read before it is written"
            for dim, role in enumerate(self.known[access.buffer]):
                for axis, mine in axes.items():
                    if role != mine and is_bare(access, dim, info.var(axis)):
                        return f"{info.access_text(access)} is indexed by the {mine}"
        return None
