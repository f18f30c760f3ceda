"""What the kernels of experts' layers are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pit_tvm.errors import ShapeError
from pit_tvm.runtime import cuda_experts_call, cuda_workspace
from pit_tvm.runtime.cuda_experts import CudaExperts
from pit_tvm.runtime.cuda_rows import fits
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.schedules.hopper_combine import THREADS
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.store import TileStore

torch = pytest.importorskip("torch")

TOKENS, TOP_K, HIDDEN, INTER, EXPERTS = 6, 2, 64, 128, 4


@pytest.fixture
def given() -> list[tuple[Any, ...]]:
    """The arguments of products, which do not run."""
    return []


@pytest.fixture
def experts(given: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> CudaExperts:
    """A layer that takes the CPU's tensors; its detection does not run either."""
    monkeypatch.setattr(cuda_experts_call, "check_tensor", lambda *given: None)
    monkeypatch.setattr(cuda_experts_call, "by_choices", lambda *given: False)
    target = resolve_target("cuda -arch=sm_90a -model=h200")
    store = TileStore.open(None, device=target.device, isa=target.isa)
    made: Any = CudaExperts(target, store, KernelCache())
    index = SimpleNamespace(ids=torch.empty(0), count=torch.empty(0))
    monkeypatch.setattr(made, "_find", lambda *given: lambda ids, take: (index, None))
    monkeypatch.setattr(made, "_learn", lambda *given: None)
    kernels = SimpleNamespace(
        product=lambda *form, **options: lambda *arrays: given.append(arrays),
        combine_kernel=lambda *form: lambda *arrays: None,
    )
    monkeypatch.setattr(made, "kernels", kernels)
    monkeypatch.setattr(made.fill, "clear_ungrouped", lambda *given: None)
    monkeypatch.setattr(made, "_repeats", None)
    monkeypatch.setattr(cuda_workspace, "stream_of", lambda device: 0)
    return made


def beside(*shape: int) -> Any:
    """Random numbers that begin 2 bytes behind a multiple of 16."""
    made = torch.randn(8 + torch.Size(shape).numel()).half()
    skip = -made.data_ptr() % 16 // 2 + 1
    return made[skip : skip + torch.Size(shape).numel()].view(shape)


def test_products_read_operands_that_begin_at_16_bytes(
    experts: CudaExperts, given: list[tuple[Any, ...]]
) -> None:
    ids, weights = torch.zeros(TOKENS, TOP_K, dtype=torch.int64), torch.ones(TOKENS, TOP_K)
    x, up = beside(TOKENS, HIDDEN), beside(EXPERTS, 2 * INTER, HIDDEN)
    down = beside(EXPERTS, HIDDEN, INTER)
    bias = beside(EXPERTS, 2 * INTER)
    for _ in range(2):  # known by its signature, and then again
        experts.run(x, ids, weights, up, down)
        experts.grouped(x, ids, up, bias, "relu")
    assert len(given) == 6
    for arrays in given:
        assert [array.data_ptr() % 16 for array in arrays] == [0] * len(arrays)
    for first, second, alone in (given[:3], given[3:]):
        assert torch.equal(first[0], x) and torch.equal(first[3], up)
        assert torch.equal(second[3], down)
        assert torch.equal(alone[0], x) and torch.equal(alone[4], bias)


def test_operands_are_not_copied_without_need(
    experts: CudaExperts, given: list[tuple[Any, ...]]
) -> None:
    x, weight = torch.randn(TOKENS, HIDDEN).half(), torch.randn(EXPERTS, INTER, HIDDEN).half()
    experts.grouped(x, torch.zeros(TOKENS, 1, dtype=torch.int32), weight, None, "none")
    assert given[0][0] is x and given[0][3] is weight


def test_turned_weights_are_read_as_they_are_stored(
    experts: CudaExperts, given: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts: list[str] = []

    def product(tile: Any, groups: int, **options: Any) -> Any:
        assert fits(tile, "float16", options)
        layouts.append(options.get("rhs_layout", "nk"))
        return lambda *arrays: given.append(arrays)

    monkeypatch.setattr(experts.kernels, "product", product)
    x, ids = torch.randn(TOKENS, HIDDEN).half(), torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
    weights = torch.ones(TOKENS, TOP_K)
    up, down = beside(EXPERTS, HIDDEN, 2 * INTER), torch.randn(EXPERTS, HIDDEN, INTER).half()
    for weight in (up.mT, up.mT.contiguous()):
        experts.run(x, ids, weights, weight, down)
        experts.grouped(x, ids, weight, None, "none")
    assert layouts == ["kn", "nk", "kn", "nk", "nk", "nk"]
    first, second, alone = given[:3]
    assert torch.equal(first[3], up) and torch.equal(alone[3], up) and second[3] is down
    assert first[3].is_contiguous() and first[3].data_ptr() % 16 == 0


@pytest.mark.parametrize(("tokens", "hidden"), [(2**20, 2**14), (2**31 - THREADS + 1, 8)])
def test_more_sums_than_a_grid_has_threads(experts: CudaExperts, tokens: int, hidden: int) -> None:
    x, ids, up, down = (
        torch.empty(shape, dtype=torch.half, device="meta")
        for shape in ((tokens, hidden), (tokens, 1), (EXPERTS, 8, hidden), (EXPERTS, hidden, 8))
    )
    with pytest.raises(ShapeError, match=f"x: expected at most {2**31 - THREADS} pieces of 8"):
        experts.run(x, ids, ids, up, down, gate=None)


def test_sums_of_outer_products_are_given_aligned_operands_and_the_choices_of_a_row(
    experts: CudaExperts, given: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[tuple[int, int]] = []

    def product(tile: Any, *, share: int) -> Any:
        shares.append((tile.tile_n, share))
        return lambda *arrays: given.append(arrays)

    monkeypatch.setattr(experts, "columns", SimpleNamespace(product=product))
    left, right = beside(TOKENS * TOP_K, INTER), beside(TOKENS, HIDDEN)
    ids = torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
    out = experts.outer(left, right, ids, EXPERTS)
    ((own, _, _, others, flat),) = given
    assert shares == [(64, TOP_K)] and out.shape == (EXPERTS, INTER, HIDDEN)
    assert torch.equal(own, left) and torch.equal(others[0], right)
    assert own.data_ptr() % 16 == others.data_ptr() % 16 == 0
    assert flat.shape == (EXPERTS * INTER, HIDDEN) and flat.data_ptr() == out.data_ptr()
    assert not experts.outer(left[:0], right[:0], ids[:0], EXPERTS).any()


@pytest.mark.parametrize(
    ("shapes", "groups", "message"),
    [
        (((12, 128, 1), (6, 64), (6, 2)), 4, "left, right, ids: expected left"),
        (((12, 128), (6, 64), (6, 2)), 1025, "groups: expected at most 1024, got 1025"),
        (((12, 100), (6, 64), (6, 2)), 4, "n: expected a multiple of 8, at least 8, got 100"),
        (((12, 128), (6, 0), (6, 2)), 4, "k: expected a multiple of 8, at least 8, got 0"),
        (
            ((2**20, 2**13), (2**19, 8), (2**19, 2)),
            4,
            f"left: expected fewer than {2**33} elements",
        ),
    ],
)
def test_outer_products_that_no_kernel_computes(
    experts: CudaExperts, shapes: Any, groups: int, message: str
) -> None:
    made = (torch.empty(shape, dtype=torch.half, device="meta") for shape in shapes)
    with pytest.raises(ShapeError, match=message):
        experts.outer(*made, groups)
