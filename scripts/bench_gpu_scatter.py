"""The layer by ScatterMoE's kernels: products of scattered rows in Triton, index by ``sort``."""

from __future__ import annotations

import torch
import triton
from bench_gpu_rivals import LayerData, Run, activate, combine, compiled, sort_ids
from scattermoe.kernels import ops

# Columns, depth, stages and warps: the package's own, and two that suit Hopper better.
CONFIGS = ((128, 32, 4, 4), (128, 64, 4, 4), (256, 64, 3, 8))


def variants(data: LayerData) -> dict[str, Run]:
    """One function that computes the layer once: the package's autotuner picks a configuration.

    The first product leaves rows by expert, the second in the order of the tokens.
    """
    case = data.case
    up, down = data.up.transpose(1, 2), data.down.transpose(1, 2)
    index, between, together = (
        compiled(part, data.x.device.type) for part in (sort_ids, activate, combine)
    )
    ops._scatter2scatter.configs = [
        triton.Config({"BLOCK_N": n, "BLOCK_K": k}, num_stages=stages, num_warps=warps)
        for n, k, stages, warps in CONFIGS
    ]

    def run() -> torch.Tensor:
        ordered, choices = index(data.ids, case.experts)
        rows = ops.scatter2scatter(data.x, up, ordered, choices, case.top_k, y_grouped=True)
        rows = between(rows, case.act, case.gated)
        rows = ops.scatter2scatter(rows, down, ordered, choices, 1, x_grouped=True)
        return together(rows, data.gates)

    return {"autotuned": run}
