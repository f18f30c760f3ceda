"""The suite ``index``: online detection, against what torch offers for the same input.

* csr: ``to_sparse_csr`` of the mask, which lists elements; it waits for the device;
* blocks: FlexAttention's ``create_block_mask``, which lists live blocks of 128x128;
* sort: ``torch.argsort`` of expert ids, which orders all of them;
* nonzero: ``torch.nonzero`` of the rows that lengths cover.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from bench_gpu_cases import Indexed, draw_lengths, draw_routing, list_indexed
from bench_gpu_measure import Contender, GpuSettings, fresh_memory, measure, on
from bench_gpu_pit import detection
from bench_rows import (
    Array,
    Case,
    Column,
    Row,
    Suite,
    Target,
    block_mask,
    fact,
    fact_column,
    limits,
    time_column,
)

import pit_tvm
from pit_tvm.reference.index import index_lists
from pit_tvm.structs import MicroTile, SparsitySpec

MASK_US, IDS_US = 12.0, 6.0
CSR_SPEED_UP, BLOCKS_SPEED_UP = 10.0, 100.0
BLOCK = 128


def problem(
    case: Indexed, rng: np.random.Generator
) -> tuple[SparsitySpec, Array, tuple[int, int], MicroTile]:
    """Specification, pattern, shape of the operand, and micro-tile of a case."""
    if case.kind == "mask":
        rows, columns = case.grain
        block = (rows, columns or case.size)
        dim = 1 if rows > 1 else 0
        mask = block_mask(rng, (case.size, case.size), block, case.zeros)
        return pit_tvm.Mask(), mask, mask.shape, MicroTile("lhs", "mk"[dim], dim, case.grain)
    rows_tile = MicroTile("lhs", "m", 0, (1, 0))
    if case.kind == "groups":
        ids = draw_routing(rng, "zipf", case.size, case.parts, 1)
        return pit_tvm.Groups(case.parts), ids, (case.size, 64), rows_tile
    lengths = draw_lengths(rng, "uniform", case.parts, case.size // case.parts)
    return pit_tvm.Lengths(), lengths, (case.size, 64), rows_tile


def measure_index(case: Indexed, settings: GpuSettings) -> Row:
    """One detection and its peers."""
    spec, pattern, shape, micro_tile = problem(case, settings.rng(case.label))
    want = index_lists(spec, pattern, shape, micro_tile)
    with fresh_memory(settings.device):
        value = on(settings.device, pattern)
        ours = Contender(
            detection(settings, spec, value, shape, micro_tile),
            lambda index: 0.0 if same_lists(index, want) else float("inf"),
        )
        facts = {"kind": case.kind, "grain": list(case.grain), "live": sum(map(len, want))}
        return compared(case, {"pit": ours, **_peers(case, value)}, settings, facts)


def compared(
    case: Case, contenders: Mapping[str, Contender], settings: GpuSettings, facts: dict[str, Any]
) -> Row:
    """The row of one index, "pit", with how much longer each peer takes as facts "over_..."."""
    with warnings.catch_warnings():
        # torch calls compressed rows a beta, and block masks without torch.compile slow.
        warnings.simplefilter("ignore", UserWarning)
        found = measure(contenders, settings)
    us = {name: stat.median for name, stat in found.stats.items()}
    over = {f"over_{name}": us[name] / us["pit"] for name in us if name != "pit"}
    facts = {**facts, "without_graph": found.plain, **over}
    return Row(case.label, case.held_out, found.stats, facts, found.errors)


def same_lists(index: Any, want: Sequence[Array]) -> bool:
    """Whether the lists of an index, in any order, are those wanted."""
    count = torch.as_tensor(index.count).cpu().numpy()
    ids = torch.as_tensor(index.ids).cpu().numpy()
    if count.tolist() != [len(slot) for slot in want]:
        return False
    rows = zip(ids.reshape(len(count), -1), count, want, strict=True)
    return all(np.array_equal(np.sort(found[:n]), slot) for found, n, slot in rows)


def _peers(case: Indexed, value: torch.Tensor) -> dict[str, Contender]:
    if case.kind == "groups":
        return {"sort": Contender(lambda: torch.argsort(value))}
    if case.kind == "lengths":
        positions = torch.arange(case.size // case.parts, device=value.device)
        cover = positions < value[:, None]
        return {"nonzero": Contender(lambda: torch.nonzero(cover.flatten()), capture=False)}
    return {
        "csr": Contender(value.to_sparse_csr, capture=False),
        "blocks": Contender(block_masker(value, BLOCK), capture=False),
    }


def block_masker(mask: torch.Tensor, block: int | tuple[int, int]) -> Callable[[], Any]:
    """A function that lists live blocks of a mask by FlexAttention's ``create_block_mask``."""
    from torch.nn.attention.flex_attention import create_block_mask

    options: dict[str, Any] = {"device": str(mask.device), "BLOCK_SIZE": block}
    return lambda: create_block_mask(
        lambda b, h, q, kv: mask[q, kv], None, None, *mask.shape, **options
    )


def index_targets(rows: Sequence[Row]) -> list[Target]:
    """The issue's limits for detection."""

    def us(row: Row) -> float:
        return row.us("pit")

    def fine(row: Row) -> bool:
        return row.facts["grain"] == [32, 1]

    def mask(row: Row) -> bool:
        return row.facts["kind"] == "mask"

    ids = [row for row in rows if row.facts["kind"] == "groups"]
    masks = [row for row in rows if mask(row)]
    return [
        *limits(rows, "index: us, mask at 32x1", MASK_US, us, at_least=False, only=fine),
        *limits(ids, "index: us, expert ids", IDS_US, us, at_least=False),
        *limits(masks, "index: over to_sparse_csr", CSR_SPEED_UP, fact("over_csr"), only=fine),
        *limits(
            masks, "index: over create_block_mask", BLOCKS_SPEED_UP, fact("over_blocks"), only=fine
        ),
    ]


def _peers_of(row: Row) -> str:
    each = ((name, row.us(name), row.facts[f"over_{name}"]) for name in row.stats if name != "pit")
    return ", ".join(f"{name} {us:.1f} ({over:.1f}x)" for name, us, over in each)


COLUMNS = (
    fact_column("live", "live"),
    time_column("pit", "pit", 1),
    Column("right", lambda row: "no" if row.wrong else "yes"),
    Column("peers (times pit)", _peers_of),
)
INDEX = Suite(
    name="index",
    title="one index; us",
    cases=list_indexed,
    measure=measure_index,
    columns=COLUMNS,
    targets=index_targets,
)
