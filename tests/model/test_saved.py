"""Models saved to one file: loaded here, loaded without torch, and refused where they must be."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem, setitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pit_tvm.errors import BackendUnavailable, PitError, SavedModelError, UnsupportedTarget
from pit_tvm.model import CompiledModel, compile, load
from tests.model.elsewhere import WITHOUT_TORCH

VOCABULARY, WIDTH = 17, 16
Pair = namedtuple("Pair", ["first", "total"])
LEAF = {"kind": "leaf", "name": "", "keys": [], "parts": []}

# Loads a file where torch and transformers cannot be imported, and runs it on arrays.
ELSEWHERE = (
    WITHOUT_TORCH
    + """

given = dict(np.load(sys.argv[2]))
model = load(sys.argv[1])
tokens, pair = model(**given)
assert type(pair).__name__ == "Pair" and pair._fields == ("first", "total")
assert not any("torch" in name.split(".")[0] for name in sys.modules)
np.savez(sys.argv[3], tokens=tokens, first=pair.first, total=pair.total)
print(model.explain())
"""
)


class Small(nn.Module):
    """An embedding and two linear layers: values ``[batch, tokens, width]``, and a named pair."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH, bias=False)
        self.factor = factor

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """Outputs of three containers: a tuple, and a named tuple in it."""
        x = self.down(nn.functional.gelu(self.up(self.words(input_ids)))) * self.factor
        live = attention_mask.unsqueeze(-1).to(x.dtype)
        return x, Pair(x[:, 0], (x * live).sum(1))


def inputs(seed: int = 0) -> dict[str, np.ndarray]:
    """Ids and a mask ``[3, 5]``."""
    rng = np.random.default_rng(seed)
    lengths = np.array([[3], [5], [0]])
    return {
        "input_ids": rng.integers(0, VOCABULARY, (3, 5)),
        "attention_mask": (np.arange(5) < lengths).astype(np.int64),
    }


def tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One folder for the kernels of all models here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIT_TVM_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield


def made(factor: float) -> CompiledModel:
    torch.manual_seed(0)
    return compile(Small(factor), tensors(inputs()))


@pytest.fixture(scope="module")
def ours() -> CompiledModel:
    return made(1.0)


@pytest.fixture(scope="module")
def saved(ours: CompiledModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small.pit"
    ours.save(path)
    return path


def check(found: Any, expected: Any) -> None:
    """The same containers with equal arrays of one kind."""
    assert found[1]._fields == expected[1]._fields
    for mine, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert type(mine) is type(other)
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))


def test_a_process_without_torch_gets_the_same_results(
    ours: CompiledModel, saved: Path, tmp_path: Path
) -> None:
    given = inputs(seed=1)
    np.savez(tmp_path / "given.npz", **given)
    root, cache = Path(__file__).parents[2], tmp_path / "no kernels"
    arguments = [saved, tmp_path / "given.npz", tmp_path / "found.npz"]
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(root), "PIT_TVM_CACHE": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not cache.exists()  # nothing was compiled
    tokens, pair = ours(**given)
    with np.load(tmp_path / "found.npz") as found:
        np.testing.assert_array_equal(found["tokens"], tokens)
        np.testing.assert_array_equal(found["first"], pair.first)
        np.testing.assert_array_equal(found["total"], pair.total)
    assert done.stdout.strip() == ours.explain()


@pytest.mark.parametrize("convert", [dict, tensors], ids=["numpy", "torch"])
def test_results_are_of_the_kind_of_the_inputs(
    ours: CompiledModel, saved: Path, convert: Callable[[Any], Any]
) -> None:
    given = convert(inputs())
    check(load(saved)(**given), ours(**given))


def test_a_loaded_model_can_be_saved_again(saved: Path, tmp_path: Path) -> None:
    load(saved).save(tmp_path / "again.pit")
    check(load(tmp_path / "again.pit")(**inputs()), load(saved)(**inputs()))


def test_models_of_one_process_keep_to_themselves(
    ours: CompiledModel, saved: Path, tmp_path: Path
) -> None:
    made(3.0).save(tmp_path / "other.pit")
    first, other, again = load(saved), load(tmp_path / "other.pit"), load(saved)
    expected = ours(**inputs())
    check(first(**inputs()), expected)
    check(again(**inputs()), expected)
    np.testing.assert_allclose(other(**inputs())[0], 3 * expected[0], rtol=1e-5, atol=1e-6)


