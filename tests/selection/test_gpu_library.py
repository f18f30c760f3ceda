"""What a library's dense products are taken to cost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pit_tvm.selection.gpu_library import library_of

MEASURED = Path(__file__).parents[2] / "tuning_logs" / "h200-sm_90a" / "dense.json"
GBPS = 4165.0


@pytest.mark.parametrize(
    ("dtype", "median", "most"),
    [("float16", 0.04, 0.12), ("bfloat16", 0.04, 0.12), ("float32", 0.07, 0.2)],
)
def test_costs_fit_what_was_measured(dtype: str, median: float, most: float) -> None:
    """The median error, and that of nine shapes of ten."""
    library, errors = library_of(dtype), []
    for row in json.loads(MEASURED.read_text())["rows"]:
        if f"{dtype}_nk" in row:
            us, bound = library.product_us(row["m"], row["n"], row["k"], GBPS)
            errors.append(abs(us / row[f"{dtype}_nk"] - 1))
            assert bound < us
    assert len(errors) > 40
    assert np.median(errors) < median and np.quantile(errors, 0.9) < most


def test_float32_on_tensor_cores_costs_what_was_measured() -> None:
    library, errors = library_of("tf32"), []
    for row in json.loads(MEASURED.read_text())["rows"]:
        if "tf32_kn" in row:
            us, bound = library.product_us(row["m"], row["n"], row["k"], GBPS)
            errors.append(abs(us / row["tf32_kn"] - 1))
            assert bound < us
    assert len(errors) > 20
    assert np.median(errors) < 0.04 and np.quantile(errors, 0.9) < 0.12


def test_operands_with_the_depth_first_cost_more_on_tensor_cores() -> None:
    rows = json.loads(MEASURED.read_text())["depth first rows"]
    times = [row["tf32_km_kn"] / row["tf32_kn"] for row in rows if row["tf32_kn"] > 50]
    assert len(times) > 8
    assert library_of("tf32").depth_first == pytest.approx(np.median(times), rel=0.03)
    assert library_of("float32").depth_first == library_of("float16").depth_first == 1.0


def test_zeros_draw_no_power() -> None:
    library = library_of("tf32")
    # Dense times of the granularity suite on an H200, with 90, 95 and 99 % of lhs zero.
    for zeros, measured in ((0.9, 319.8), (0.95, 319.1), (0.99, 317.8)):
        assert library.product_us(4096, 4096, 4096, GBPS, zeros)[0] == pytest.approx(
            measured, rel=0.02
        )
    costs = [library.product_us(4096, 4096, 4096, GBPS, zeros)[0] for zeros in (0.0, 0.5, 1.0)]
    assert costs == sorted(costs, reverse=True) and costs[0] > 1.15 * costs[2]
    single = library_of("float32")  # never short of power
    assert single.product_us(64, 64, 64, GBPS, 0.9) == single.product_us(64, 64, 64, GBPS)


def test_a_steady_load_leaves_less_power() -> None:
    library, errors, alone = library_of("float16"), [], []
    for row in json.loads(MEASURED.read_text())["steady rows"]:
        sizes, measured = (row["m"], row["n"], row["k"]), row["us"]
        alone.append(measured / library.product_us(*sizes, GBPS)[0])
        us, bound = library.product_us(*sizes, GBPS, steady=True)
        errors.append(abs(us / measured - 1))
        assert bound == library.product_us(*sizes, GBPS)[1]
    assert len(errors) == 14 and max(alone) > 1.12
    assert max(errors) < 0.08 and np.median(errors) < 0.04
    for dtype in ("float32", "tf32"):
        other = library_of(dtype)
        assert other.product_us(64, 64, 64, GBPS, 0.0, True) == other.product_us(64, 64, 64, GBPS)


def test_narrow_products_cost_more_for_each_operation() -> None:
    half = library_of("bfloat16")
    square, narrow = (half.product_us(2048, n, 4096, GBPS)[0] / n for n in (2048, 64))
    assert narrow > 2 * square
    assert half.product_us(2048, 2048, 4096, GBPS) == library_of("float16").product_us(
        2048, 2048, 4096, GBPS
    )


def test_few_tiles_split_their_depth() -> None:
    half = library_of("float16")
    deep, shallow = (half.product_us(128, 128, k, GBPS)[0] for k in (8192, 1024))
    assert deep < 2.5 * shallow
