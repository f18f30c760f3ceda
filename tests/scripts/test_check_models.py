"""The check of families of models: what is right, wrong, refused and missing."""

from __future__ import annotations

from typing import Any

import check_models
import pytest
import torch
import transformers
from check_models_families import FAMILIES, Family

from pit_tvm.errors import UnsupportedModel

ONE = "distilbert, classifier"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_family_is_compared(capsys: Any, dtype: str) -> None:
    assert check_models.main(["--match", ONE, "--dtype", dtype]) == 0
    found = capsys.readouterr().out
    assert f"{ONE}: error " in found and "0 wrong or refused" in found
    assert "0 operators" not in found.split("error")[1] and ", 0 on all" in found


def test_what_is_wrong_refused_or_missing_is_said(
    capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = {"a": 1.0, "b": float("nan"), "c": UnsupportedModel("model: no"), "d": 1e-6}

    def check(name: str, family: Family, options: Any) -> check_models.Checked:
        if isinstance(outcomes[name], UnsupportedModel):
            raise outcomes[name]
        return check_models.Checked(name, outcomes[name], 1, 0, 0.0)

    options = check_models.parse([])
    options.families = dict.fromkeys("abcd", FAMILIES["bert"]) | {"e": Family("NoModel", "No")}
    monkeypatch.setattr(check_models, "check", check)
    assert check_models.run(options) == 1
    found = capsys.readouterr().out
    assert "c: refused: model: no" in found and "has no NoModel" in found
    assert "3 wrong or refused: a, b, c" in found


def test_deviations() -> None:
    live = torch.tensor([[True, True, False]])
    exact = torch.tensor([[[1.0], [-2.0], [8.0]]], dtype=torch.float64)
    near = torch.tensor([[[1.0], [-1.5], [0.0]]])
    assert check_models.deviation([near], [exact], live) == 0.25
    assert check_models.deviation([near[:, :2]], [exact], live) == float("inf")
    assert check_models.deviation([near * torch.nan], [exact], live) == float("inf")
    assert check_models.deviation([near[0, 0]], [exact[0, 0]], live) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_made(name: str) -> None:
    family = FAMILIES[name]
    if not hasattr(transformers, family.model):
        pytest.skip(reason=f"this transformers has no {family.model}")
    assert isinstance(family.make(), torch.nn.Module)


def test_names_are_listed_and_chosen(capsys: Any) -> None:
    assert check_models.main(["--list", "--match", "gpt2"]) == 0
    assert capsys.readouterr().out.split("\n") == ["gpt2", "gpt2, classifier", ""]
    for wrong in (["--match", "no such family"], ["--seed", "-1"]):
        with pytest.raises(SystemExit):
            check_models.parse(wrong)


def test_without_a_gpu_the_command_says_so(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_models.main(["--device", "cuda", "--match", ONE]) == 2
    assert "a CUDA device" in capsys.readouterr().err
