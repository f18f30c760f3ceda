"""What the custom operators run: operators of pit-tvm, compiled once for each combination of
options, kernels of a GPU, or on CPUs torch itself (`pit_tvm.torch.host`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from .. import op as te_op
from ..api import Operator
from ..api import compile as compile_operator
from ..errors import ShapeError, mismatch
from ..gates import Gate
from ..op.arguments import resolve_dtypes
from ..op.epilogue import check_activation
from ..reference.index import index_lists
from ..runtime.cuda_arrays import dtype_name
from ..runtime.cuda_between import CudaBetween
from ..runtime.cuda_experts import CudaExperts
from ..runtime.detect import Detector
from ..runtime.kernel_cache import KernelCache
from ..runtime.promise import asked_for
from ..runtime.torch_arrays import stored_weight
from ..schedules.hopper_space import DTYPES
from ..structs import Groups, Lengths, MicroTile, Rows, SparsitySpec
from ..target import resolve_target
from ..tile_db.store import TileStore
from . import host

KINDS = ("lengths", "cu_seqlens", "rows")
# Elements from which on reading live rows alone makes up for finding them: torch's activations find
# nothing, and take one launch where these take two.
MANY = 1 << 24
ONES = 8  # columns of an input that is always 1: a vector of 16 bytes on GPUs


def spec_of(kind: str) -> SparsitySpec:
    """The pattern of rows that a name stands for."""
    if kind not in KINDS:
        raise ShapeError(mismatch("kind", f"one of {KINDS}", repr(kind)))
    return Rows() if kind == "rows" else Lengths(cumulative=kind == "cu_seqlens")


def result_type(x: torch.Tensor) -> torch.dtype:
    """Element type of a product of ``x``: its own, and int32 of int8."""
    found: torch.dtype = getattr(torch, resolve_dtypes(dtype_name(x)).output)
    return found


def shaped(made: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A new tensor in another shape, and no view: autograd lets nobody change one in place that was
    made where it does not look."""
    return made if made.shape == shape else made.view(shape).data


def linear_of_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pattern: torch.Tensor,
    kind: str,
    activation: str | None,
) -> torch.Tensor:
    """``activation(x @ weight.T + bias)`` over the rows that a pattern names, zeros elsewhere."""
    if not x.shape[1]:  # a gradient of no columns: functions refuse x without a depth
        return x.new_zeros((len(x), weight.shape[0]))
    if not x.is_cuda and x.dtype != torch.float32 and host.computes(x.dtype):
        check_activation(activation, resolve_dtypes(dtype_name(x)))
        return host.live_rows(x, weight, bias, _rows_of(x, pattern, kind), activation)
    # GPU kernels take every size at run time.
    sizes = (None, None) if x.is_cuda else tuple(map(int, weight.shape))
    target, (stored, layout) = "cuda" if x.is_cuda else "llvm", stored_weight(weight)
    operator = _linear(target, dtype_name(x), kind, *sizes, layout, bias is not None, activation)
    operands = (stored,) if bias is None else (stored, bias)
    if x.is_cuda and layout == "nk":
        _rows_operators()[x.dtype, kind, bias is not None, activation] = operator
    out: torch.Tensor = operator(x, *operands, sparsity=pattern)
    return out


def repeated_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pattern: torch.Tensor,
    kind: str,
    activation: str | None,
) -> torch.Tensor | None:
    """`linear_of_rows` again on a GPU, of what was there before, for rows [..., k]; None where it
    has to be computed."""
    operator = _rows_operators().get((x.dtype, kind, bias is not None, activation))
    if operator is None or not x.is_contiguous():
        return None
    rows = x if x.dim() == 2 else x.view(x.shape[:-1].numel(), *x.shape[-1:])
    operands = (weight,) if bias is None else (weight, bias)
    made: torch.Tensor | None = operator.repeated(rows, *operands, sparsity=pattern)
    return None if made is None else shaped(made, (*x.shape[:-1], len(weight)))


@cache
def _rows_operators() -> dict[object, Operator]:
    """Those of `linear_of_rows` that ran on GPUs with weights [n, k], by what calls ask for."""
    return {}


