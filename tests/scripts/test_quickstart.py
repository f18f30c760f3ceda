"""The quickstart's parts, on a small random encoder and a stand-in for the compiled model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quickstart
import quickstart_contenders as contenders
import quickstart_data as data
import quickstart_measure as measuring
import quickstart_report as report
import torch
from transformers import BertConfig, BertModel

import pit_tvm.model

KEYS = [
    "model",
    "sentences",
    "batch",
    "threads",
    "fill",
    "least_cosine",
    "sentences_per_second",
    "speedup",
    "index_share",
    "compile_seconds",
    "rounds",
]
WORDS = 50


@pytest.fixture(scope="module")
def encoder() -> data.Encoder:
    """Two layers of a BERT with random weights and 50 tokens."""
    torch.manual_seed(2)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
    )
    module = data.SentenceEncoder(BertModel(config, add_pooling_layer=False))
    return data.Encoder("random", "none", module.eval())


def test_help_installs_nothing(tmp_path: Path) -> None:
    script, venv = Path(quickstart.__file__).with_suffix(".sh"), tmp_path / "venv"
    given = {**os.environ, "PYTHON": sys.executable, "PIT_TVM_VENV": str(venv)}
    command = ["bash", str(script), "--batch", "0", "--help"]
    done = subprocess.run(command, env=given, capture_output=True, text=True)
    assert done.returncode == 0 and "--no-torch-compile" in done.stdout, done.stderr
    assert not venv.exists()


def random_tokens(sentences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask as ``tokenise`` gives them."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, data.MAX_LEN + 1, (sentences, 1), generator=generator)
    ids = torch.randint(1, WORDS, (sentences, data.MAX_LEN), generator=generator)
    mask = (torch.arange(data.MAX_LEN) < lengths).long()
    return ids * mask, mask


def stand_in(fault: str) -> Callable[..., Any]:
    """Has the interface of ``pit_tvm.model.compile``; ``fault`` makes it wrong in one way."""

    def compile(module: torch.nn.Module, example: dict[str, torch.Tensor]) -> Any:
        def run(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                found = module(input_ids=input_ids, attention_mask=attention_mask).clone()
            if fault == "turned":
                found[-1, 0] += 0.02
            if fault == "nan":
                found[0, 0] = torch.nan
            if fault == "exchanged":
                found[[0, 1]] = found[[1, 0]]
            return found

        assert set(example) == {"input_ids", "attention_mask"}
        return run

    return compile


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, encoder: data.Encoder) -> Any:
    """Runs the quickstart's main function on random data with a given fault."""
    threads = str(torch.get_num_threads())
    for name in ("OMP", "OPENBLAS", "MKL", "TVM"):
        monkeypatch.setenv(f"{name}_NUM_THREADS", threads)
    monkeypatch.setattr(data, "load_encoder", lambda: encoder)
    monkeypatch.setattr(
        data, "load_sentences", lambda count, seed: [f"s {n}" for n in range(count)]
    )
    monkeypatch.setattr(data, "tokenise", lambda sentences: random_tokens(len(sentences)))
    monkeypatch.setattr(measuring, "settle", lambda: None)

    def run(fault: str = "", *options: str) -> int:
        monkeypatch.setattr(pit_tvm.model, "compile", stand_in(fault))
        common = ["--sentences", "24", "--batch", "4", "--threads", threads]
        return quickstart.main([*common, "--no-torch-compile", *options])

    return run


