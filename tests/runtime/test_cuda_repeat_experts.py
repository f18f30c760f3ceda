"""Layers of experts whose calls are repeated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pit_tvm.gates import Gate
from pit_tvm.runtime import (
    cuda_detect,
    cuda_detect_ids,
    cuda_experts,
    cuda_experts_call,
    cuda_repeat,
    cuda_workspace,
)
from pit_tvm.runtime.cuda_experts import CudaExperts
from pit_tvm.runtime.cuda_modules import CudaKernels
from pit_tvm.runtime.cuda_repeat import CudaRepeats
from pit_tvm.runtime.cuda_repeat_code import COUNT, OFTEN
from pit_tvm.runtime.cuda_rows import RowsKernels
from pit_tvm.runtime.cuda_watch import PERIOD, CountWatch
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.selection import gpu_choices
from pit_tvm.selection.gpu_choices import MOST_CHOICES, by_choices
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.store import TileStore
from tests.runtime import fake_graphs
from tests.runtime.test_cuda_repeat import aligned
from tests.runtime.test_cuda_repeat_operators import noting

torch = pytest.importorskip("torch")

TOKENS, TOP_K, HIDDEN, INTER, EXPERTS = 6, 2, 64, 128, 4
PAIRED = Gate(7.0, 1.702, 1.0, interleaved=True)


@pytest.fixture
def seen() -> list[Any]:
    """What is launched, with its arguments."""
    return []


@pytest.fixture(scope="module")
def fake() -> Any:
    """The compiled code of repeated calls, for tensors of the CPU; its graphs are numbers."""
    return fake_graphs.fake_graphs()


@pytest.fixture
def experts(seen: list[Any], fake: Any, monkeypatch: pytest.MonkeyPatch) -> CudaExperts:
    """Layers of the CPU's tensors: launches are noted, and outputs come at the same addresses."""
    note, outputs = noting(seen), dict[Any, Any]()
    fake_graphs.without_streams(monkeypatch)

    def empty(like: Any, shape: tuple[int, ...]) -> Any:
        made = outputs.setdefault((like.dtype, tuple(shape)), like.new_empty(shape))
        return made.fill_(torch.nan)

    for module in (cuda_experts, cuda_repeat):
        monkeypatch.setattr(module, "empty", empty)
    monkeypatch.setattr(CudaKernels, "slices", lambda self, name: note("index"))
    monkeypatch.setattr(
        RowsKernels, "product", lambda *given, **options: note(options.get("act", "down"))
    )
    monkeypatch.setattr(RowsKernels, "combine_kernel", lambda *given: note("sum"))
    monkeypatch.setattr(
        RowsKernels, "choices", lambda self, tile: note("sums" if tile.factors else "choices")
    )
    monkeypatch.setattr(cuda_experts_call, "by_choices", lambda *given: False)
    monkeypatch.setattr(CountWatch, "due", lambda self: False)
    monkeypatch.setattr(CountWatch, "report", lambda self, *given: None)
    monkeypatch.setattr(CudaRepeats, "look", fake["main"])
    monkeypatch.setattr(cuda_workspace, "stream_of", lambda device: 0)
    for module in (cuda_experts_call, cuda_detect, cuda_detect_ids):
        monkeypatch.setattr(module, "check_tensor", lambda *given, **options: None)
    target = resolve_target("cuda -arch=sm_90a -model=h200")
    store = TileStore.open(None, device=target.device, isa=target.isa)
    return CudaExperts(target, store, KernelCache())


def arguments(dtype: str = "float32") -> list[Any]:
    """x, ids, weights of a type, up and down."""
    ids = torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
    weights = torch.ones(TOKENS, TOP_K, dtype=getattr(torch, dtype))
    shapes = (TOKENS, HIDDEN), (EXPERTS, 2 * INTER, HIDDEN), (EXPERTS, HIDDEN, INTER)
    x, up, down = (aligned(*shape) for shape in shapes)
    return [x, ids, weights, up, down]


def names(seen: list[Any]) -> list[str]:
    return [name for name, *_ in seen]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_layers_are_launched_again_by_a_graph(
    experts: CudaExperts, fake: Any, seen: list[Any], dtype: str
) -> None:
    given, parts = arguments(dtype), ["index", "silu", "down", "sum"]
    launched, made = (fake["log"](what) for what in (fake_graphs.LAUNCHED, fake_graphs.MADE))
    outs = [experts.run(*given) for _ in range(OFTEN + 8)]
    assert fake["log"](fake_graphs.MADE) == made + 1
    again = fake["log"](fake_graphs.LAUNCHED) - launched
    one_by_one = len(outs) - again
    assert again >= 7 and names(seen) == parts * (one_by_one + 1)  # recorded once
    assert all(out is outs[0] for out in outs)
    if dtype == "float32":
        assert seen[-4:] == seen[-8:-4]
    shapes = [[arg[1] for arg in args if isinstance(arg, tuple)] for _, *args in seen[-4:]]
    choices, (x, *_, up, middle), (_, *_, down, rows), (apart, *_, out) = shapes
    assert (x, middle, rows) == ((TOKENS, HIDDEN), (12, INTER), (12, HIDDEN))
    assert (apart, out) == ((TOKENS, TOP_K, HIDDEN), x) and choices[0] == (TOKENS * TOP_K,)
    assert (up, down) == tuple(tuple(weight.shape) for weight in given[3:])
    experts.run(*given, activation="gelu")  # the same tensors in another layer
    assert names(seen[-4:]) == ["index", "gelu", "down", "sum"]


