"""How the quickstart measures: all contenders on one batch after the other, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from bench_rows import in_turn
from quickstart_contenders import Contender
from quickstart_data import Batch
from tqdm import tqdm

from pit_tvm.runtime.live_tokens import live_tokens

# Seconds of each contender on each of its batches that is timed, one entry per round.
Samples = dict[str, dict[int, list[float]]]


def settle() -> None:
    """Wait until idle threads of the library that ran last stop spinning, which takes up to 0.1 s,
    and no longer than 1 s: they would slow down whatever runs next."""
    end = time.perf_counter() + 1.0
    busy = True
    while busy and time.perf_counter() < end:
        before = time.process_time()
        time.sleep(0.005)
        busy = time.process_time() - before > 0.001


def measure(contenders: Mapping[str, Contender], seconds: float, rounds: int) -> Samples:
    """Rounds over all batches until ``seconds`` have passed or ``rounds`` are done, at least one.

    Contenders take turns batch by batch, every batch beginning with another one.
    """
    samples: Samples = {name: {} for name in contenders}
    number = max(len(c.batches) for c in contenders.values())
    end = time.perf_counter() + seconds
    for turn in range(rounds):
        if turn and time.perf_counter() > end:
            break
        for at in tqdm(range(number), desc=f"round {turn + 1}", unit="batch", leave=False):
            for name in in_turn(contenders, at + turn):
                contender = contenders[name]
                if at < len(contender.batches) and at % contender.every == 0:
                    taken = samples[name].setdefault(at, [])
                    taken.append(time_batch(contender, contender.batches[at]))
    return samples


def time_batch(contender: Contender, batch: Batch) -> float:
    """Seconds of one call."""
    settle()
    return _timed(lambda: contender.encode(batch.ids, batch.mask))


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def mean_seconds(samples: Mapping[int, Sequence[float]]) -> float:
    """Seconds of a batch: the mean over the batches of their medians over the rounds."""
    return statistics.fmean(statistics.median(taken) for taken in samples.values())


def index_seconds(batches: Sequence[Batch]) -> float:
    """Seconds to find the live tokens of a batch: the median over ``batches``."""
    masks = [batch.mask.numpy() for batch in batches]
    live_tokens(masks[0])
    return statistics.median(_timed(partial(live_tokens, mask)) for mask in masks)


def least_cosine(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The smallest cosine of two vectors of one sentence, ``[sentences, width]``; -1 if one is
    no number."""
    found = torch.nn.functional.cosine_similarity(ours, theirs, dim=1)
    return float(np.nan_to_num(found.numpy(), nan=-1.0).min())
