"""The quickstart's parts, on a small random encoder and a stand-in for the compiled operator."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import quickstart
import quickstart_contenders as contenders
import quickstart_data as data
import torch

KEYS = [
    "fill",
    "torch_ms",
    "torch_gather_ms",
    "numpy_ms",
    "kernels",
    "pit_ms",
    "speedup_vs_torch",
    "index_us",
    "select_us",
    "max_rel_err",
]


def random_encoder(rng: np.random.Generator, hidden: int = 16, inner: int = 24) -> data.Encoder:
    """Two layers of a BERT-type model with random weights and 50 tokens."""

    def array(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def linear(n: int, k: int) -> data.Linear:
        return data.Linear(array(n, k), array(n))

    def norm() -> data.Norm:
        return data.Norm(1 + array(hidden), array(hidden))

    def layer() -> data.EncoderLayer:
        square = [linear(hidden, hidden) for _ in range(4)]
        products = (*square, linear(inner, hidden), linear(hidden, inner))
        return data.EncoderLayer(*products, attention_norm=norm(), output_norm=norm())

    tables = data.Embeddings(array(50, hidden), array(512, hidden), array(2, hidden), norm())
    return data.Encoder("random", "none", 2, 1e-12, tables, (layer(), layer()))


def random_tokens(rng: np.random.Generator, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and lengths as ``tokenise`` gives them."""
    lengths = rng.integers(1, data.MAX_LEN + 1, batch).astype(np.int32)
    ids = rng.integers(1, 50, (batch, data.MAX_LEN)).astype(np.int32)
    ids[np.arange(data.MAX_LEN) >= lengths[:, None]] = 0
    return ids, lengths


class StandIn:
    """Has the interface of the compiled operator; ``fault`` makes it wrong in one way."""

    def __init__(self, gelu: bool, fault: str) -> None:
        self.gelu, self.fault = gelu, fault

    def pack(self, rhs: np.ndarray) -> np.ndarray:
        """The weight as it is."""
        return rhs

    def __call__(
        self, x: np.ndarray, w: np.ndarray, b: np.ndarray, sparsity: np.ndarray, out: np.ndarray
    ) -> np.ndarray:
        """Live rows only, in float64."""
        rows = np.arange(len(x) // len(sparsity)) < sparsity[:, None]
        live = np.flatnonzero(rows)
        case = contenders.Case(0, "", data.Linear(w, b), self.gelu)
        out[live] = contenders.exact(case, contenders.Batch({0: x}, sparsity, live))
        if self.fault == "error":
            out[live] *= 1.001
        if self.fault == "nan":
            out[live[-1]] = np.nan
        if self.fault == "dead row":
            out[np.flatnonzero(~rows)[0]] = 0
        return out

    def profile(self, *arrays: np.ndarray, sparsity: np.ndarray) -> SimpleNamespace:
        """Made-up parts."""
        return SimpleNamespace(index_us=10.0, select_us=2.0, kernel=f"kernel gelu={self.gelu}")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the quickstart's main function on random data with a given fault."""
    rng = np.random.default_rng(2)
    encoder, (ids, lengths) = random_encoder(rng), random_tokens(rng, 8)
    threads = str(torch.get_num_threads())
    for name in ("OMP", "OPENBLAS", "MKL", "TVM"):
        monkeypatch.setenv(f"{name}_NUM_THREADS", threads)
    monkeypatch.setattr(data, "load_encoder", lambda: encoder)
    monkeypatch.setattr(data, "load_sentences", lambda count, seed: ["a"] * count)
    monkeypatch.setattr(data, "tokenise", lambda sentences: (ids, lengths))

    def run(fault: str = "", *options: str) -> int:
        fake = SimpleNamespace(
            Lengths=lambda: None,
            op=SimpleNamespace(linear=lambda m, n, k, bias, activation: activation == "gelu"),
            compile=lambda tensors, sparse, target: StandIn(tensors, fault),
        )
        monkeypatch.setattr(contenders, "pit_tvm", fake)
        common = ["--sentences", "8", "--batch", "4", "--threads", threads]
        return quickstart.main([*common, *options])

    return run


def test_job_ends_with_one_json_line_of_exactly_the_promised_keys(
    job: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job() == 0
    lines = capsys.readouterr().out.splitlines()
    summary = json.loads(lines[-1])
    assert list(summary) == KEYS
    assert summary["kernels"] == ["kernel gelu=False", "kernel gelu=True"]
    assert (summary["index_us"], summary["select_us"]) == (10.0, 2.0)
    assert 0 < summary["max_rel_err"] < 1e-6
    assert sum(line.startswith("layer ") for line in lines) == 1 + 2 * 6


@pytest.mark.parametrize(("fault", "least"), [("error", 1e-4), ("nan", float("inf"))])
def test_job_fails_where_a_result_is_wrong(
    job: Any, capsys: pytest.CaptureFixture[str], fault: str, least: float
) -> None:
    assert job(fault) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["max_rel_err"] >= least


def test_job_refuses_an_operator_that_writes_dead_rows(job: Any) -> None:
    with pytest.raises(RuntimeError, match="layer 0 query: rows beyond the lengths"):
        job("dead row")


def test_sentences_must_fill_whole_batches() -> None:
    with pytest.raises(SystemExit):
        quickstart.parse(["--sentences", "10", "--batch", "4"])


@pytest.mark.parametrize(
    "make", [contenders.numpy_dense, contenders.torch_padded, contenders.torch_gather]
)
def test_peers_compute_the_exact_layers(make: Any) -> None:
    rng = np.random.default_rng(3)
    encoder, (ids, lengths) = random_encoder(rng), random_tokens(rng, 3)
    batch = contenders.make_batch(encoder, ids, lengths)
    run = make(ids.size)
    for case in contenders.list_cases(encoder):
        want = contenders.exact(case, batch)
        got = run(case, batch)[batch.live]
        assert np.abs(got - want).max() < 1e-6 * np.abs(want).max()


def test_layer_inputs_do_not_depend_on_the_other_sentences() -> None:
    rng = np.random.default_rng(4)
    encoder, (ids, lengths) = random_encoder(rng), random_tokens(rng, 3)
    together = data.layer_inputs(encoder, ids, lengths)
    for at, length in enumerate(lengths):
        alone = data.layer_inputs(encoder, ids[at : at + 1, :length], lengths[at : at + 1])
        for one, many in zip(alone, together, strict=True):
            for name in ("hidden", "context", "attended", "inner"):
                got = getattr(many, name).reshape(3, data.MAX_LEN, -1)[at]
                want = getattr(one, name)
                assert np.abs(got[:length] - want).max() < 1e-5 * np.abs(want).max()
                assert not got[length:].any()


def test_sentences_are_many_different_and_the_same_every_time() -> None:
    first = data.load_sentences(data.MIN_POOL)
    assert first == data.load_sentences(data.MIN_POOL)
    assert len(set(first)) == data.MIN_POOL
    assert set(first[:256]) != set(data.load_sentences(256, seed=1))


def test_sentence_splitter_keeps_prose_and_leaves_code_and_headings() -> None:
    text = (
        "Heading\n*******\n\nThe first sentence runs\nover two lines.  Is this the second one?\n\n"
        "   >>> print(1 + 2)\n   3\n\nToo short.\n"
    )
    want = ["The first sentence runs over two lines.", "Is this the second one?"]
    assert data.split_sentences(text) == want
