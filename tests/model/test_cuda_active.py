"""When a layer behind ReLU reads only the weights of what lives."""

from __future__ import annotations

import pytest
import torch

from pit_tvm.model import cuda_active
from pit_tvm.model.cuda_active import ActiveRows
from pit_tvm.model.linear import LinearForm

FORM = LinearForm(5120, 20480, "float16", True, "")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran, in order; nothing is recorded."""
    monkeypatch.setattr(cuda_active, "is_capturing", lambda device: False)
    return []


def layer(taken: list[str], dense_us: float = 56.0) -> ActiveRows:
    """A layer of OPT-13B, for one row."""
    return ActiveRows(
        3,
        FORM,
        1,
        lambda x, out: taken.append("dense"),
        lambda x, out: taken.append("gathers"),
        dense_us,
    )


def drawn(live: float) -> torch.Tensor:
    """A row with about this share of elements that are not 0."""
    return torch.randn(1, 20480) * (torch.rand(1, 20480) < live)


def test_what_is_mostly_zero_is_gathered(taken: list[str]) -> None:
    one = layer(taken)
    one(drawn(0.05), torch.empty(1, 5120))
    assert taken == ["gathers"]
    report = one.report()
    assert report.gathers and report.calls == (1, 1) and 0.04 < report.live < 0.06
    assert "layer 3" in str(report) and "after relu" in str(report)


def test_what_is_mostly_live_is_not(taken: list[str]) -> None:
    one = layer(taken)
    one(drawn(0.95), torch.empty(1, 5120))
    assert taken == ["dense"] and not one.report().gathers


def test_samples_become_rare_and_decisions_change_with_them(taken: list[str]) -> None:
    one = layer(taken)
    sparse, dense, out = drawn(0.05), drawn(1.0), torch.empty(1, 5120)
    for _ in range(4):  # samples at calls 0, 1, 3
        one(sparse, out)
    one(dense, out)  # not sampled
    assert taken == ["gathers"] * 5
    for _ in range(8):
        one(dense, out)
    assert taken[-1] == "dense"


def test_recorded_calls_are_not_sampled(taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    one = layer(taken)
    monkeypatch.setattr(cuda_active, "is_capturing", lambda device: True)
    one(drawn(0.05), torch.empty(1, 5120))
    assert taken == ["dense"]
    monkeypatch.setattr(cuda_active, "is_capturing", lambda device: False)
    one(drawn(0.05), torch.empty(1, 5120))
    assert taken == ["dense", "gathers"]
