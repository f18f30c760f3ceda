"""Models on a GPU saved to one file: what is in it, and that nothing else is needed to run it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from tvm import relax

import pit_tvm.model
from pit_tvm.errors import SavedModelError, UnsupportedTarget
from pit_tvm.model import cuda_layers, saved
from pit_tvm.model.cuda_layers import CudaLayers
from pit_tvm.model.cuda_machine import cuda_program
from pit_tvm.model.cuda_replay import rows_for
from pit_tvm.model.inputs import Input, Inputs
from pit_tvm.model.linear import LinearLayer
from pit_tvm.model.outputs import Outputs
from pit_tvm.model.saved import Parts, ProgramText
from pit_tvm.model.torch_program import TorchProgram, program_text
from pit_tvm.runtime.cuda_few_rows import CudaFewRows
from pit_tvm.runtime.cuda_rows import RowsKernels
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.structs import Tile
from pit_tvm.target import resolve_target
from tests.model.graphs import T, graph
from tests.model.test_cuda_model import batch, bert, opt

CPU = torch.device("cpu")
TARGET = resolve_target("cuda -arch=sm_90a -model=h200")

# Loads a file where transformers cannot be imported and nothing can be compiled, and runs it.
ELSEWHERE = """
import sys
sys.modules["transformers"] = None
import torch
from pit_tvm.model import load

model = load(sys.argv[1])
for number, inputs in enumerate(torch.load(sys.argv[2])):
    torch.save(model(**inputs)[0], f"{sys.argv[2]}.{number}")
print(model.explain())
"""


def random(*shape: int) -> np.ndarray:
    """Normal numbers, float16."""
    return np.random.default_rng().standard_normal(shape).astype(np.float16)


def layers() -> list[LinearLayer]:
    """A layer of each kind: with all there is, behind ReLU (kept turned), and bfloat16."""
    wide = random(24, 16).astype(ml_dtypes.bfloat16)
    return [
        LinearLayer(random(48, 16), random(48), "gelu", "float16"),
        LinearLayer(random(16, 64), random(16), None, "float16", "relu"),
        LinearLayer(wide, None, None, "bfloat16"),
    ]


def on_cpu(found: list[LinearLayer], **options: Any) -> CudaLayers:
    """The layers as a GPU has them, in the CPU's memory."""
    return CudaLayers(found, TARGET, CPU, KernelCache(), **options)


def text() -> ProgramText:
    """A program of a packed function, a constant of 16 bits, and one without dimensions."""
    constant = relax.const(np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16))
    scale = relax.const(np.float32(1.5))

    def make(x: Any) -> Any:
        ty = relax.TensorType([T, 3], "float32")
        return relax.op.call_pure_packed("times", x, constant, scale, ty_args=[ty])

    return program_text(graph(make, x=(T, 2))["main"])


def _times(x: Any, matrix: Any, scale: Any) -> Any:
    assert scale.ndim == 0
    return scale * (x @ matrix.float())


def parts(**changed: Any) -> Parts:
    """A model's parts."""
    held = on_cpu(layers())
    inputs = Inputs(
        {"mask": Input("int64", ("batch", 4), None)}, "mask", {"batch": (0, None), "tokens": (3, 7)}
    )
    given = {"graph": text(), "layers": held.found, "tiles": held.tiles, **changed}
    kernels: dict[str, bytes] = {"0" * 64: b"library"}
    return Parts(
        TARGET,
        inputs,
        Outputs(),
        [],
        given["graph"],
        given["layers"],
        kernels,
        given["tiles"],
        None,
        given.get("grouped", ()),
    )


def test_layers_come_back_as_they_were_given() -> None:
    given = layers()
    for before, after in zip(given, on_cpu(given).found, strict=True):
        assert vars(before).keys() == vars(after).keys()
        for name in ("weight", "bias"):
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name))
        assert after.weight.dtype == before.weight.dtype and after.weight.flags.c_contiguous
        for name in ("activation", "dtype", "after"):
            assert getattr(before, name) == getattr(after, name)