@pytest.mark.parametrize("gate", [PAIRED, None])
def test_few_tokens_are_read_choice_by_choice(
    experts: CudaExperts,
    seen: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    gate: Gate | None,
) -> None:
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(cuda_experts_call, "by_choices", lambda *given: asked.append(given) or True)
    given = arguments("float16")
    given[3] = given[3][:, :INTER].contiguous() if gate is None else given[3]
    biases = {"up_bias": aligned(*given[3].shape[:2])} if gate else {}
    how = {**biases, "gate": gate}
    outs = [experts.run(*given, **how) for _ in range(OFTEN + 8)]
    assert all(out is outs[0] for out in outs)
    one_by_one = len(seen) // 2
    assert names(seen) == ["choices", "sums"] * one_by_one and one_by_one < len(outs)
    shapes = [[arg[1] for arg in args] for _, *args in seen[-2:]]
    x, ids, weights, up, down = (tuple(each.shape) for each in given)
    bias = [tuple(each.shape) for each in biases.values()]
    assert shapes == [[x, ids, up, *bias, (12, INTER)], [(12, INTER), ids, weights, down, x]]
    assert asked == [(TOKENS, TOP_K, EXPERTS, (6 if gate else 4) * INTER * HIDDEN)]


def test_layers_of_turned_weights_with_biases_are_launched_again(
    experts: CudaExperts, fake: Any, seen: list[Any]
) -> None:
    given = arguments("float16")
    given[3] = aligned(EXPERTS, HIDDEN, 2 * INTER).mT
    biases = {"up_bias": aligned(EXPERTS, 2 * INTER), "down_bias": aligned(EXPERTS, HIDDEN)}
    launched = fake["log"](fake_graphs.LAUNCHED)
    outs = [experts.run(*given, **biases, gate=PAIRED) for _ in range(OFTEN + 8)]
    again = fake["log"](fake_graphs.LAUNCHED) - launched
    parts = ["index", "silu", "down", "sum"]
    assert again >= 7 and names(seen) == parts * (len(outs) - again + 1)
    first, second = ([arg[1] for arg in args if isinstance(arg, tuple)] for _, *args in seen[-3:-1])
    assert first[-3:] == [(EXPERTS, HIDDEN, 2 * INTER), (EXPERTS, 2 * INTER), (12, INTER)]
    assert second[-3:] == [(EXPERTS, HIDDEN, INTER), (EXPERTS, HIDDEN), (12, HIDDEN)]


