"""What the GPU benchmark measures: shapes, length mixes, routings, and what is never tuned on.

The data of every case come from seeds that tuning cannot use, see `bench_rows.Settings.rng`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from bench_rows import Array

DTYPES = ("float16", "bfloat16")
SHORT = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "tf32": "tf32"}
QUICK = 8  # extents are divided by this with --quick

# Name, n, k.
BERT = (("fc1", 3072, 768), ("fc2", 768, 3072), ("out", 768, 768))
# Sequences, padded length, mixes of their lengths.
BATCHES = (
    (256, 128, ("uniform", "short", "tail", "full")),
    (64, 512, ("uniform", "short", "tail", "full")),
    (16, 2048, ("documents",)),
)
# Live rows, stored rows, n, k.
LIVE = (
    *((live, 8192, 4096, 4096) for live in (1000, 3000, 8192)),
    (1000, 8192, 11008, 4096),
)
# Experts, top-k, n, k.
EXPERTS = ((64, 1, 3072, 768), (128, 1, 3072, 768), (64, 6, 1408, 2048), (8, 2, 14336, 4096))
TOKENS = 8192
ROUTINGS = ("uniform", "zipf", "hot")
HOT_SHARE = 0.84  # of the tokens, as in a real trace of a Switch transformer

# Never tune on these, nor let `pit-tvm tune` calibrate on them: they show what tiles tuned on
# other shapes are worth. The run fails its target if the tile database knows one of them.
HELD_OUT_LIVE = ((3500, 7000, 5120, 5120), (2000, 4000, 8192, 2048))
HELD_OUT_EXPERTS = ((96, 1, 3072, 768),)

# Whole layers: experts, top-k, hidden, inter, activation, whether gates multiply. The first is
# Switch Transformer's, the others are the sizes of DeepSeek's and Mixtral's experts.
LAYERS = (
    (64, 1, 768, 3072, "relu", False),
    (64, 6, 2048, 1408, "silu", True),
    (8, 2, 4096, 14336, "silu", True),
)
HELD_OUT_LAYERS = ((96, 1, 768, 3072, "relu", False),)
# While a model writes text: a layer of Qwen3-30B-A3B, and tokens.
WRITING, FEW_TOKENS = (128, 8, 2048, 768, "silu", True), (1, 16)

# Training steps of linear layers: name, sequences, padded length, mix, n, k, whether GELU follows.
TRAINED = (
    ("fc1", 256, 128, "uniform", 3072, 768, False),
    ("fc1", 256, 128, "short", 3072, 768, False),
    ("fc1", 256, 128, "uniform", 3072, 768, True),
    ("1024->4096", 64, 512, "uniform", 4096, 1024, False),
    ("4096->4096", 16, 512, "uniform", 4096, 4096, False),
)
HELD_OUT_TRAINED = (("1280->5120", 48, 384, "uniform", 5120, 1280, False),)
TRAINED_ROUTINGS = ("uniform", "hot")

# Of lognormal lengths: mean as a share of the padded length, spread, share at the limit.
MIXES = {"short": (0.24, 0.6, 0.0), "tail": (0.33, 0.5, 0.02), "documents": (0.34, 0.5, 0.0)}


def draw_lengths(rng: np.random.Generator, mix: str, batch: int, padded: int) -> Array:
    """int32 ``[batch]``, from 1 to ``padded``, of one mix: "uniform" is even and fills a half,
    "full" is all of it, and `MIXES` has the others."""
    if mix == "full":
        return np.full(batch, padded, np.int32)
    if mix == "uniform":
        return rng.integers(1, max(2, padded), batch, np.int32)
    share, spread, limit = MIXES[mix]
    mean = padded * (share - limit) / (1.0 - limit)
    lengths = rng.lognormal(np.log(mean) - spread * spread / 2.0, spread, batch).round()
    lengths[rng.random(batch) < limit] = padded
    return np.clip(lengths, 1, padded).astype(np.int32)


def draw_routing(
    rng: np.random.Generator, routing: str, tokens: int, experts: int, top_k: int
) -> Array:
    """int32 ``[tokens * top_k]``: ``top_k`` different experts of each token, one after the other.

    "uniform"; "zipf": shares of 1, 1/2, 1/3 ... in random order; "hot": one expert has
    `HOT_SHARE` of the first choices.
    """
    shares = np.ones(experts)
    if routing == "zipf":
        shares = rng.permutation(1.0 / np.arange(1, experts + 1))
    elif routing == "hot":
        shares[rng.integers(experts)] = HOT_SHARE / (1.0 - HOT_SHARE) * max(1, experts - 1)
    # The largest of logarithms plus Gumbel noise are a sample without replacement.
    noisy = np.log(shares / shares.sum()) + rng.gumbel(size=(tokens, experts))
    best = np.argpartition(-noisy, top_k - 1, axis=1)[:, :top_k]
    return np.ascontiguousarray(best, np.int32).reshape(-1)


@dataclass(frozen=True)
class Linear:
    """``x @ weight.T`` over some of ``stored`` rows, named by lengths, or by row ids if ``batch``
    is 0; with ``gelu`` also bias and GELU."""

    name: str
    stored: int
    n: int
    k: int
    dtype: str
    mix: str = ""
    batch: int = 0
    live: int = 0
    gelu: bool = False
    held_out: bool = False

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        if self.batch:
            rows = f"{self.name} {self.batch}x{self.stored // self.batch} {self.mix}"
        else:
            rows = f"{self.live} of {self.stored} rows {self.n}x{self.k}"
        return f"{rows}{' gelu' * self.gelu} {SHORT[self.dtype]}"

    def pattern(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """What a call passes, int32 ``[batch]`` or ``[live]``, and the live rows, ascending."""
        if not self.batch:
            ids = rng.permutation(self.stored)[: self.live].astype(np.int32)
            return ids, np.sort(ids)
        padded = self.stored // self.batch
        lengths = draw_lengths(rng, self.mix, self.batch, padded)
        rows = np.arange(self.stored, dtype=np.int32)
        return lengths, rows[rows % padded < lengths[rows // padded]]

    def counts(self, rng: np.random.Generator) -> tuple[int, ...]:
        """Live rows, as one group."""
        return (len(self.pattern(rng)[1]),)

    def small(self) -> Linear:
        """The same with extents divided by `QUICK`."""
        batch = max(1, self.batch // QUICK) if self.batch else 0
        stored = self.stored // self.batch * batch if batch else self.stored // QUICK
        n, k, live = self.n // QUICK, self.k // QUICK, self.live // QUICK
        return replace(self, batch=batch, stored=stored, n=n, k=k, live=live)


class Routed:
    """A case that sends ``tokens`` tokens to ``top_k`` of ``experts`` experts each."""

    experts: int
    top_k: int
    routing: str
    tokens: int

    @property
    def rows(self) -> int:
        """Choices of all tokens."""
        return self.tokens * self.top_k

    def route(self, rng: np.random.Generator) -> Array:
        """int32 ``[rows]``: the expert of each choice, a token's side by side."""
        return draw_routing(rng, self.routing, self.tokens, self.experts, self.top_k)

    def counts(self, rng: np.random.Generator) -> tuple[int, ...]:
        """Rows of each expert."""
        return tuple(np.bincount(self.route(rng), minlength=self.experts).tolist())