def test_a_file_holds_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = parts()
    saved.write(given, tmp_path / "model.pit")
    monkeypatch.setattr(saved, "runs_here", lambda info: True)
    found = saved.read(tmp_path / "model.pit")
    assert (found.target.kind, found.target.isa) == ("cuda", "sm_90a")
    assert found.inputs == given.inputs and found.kernels == given.kernels
    assert len(found.layers) == 3 and found.tiles == given.tiles
    assert saved.tile_store(found.tiles, found.target).all() == on_cpu([])._store.all()
    assert isinstance(found.graph, ProgramText)
    run = TorchProgram(found.graph, {"times": _times}, CPU)
    x = torch.randn(5, 2)
    expected = 1.5 * (x @ torch.arange(6.0).view(2, 3))
    torch.testing.assert_close(run(x)[0], expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_without_the_gpu(tmp_path: Path) -> None:
    saved.write(parts(), tmp_path / "model.pit")
    with pytest.raises(UnsupportedTarget, match="target: expected a GPU that runs code for sm_90a"):
        pit_tvm.model.load(tmp_path / "model.pit")


def test_a_file_without_its_kernels(tmp_path: Path) -> None:
    lost = ProgramText("", {}, {"add": "add_f0"}, False, {"add": "0" * 64})
    with pytest.raises(SavedModelError, match="kernels: expected those of the graph"):
        cuda_program(lost, {}, CPU, KernelCache(tmp_path))


def test_kernels_of_all_usual_numbers_of_rows_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[object, ...]] = set()
    monkeypatch.setattr(RowsKernels, "product", lambda self, *form, **options: asked.add(form))
    monkeypatch.setattr(CudaFewRows, "kernel", lambda self, *form: asked.add(form))
    wide = LinearLayer(random(4096, 1024), None, "relu", "float16")
    held = on_cpu([wide, LinearLayer(random(1024, 4096), None, None, "float16", "relu")])
    held.prepare()
    chosen = {
        held.plan(number, rows).choice.tile
        for number in (0, 1)
        for rows in cuda_layers._NUMBERS_OF_ROWS
    }
    assert {form[0] for form in asked if len(form) == 2} == chosen - {None} != set()
    assert {form[0].rows for form in asked if len(form) == 3} == {8, 16}
    in_place = on_cpu([wide], in_place=[0])
    before = len(asked)
    in_place.prepare()
    assert len(asked) > before  # cuBLAS cannot store rows in place


@pytest.mark.parametrize(("n", "k", "act"), [(3072, 768, "gelu"), (1536, 384, "gelu")])
def test_kernels_of_all_numbers_of_rows_are_compiled(
    n: int, k: int, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: set[Tile | None] = {None}
    monkeypatch.setattr(RowsKernels, "product", lambda self, tile, *_, **__: compiled.add(tile))
    layer = LinearLayer(np.zeros((n, k), np.float16), random(n), act, "float16")
    on_cpu([layer]).prepare()
    loaded = on_cpu([layer])
    for live in (*range(1, 9000, 3), *range(9000, 300_000, 301)):
        for rows in (rows_for(live, 1 << 30), live):
            assert loaded.plan(0, rows).choice.tile in compiled


def test_numbers_of_rows_share_a_plan_whichever_comes_first() -> None:
    layer = LinearLayer(random(1536, 384), None, "gelu", "float16")
    for few, many in ((1290, 1344), (65, 128), (8129, 8192)):
        plans = [on_cpu([layer]).plan(0, rows) for rows in (few, many)]
        assert plans[0] == plans[1]


@pytest.mark.gpu
@pytest.mark.parametrize("make", [bert, opt])
def test_another_process_compiles_nothing(
    make: Callable[[], transformers.PreTrainedModel], tmp_path: Path
) -> None:
    compiled = pit_tvm.model.compile(make().eval().half(), batch(3, 16), target="cuda")
    compiled.save(tmp_path / "model.pit")
    given = [{n: v.cuda() for n, v in batch(rows, 90).items()} for rows in (1, 7, 7, 7, 60)]
    for one in given:
        one["attention_mask"][:, 50:] = 0
    torch.save(given, tmp_path / "given")
    root, cache = Path(__file__).parents[2], tmp_path / "no kernels"
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path / "model.pit"), str(tmp_path / "given")],
        env={
            **os.environ,
            "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}",
            "PIT_TVM_CACHE": str(cache),
            "CUDA_HOME": str(tmp_path),
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not cache.exists()  # nothing was compiled
    assert done.stdout.strip() == compiled.explain()
    for number, one in enumerate(given):
        found = torch.load(tmp_path / f"given.{number}")
        torch.testing.assert_close(found, compiled(**one)[0], rtol=5e-3, atol=5e-3)


@pytest.mark.gpu
def test_a_loaded_model_can_be_saved_again(tmp_path: Path) -> None:
    compiled = pit_tvm.model.compile(bert().half().eval(), batch(3, 16), target="cuda")
    compiled.save(tmp_path / "model.pit")
    loaded = pit_tvm.model.load(tmp_path / "model.pit")
    loaded.save(tmp_path / "again.pit")
    names = [
        sorted(zipfile.ZipFile(tmp_path / name).namelist()) for name in ("model.pit", "again.pit")
    ]
    assert names[0] == names[1]
    inputs = {name: value.cuda() for name, value in batch(5, 20).items()}
    found = pit_tvm.model.load(tmp_path / "again.pit")(**inputs)[0]
    torch.testing.assert_close(found, compiled(**inputs)[0], rtol=5e-3, atol=5e-3)
