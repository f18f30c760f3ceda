"""The layer by OpenAI's ``matmul_ogs``: index, activation and gate in kernels in Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from bench_gpu_rivals import LayerData, Run
from triton_kernels.matmul_ogs import (
    FnSpecs,
    FusedActivation,
    GatherIndx,
    RoutingData,
    ScatterIndx,
    matmul_ogs,
)
from triton_kernels.matmul_ogs_details.opt_flags import (
    reset_opt_flags_constraints,
    update_opt_flags_constraints,
)
from triton_kernels.tensor import (
    BIT,
    Bitmatrix,
    make_bitmatrix_metadata,
    make_ragged_tensor_metadata,
)

BLOCK = 256
WORD = 32
FEW_ROWS, MANY_ROWS = 256, 1024  # of an expert


@triton.jit
def _relu(rows):
    return tl.maximum(rows, 0.0)


@triton.jit
def _gated_silu(pairs):
    gate, other = tl.split(tl.reshape(pairs, (pairs.shape[0], pairs.shape[1] // 2, 2)))
    return gate / (1.0 + tl.exp(-gate)) * other


@triton.jit
def _set_bits(
    ids,
    padded,
    bits,
    tokens,
    stride,
    WORDS: tl.constexpr,
    CHOICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Bit ``e`` of a token's row is set for each of its experts; rows padded with -1."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for choice in tl.static_range(PADDED):
        expert = tl.full([BLOCK], -1, tl.int32)
        if choice < CHOICES:
            expert = tl.load(ids + rows * CHOICES + choice, mask=rows < tokens, other=-1)
        tl.store(padded + rows * PADDED + choice, expert.to(tl.int16), mask=rows < tokens)
    for word in tl.static_range(WORDS):
        packed = tl.zeros([BLOCK], tl.uint32)
        for choice in tl.static_range(CHOICES):
            expert = tl.load(ids + rows * CHOICES + choice, mask=rows < tokens, other=-1)
            bit = tl.full([BLOCK], 1, tl.uint32) << (expert & 31).to(tl.uint32)
            packed |= tl.where((expert >> 5) == word, bit, 0)
        tl.store(bits + word * stride + rows, packed, mask=rows < tokens)


@triton.jit
def _drop_padding(
    by_expert,
    by_token,
    gates,
    choices_out,
    places_out,
    gates_out,
    total,
    CHOICES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choices by expert, where each choice stands, and the gates by expert, without padding."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    choice = tl.load(by_expert + at, mask=at < total, other=0)
    choice = choice // PADDED * CHOICES + choice % PADDED
    place = tl.load(by_token + at // CHOICES * PADDED + at % CHOICES, mask=at < total, other=0)
    gate = tl.load(gates + choice, mask=at < total, other=0.0)
    tl.store(choices_out + at, choice, mask=at < total)
    tl.store(places_out + at, place, mask=at < total)
    tl.store(gates_out + at, gate, mask=at < total)


@dataclass(frozen=True)
class _Routing:
    data: Any
    gather: Any
    scatter: Any
    gates: torch.Tensor


def _route(ids: torch.Tensor, gates: torch.Tensor, experts: int) -> _Routing:
    """The library's index of given ids [tokens, top_k]. It wants as many choices as a power of
    two, so others are padded and the padding is dropped."""
    tokens, choices = ids.shape
    padded = triton.next_power_of_2(choices)
    words = triton.cdiv(experts, WORD)
    wide = ids.new_empty((tokens, padded), dtype=torch.int16)
    bits = ids.new_empty((words, triton.cdiv(tokens, WORD) * WORD), dtype=torch.uint32)
    _set_bits[(triton.cdiv(tokens, BLOCK),)](
        ids, wide, bits, tokens, bits.stride(0), words, choices, padded, BLOCK
    )
    matrix = Bitmatrix(
        bits.t()[:tokens], dtype=BIT, shape=[tokens, experts], shape_max=[tokens, None]
    )
    found = make_bitmatrix_metadata(wide, matrix)
    total = ids.numel()
    lists = [ids.new_empty(total) for _ in range(2)]
    sorted_gates = gates.new_empty(total)
    _drop_padding[(triton.cdiv(total, BLOCK),)](
        found.col_sorted_indx,
        found.row_sorted_indx,
        gates,
        *lists,
        sorted_gates,
        total,
        choices,
        padded,
        BLOCK,
    )
    by_expert, by_token = lists
    ragged = make_ragged_tensor_metadata(found.col_sum, total)
    data = RoutingData(sorted_gates, found.col_sum, experts, choices, ragged)
    gather, scatter = GatherIndx(by_expert, by_token), ScatterIndx(by_token, by_expert)
    return _Routing(data, gather, scatter, sorted_gates)


def variants(data: LayerData) -> dict[str, Run]:
    """Functions that compute the layer once: with the library's own choice of tiles, with lower
    ones for few rows, and with weights stored the other way for many."""
    case = data.case
    up, down = data.up, data.down
    if case.gated:  # a gate beside what it multiplies
        up = up.unflatten(1, (2, case.inter)).transpose(1, 2).flatten(1, 2)
    up, down = (weights.transpose(1, 2) for weights in (up, down))
    chosen = {"as chosen": _layer(data, up, down, {})}
    if case.rows <= FEW_ROWS * case.experts:
        chosen["block_m=64"] = _layer(data, up, down, {"block_m": 64})
    if case.rows >= MANY_ROWS * case.experts:
        chosen["row-major"] = _layer(data, up.contiguous(), down.contiguous(), {})
    return chosen


def _layer(data: LayerData, up: torch.Tensor, down: torch.Tensor, wanted: dict[str, int]) -> Run:
    case = data.case
    specs = {
        ("relu", False): FnSpecs("relu", _relu, (), reduction_n=1),
        ("silu", True): FnSpecs("gated_silu", _gated_silu, (), reduction_n=2),
    }
    fused = FusedActivation(specs[case.act, case.gated], ())

    def compute() -> torch.Tensor:
        to = _route(data.ids, data.gates, case.experts)
        rows = matmul_ogs(data.x, up, None, to.data, gather_indx=to.gather, fused_activation=fused)
        return matmul_ogs(rows, down, None, to.data, scatter_indx=to.scatter, gammas=to.gates)

    def run() -> torch.Tensor:
        update_opt_flags_constraints(wanted)
        try:
            return compute()
        finally:
            reset_opt_flags_constraints()

    return run