def outer_of_rows(
    left: torch.Tensor, right: torch.Tensor, pattern: torch.Tensor, kind: str
) -> torch.Tensor:
    """``left.T @ right`` [n, k] over the rows that a pattern names, on CPUs by torch."""
    if not left.is_cuda:
        return host.outer_live(left, right, _rows_of(left, pattern, kind))
    if 0 in left.shape or 0 in right.shape:
        return left.new_zeros((left.shape[1], right.shape[1]))
    out: torch.Tensor = _outer(dtype_name(left), kind)(left, right, sparsity=pattern)
    return out


def activated_of_rows(
    rows: torch.Tensor, pattern: torch.Tensor, kind: str, activation: str
) -> torch.Tensor:
    """The activation of rows [number, n], zeros in those that a pattern does not name, which are
    zeros."""
    if reads_live(rows):
        return _cuda_between().activate(rows, spec_of(kind), pattern, activation)
    return host.activate(activation)(rows)


def gradient_of_activated(
    rows: torch.Tensor, down: torch.Tensor, pattern: torch.Tensor, kind: str, activation: str
) -> torch.Tensor:
    """The gradient to the rows of `activated_of_rows` that a pattern names, ``down`` being that to
    its result; others hold anything."""
    if reads_live(rows):
        given = (rows, down, spec_of(kind), pattern, activation)
        return _cuda_between().activate_gradient(*given)
    return host.activate_gradient(rows, down, activation)


def reads_live(rows: torch.Tensor) -> bool:
    """Whether activations of these rows [..., n] read those that live alone, also where their
    number is not known yet."""
    n, size = rows.shape[-1], rows.numel()
    takes = rows.is_cuda and dtype_name(rows) in DTYPES and not n % ONES
    return takes and (not isinstance(size, int) or size >= MANY)


def _rows_of(x: torch.Tensor, pattern: torch.Tensor, kind: str) -> torch.Tensor:
    """Ids of the rows that a pattern names, on the CPU; errors as `Detector.detect`."""
    spec, of = spec_of(kind), (tuple(x.shape), MicroTile("lhs", "m", 0, (1, 0)))
    read = _detector(asked_for()).read(spec, pattern, *of)
    (ids,) = index_lists(spec, read, *of)
    return torch.from_numpy(ids)


@cache
def _detector(checked: bool) -> Detector:
    return Detector("llvm", checked=checked)


@cache
def _cuda_experts() -> CudaExperts:
    target = resolve_target("cuda")
    store = TileStore.open(None, device=target.device, isa=target.isa)
    return CudaExperts(target, store, KernelCache())


@cache
def _cuda_between() -> CudaBetween:
    return CudaBetween(KernelCache(), resolve_target("cuda").isa)


def moe_layer(device: str) -> Callable[..., torch.Tensor]:
    """``layer(x, ids, weights, up, down, up_bias=, down_bias=, activation=, gate=)`` on one kind of
    device."""
    return _cuda_experts().run if device == "cuda" else _host_moe


def repeated_layer(
    tensors: Sequence[torch.Tensor | None], activation: str, gate: Gate | None
) -> torch.Tensor | None:
    """A layer again on a GPU that was there before: x [tokens, hidden], ids, weights, up, down and
    both biases, if there are any; None where it has to be computed."""
    made: torch.Tensor | None = _cuda_experts().repeated(*tensors, activation, gate)
    return made


