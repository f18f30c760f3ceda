"""Calls of operators with every kind of pattern, and of layers, on any device, and what they must
give."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import pit_tvm
from pit_tvm import Operator, op
from pit_tvm import torch as pit
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.structs import Candidate, Plan, SparsitySpec

EXTENT, FEW, GROUPS, PARTS = 256, 4, 4, 8  # of all axes; rows of few; groups; sequences
LIMITS = {"float16": 2e-3, "float32": 1e-4}
SHARE = 0.4  # that lives
SLEEP = 50_000_000  # cycles of a device: some 25 ms, longer than a few calls take the host

# Of the layers of experts, as tests/torch/test_experts.py has them: the kernels are the same.
EXPERTS, HIDDEN, INTER, TOKENS, TOP_K = 5, 32, 40, 23, 3

# A pattern, and what lives of an operand or of the output, as factors that broadcast.
Told = tuple[torch.Tensor | None, torch.Tensor]
Run = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """What an operator computes, the pattern of ``sparse``, and how that is drawn. ``exists``: what
    does not live may hold anything, instead of zeros. ``runs``: the kind of candidates that calls
    on a GPU choose from."""

    spec: SparsitySpec
    draw: Callable[[torch.Generator], Told]
    sparse: str = "lhs"
    dtype: str = "float16"
    dead: str = "skip"
    m: int = EXTENT
    exists: bool = False
    runs: str = "pit"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def groups(self) -> tuple[int, ...]:
        """How many groups of rows there are; nothing without."""
        return (GROUPS,) if isinstance(self.spec, pit_tvm.Groups) else ()

    def compiled(self, cache: KernelCache, target: str = "cuda") -> Operator:
        """The operator; on a GPU all calls run the smallest tile of the first plan, so that there
        is one product to compile."""
        sizes: tuple[Any, ...] = (None, None, None, *self.groups)
        make: Any = op.grouped_matmul if self.groups else op.matmul
        tensors, sparse = make(*sizes, dtype=self.dtype, **self.options), {self.sparse: self.spec}
        made = pit_tvm.compile(tensors, sparse=sparse, target=target, cache=cache, dead=self.dead)
        if target != "llvm":
            planner: Any = made._dispatcher.planner
            planner.decide = _of_one_tile(planner.decide, self.runs)
        return made

    def problem(self, seed: int, device: str) -> Problem:
        """Random operands and a random pattern."""
        rng = torch.Generator().manual_seed(seed)
        value, live = self.draw(rng)
        arrays, everything = self._operands(rng), torch.ones(1, 1)
        if self.sparse == "lhs" and not self.exists:
            arrays[0] *= live
            live = everything
        lhs, rhs, *bias = (array.double() for array in arrays)
        left = lhs.mT if self._has("transpose_lhs") else lhs
        right = rhs.mT if self._has("transpose_rhs") else rhs
        if self._has("transpose_lhs"):  # rows of both operands, which are summed over
            left, live = left * live.mT, everything
        if self.groups and value is not None:
            ids = value.long()
            want = (left[:, None] @ right[ids])[:, 0] + bias[0][ids]
            arrays.append(value)
            value = None
        else:
            want = left @ right + (bias[0] if bias else 0)
        if self.dead == "zero":
            want, live = want * live, everything
        return Problem(arrays, value, want, live.bool(), LIMITS[self.dtype]).on(device)

    def _has(self, option: str) -> bool:
        return bool(self.options.get(option))

    def _operands(self, rng: torch.Generator) -> list[torch.Tensor]:
        first = (EXTENT, self.m) if self._has("transpose_lhs") else (self.m, EXTENT)
        shapes: list[tuple[int, ...]] = [first, (*self.groups, EXTENT, EXTENT)]
        if self._has("bias"):
            shapes.append((*self.groups, EXTENT))
        dtype = getattr(torch, self.dtype)
        return [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]


@dataclass
class Problem:
    """One call: what is passed, and what is right where ``live``."""

    arrays: list[torch.Tensor]
    value: torch.Tensor | None
    want: torch.Tensor
    live: torch.Tensor
    limit: float

    def on(self, device: str) -> Problem:
        """The same call there."""
        value = None if self.value is None else self.value.to(device)
        return replace(self, arrays=[array.to(device) for array in self.arrays], value=value)

    def out(self) -> torch.Tensor:
        """An output that shows what was not written."""
        return self.arrays[0].new_full(self.want.shape, torch.nan)

    def call(self, run: Run, **out: torch.Tensor) -> torch.Tensor:
        """What an operator gives, or a layer."""
        told = {} if self.value is None else {"sparsity": self.value}
        return run(*self.arrays, **told, **out)

    def become(self, other: Problem) -> None:
        """Take the contents of another, in the same memory, on the current stream."""
        for mine, new in zip(self._tensors(), other._tensors(), strict=True):
            mine.copy_(new)
        self.want, self.live = other.want, other.live

    def is_right(self, found: torch.Tensor) -> bool:
        """Whether a result is, and on the device of the operands."""
        error = (found.cpu().double() - self.want).abs() / self.want.abs().max()
        worst = error.masked_fill(~self.live, 0.0).max()  # NaN stays
        return bool(worst < self.limit) and found.device == self.arrays[0].device

    def _tensors(self) -> list[torch.Tensor]:
        return self.arrays if self.value is None else [*self.arrays, self.value]


@contextlib.contextmanager
def beside(stream: torch.cuda.Stream) -> Iterator[None]:
    """``stream`` is the current one of its device, but the current device is the first."""
    with torch.cuda.stream(stream), torch.cuda.device(0):
        yield


def delay(device: int) -> None:
    """Keep the current stream of a device busy."""
    with torch.cuda.device(device):
        torch.cuda._sleep(SLEEP)


def _of_one_tile(decide: Callable[..., Plan], runs: str) -> Callable[..., Plan]:
    kept: list[Candidate] = []

    def decided(*given: Any) -> Plan:
        plan = decide(*given)
        found = [choice for choice in plan.candidates if choice.kind == runs]
        kept[:] = kept[:1] or [min(found, key=_size)]
        return replace(plan, choice=kept[0])

    return decided


def _size(choice: Candidate) -> tuple[object, ...]:
    """Both axes before one, then by what a CTA, or a thread, computes."""
    micro_tile, tile = choice.micro_tile, choice.tile
    if micro_tile is None or tile is None:  # the dense product
        return ()
    knobs = dict(tile.knobs)
    each = knobs.get("reg_m", 1) * knobs.get("reg_n", 1)
    return micro_tile.also is None, tile.tile_m * tile.tile_n, each, str(tile)


# --------------------------------------------------------------------------------------------
# Patterns


def _lengths(rng: torch.Generator) -> Told:
    told = torch.randint(0, EXTENT // PARTS + 1, (PARTS,), generator=rng)
    live = torch.arange(EXTENT // PARTS) < told[:, None]
    return told.int(), live.reshape(-1, 1)


def _rows(rng: torch.Generator) -> Told:
    told = torch.randperm(EXTENT, generator=rng)[: int(SHARE * EXTENT)]
    return told.int(), torch.zeros(EXTENT, 1).index_fill_(0, told, 1.0)


def _groups(rng: torch.Generator) -> Told:
    told = torch.randint(0, GROUPS, (EXTENT,), generator=rng)
    return told.int(), torch.ones(1, 1)


def _blocks(high: int, wide: int, whole: bool = True) -> Callable[[torch.Generator], Told]:
    """Blocks of zeros; ``whole``: told by an element for each of the operand's."""

    def draw(rng: torch.Generator) -> Told:
        told = torch.rand(EXTENT // high, EXTENT // wide, generator=rng) < SHARE
        live = told.repeat_interleave(high, 0).repeat_interleave(wide, 1)
        return live if whole else told, live

    return draw


def _grid(rng: torch.Generator) -> Told:
    rows, columns = (torch.rand(EXTENT, generator=rng) < SHARE for _ in range(2))
    live = rows[:, None] & columns
    return live, live


def _values(rng: torch.Generator) -> Told:
    return None, torch.rand(1, EXTENT, generator=rng) < SHARE


_LINEAR = {"bias": True, "transpose_rhs": True}
_ROWS = Kind(pit_tvm.Rows(), _rows, exists=True, options=_LINEAR)
_BANDS = Kind(pit_tvm.Mask(32, 1), _blocks(32, 1))
_BLOCKS = Kind(pit_tvm.BlockMask(64, 64), _blocks(64, 64, whole=False))
KINDS = {
    "rows": _ROWS,
    "lengths": replace(_ROWS, spec=pit_tvm.Lengths(), draw=_lengths),
    "zeros": replace(_ROWS, spec=pit_tvm.Lengths(), draw=_lengths, dead="zero"),
    "groups": replace(_ROWS, spec=pit_tvm.Groups(GROUPS), draw=_groups),
    "depth": replace(_ROWS, options={"transpose_lhs": True}),
    "bands": _BANDS,
    "dense": replace(_BANDS, runs="dense"),
    "float32": replace(_BANDS, dtype="float32"),
    "pieces": Kind(pit_tvm.Mask(1, 64), _blocks(1, 64)),
    "blocks": _BLOCKS,
    "outputs": replace(_BLOCKS, sparse="out"),
    "grid": Kind(pit_tvm.Grid(), _grid),
    "few rows": Kind(pit_tvm.Values(), _values, m=FEW),
}


# --------------------------------------------------------------------------------------------
# Layers


def _linear_rows(seed: int, device: str) -> Problem:
    rng = torch.Generator().manual_seed(seed)
    shapes = ((6, 32, 64), (128, 64), (128,))
    x, weight, bias = (torch.randn(shape, generator=rng).half() for shape in shapes)
    lengths = torch.randint(0, 33, (6,), generator=rng)
    live = (torch.arange(32) < lengths[:, None])[..., None]
    want = (x.double() @ weight.double().T + bias.double()) * live
    everything = torch.ones(1, dtype=torch.bool)
    return Problem([x, weight, bias, lengths], None, want, everything, 2e-3).on(device)


def _routed(seed: int) -> list[torch.Tensor]:
    """Rows of tokens, the experts of each, which differ, and the weights of both products."""
    rng = torch.Generator().manual_seed(seed)
    shapes = ((TOKENS, HIDDEN), (EXPERTS, 2 * INTER, HIDDEN), (EXPERTS, HIDDEN, INTER))
    x, up, down = (torch.randn(shape, generator=rng) for shape in shapes)
    ids = torch.rand(TOKENS, EXPERTS, generator=rng).argsort(-1)[:, :TOP_K].contiguous()
    return [x.half(), ids, (0.3 * up).half(), (0.3 * down).half()]


def _grouped_linear(seed: int, device: str) -> Problem:
    x, ids, weight, _ = _routed(seed)
    ids[:, 1][ids[:, 1] == 2] = -1
    every = torch.einsum("tk,enk->ten", x.double(), weight.double())
    want = every.gather(1, ids.clamp(min=0)[..., None].expand(-1, -1, 2 * INTER))
    want *= (ids >= 0)[..., None]
    everything = torch.ones(1, dtype=torch.bool)
    return Problem([x, weight, ids], None, want, everything, 2e-3).on(device)


def _moe(seed: int, device: str) -> Problem:
    x, ids, up, down = _routed(seed)
    shares = torch.linspace(0.1, 1.0, TOKENS * TOP_K).view(TOKENS, TOP_K)
    gates, others = torch.einsum("tk,enk->etn", x.double(), up.double()).chunk(2, -1)
    rows = (torch.nn.functional.silu(gates) * others) @ down.double().mT
    chosen = rows[ids, torch.arange(TOKENS)[:, None]]
    want = (chosen * shares.double()[..., None]).sum(1)
    everything = torch.ones(1, dtype=torch.bool)
    return Problem([x, ids, shares, up, down], None, want, everything, 1e-2).on(device)


def _of_lengths(*arrays: torch.Tensor) -> torch.Tensor:
    *operands, lengths = arrays
    return pit.linear_rows(*operands, lengths=lengths)


LAYERS: dict[str, tuple[Run, Callable[[int, str], Problem]]] = {
    "linear_rows": (_of_lengths, _linear_rows),
    "grouped_linear": (pit.grouped_linear, _grouped_linear),
    "moe_feed_forward": (pit.moe_feed_forward, _moe),
}


def case(name: str, cache: KernelCache) -> tuple[Run, Callable[[int, str], Problem]]:
    """What runs, an operator or a layer, and what draws its problems by seed and device."""
    if name in LAYERS:
        return LAYERS[name]
    return KINDS[name].compiled(cache), KINDS[name].problem