def tokens(number: int) -> dict[str, np.ndarray]:
    """So many sequences of one live token."""
    ids = np.random.default_rng(number).integers(0, VOCABULARY, (number, 1))
    return {"input_ids": ids, "attention_mask": np.ones((number, 1), np.int64)}


def test_a_file_has_the_kernels_for_any_usual_number_of_tokens(saved: Path) -> None:
    model = load(saved)
    for number in (1, 2, 3, 7, 13, 30, 100, 250, 333, 700, 1000, 3000, 5000, 8192):
        model(**tokens(number))
    assert model._layers._cache.stats.builds == model._layers._cache.stats.disk_hits == 0


def test_more_tokens_than_the_file_was_made_for(ours: CompiledModel, saved: Path) -> None:
    check(load(saved)(**tokens(20000)), ours(**tokens(20000)))


def test_a_file_is_replaced_as_one(ours: CompiledModel, saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "small.pit"
    path.write_bytes(b"old")
    ours.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["small.pit"]
    check(load(path)(**inputs()), ours(**inputs()))


def test_weights_are_in_the_file_once(saved: Path) -> None:
    with zipfile.ZipFile(saved) as archive:
        members = {info.filename: info.file_size for info in archive.infolist()}
    assert members["weights/0.npy"] == members["weights/1.npy"] == 128 + 4 * 40 * WIDTH
    assert "biases/0.npy" in members and "biases/1.npy" not in members


# --------------------------------------------------------------------------------------------
# What is refused


def rewritten(saved: Path, path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The file with another manifest."""
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name == "manifest.json":
                manifest = json.loads(content)
                change(manifest)
                content = json.dumps(manifest).encode()
            target.writestr(name, content)
    return path


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            lambda m: m["versions"].update({"apache-tvm": "0.1"}),
            SavedModelError,
            "version of apache-tvm: expected 0.1, with which .* install apache-tvm 0.1, or compile",
        ),
        (
            lambda m: m["versions"].update({"pit_tvm": "99"}),
            SavedModelError,
            "version of pit_tvm: expected 99",
        ),
        (lambda m: m.update(code="0"), SavedModelError, "pit_tvm: expected the code of"),
        (lambda m: m.update(format=99), SavedModelError, "format: expected 5, got 99"),
        (
            lambda m: m["features"].append("avx1024"),
            UnsupportedTarget,
            "got one without avx1024; compile the model for it",
        ),
        (lambda m: m["inputs"].update(mask="none"), SavedModelError, "a whole file.*mask: exp"),
        (lambda m: m["kernels"].pop(), SavedModelError, "to name all members, got none of .*so"),
        (lambda m: m["layers"].pop(), SavedModelError, "name all members, got none of .*1.npy"),
        (lambda m: m["layers"][0].pop("bias"), SavedModelError, "members, .*'biases/0.npy'"),
        (lambda m: m["layers"][0].update(dtype="int8"), SavedModelError, "0.npy: expected int8, g"),
        (
            lambda m: m["layers"][0].update(weight="biases/0.npy", bias="weights/0.npy"),
            SavedModelError,
            r"npy: expected a weight of 2 dim.*got \[\(40,\), \(40, 16\)\]",
        ),
    ],
    ids=["tvm", "pit", "code", "format", "features", "mask", "kernels", "layers", "bias"]
    + ["type", "turned"],
)
def test_other_versions_and_machines(
    saved: Path,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], Any],
    error: type[PitError],
    words: str,
) -> None:
    with pytest.raises(error, match=words):
        load(rewritten(saved, tmp_path / "other.pit", change))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("layers", None, "a list, got None"),
        ("layers/0/weight", None, "a string, got None"),
        ("layers/0/activation", "exp", "one of null, relu, .*, got 'exp'"),
        ("layers/1/other", 1, "no such key, got one"),
        ("threshold", float("nan"), "a finite number of at least 0, or null, got nan"),
        ("threshold", 10**400, "a finite number of at least 0, or null, got 1000"),
        ("threshold", "0.5", "a finite number of at least 0, or null, got '0.5'"),
        ("inputs", [], r"an object, got \[\]"),
        ("inputs/known/input_ids/dtype", "float", "one of bfloat16, float16, .*, got 'float'"),
        ("inputs/known/input_ids/extents/0", True, "batch, tokens, a .* or null, got True"),
        ("inputs/known/input_ids/rows", -1, "a whole number of at least 0, or null, got -1"),
        ("inputs/bounds/tokens", [0], r"the least, and the most or null, got \[0\]"),
        ("inputs/live", 2.5, "a whole number of at least 0, or null, got 2.5"),
        ("outputs/kind", "set", "one of leaf, tuple, list, .*, got 'set'"),
        ("outputs/parts/1/keys/0", [], r"a string or a whole number, got \[\]"),
        ("decisions/0/reason", [], r"a string, got \[\]"),
        ("features", {}, "a list, got {}"),
        ("versions/numpy", 2, "a string, got 2"),
        ("graph", {"constants": {}}, "a value, got none"),
    ],
)
def test_manifests_that_were_edited(
    saved: Path, tmp_path: Path, key: str, value: Any, words: str
) -> None:
    *outer, last = (int(name) if name.isdigit() else name for name in key.split("/"))
    path = rewritten(
        saved, tmp_path / "a.pit", lambda m: setitem(reduce(getitem, outer, m), last, value)
    )
    named = re.sub(r"/(\d+)", r"\\[\1\\]", key).replace("/", ".")
    with pytest.raises(SavedModelError, match=f"a.pit: manifest.{named}.*: expected .*{words}"):
        load(path)


def test_outputs_may_be_named_by_truth_values(saved: Path, tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        named = {"kind": "dict", "name": "dict", "keys": [True], "parts": [LEAF]}
        manifest["outputs"]["parts"][0] = named

    found = load(rewritten(saved, tmp_path / "a.pit", change))(**inputs())
    assert list(found[0]) == [True]


@pytest.mark.parametrize("part", ["weights/0.npy", "machine.so", "manifest.json"])
def test_a_damaged_member(saved: Path, tmp_path: Path, part: str) -> None:
    with zipfile.ZipFile(saved) as archive:
        info = archive.getinfo(part)
    content = bytearray(saved.read_bytes())
    content[info.header_offset + 40 + len(part) + info.file_size // 2] ^= 0x55
    (tmp_path / "damaged.pit").write_bytes(content)
    with pytest.raises(SavedModelError, match="whole file that a compiled model saved"):
        load(tmp_path / "damaged.pit")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_file_that_was_cut_off(saved: Path, tmp_path: Path, share: float) -> None:
    content = saved.read_bytes()
    (tmp_path / "cut.pit").write_bytes(content[: int(share * len(content))])
    with pytest.raises(SavedModelError, match="whole file that a compiled model saved"):
        load(tmp_path / "cut.pit")


@pytest.mark.parametrize("manifest", ["[]", "3", "null", '"text"'])
def test_manifests_of_another_shape(tmp_path: Path, manifest: str) -> None:
    with zipfile.ZipFile(tmp_path / "other.pit", "w") as archive:
        archive.writestr("manifest.json", manifest)
    with pytest.raises(SavedModelError, match="whole file that a compiled model saved"):
        load(tmp_path / "other.pit")


def test_files_of_other_kinds(tmp_path: Path) -> None:
    with pytest.raises(SavedModelError, match="path: expected a file that can be read, got .*No"):
        load(tmp_path / "missing.pit")
    torch.save(Small(1.0).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(SavedModelError, match="weights.pt: expected a whole file"):
        load(tmp_path / "weights.pt")


@pytest.mark.parametrize("path", [None, b"model", 3, ""])
def test_what_names_no_file(path: Any) -> None:
    with pytest.raises(SavedModelError, match="path: .*is no path"):
        load(path)


def test_a_folder_that_is_not_there(ours: CompiledModel, tmp_path: Path) -> None:
    with pytest.raises(SavedModelError, match="path: expected a file that can be written"):
        ours.save(tmp_path / "nowhere" / "small.pit")
    for path in ("a\0b", None, 5):
        with pytest.raises(SavedModelError, match="path: expected a file that can be written"):
            ours.save(path)  # type: ignore[arg-type]


def test_kernels_must_be_on_disk(
    ours: CompiledModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours._layers._cache, "directory", tmp_path / "emptied")
    with pytest.raises(BackendUnavailable, match="kernel cache: .*set PIT_TVM_CACHE"):
        ours.save(tmp_path / "small.pit")


def test_copies_share_the_model_and_pickles_are_told_of_saving() -> None:
    compiled = compile(Small(1.0).eval(), tensors(inputs()))
    assert copy.copy(compiled) is copy.deepcopy(compiled) is compiled
    with pytest.raises(SavedModelError, match=r"^compiled model: .*\.save\(path\) and .*load"):
        pickle.dumps(compiled)
