"""Iterative pruning of a BERT layer, in a dry run on the CPU."""

from __future__ import annotations

import bench_gpu_measure as measure
import prune_bert
import pytest
import torch

DRY = measure.GpuSettings(1, 0, quick=True, device="cpu")
GRAIN = (32, 64)


def test_steps_are_pruned_trained_and_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prune_bert, "GRAINS", (GRAIN,))
    monkeypatch.setattr(prune_bert, "STEPS", (0.0, 0.5, 0.9))
    options = ("--quick", "--device", "cpu", "--rounds", "1", "--training", "10")
    assert prune_bert.main(options) == 0
    head, *steps = capsys.readouterr().out.splitlines()
    assert head == prune_bert.HEAD
    found = [line.split() for line in steps]
    assert [line[:2] for line in found] == [["32x64", zeros] for zeros in ("0", "50", "90")]
    errors = [tuple(map(float, line[2:5])) for line in found]
    assert errors[0][:2] == (0.0, 0.0) and all(kernel < 1e-5 for *_, kernel in errors)
    assert all(trained < pruned for pruned, trained, _ in errors[1:])


def test_what_is_pruned_stays_zero_and_the_least_blocks_go() -> None:
    x, dense = prune_bert.make(DRY, (16, 64, 128))
    live = prune_bert.prune(dense, GRAIN, 0.5)
    want = prune_bert.forward(x, dense)
    trained = prune_bert.train(x, want, dense, live, GRAIN, 3)
    for before, after, blocks in zip(dense[::2], trained[::2], live, strict=True):
        assert blocks.sum() * 2 == blocks.numel()
        dead = ~blocks.repeat_interleave(32, 0).repeat_interleave(64, 1)
        assert (after[dead] == 0).all() and not torch.equal(before, after)
    again = prune_bert.prune(trained, GRAIN, 0.75)
    assert all((old | ~new).all() for old, new in zip(live, again, strict=True))


@pytest.mark.parametrize("options", [["--training", "0"], ["--seed", "-1"], ["--device", "x"]])
def test_bad_option_is_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        prune_bert.parse(options)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert prune_bert.main([]) == 2
    assert "--device cpu" in capsys.readouterr().err
