"""Whole models with sparse activations against torch, with and without a threshold."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pit_tvm.errors import ShapeError, UnsupportedTarget
from pit_tvm.model import compile, load
from tests.model.test_gathered import force

VOCABULARY, WIDTH, INNER = 37, 16, 90


class Feed(nn.Module):
    """An embedding and a gated feed-forward part: values ``[batch, tokens, width]``."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.act = nn.Embedding(VOCABULARY, WIDTH), act
        self.up, self.gate = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """The values; the mask is there to skip padding by."""
        return self.down(self.inner(input_ids)) * attention_mask.unsqueeze(-1)

    def inner(self, input_ids: torch.Tensor) -> torch.Tensor:
        """What the last layer reads."""
        x = self.words(input_ids)
        return self.act(self.up(x)) * self.gate(x)


def batch(*lengths: int) -> dict[str, torch.Tensor]:
    """Random ids, and the mask of sequences padded right."""
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    ids = np.random.default_rng(len(lengths)).integers(0, VOCABULARY, mask.shape)
    return {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
    }


def error(found: torch.Tensor, expected: torch.Tensor, given: dict[str, torch.Tensor]) -> float:
    """The largest at live tokens, relative to the largest value."""
    live = given["attention_mask"].bool()
    found, expected = found[live].double(), expected[live].double()
    return float((found - expected).abs().max() / expected.abs().max())


def test_models_equal_torch_gathered_and_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Feed(nn.ReLU())
    with torch.no_grad():
        model.up.bias -= 0.5  # most are zero
    ours = compile(model, batch(2, 3))
    for margin, given in ((math.inf, batch(30, 0, 20)), (0.0, batch(3, 2))):
        force(monkeypatch, margin)
        with torch.no_grad():
            assert error(ours(**given), model(**given), given) < 1e-5
    few, many = ours.activity
    assert (few.gathers, many.gathers) == (False, True)
    assert 0.0 < many.live < 1.0 and many.after == "relu"
    assert (many.form.n, many.form.k) == (WIDTH, INNER)
    assert ours.explain().splitlines()[-2:] == [str(few), str(many)]


def test_threshold_reports_the_error_that_it_makes() -> None:
    model, given = Feed(nn.GELU()), batch(9, 4)
    with torch.no_grad():
        expected = model(**given)
    exact = compile(model, batch(2, 3))
    assert error(exact(**given), expected, given) < 1e-5 and exact.activity == []
    ours = compile(model, batch(2, 3), activation_threshold=0.1)
    assert 1e-5 < error(ours(**given), expected, given) < 0.5
    (one,) = ours.activity
    assert one.after == "gelu" and f"dropped {one.dropped:.2%} of" in ours.explain()
    with torch.no_grad():
        inner = model.inner(given["input_ids"])[given["attention_mask"].bool()]
    small = inner[inner.abs() <= 0.1]
    assert one.dropped == pytest.approx(float(small.norm() / inner.norm()), rel=1e-3)


def test_saved_models_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force(monkeypatch, math.inf)
    ours = compile(Feed(nn.SiLU()), batch(2, 3), activation_threshold=0.1)
    ours.save(tmp_path / "model.pit")
    assert ours.activity == []  # saving is no call
    loaded = load(tmp_path / "model.pit")
    for given in (batch(1), batch(7, 0, 20)):
        arrays = {name: value.numpy() for name, value in given.items()}
        np.testing.assert_array_equal(loaded(**arrays), ours(**arrays))
    assert loaded._layers._cache.stats.builds == loaded._layers._cache.stats.disk_hits == 0
    assert loaded.activity == ours.activity != []
    assert {one.after for one in loaded.activity} == {"silu"}
    assert loaded.explain() == ours.explain()


def test_thresholds_that_are_refused() -> None:
    model, target = Feed(nn.ReLU()), {"kind": "cuda", "arch": "sm_90a"}
    with pytest.raises(ShapeError, match="activation_threshold: expected None or a finite"):
        compile(model, batch(2, 3), activation_threshold=-1.0)
    with pytest.raises(UnsupportedTarget, match="activation_threshold: expected None on a GPU"):
        compile(model.half(), batch(2, 3), target=target, activation_threshold=1.0)