def grouped_choices(
    x: torch.Tensor,
    ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """[tokens * choices, n]: every choice ``ids[t, c]`` of a row; zeros where it is no group."""
    if not x.shape[1]:  # as above
        return x.new_zeros((ids.numel(), weight.shape[1]))
    if x.is_cuda:
        return _cuda_experts().grouped(x, ids, weight, bias, activation or "none")
    host.check_ids("group_ids", ids, len(weight))
    if host.computes(x.dtype):
        check_activation(activation, resolve_dtypes(dtype_name(x)))
        return host.grouped_rows(x, ids, weight, bias, activation)
    rows = x.repeat_interleave(ids.shape[1], 0)
    stored, layout = stored_weight(weight)
    operands = (stored,) if bias is None else (stored, bias)
    sizes = map(int, weight.shape)
    operator = _host_grouped(dtype_name(x), *sizes, layout, bias is not None, activation)
    return operator(rows, *operands, ids.reshape(-1).to(torch.int32))


def outer_of_groups(
    left: torch.Tensor, right: torch.Tensor, ids: torch.Tensor, groups: int
) -> torch.Tensor:
    """[groups, n, k]: of each group ``left.T @ right`` over its rows, those of ``left`` being the
    choices ``ids[t, c]`` of the rows of ``right``."""
    if left.is_cuda:
        return _cuda_experts().outer(left, right, ids, groups)
    host.check_ids("group_ids", ids, groups)
    return host.outer_groups(left, right, ids, groups)


def combined_choices(rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[tokens, n]: sums of the rows [tokens, choices, n] of a token, each by its weight."""
    if rows.is_cuda:
        return _cuda_between().combine(rows, weights, ids)
    return host.combined(rows, ids, weights, rows.dtype)


def spread_sums(
    rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `combined_choices` to rows and weights, ``down`` that to its result."""
    if rows.is_cuda:
        return _cuda_between().spread(rows, weights, ids, down)
    return host.spread(rows, ids, weights, down)


def summed_choices(rows: torch.Tensor) -> torch.Tensor:
    """[tokens, n]: sums of the rows [tokens, choices, n] of a token."""
    return _cuda_between().total(rows) if rows.is_cuda else rows.sum(1)


def gated_rows(rows: torch.Tensor, activation: str, gate: Gate) -> torch.Tensor:
    """What ``gate`` makes of rows [number, 2 * width] of gates and others."""
    if rows.is_cuda:
        return _cuda_between().gate(rows, activation, gate)
    return host.gate_halves(rows, activation, gate)


def gradient_of_gated(
    rows: torch.Tensor, down: torch.Tensor, activation: str, gate: Gate
) -> torch.Tensor:
    """The gradient to the rows of `gated_rows`, ``down`` being that to its result."""
    if rows.is_cuda:
        return _cuda_between().gate_gradient(rows, down, activation, gate)
    return host.gate_gradient(rows, down, activation, gate)


def _host_moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    gate: Gate | None,
) -> torch.Tensor:
    """The layer expert by expert, or by two grouped products."""
    check_activation(activation, resolve_dtypes(dtype_name(x)))
    host.check_ids("expert_ids", ids, len(up))
    if host.computes(x.dtype):
        return host.feed_forward(x, ids, weights, up, down, up_bias, down_bias, activation, gate)
    rows = grouped_choices(x, ids, up, up_bias, activation if gate is None else None)
    if gate is not None:
        rows = host.gate_halves(rows.float(), activation, gate).to(x.dtype)
    rows = grouped_choices(rows, ids.reshape(-1, 1), down, down_bias, None)
    return host.combined(rows, ids, weights, x.dtype)


@cache
def _linear(
    target: str,
    dtype: str,
    kind: str,
    n: int | None,
    k: int | None,
    layout: str,
    bias: bool,
    activation: str | None,
) -> Operator:
    form: dict[str, Any] = {"transpose_rhs": layout == "nk", "bias": bias, "activation": activation}
    tensors = te_op.matmul(None, n, k, dtype=dtype, **form)
    return compile_operator(tensors, sparse={"lhs": spec_of(kind)}, target=target, dead="zero")


@cache
def _outer(dtype: str, kind: str) -> Operator:
    tensors = te_op.matmul(None, None, None, dtype=dtype, transpose_lhs=True)
    return compile_operator(tensors, sparse={"lhs": spec_of(kind)}, target="cuda")


@cache
def _host_grouped(
    dtype: str, groups: int, n: int, k: int, layout: str, bias: bool, activation: str | None
) -> Operator:
    """A grouped product on the CPU, with one weight for each group, in the order of ``layout``."""
    form: dict[str, Any] = {"transpose_rhs": layout == "nk", "bias": bias, "activation": activation}
    tensors = te_op.grouped_matmul(None, n, k, groups, dtype=dtype, **form)
    return compile_operator(tensors, sparse={"lhs": Groups(groups)}, dead="zero")
