"""The bits that the Hopper rows family writes beside its output, and the lists made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tvm

from pit_tvm.errors import BackendUnavailable
from pit_tvm.gates import PLAIN
from pit_tvm.reference.index import dense_mask, index_lists
from pit_tvm.runtime.cuda_build import build_cuda, find_nvcc
from pit_tvm.runtime.cuda_detect import CudaDetector
from pit_tvm.runtime.cuda_fill import CudaFill
from pit_tvm.runtime.cuda_modules import cached_modules
from pit_tvm.runtime.cuda_rows import RowsKernels
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.schedules.hopper_rows import RowsTile, rows_kernel
from pit_tvm.schedules.hopper_space import GROUPS, ROWS, as_tile
from pit_tvm.structs import BitMask, MicroTile, Rows, Values

torch = pytest.importorskip("torch")

POISON = 0x55  # in bytes of bits that no kernel may write
CASES = 60  # of each kernel


@dataclass(frozen=True)
class Kind:
    """One kernel: knobs, element type, options, and the most groups that it is given."""

    knobs: RowsTile
    dtype: str = "float16"
    groups: int = 1
    options: dict[str, Any] = field(default_factory=dict)


KINDS = (
    Kind(RowsTile(cluster=2), options={"bias": True, "act": "relu"}),
    Kind(RowsTile(tile_n=168, stages=4, store_cols=128), groups=9),
    Kind(
        RowsTile(tile_m=64, tile_n=72, stages=8, consumers=1, store_cols=32),
        "bfloat16",
        groups=3,
        options={"act": "relu", "row_scale": True, "share": 2},
    ),
    Kind(
        RowsTile(tile_n=128, lag=1),
        "bfloat16",
        options={"act": "relu", "gate": PLAIN, "rhs_layout": "kn"},
    ),
)


def test_a_kernel_with_bits_compiles_to_machine_code() -> None:
    try:
        find_nvcc()
    except BackendUnavailable as error:
        pytest.skip(reason=f"nothing to compile with: {error}")
    kind = KINDS[2]
    func = rows_kernel(kind.dtype, kind.knobs, live_bits=True, **kind.options)
    assert callable(build_cuda(tvm.IRModule({"main": func}), tirx=True).mod["main"])


# --------------------------------------------------------------------------------------------
# On a GPU


@dataclass(frozen=True)
class Problem:
    """Arrays of one call in the kernel's order, and ``want`` float64 [rows, n]: NaN elsewhere."""

    inputs: tuple[Any, ...]
    out: Any
    bits: Any
    want: Any
    named: Any  # int64: the rows that the call must write


