"""How the quickstart reports: the table, neighbours, the JSON values and the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from quickstart_contenders import COMPILED, COMPILED_SORTED, EAGER, PIT, SORTED, Contenders
from quickstart_data import Batch
from quickstart_measure import Samples, mean_seconds, time_batch
from tqdm import tqdm

KEYS = {
    EAGER: "torch_padded",
    SORTED: "torch_sorted",
    COMPILED: "torch_compile_padded",
    COMPILED_SORTED: "torch_compile_sorted",
    PIT: "pit",
}
_SHOWN = 88  # characters of a sentence


def print_table(samples: Samples, batch: int) -> None:
    """One line per contender."""
    ours = mean_seconds(samples[PIT])
    print(f"{'':32} {'ms of a batch':>13} {'sentences/s':>12} {'pit-tvm is faster by':>21}")
    for name, taken in samples.items():
        seconds = mean_seconds(taken)
        gain = "" if name == PIT else f"{seconds / ours:.2f}x"
        print(f"{name:32} {1e3 * seconds:13.1f} {batch / seconds:12.1f} {gain:>21}")


def summarise(samples: Samples, batch: int) -> dict[str, Any]:
    """Sentences per second, and how much faster pit-tvm is than each torch (None: not run)."""
    rates = {
        key: batch / mean_seconds(samples[name]) if name in samples else None
        for name, key in KEYS.items()
    }
    ours = rates["pit"]
    gains = {
        key: round(ours / rate, 3) if ours and rate else None
        for key, rate in rates.items()
        if key != "pit"
    }
    rounded = {key: rate and round(rate, 2) for key, rate in rates.items()}
    return {"sentences_per_second": rounded, "speedup": gains}


def print_neighbours(sentences: Sequence[str], vectors: torch.Tensor, queries: int) -> None:
    """The first ``queries`` sentences, each with the sentence whose vector is nearest."""
    cosine = vectors[:queries] @ vectors.T
    cosine[:, :queries].fill_diagonal_(-1.0)
    for query, (value, number) in enumerate(zip(*cosine.max(1), strict=True)):
        print(f"  {_shown(sentences[query])}")
        print(f"    {float(value):.2f}  {_shown(sentences[int(number)])}")


def _shown(sentence: str) -> str:
    return sentence if len(sentence) <= _SHOWN else sentence[: _SHOWN - 3] + "..."


def times_by_fill(
    contenders: Contenders, spread: Sequence[Batch]
) -> Mapping[str, list[tuple[float, float]]]:
    """Fill and milliseconds of batches of like sentences: pit-tvm and torch on them as they are,
    and torch on the same cut to their longest sentence."""
    points: dict[str, list[tuple[float, float]]] = {EAGER: [], SORTED: [], PIT: []}
    last = len(spread) - 1
    for at, batch in enumerate(tqdm(spread, desc="time against fill", unit="batch", leave=False)):
        for name, found in points.items():
            contender = contenders[name]
            if at % contender.every == 0 or at == last:
                taken = contender.batches[at] if name == SORTED else batch
                time_batch(contender, taken)
                found.append((batch.fill, 1e3 * time_batch(contender, taken)))
    return points


def plot(path: str | Path, points: Mapping[str, Sequence[tuple[float, float]]], batch: int) -> None:
    """Time of a batch against its fill, written as PNG to ``path``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, found in points.items():
        axes.plot(*zip(*found, strict=True), marker="o", markersize=3, label=name)
    axes.set_xlabel("share of tokens that live")
    axes.set_ylabel(f"ms, a batch of {batch}")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=120)
