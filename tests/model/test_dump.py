"""The graph after every pass, on request."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pit_tvm.errors import BackendUnavailable
from pit_tvm.model.dump import into
from pit_tvm.model.importer import import_model
from pit_tvm.model.kernels import CpuKernels
from pit_tvm.model.rewrite import rewrite
from pit_tvm.target import resolve_target


class Small(nn.Module):
    """A row of a table, a layer and a norm for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.norm = nn.Embedding(9, 8), nn.Linear(8, 16), nn.LayerNorm(16)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens, 16]``, 0 at dead tokens."""
        x = torch.relu(self.up(self.words(input_ids)))
        return self.norm(x) * attention_mask[..., None]


def test_a_file_for_every_pass(tmp_path: Path) -> None:
    ids = torch.ones(2, 5, dtype=torch.long)
    imported = import_model(
        Small().eval(), {"input_ids": ids, "attention_mask": ids}, "attention_mask"
    )
    folder = tmp_path / "new" / "graphs"
    rewrite(imported, CpuKernels(resolve_target("llvm")), into(folder))
    names = ["imported", "tidy", "propagate", "tidy", "embeddings", "norms", "linear"]
    expected = [f"{number:02}_{name}.py" for number, name in enumerate(names)]
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert sorted(texts) == expected
    assert all("def main" in text for text in texts.values())
    assert "live_tokens" not in texts[expected[1]] and "live_tokens" in texts[expected[2]]
    assert "layer_norm" in texts[expected[4]] and "layer_norm" not in texts[expected[5]]
    assert "pit_tvm.model.linear" in texts[expected[6]]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(BackendUnavailable, match="dump"):
        into(taken)