def test_job_ends_with_one_json_line_of_exactly_the_promised_keys(
    job: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert job("", "--rounds", "2", "--json", str(tmp_path / "line.json")) == 0
    lines = capsys.readouterr().out.splitlines()
    summary = json.loads(lines[-1])
    assert summary == json.loads((tmp_path / "line.json").read_text())
    assert list(summary) == KEYS
    assert list(summary["sentences_per_second"]) == list(report.KEYS.values())
    assert summary["sentences_per_second"]["torch_compile_sorted"] is None
    assert summary["speedup"]["torch_sorted"] > 0
    assert (summary["rounds"], summary["sentences"]) == (2, 24)
    assert 1 - 1e-6 < summary["least_cosine"] <= 1 + 1e-6
    assert 0 < summary["fill"] < 1


@pytest.mark.parametrize("fault", ["turned", "nan", "exchanged"])
def test_job_fails_where_a_vector_is_wrong(
    job: Any, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    assert job(fault, "--rounds", "1") == 1
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["least_cosine"] < quickstart.LEAST_COSINE


def test_rounds_end_when_the_time_is_over(job: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert job("", "--rounds", "9", "--seconds", "0") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rounds"] == 1


def test_sentences_must_fill_whole_batches() -> None:
    with pytest.raises(SystemExit):
        quickstart.parse(["--sentences", "10", "--batch", "4"])


def test_torch_compile_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not contenders.has_compiler()


def test_sorted_batches_hold_every_sentence_once_and_all_of_it() -> None:
    ids, mask = random_tokens(24)
    for cut in (True, False):
        batches = data.by_length(ids, mask, 4, cut=cut)
        assert sorted(n for batch in batches for n in batch.numbers) == list(range(24))
        for batch in batches:
            longest = int(batch.mask.sum(1).max())
            assert batch.ids.shape[1] == (longest if cut else data.MAX_LEN)
            assert batch.mask.sum() == mask[list(batch.numbers)].sum()
            assert torch.equal(batch.ids, ids[list(batch.numbers), : batch.ids.shape[1]])


def test_vectors_come_in_the_order_of_the_sentences(encoder: data.Encoder) -> None:
    ids, mask = random_tokens(24)
    encode = contenders.by_torch(encoder.module)
    padded = contenders.Contender(encode, data.in_order(ids, mask, 4))
    by_length = contenders.Contender(encode, data.by_length(ids, mask, 4, cut=True))
    ours, theirs = (contenders.vectors_of(each, 24) for each in (padded, by_length))
    assert measuring.least_cosine(ours, theirs) > 1 - 1e-6
    assert torch.allclose(ours.norm(dim=1), torch.ones(24, dtype=torch.float64), atol=1e-6)


def test_every_contender_is_timed_on_its_batches() -> None:
    ids, mask = random_tokens(24)
    batches, seen = data.in_order(ids, mask, 4), []

    def encode(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen.append(ids)
        return ids

    known = {
        "all": contenders.Contender(encode, batches),
        "some": contenders.Contender(encode, batches, every=3),
    }
    samples = measuring.measure(known, 60, 2)
    assert {name: list(taken) for name, taken in samples.items()} == {
        "all": list(range(6)),
        "some": [0, 3],
    }
    assert all(len(times) == 2 for taken in samples.values() for times in taken.values())
    assert len(seen) == 2 * (6 + 2)


def test_mean_of_medians() -> None:
    assert measuring.mean_seconds({0: [1.0, 9.0, 2.0], 1: [4.0, 4.0, 0.0]}) == 3.0


def test_neighbours_are_the_nearest_others(capsys: pytest.CaptureFixture[str]) -> None:
    vectors = torch.eye(4, dtype=torch.float64)
    vectors[3] = torch.tensor([0.6, 0.0, 0.8, 0.0])
    report.print_neighbours(["a", "b", "c", "d" * 200], vectors, 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "a"
    assert lines[1].strip() == "0.60  " + "d" * 85 + "..."


def test_time_against_fill_of_batches_of_like_sentences(encoder: data.Encoder) -> None:
    ids, mask = random_tokens(24)
    padded, cut = data.in_order(ids, mask, 4), data.by_length(ids, mask, 4, cut=True)
    spread = data.by_length(ids, mask, 4, cut=False)
    encode = contenders.by_torch(encoder.module)
    made = contenders.Contenders(
        {
            contenders.EAGER: contenders.Contender(encode, padded, every=4),
            contenders.SORTED: contenders.Contender(encode, cut),
            contenders.PIT: contenders.Contender(encode, padded),
        }
    )
    points = report.times_by_fill(made, spread)
    assert [len(found) for found in points.values()] == [3, 6, 6]
    fills = [fill for fill, _ in points[contenders.PIT]]
    assert fills == sorted(fills) and fills[0] < fills[-1]


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
