"""Models from ONNX against onnx's own evaluator in float64."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tvm import relax

onnx = pytest.importorskip("onnx")

from pit_tvm.errors import BackendUnavailable, PitError, ShapeError, UnsupportedModel  # noqa: E402
from pit_tvm.model import CompiledModel, compile  # noqa: E402
from pit_tvm.model.examples import find_model  # noqa: E402
from pit_tvm.model.importer import import_model  # noqa: E402
from pit_tvm.model.outputs import Outputs  # noqa: E402
from pit_tvm.model.rebuild import shape_of, values_of  # noqa: E402
from tests.model.onnx_graphs import LONGEST, VOCABULARY, add_arrays, encoder, truth  # noqa: E402

MASK = "attention_mask"


@pytest.fixture(scope="module")
def ours() -> CompiledModel:
    return compile(encoder())


def batch(*lengths: int, left: bool = False) -> dict[str, np.ndarray]:
    """Random ids, and the mask of sequences padded right or left."""
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    mask = mask[:, ::-1] if left else mask
    ids = np.random.default_rng(len(lengths)).integers(0, VOCABULARY, mask.shape)
    return {"input_ids": ids, MASK: np.ascontiguousarray(mask).astype(np.int64)}


@pytest.mark.parametrize(
    "given",
    [batch(5, 9), batch(LONGEST, 1, 0), batch(1), batch(3, 7, left=True), batch(4, 4)],
    ids=["right", "longest", "one", "left", "full"],
)
def test_equals_onnx_at_live_tokens(ours: CompiledModel, given: dict[str, np.ndarray]) -> None:
    expected, found = truth(encoder("float64"), given), ours(**given)
    assert list(found) == ["values", "mean"]
    live = given[MASK].astype(bool)
    for name, at in (("values", live), ("mean", live.any(1))):
        assert found[name].shape == expected[name].shape
        wanted = expected[name][at]
        error = np.abs(found[name][at].astype(np.float64) - wanted).max()
        assert error <= 1e-5 * np.abs(wanted).max()
    assert not found["values"][~live].any()


@pytest.mark.gpu
@pytest.mark.parametrize("given", [batch(5, 9), batch(LONGEST, 1, 0), batch(3, 7, left=True)])
def test_equals_onnx_on_a_gpu(given: dict[str, np.ndarray]) -> None:
    torch = pytest.importorskip("torch")
    ours = compile(encoder("float16"), target="cuda")
    expected = truth(encoder("float64"), given)
    found = ours(**{name: torch.from_numpy(value).cuda() for name, value in given.items()})
    live = given[MASK].astype(bool)
    for name, at in (("values", live), ("mean", live.any(1))):
        wanted = expected[name][at]
        error = np.abs(found[name].double().cpu().numpy()[at] - wanted).max()
        assert error <= 5e-3 * np.abs(wanted).max()


def test_everything_runs_on_live_tokens_only(ours: CompiledModel) -> None:
    lines = ours.explain().splitlines()
    assert "  1 of them attention, full, over live tokens" in lines
    assert {d.operator for d in ours.decisions if d.whole} <= {"astype", "sum", "expand_dims"}
    assert [one.after for one in ours.activity][:1] in ([], ["relu"])


def test_extents_are_those_of_the_inputs() -> None:
    imported = import_model(encoder(), None, MASK)
    assert (imported.inputs, imported.longest) == (("input_ids", MASK), LONGEST)
    main = imported.module["main"]
    tensors = [var for var in values_of(main) if isinstance(var.ty, relax.TensorType)]
    assert len(tensors) > 50 and None not in map(shape_of, tensors)


def test_tables_bound_the_length(ours: CompiledModel) -> None:
    with pytest.raises(ShapeError, match=f"{MASK}: expected at most {LONGEST} tokens"):
        ours(**batch(LONGEST + 1))
    wrong = batch(3) | {"input_ids": np.full((1, 3), -1)}
    with pytest.raises(ShapeError, match=f"input_ids: expected ids of 0 to {VOCABULARY - 1}"):
        ours(**wrong)


def test_files_are_read(tmp_path: Path) -> None:
    onnx.save(encoder(), str(tmp_path / "encoder.onnx"))
    imported = import_model(tmp_path / "encoder.onnx", None, MASK)
    assert imported.longest == LONGEST
    found = find_model(str(tmp_path / "encoder.onnx"))  # for the command line
    assert import_model(found.model, found.inputs, found.mask).inputs == imported.inputs
    kept = Outputs.from_json(Outputs.of(imported.structure).to_json())  # as a saved model has it
    assert kept.build([1, 2]) == {"values": 1, "mean": 2}


# --------------------------------------------------------------------------------------------
# What is refused


def tiny(body: str, **arrays: np.ndarray) -> onnx.ModelProto:
    """``y`` of ids and a mask."""
    text = f"""
    <ir_version: 8, opset_import: ["": 20]>
    tiny (int64[batch, tokens] input_ids, int64[batch, tokens] attention_mask)
        => (int64[batch, tokens] y)
    {{ {body} }}
    """
    model = onnx.parser.parse_model(text)
    add_arrays(model, arrays)
    return model


ONE, NONE = np.array([1]), np.array([0])
BATCH_TABLE = "sizes = Shape (input_ids) n = Gather (sizes, none) y = Slice (table, none, n, none)"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: tiny("y = Bernoulli (input_ids)"), "Bernoulli"),
        (
            lambda: tiny(BATCH_TABLE, none=NONE, table=np.arange(9)),
            "tables that are cut to the length of attention_mask only, got one cut to batch",
        ),
        (
            lambda: tiny("y = Reshape (input_ids, shape)", shape=np.array([0, 0, 0, 0])),
            "expected Reshape",
        ),
    ],
    ids=["unknown", "batch", "conversion"],
)
def test_graphs_that_have_no_form(
    model: Callable[[], onnx.ModelProto], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        compile(model())
    assert not capsys.readouterr().out


def test_fixed_extents_are_named() -> None:
    model = encoder()
    for given in model.graph.input:
        given.type.tensor_type.shape.dim[0].dim_value = 2
    with pytest.raises(PitError, match="dynamic batch and a dynamic length, got a batch of"):
        compile(model)


def test_masks_that_are_no_input() -> None:
    with pytest.raises(ShapeError, match="mask: expected an input of the program"):
        compile(encoder(), mask="padding")


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="expected an ONNX model in .*missing.onnx"):
        compile(tmp_path / "missing.onnx")
    (tmp_path / "wrong.onnx").write_bytes(b"no model")
    with pytest.raises(UnsupportedModel, match="expected an ONNX model in .*wrong.onnx"):
        compile(tmp_path / "wrong.onnx")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(BackendUnavailable, match="model: expected the package onnx, got none"):
        compile("encoder.onnx")
