"""What selection knows of a pattern: from samples or counts, and the key of its plans."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from pit_tvm import op
from pit_tvm.runtime.detect_sample import Sample
from pit_tvm.runtime.pattern import Pattern, Sampler, counted
from pit_tvm.runtime.program import Program, analyse
from pit_tvm.selection.cover import SAMPLE_EXTENTS, bucket, reading
from pit_tvm.structs import BlockMask, Grid, Mask, Rows, SparsitySpec

TOTAL = 2**40  # micro-tiles in a sample: multiples of its inverse are exact densities


def sampled(densities: Iterable[float], rows: float, beside: float = 1.0) -> Sample:
    """A sample of these densities."""
    known = np.array([*densities, beside, rows])
    totals = np.full(len(known), float(TOTAL))
    return Sample(bytes(map(bucket, known)), (known * totals).astype(np.int64).tobytes(), totals)


def matmul(spec: SparsitySpec, **options: Any) -> Program:
    return analyse(op.matmul(None, None, None, **options), {"lhs": spec})


def test_samples_become_covered_densities_of_the_routes() -> None:
    densities = {extents: 0.01 * (1 + i) for i, extents in enumerate(SAMPLE_EXTENTS)}
    found = Sampler(matmul(Mask())).pattern(sampled(densities.values(), 0.9))
    assert found.covered == pytest.approx((0.9, densities[1, 64], densities[32, 1]))
    turned = analyse(op.matmul(None, None, None, transpose_lhs=True), {"lhs": Mask()})
    found = Sampler(turned).pattern(sampled(densities.values(), 0.9))
    by_name = dict(zip([str(r.micro_tile) for r in turned.routes], found.covered, strict=True))
    assert by_name == pytest.approx(
        {"1x32": densities[1, 32], "*x1": 0.9, "64x1": densities[64, 1]}
    )


def test_rows_and_what_lives_beside_them_live_together() -> None:
    found = Sampler(matmul(Grid())).pattern(sampled([0.5] * len(SAMPLE_EXTENTS), 0.8, 0.25))
    assert found.covered == pytest.approx((0.8, 0.5, 0.5, 0.2))
    other = Sampler(matmul(Grid())).pattern(sampled([0.5] * len(SAMPLE_EXTENTS), 0.8, 0.75))
    assert other.key != found.key


def test_densities_that_nobody_sampled_are_the_covers_estimates() -> None:
    program = matmul(BlockMask(40, 48))
    samples = (np.random.default_rng(3).integers(1, TOTAL, len(SAMPLE_EXTENTS)) / TOTAL).tolist()
    found = Sampler(program).pattern(sampled(samples, 0.5)).covered
    estimated = 0
    for route, density in zip(program.routes, found, strict=True):
        rows, depth = route.micro_tile.extents
        if depth:
            assert density == reading((rows, depth))(samples)
            estimated += (rows, depth) not in SAMPLE_EXTENTS
    assert estimated


def test_batches_and_expressions_without_a_product_count_as_whole() -> None:
    for tensors, name in ((op.batch_matmul(2, 8, 8, 8), "lhs"), (op.reduce_sum(8, 8), "data")):
        program = analyse(tensors, {name: Mask()})
        found = Sampler(program).pattern(sampled([0.25] * len(SAMPLE_EXTENTS), 0.25)).covered
        con = program.contraction
        wanted = [
            1.0 if con is None or r.micro_tile.axis in con.batch else 0.25 for r in program.routes
        ]
        assert list(found) == wanted and 1.0 in found


def test_patterns_of_one_bucket_share_a_key() -> None:
    sampler, samples = Sampler(matmul(Mask())), [0.5] * len(SAMPLE_EXTENTS)
    key = sampler.pattern(sampled(samples, 0.5)).key
    assert sampler.pattern(sampled([d * 1.01 for d in samples], 0.501)).key == key
    assert sampler.pattern(sampled([d * 1.5 for d in samples], 0.5)).key != key
    assert sampler.pattern(sampled(samples, 0.9)).key != key


def test_counts_are_exact_and_full_is_a_bucket_of_its_own() -> None:
    program = matmul(Rows())
    assert counted(program, 3, 12).covered == (0.25,)
    assert counted(program, 0, 0).covered == (0.0,)
    assert counted(program, 9999, 10000).key != counted(program, 10000, 10000).key


def test_covered_densities_are_worked_out_when_they_are_asked_for() -> None:
    asked: list[int] = []

    def covered() -> tuple[float, ...]:
        asked.append(1)
        return (0.5,)

    pattern = Pattern(covered, (6,))
    assert not asked and pattern.key == (6,)
    assert pattern.covered == pattern.covered == (0.5,) and asked == [1]
