"""ONNX graphs that TVM's importer alone would misread: converted as ONNX has them, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from pit_tvm.errors import ShapeError, UnsupportedModel  # noqa: E402
from pit_tvm.model import compile  # noqa: E402
from tests.model.onnx_graphs import add_arrays, truth  # noqa: E402

ROWS = np.random.default_rng(0).standard_normal((9, 6)).astype(np.float32)
FAR = 2**62
INPUTS = "int64[batch, tokens] input_ids, int64[batch, tokens] attention_mask"


def graph(
    body: str,
    *outputs: str,
    opset: int = 20,
    domain: str = "own",
    inputs: str = INPUTS,
    **arrays: np.ndarray,
) -> Any:
    """``body`` on ``rows``, what `ROWS` has at the ids."""
    results = ", ".join(f"float[b_{n}, t_{n}, w_{n}] {n}" for n in outputs)
    text = f"""
    <ir_version: 8, opset_import: ["": {opset}, "{domain}": 1]>
    graph ({inputs}) => ({results}) {{ rows = Gather (table, input_ids) {body} }}
    """
    model = onnx.parser.parse_model(text)
    add_arrays(model, {"table": ROWS, **arrays})
    return model


def batch(sequences: int, tokens: int) -> dict[str, np.ndarray]:
    """Random ids; all tokens are live."""
    ids = np.random.default_rng(tokens).integers(0, len(ROWS), (sequences, tokens))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def check(model: Any, *sizes: tuple[int, int]) -> None:
    """Compiled, it gives what onnx's evaluator does."""
    ours = compile(model)
    for size in sizes:
        given = batch(*size)
        found = ours(**given)
        for name, wanted in truth(model, given).items():
            np.testing.assert_allclose(found[name], wanted, 0, 1e-5, err_msg=f"{name} {size}")


SLICES = [(-2, FAR), (-5, FAR), (0, -5), (-5, -3), (2, -2), (-2, 2), (-1, -4), (4, 2), (3, FAR)]


@pytest.mark.parametrize("axis", [1, -1], ids=["tokens", "last"])
def test_slices_end_where_the_dimension_does(axis: int) -> None:
    ends = {f"e{i}": np.array(pair) for i, pair in enumerate(SLICES)}
    numbers = {f"n{j}": np.array([j]) for j in range(2)} | {"axis": np.array([axis])}
    picks = "".join(
        f"a{i} = Gather (e{i}, n0) b{i} = Gather (e{i}, n1) y{i} = Slice (rows, a{i}, b{i}, axis) "
        for i in range(len(SLICES))
    )
    names = [f"y{i}" for i in range(len(SLICES))]
    check(graph(picks, *names, **ends, **numbers), (2, 6), (3, 3), (1, 1))


def test_operators_that_the_importer_has_as_loops() -> None:
    bound = {"low": np.float32(-0.5).reshape(()), "high": np.float32(0.3).reshape(())}
    body = """
        clipped = Clip (rows, low, high)
        capped = Clip (rows, "", high)
        wide = Pad (clipped, widths)
        tiled = Tile (wide, repeats)
        turned = CumSum <reverse = 1> (rows, last)
        mixed = Einsum <equation = "bsk,kn->bsn"> (rows, square)
    """
    arrays = bound | {"widths": np.array([0, 0, 1, 0, 0, 2]), "repeats": np.array([1, 1, 2])}
    arrays |= {"last": np.array(2), "square": ROWS[:6]}
    names = "clipped", "capped", "wide", "tiled", "turned", "mixed"
    check(graph(body, *names, **arrays), (2, 5))
    check(graph("y = Clip (rows, low, high)", "y", **bound), (2, 5))
    check(graph("y = Clip <min = -0.5, max = 0.25> (rows)", "y", opset=10), (2, 5))


def test_dropout_is_none() -> None:
    body = "z = Dropout (rows, share, off) y = Dropout (z, none, on)"
    check(graph(body, "y", none=np.array(0.0, np.float32), **DROPPED), (2, 5))


def test_clipped_rows_are_live_ones_alone() -> None:
    low = np.float32(-0.5).reshape(())
    ours = compile(graph("y = Clip (rows, low)", "y", low=low))
    assert not any(decision.whole for decision in ours.decisions)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_softmax_of_old_along_the_last_axis(op: str, recwarn: pytest.WarningsRecorder) -> None:
    check(graph(f"y = {op} <axis = 2> (rows)", "y", opset=11), (2, 5))
    assert not any("opset" in str(one.message) for one in recwarn)


def test_results_that_nothing_reads_may_be_named() -> None:
    body = "y, mean, deviation = LayerNormalization (rows, scale)"
    check(graph(body, "y", scale=ROWS[0]), (2, 5))


# --------------------------------------------------------------------------------------------
# What is refused

DROPPED = {"share": np.array(0.5, np.float32), "on": np.array(True), "off": np.array(False)}
MEAN = "x, mean, deviation = LayerNormalization (rows, scale) y = Add (x, mean)"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: graph("y = Softmax (rows)", "y", opset=11), "axes 1 to 2 at once"),
        (lambda: graph(MEAN, "y", scale=ROWS[0]), "only the first result of LayerNormalization"),
        (lambda: graph("y = Relu (rows)", "y", opset=6), "expected opset 7 or later, got opset 6"),
        (lambda: graph("y = own.Relu (rows)", "y"), "got Relu of the domain own"),
        (lambda: graph("y = Relu (rows)", "y", "y"), "outputs of different names"),
        (lambda: graph("y = Relu (rows)"), "outputs of different names, got"),
        (
            lambda: graph("other = Gather (table, far) y = Add (rows, other)", "y", far=FAR_ID),
            "Gather",
        ),
        (
            lambda: graph("y = Reshape (rows, to)", "y", to=np.array([0, 0, 9])),
            "Reshape .* another number of elements",
        ),
        (
            lambda: graph("y = Reshape (rows, to)", "y", to=np.array([-1, -1, 6])),
            "Reshape .* 2 extents of -1",
        ),
        (
            lambda: graph("y = Dropout (rows, share, on)", "y", **DROPPED),
            r"no random numbers, got Dropout \(node .*\) in training",
        ),
    ],
    ids="softmax mean opset domain twice none far size holes dropout".split(),
)
def test_graphs_that_would_be_misread(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        compile(make())


FAR_ID = np.array(len(ROWS))


def test_masks_of_three_dimensions() -> None:
    inputs = INPUTS.replace("tokens] attention_mask", "tokens, 1] attention_mask")
    with pytest.raises(ShapeError, match="attention_mask with two dimensions"):
        compile(graph("y = Relu (rows)", "y", inputs=inputs))


def test_weights_of_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, weights = tmp_path / "model.onnx", tmp_path / "weights"
    model = graph("y = Relu (rows)", "y")
    onnx.save(model, str(path), save_as_external_data=True, location="weights", size_threshold=0)
    compile(path)
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(UnsupportedModel, match="stored in weights"):
        compile(onnx.load(str(path), load_external_data=False))
    weights.write_bytes(weights.read_bytes()[:9])
    with pytest.raises(UnsupportedModel, match=r"an ONNX model in .*model\.onnx"):
        compile(path)
    weights.unlink()
    with pytest.raises(UnsupportedModel, match=r"an ONNX model in .*model\.onnx"):
        compile(path)
