"""The schedule of any function on a GPU: a thread for each result, with all that it needs."""

from __future__ import annotations

from tvm import s_tir, tirx

THREADS = 128


def apply(sch: s_tir.Schedule) -> None:
    """Bind the last block's results to threads, and compute what it reads where it is read.

    Positions behind the live ones end at their guards. Sums are one thread's work: families exist
    for what is worth more.
    """
    *before, last = sch.get_child_blocks(sch.get_sblock("root"))
    sums_of = [block for block in before if not _is_injective(sch.get(block))]
    for block in before:
        if block not in sums_of:
            sch.compute_inline(block)
    kinds = [iv.iter_type for iv in sch.get(last).iter_vars]
    loops = list(sch.get_loops(last))
    spatial = [loop for loop, kind in zip(loops, kinds, strict=True) if _is_spatial(kind)]
    sums = [loop for loop, kind in zip(loops, kinds, strict=True) if not _is_spatial(kind)]
    fused = sch.fuse(*spatial) if spatial else sch.add_unit_loop(last)
    if sums:
        sch.reorder(fused, *sums)
    grid, thread = sch.split(fused, [None, THREADS])
    sch.bind(grid, "blockIdx.x")
    sch.bind(thread, "threadIdx.x")
    for block in reversed(sums_of):
        sch.set_scope(block, 0, "local")
        sch.compute_at(block, thread)


def _is_injective(block: s_tir.SBlock) -> bool:
    """Whether a block computes every element once."""
    return all(_is_spatial(iv.iter_type) for iv in block.iter_vars)


def _is_spatial(kind: int) -> bool:
    return kind == tirx.IterVar.DataPar