@dataclass(frozen=True)
class Moe(Routed):
    """The first expert product of ``tokens`` tokens, each at ``top_k`` of ``experts`` experts."""

    experts: int
    top_k: int
    n: int
    k: int
    routing: str
    tokens: int = TOKENS
    dtype: str = "bfloat16"
    held_out: bool = False

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        return f"E={self.experts} top-{self.top_k} {self.k}->{self.n} {self.routing}"

    def small(self) -> Moe:
        """The same with extents divided by `QUICK`."""
        experts = max(self.top_k + 1, self.experts // QUICK)
        n, k, tokens = self.n // QUICK, self.k // QUICK, self.tokens // QUICK
        return replace(self, experts=experts, n=n, k=k, tokens=tokens)


@dataclass(frozen=True)
class Layer(Routed):
    """A whole feed-forward layer of ``tokens`` tokens, each at ``top_k`` of ``experts`` experts:
    from ``hidden`` to ``inter`` and back; ``gated``: by gates, ``act`` of a second product."""

    experts: int
    top_k: int
    hidden: int
    inter: int
    act: str
    gated: bool
    routing: str
    tokens: int = TOKENS
    dtype: str = "bfloat16"
    held_out: bool = False

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        sizes = f"{self.hidden}->{self.inter}->{self.hidden}"
        gated = " gated" * self.gated
        few = f" {self.tokens} tokens" if self.tokens < QUICK * QUICK else ""
        return f"E={self.experts} top-{self.top_k} {sizes} {self.act}{gated} {self.routing}{few}"

    @property
    def products(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """n and k of both products."""
        wide = 2 * self.inter if self.gated else self.inter
        return (wide, self.hidden), (self.hidden, self.inter)

    def small(self) -> Layer:
        """The same with extents divided by `QUICK`."""
        experts = max(self.top_k + 1, self.experts // QUICK)
        hidden, inter = self.hidden // QUICK, self.inter // QUICK
        tokens = max(self.tokens // QUICK, min(self.tokens, QUICK))
        return replace(self, experts=experts, hidden=hidden, inter=inter, tokens=tokens)


@dataclass(frozen=True)
class TrainingStep:
    """A training step of a layer, forward and backward; a linear one has a bias, GELU or not."""

    layer: Linear | Layer

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        return self.layer.label

    @property
    def held_out(self) -> bool:
        """Whether its shape is one that tuning must not see."""
        return self.layer.held_out

    def counts(self, rng: np.random.Generator) -> tuple[int, ...]:
        """Rows that each weight is multiplied by."""
        return self.layer.counts(rng)

    def small(self) -> TrainingStep:
        """The same with extents divided by `QUICK`."""
        return TrainingStep(self.layer.small())


@dataclass(frozen=True)
class Indexed:
    """One detection: of a boolean mask with zeros in blocks of ``grain`` (``kind`` "mask"), of
    ``size`` expert ids ("groups"), or of lengths ("lengths", ``parts`` sequences)."""

    kind: str
    size: int
    grain: tuple[int, int] = (0, 0)
    zeros: float = 0.0
    parts: int = 0
    held_out: bool = False

    @property
    def label(self) -> str:
        """Name of the case; equal names mean equal data."""
        if self.kind == "mask":
            grain = "rows" if 0 in self.grain else "x".join(map(str, self.grain))
            return f"mask {self.size}^2 {grain} {100 * self.zeros:g} %"
        if self.kind == "groups":
            return f"{self.size} ids of {self.parts} experts"
        return f"lengths {self.parts}x{self.size // self.parts}"


# --------------------------------------------------------------------------------------------


def list_linear(quick: bool) -> list[Linear]:
    """Cases of the suite ``padding``, held-out ones last."""
    cases = [case for dtype in DTYPES for case in _bert(dtype)]
    for shapes, apart in ((LIVE, False), (HELD_OUT_LIVE, True)):
        for live, stored, n, k in shapes:
            cases += [Linear("", stored, n, k, d, live=live, held_out=apart) for d in DTYPES]
    return [case.small() for case in cases] if quick else cases


def _bert(dtype: str) -> Iterator[Linear]:
    for name, n, k in BERT:
        for batch, padded, mixes in BATCHES:
            for mix in mixes:
                yield Linear(name, batch * padded, n, k, dtype, mix, batch)
    name, n, k = BERT[0]
    batch, padded, mixes = BATCHES[0]
    for mix in mixes:
        yield Linear(name, batch * padded, n, k, dtype, mix, batch, gelu=True)


def list_moe(quick: bool) -> list[Moe]:
    """Cases of the suite ``moe``, held-out ones last."""
    cases = [
        Moe(*sizes, routing, held_out=apart)
        for shapes, apart in ((EXPERTS, False), (HELD_OUT_EXPERTS, True))
        for sizes in shapes
        for routing in ROUTINGS
    ]
    return [case.small() for case in cases] if quick else cases


def list_layers(quick: bool) -> list[Layer]:
    """Cases of the suite ``layer``, held-out ones last."""
    cases = [
        Layer(*sizes, routing, held_out=apart)
        for shapes, apart in ((LAYERS, False), (HELD_OUT_LAYERS, True))
        for sizes in shapes
        for routing in ROUTINGS
    ]
    few = [Layer(*WRITING, "uniform", tokens=tokens) for tokens in FEW_TOKENS]
    cases = [*few, *cases]
    return [case.small() for case in cases] if quick else cases


def list_training(quick: bool) -> list[TrainingStep]:
    """Cases of the suite ``training``: linear layers, held-out ones last, and those of experts."""
    linear = [
        Linear(name, batch * padded, n, k, "bfloat16", mix, batch, gelu=gelu, held_out=apart)
        for shapes, apart in ((TRAINED, False), (HELD_OUT_TRAINED, True))
        for name, batch, padded, mix, n, k, gelu in shapes
    ]
    layers = [case for case in list_layers(False) if case.routing in TRAINED_ROUTINGS]
    layers = [case for case in layers if case.tokens == TOKENS]
    steps = [*map(TrainingStep, linear), *map(TrainingStep, layers)]
    return [step.small() for step in steps] if quick else steps


def list_indexed(quick: bool) -> list[Indexed]:
    """Cases of the suite ``index``; nothing about it is tuned, so nothing is held out."""
    size, ids = (512, 1024) if quick else (4096, 16384)
    masks = [
        Indexed("mask", size, grain, zeros)
        for grain in ((32, 1), (1, 64), (1, 0))
        for zeros in (0.5, 0.9, 0.99)
    ]
    groups = [Indexed("groups", ids, parts=experts) for experts in (8, 64, 128)]
    lengths = [Indexed("lengths", batch * padded, parts=batch) for batch, padded, _ in BATCHES]
    return [*masks, *groups, *lengths]


def list_selected(quick: bool) -> list[Linear | Moe]:
    """Cases of the suite ``search``: one of each shape."""
    linear = {
        (case.stored, case.n, case.k): case
        for case in list_linear(quick)
        if case.dtype == DTYPES[0] and not case.gelu
    }
    return [*linear.values(), *(case for case in list_moe(quick) if case.routing == "zipf")]
