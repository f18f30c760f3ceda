"""Programs in torch's core operators, whatever their views are of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.export import Dim

from pit_tvm.errors import UnsupportedModel
from pit_tvm.model import compile
from pit_tvm.model.decomposing import decompose


class Viewed(torch.nn.Module):
    """A view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of 2."""
        return x.view(-1, 2)


def exported() -> torch.export.ExportedProgram:
    return torch.export.export(Viewed(), (torch.ones(4, 6),), dynamic_shapes=({0: Dim("n")},))


def targets(program: torch.export.ExportedProgram) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if n.op == "call_function"]


def test_the_program_given_is_left_alone() -> None:
    program = exported()
    before = targets(program)
    assert "aten.view.default" in before
    found = decompose(program)
    assert targets(program) == before
    x = torch.arange(18.0).reshape(3, 6)
    assert torch.equal(found.module()(x), x.view(-1, 2))


def test_nothing_is_said_of_torchs_own_copies(recwarn: pytest.WarningsRecorder) -> None:
    program = exported()
    recwarn.clear()
    decompose(program)
    assert not [w for w in recwarn if issubclass(w.category, FutureWarning)]


def test_what_torch_raises_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("Cannot view a tensor")

    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", fail)
    with pytest.raises(UnsupportedModel, match="torch can decompose, got ValueError: Cannot view"):
        decompose(exported())


def test_gpt2_with_attention_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("PIT_TVM_CACHE", str(tmp_path))
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False
    )
    model = transformers.GPT2Model(config).eval()
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    given = {"input_ids": torch.randint(0, 40, mask.shape), "attention_mask": mask}
    with torch.no_grad():
        expected = model(**given).last_hidden_state
    found = compile(model, given)(**given).last_hidden_state
    live = mask.bool()
    torch.testing.assert_close(found[live], expected[live], rtol=0, atol=1e-5)
    assert not found[~live].any()