def draw(rng: np.random.Generator, kind: Kind) -> Problem:
    """Whole numbers over powers of two: float32 sums are exact, and many results are zero.

    Now and then they are so small that float16 rounds some of them to zero, or one row is NaN.
    """
    options, dtype = kind.options, getattr(torch, kind.dtype)
    n, k = (8 * int(rng.integers(1, 50)) for _ in range(2))
    groups = int(rng.integers(1, kind.groups + 1))
    counts = rng.integers(0, 300, groups) * (rng.random(groups) < 0.8)
    rows, share = int(counts.sum() + rng.integers(1, 50)), options.get("share", 1)
    wide = n * (2 if options.get("gate") else 1)
    small = 2.0 ** -int(rng.choice([1, 1, 13]))

    def whole(*shape: int) -> Any:
        return torch.from_numpy(rng.integers(-2, 3, shape).astype(np.float64)).cuda()

    lhs, rhs = whole(-(-rows // share), k) * small, whole(groups, wide, k) * small
    if options.get("act") is None and rng.random() < 0.5:
        lhs[int(rng.integers(len(lhs)))] = float("nan")
    bias, scale = whole(groups, wide) * small, whole(rows)
    order = rng.permutation(rows)
    ids = np.full((groups, max(1, counts.max()) + int(rng.integers(4))), 2**30, np.int32)
    want = torch.full((rows, n), float("nan"), dtype=torch.float64, device="cuda")
    for group, begin in enumerate(np.cumsum(counts) - counts):
        mine = order[begin : begin + counts[group]]
        ids[group, : len(mine)] = mine
        at = torch.from_numpy(mine).cuda()
        value = lhs[at // share] @ rhs[group].T + bias[group] * bool(options.get("bias"))
        gate, up = value[:, :n], value[:, n:]
        gate = gate.relu() if options.get("act") else gate
        want[at] = (gate * up if wide > n else gate) * (
            scale[at, None] if "row_scale" in options else 1
        )
    if options.get("rhs_layout") == "kn":
        rhs = rhs.transpose(1, 2).contiguous()
    inputs = [lhs.to(dtype), torch.from_numpy(ids).cuda(), torch.from_numpy(counts).int().cuda()]
    inputs += [rhs.to(dtype), *([bias.to(dtype)] if options.get("bias") else [])]
    inputs += [scale.float()] if "row_scale" in options else []
    out = torch.full((rows, n), float("nan"), dtype=dtype, device="cuda")
    bits = torch.full((rows, -(-n // 128) * 16), POISON, dtype=torch.uint8, device="cuda")
    return Problem(tuple(inputs), out, bits, want, torch.from_numpy(order[: counts.sum()]).cuda())


def host_bits(out: Any) -> np.ndarray:
    """The truth: `BitMask` bytes of the non-zero elements of a 16-bit tensor."""
    raw = out.view(torch.int16).cpu().numpy().view(np.uint16)
    return np.packbits(dense_mask(Values(), raw, raw.shape), axis=-1, bitorder="little")


def kernel_of(cache: KernelCache, kind: Kind) -> Callable[..., Any]:
    """The compiled kernel."""
    tile = as_tile(kind.knobs, ROWS if kind.groups == 1 else GROUPS, kind.dtype)
    return RowsKernels(cache, "sm_90a").product(tile, kind.groups, **kind.options, live_bits=True)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_bits_say_what_is_not_zero_and_nothing_else_is_written(
    cache: KernelCache, kind: Kind
) -> None:
    kernel, rng = kernel_of(cache, kind), np.random.default_rng(3)
    for _ in range(CASES):
        problem = draw(rng, kind)
        kernel(*problem.inputs, problem.out, problem.bits)
        want = problem.want.to(problem.out.dtype)
        assert torch.equal(torch.nan_to_num(problem.out, 77), torch.nan_to_num(want, 77))
        expected, bits = host_bits(problem.out), problem.bits.cpu().numpy()
        named = problem.named.cpu().numpy()
        assert np.array_equal(bits[named, : expected.shape[1]], expected[named])
        assert (np.delete(bits, named, axis=0) == POISON).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tile",
    [
        MicroTile("lhs", "m", 0, (1, 32)),
        MicroTile("lhs", "m", 0, (1, 64)),
        MicroTile("lhs", "k", 1, (32, 1)),
        MicroTile("lhs", "k", 1, (0, 1)),
    ],
)
def test_lists_of_the_next_operator_come_from_the_bits(cache: KernelCache, tile: MicroTile) -> None:
    kernel, rng = kernel_of(cache, KINDS[0]), np.random.default_rng(4)
    modules = cached_modules(cache)
    detector, fill = CudaDetector(modules), CudaFill(modules)
    for _ in range(10):
        problem = draw(rng, KINDS[0])
        kernel(*problem.inputs, problem.out, problem.bits)
        shape = tuple(problem.out.shape)
        rows = MicroTile("out", "m", 0, (1, 0))
        _, dead = detector.detect_split(Rows(), problem.named, shape, rows)
        fill.fill_rows(problem.bits, dead)
        bits = problem.bits[:, : shape[1] // 8]
        index = detector.detect(BitMask(), bits, shape, tile)
        live = torch.where(problem.out.isnan(), 0, problem.out)  # dead rows are zero
        expected = index_lists(BitMask(), host_bits(live), shape, tile)
        counts = index.count.cpu().numpy().reshape(-1)
        ids = index.ids.cpu().numpy().reshape(len(counts), -1)
        assert [len(each) for each in expected] == counts.tolist()
        for got, want in zip(ids, expected, strict=True):
            assert np.array_equal(got[: len(want)], want)
