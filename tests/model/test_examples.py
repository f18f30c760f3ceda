"""Example models of the command, in small configurations."""

from __future__ import annotations

import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pit_tvm.errors import SavedModelError
from pit_tvm.model import examples
from pit_tvm.model.examples import AllExperts, as_graph, find_model
from pit_tvm.model.report import count_axes

transformers = pytest.importorskip("transformers")

TINY_SWITCH = {
    "vocab_size": 11,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_sparse_encoder_layers": 1,
    "num_heads": 2,
    "num_experts": 4,
}


def test_experts_as_tensors_equal_the_layer_itself() -> None:
    module = transformers.models.switch_transformers.modeling_switch_transformers
    config = transformers.SwitchTransformersConfig(**TINY_SWITCH, expert_capacity=2)
    torch.manual_seed(0)
    layer = module.SwitchTransformersSparseMLP(config).eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(3, 7, 16)
    with torch.no_grad():
        torch.testing.assert_close(AllExperts(layer)(x), layer(x))


def test_axes_of_a_switch_transformer() -> None:
    counts = count_axes(as_graph(examples.switch(tokens=5, **TINY_SWITCH)))
    products = {c.axes for c in counts if c.operator == "matmul"}
    # Of the experts' products: experts, tokens, columns, and what is summed up.
    assert ("i0", "i1", "i2", "k") in products
    assert sum(c.number for c in counts if c.operator == "take") >= 1


def test_axes_of_a_resnet() -> None:
    example = examples.resnet(
        size=32, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
    )
    counts = count_axes(as_graph(example))
    convolutions = [c for c in counts if c.operator == "conv2d"]
    # Images, filters and channels may be permuted; rows and columns of an image may not.
    assert all({"nn", "ff", "rc"} <= set(c.axes) for c in convolutions)
    assert not any({"yy", "xx", "ry", "rx"} & set(c.axes) for c in convolutions)
    assert sum(c.number for c in convolutions) == 6


def test_every_name_makes_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def model(config: Any) -> torch.nn.Module:
        made.append(config)
        return torch.nn.Linear(2, 2)

    kinds = ("BertModel", "OPTForCausalLM", "ResNetModel")
    configs = {n: getattr(transformers, n) for n in ("BertConfig", "OPTConfig", "ResNetConfig")}
    library = SimpleNamespace(**dict.fromkeys(kinds, model), **configs)
    monkeypatch.setattr(examples, "_transformers", lambda: library)
    for name in ("bert-base", "minilm", "opt-125m", "resnet-18"):
        assert find_model(name, "bfloat16").model.weight.dtype == torch.bfloat16
    assert [getattr(c, "hidden_size", None) for c in made] == [768, 384, 768, None]
    assert made[-1].depths == [2, 2, 2, 2]


def test_a_file_says_whether_it_has_a_mask(tmp_path: Path) -> None:
    program = torch.export.export(torch.nn.Linear(3, 2), (torch.ones(4, 3),))
    torch.export.save(program, tmp_path / "linear.pt2")
    found = find_model(str(tmp_path / "linear.pt2"))
    assert found.mask == "" and list(found.inputs) == ["input"]
    assert [(c.operator, c.number) for c in count_axes(as_graph(found))][-1][1] == 1
    with pytest.raises(SavedModelError, match="model: expected one of bert-base"):
        find_model(str(tmp_path / "other.pt2"))


@pytest.mark.parametrize(
    ("member", "content"),
    [
        ("data/sample_inputs/model.pt", b"garbage"),
        ("data/weights/model_weights_config.json", b"{}"),
        ("data/weights/model_weights_config.json", None),
        ("models/model.json", b"[]"),
    ],
)
def test_files_with_damaged_members(tmp_path: Path, member: str, content: bytes | None) -> None:
    program = torch.export.export(torch.nn.Linear(3, 2), (torch.ones(4, 3),))
    torch.export.save(program, tmp_path / "whole.pt2")
    with (
        zipfile.ZipFile(tmp_path / "whole.pt2") as whole,
        zipfile.ZipFile(tmp_path / "broken.pt2", "w") as broken,
    ):
        for name in whole.namelist():
            changed = content if name.endswith(f"/{member}") else whole.read(name)
            if changed is not None:
                # torch's archive has the folder of its own name at the top.
                broken.writestr(name.replace("whole/", "broken/", 1), changed)
    with pytest.raises(SavedModelError, match=r"model .*broken\.pt2: expected one of"):
        find_model(str(tmp_path / "broken.pt2"))