@pytest.mark.parametrize("case", ["turned", "many", "checked"])
def test_other_layers_are_read_by_tiles_of_rows(
    experts: CudaExperts, seen: list[Any], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(cuda_experts_call, "by_choices", by_choices)
    given = arguments()
    if case == "turned":
        given[4] = aligned(EXPERTS, INTER, HIDDEN).mT
    elif case == "many":
        monkeypatch.setattr(gpu_choices, "MOST_CHOICES", TOKENS * TOP_K - 1)
    else:  # ids are checked where they are listed
        monkeypatch.setattr(experts, "_repeats", None)
    experts.run(*given)
    assert names(seen) == ["index", "silu", "down", "sum"]


@pytest.mark.parametrize("biased", [False, True])
def test_products_are_launched_again_by_a_graph(
    experts: CudaExperts,
    fake: Any,
    seen: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    biased: bool,
) -> None:
    note = noting(seen)
    monkeypatch.setattr(experts.fill, "clear_ungrouped", lambda *given: note("clear")(*given[:2]))
    x, ids, _, up, _ = arguments()
    bias = aligned(EXPERTS, 2 * INTER) if biased else None
    outs = [experts.grouped(x, ids, up, bias, "relu") for _ in range(OFTEN + 8)]
    assert all(out is outs[0] and out.shape == (TOKENS * TOP_K, 2 * INTER) for out in outs)
    one_by_one = len(seen) // 3
    assert names(seen) == ["clear", "index", "relu"] * one_by_one and one_by_one < len(outs)
    assert seen[-3:] == seen[-6:-3]
    number = len(seen)
    for _ in range(4):
        experts.grouped(x, ids, up, aligned(EXPERTS, 2 * INTER) if biased else None, "relu")
    # A bias that lies elsewhere is one by one once, and recorded.
    assert len(seen) == number + 6 * biased


@pytest.mark.parametrize("case", ["large", "unaligned"])
def test_other_layers_are_launched_one_by_one(
    experts: CudaExperts, fake: Any, seen: list[Any], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    given = arguments()
    if case == "large":
        monkeypatch.setattr(cuda_experts_call, "_SMALL", 0)
    else:
        given[0] = torch.randn(TOKENS * HIDDEN + 1).half()[1:].view(TOKENS, HIDDEN)
    before = [fake["log"](what) for what in (fake_graphs.LAUNCHED, fake_graphs.MADE)]
    for _ in range(OFTEN + 4):
        experts.run(*given)
    assert len(seen) == 4 * (OFTEN + 4)
    assert before == [fake["log"](what) for what in (fake_graphs.LAUNCHED, fake_graphs.MADE)]


def test_calls_that_seldom_repeat_are_seldom_looked_for(
    experts: CudaExperts, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(cuda_repeat, "_TRIALS", 32)
    monkeypatch.setattr(
        CudaRepeats, "look", lambda self, *given: looked.append(given[1]) or fake["main"](*given)
    )
    given = arguments()
    x, ids, weights = (torch.cat([each] * 40) for each in given[:3])
    for tokens in range(7, 207):
        experts.run(x[:tokens], ids[:tokens], weights[:tokens], *given[3:])
    tried = [asked for asked in looked if asked == COUNT]
    assert 32 < len(tried) < 32 + 200 // 8
    made = fake["log"](fake_graphs.MADE)
    for _ in range(40 * OFTEN):  # one shape again, as in a loop
        experts.run(*given)
    assert fake["log"](fake_graphs.MADE) == made + 1
    looked.clear()
    for _ in range(64):
        experts.run(*given)
    assert len(looked) == 64 and COUNT not in looked  # by graphs alone


def test_tiles_of_repeated_layers_follow_what_lives(
    experts: CudaExperts, fake: Any, seen: list[Any]
) -> None:
    given = arguments()
    for _ in range(OFTEN + 4):
        experts.run(*given)
    (layer,) = experts._calls.values()
    tiles, number = layer.plan, len(seen)
    assert experts.plan_of(layer) is tiles
    layer.watch._known = (TOKENS * TOP_K, 0, 0, 0)
    found = experts.plan_of(layer)
    assert found is not tiles and layer.counts == layer.watch.counts()
    up, down = tiles.tiles
    layer.plan = tiles._replace(tiles=(replace(up, knobs=up.knobs[1:]), down))
    for _ in range(2 * PERIOD):
        experts.run(*given)
    assert len(seen) > number  # as soon as the plan was looked at


def test_a_checked_layer_is_never_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_experts, "asked_for", lambda: True)
    target = resolve_target("cuda -arch=sm_90a -model=h200")
    store = TileStore.open(None, device=target.device, isa=target.isa)
    assert CudaExperts(target, store, KernelCache())._repeats_of(("silu", True)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 3, MOST_CHOICES])  # by choices, and by tiles of rows
def test_repeated_layers_on_a_gpu(tokens: int, dtype: str, frozen: bool) -> None:
    from pit_tvm import torch as pit

    torch.manual_seed(0)
    shapes = (tokens, 136), (5, 2 * 264, 136), (5, 136, 264), (5, 2 * 264)
    x, up, down, bias = (torch.randn(shape, device="cuda").bfloat16() for shape in shapes)
    up, down = (torch.nn.Parameter(each, requires_grad=not frozen) for each in (up, down))
    scores = torch.rand(tokens, 5, device="cuda")
    weights, ids = (each.clone() for each in scores.topk(2))
    weights = weights.to(getattr(torch, dtype))
    with torch.no_grad():
        for call in range(OFTEN + 40):
            x.normal_()
            ids.copy_(torch.rand(tokens, 5, device="cuda").topk(2)[1])
            if call == OFTEN + 20:
                weights.neg_()
            got = pit.moe_feed_forward(x, ids, weights, up, down)
            products = _times(x.double()[:, None], up.double()[ids])
            gate, other = products.chunk(2, -1)
            rows = torch.nn.functional.silu(gate) * other
            want = (_times(rows, down.double()[ids]) * weights.double()[..., None]).sum(1)
            assert (got.double() - want).norm() < 2e-2 * want.norm(), call
            got, want = pit.grouped_linear(x, up, ids, bias), products + bias.double()[ids]
            assert (got.double() - want).norm() < 2e-2 * want.norm(), call


def _times(rows: Any, weights: Any) -> Any:
    """Rows [tokens, 1 or top_k, k] by a weight [n, k] of each choice."""
    return torch.einsum("tck,tcnk->tcn", rows.expand(-1, weights.shape[1], -1), weights)
