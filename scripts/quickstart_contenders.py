"""What the quickstart compares: one sentence encoder, run by torch in four ways and by pit-tvm."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from quickstart_data import Batch
from torch import nn

import pit_tvm.model

PIT = "pit-tvm"
EAGER, SORTED = "torch, padded", "torch, sorted by length"
COMPILED, COMPILED_SORTED = "torch.compile, padded", "torch.compile, sorted by length"

Encode = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """One way to encode all sentences: ``encode(ids, mask)`` on its ``batches``.

    ``every``: of how many batches one is timed; more than 1 where all of them cost the same.
    """

    encode: Encode
    batches: Sequence[Batch]
    every: int = 1


@dataclass
class Contenders:
    """All contenders by name, and the seconds that compiling took."""

    known: dict[str, Contender] = field(default_factory=dict)
    compile_seconds: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Contender:
        return self.known[name]


def by_torch(module: Callable[..., torch.Tensor]) -> Encode:
    """torch on all tokens of a batch."""

    def encode(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = module(input_ids=ids, attention_mask=mask)
            return found

    return encode


def by_pit(compiled: Callable[..., torch.Tensor]) -> Encode:
    """pit-tvm on the live tokens of a batch."""
    return lambda ids, mask: compiled(input_ids=ids, attention_mask=mask)


def has_compiler() -> bool:
    """Whether torch.compile finds a C++ compiler."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def make_contenders(
    module: nn.Module, padded: Sequence[Batch], cut: Sequence[Batch], *, torch_compile: bool
) -> Contenders:
    """All contenders, compiled and called once: those that pad take ``padded``, the sorted ones
    ``cut``; with ``torch_compile`` torch.compile, once for all shapes, is among them."""
    made = Contenders()
    known, sparsely = made.known, max(1, len(padded) // 4)
    eager = by_torch(module)
    known[EAGER] = Contender(eager, padded, sparsely)
    known[SORTED] = Contender(eager, cut)
    if torch_compile:
        encode = by_torch(torch.compile(module, dynamic=True))
        # Two lengths, so that none is taken for a constant.
        made.compile_seconds["torch.compile"] = _timed(encode, (cut[0], cut[-1], padded[0]))
        known[COMPILED] = Contender(encode, padded, sparsely)
        known[COMPILED_SORTED] = Contender(encode, cut)
    example = {"input_ids": padded[0].ids, "attention_mask": padded[0].mask}
    start = time.perf_counter()
    compiled = pit_tvm.model.compile(module, example)
    made.compile_seconds[PIT] = time.perf_counter() - start
    encode = by_pit(compiled)
    made.compile_seconds[PIT] += _timed(encode, padded[:1])
    known[PIT] = Contender(encode, padded)
    return made


def _timed(encode: Encode, batches: Sequence[Batch]) -> float:
    start = time.perf_counter()
    for batch in batches:
        encode(batch.ids, batch.mask)
    return time.perf_counter() - start


def vectors_of(contender: Contender, sentences: int) -> torch.Tensor:
    """All sentence vectors, float64 ``[sentences, width]``, in the order of the sentences."""
    found: Mapping[int, torch.Tensor] = {
        number: vector
        for batch in contender.batches
        for number, vector in zip(
            batch.numbers, contender.encode(batch.ids, batch.mask), strict=True
        )
    }
    return torch.stack([found[number] for number in range(sentences)]).double()
