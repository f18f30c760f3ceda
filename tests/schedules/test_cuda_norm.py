"""Layer norms of rows on a GPU: their text, and on a GPU what they compute."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import tvm

from pit_tvm.errors import DTypeError, PitError, ShapeError
from pit_tvm.runtime.cuda_build import build_cuda
from pit_tvm.schedules.cuda_norm import NormForm, norm_rows
from tests.schedules.cuda_text import cuda_text

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(("width", "moves"), [(768, True), (1021, False)])
def test_whole_pieces_of_16_bytes_where_rows_have_them(width: int, moves: bool) -> None:
    text = cuda_text(norm_rows(width, "float16", 1e-5, 2))
    assert ("ld.global.v4.b32" in text) == moves
    assert "y_ptr" in text and "griddepcontrol.wait" in text


def test_one_term_reads_one_tensor() -> None:
    assert "y_ptr" not in cuda_text(norm_rows(64, "bfloat16", 1e-5, 1))


def test_a_sum_is_stored_where_it_is_asked_for() -> None:
    for stores in (False, True):
        text = cuda_text(norm_rows(768, "float16", 1e-5, 2, stores_sum=stores))
        assert ("whole_ptr" in text) == stores
    with pytest.raises(ShapeError, match="terms"):
        norm_rows(768, "float16", 1e-5, 1, stores_sum=True)


@pytest.mark.parametrize(
    ("width", "team", "steps"), [(8, 1, 1), (768, 1, 3), (1024, 1, 4), (4096, 4, 4), (20480, 8, 10)]
)
def test_a_team_grows_with_the_row(width: int, team: int, steps: int) -> None:
    form = NormForm(width, "float16", 1e-5, 1)
    assert (form.team, form.steps) == (team, steps)


@pytest.mark.parametrize(
    ("form", "error"),
    [
        ((0, "float16", 1e-5, 1), ShapeError),
        ((8, "float32", 1e-5, 1), DTypeError),
        ((8, "float16", -1.0, 1), ShapeError),
        ((8, "float16", float("nan"), 1), ShapeError),
        ((8, "float16", 1e-5, 3), ShapeError),
    ],
)
def test_bad_forms(form: tuple[Any, ...], error: type[PitError]) -> None:
    with pytest.raises(error):
        norm_rows(*form)


WIDTHS = (1, 8, 100, 384, 1021, 1024, 2056, 5120)
DTYPES = ("float16", "bfloat16")
FORMS = ((1, False), (2, False), (2, True))


@pytest.fixture(scope="module")
def norms() -> Any:
    """All norms that are tested, compiled together."""
    made = tvm.IRModule()
    for width, dtype, (terms, stores) in product(WIDTHS, DTYPES, FORMS):
        name = f"norm_{width}_{dtype}_{terms}_{stores}"
        func = norm_rows(width, dtype, 1e-5, terms, stores_sum=stores)
        made[name] = func.with_attr("global_symbol", name)
    return build_cuda(made, tirx=True).mod


def error_of(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest value."""
    return float((found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_against_float64(width: int, form: tuple[int, bool], dtype: str, norms: Any) -> None:
    kind, limit = getattr(torch, dtype), 2e-3 if dtype == "float16" else 2e-2
    terms, stores = form
    for rows in (1, 7, 300):
        drawn = torch.randn(terms, rows, width, device="cuda") * 3 + 5
        inputs = [term.to(kind).contiguous() for term in drawn]
        scale, shift = (torch.randn(width, device="cuda").to(kind) for _ in range(2))
        shape = (1 + stores, rows + 1, width)
        outs = torch.full(shape, float("nan"), dtype=kind, device="cuda").unbind()
        norm = norms[f"norm_{width}_{dtype}_{terms}_{stores}"]
        norm(*inputs, scale, shift, *(out[:rows] for out in outs))
        x = sum(term.double() for term in inputs)
        centred = x - x.mean(1, keepdim=True)
        expected = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
        expected = expected * scale.double() + shift.double()
        for out, right in zip(outs, (expected, x), strict=False):
            assert error_of(out[:rows], right) < limit
            assert bool(out[rows].isnan().all())
