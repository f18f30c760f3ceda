"""Memory that operators keep beyond a call, and memory that belongs to CUDA graphs."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pit_tvm.runtime import cuda_arrays, cuda_detect_ids, cuda_repeat, cuda_workspace
from pit_tvm.runtime.cuda_detect_ids import SlicePlan
from pit_tvm.runtime.cuda_experts import CudaExperts
from pit_tvm.runtime.cuda_experts_call import GroupedProduct
from pit_tvm.runtime.cuda_repeat_code import COUNT, NONE, WORDS
from pit_tvm.runtime.cuda_workspace import CudaWorkspace
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.structs import Groups, Lengths, MicroTile, Rows, SparsitySpec
from pit_tvm.target import resolve_target
from pit_tvm.tile_db.store import TileStore

torch = pytest.importorskip("torch")

ROWS = MicroTile("lhs", "m", 0, (1, 0))
GRAPHS, OTHER = 7, 8  # streams


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The current stream; on one of them torch.compile runs what it will record."""
    state = {"stream": OTHER}
    monkeypatch.setattr(cuda_arrays, "stream_of", lambda device: state["stream"])
    monkeypatch.setattr(cuda_workspace, "stream_of", lambda device: state["stream"])
    for module in (cuda_workspace, cuda_repeat):
        monkeypatch.setattr(module, "is_capturing", lambda device: False)
    manager = SimpleNamespace(stream=SimpleNamespace(cuda_stream=GRAPHS))
    containers = {n: SimpleNamespace(tree_manager=m) for n, m in enumerate((None, manager))}
    local = SimpleNamespace(tree_manager_containers=containers)
    trees: Any = SimpleNamespace(local=local)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    return state


def test_memory_of_graphs_that_are_rehearsed_is_not_kept(current: dict[str, int]) -> None:
    memory, like = CudaWorkspace(), torch.zeros(1)

    def take() -> Callable[[], Any]:
        return weakref.ref(memory.take(like, "live", 1, 64).ids)

    assert take()() is not None and take()() is take()()
    current["stream"] = GRAPHS
    assert take()() is None
    current["stream"] = OTHER
    assert take()() is take()()


def test_calls_that_are_rehearsed_are_not_repeated(current: dict[str, int]) -> None:
    unused: Any = None
    repeats: Any = cuda_repeat.CudaRepeats(unused, print, unused)
    looked: list[tuple[int, int]] = []

    def look(place: int, asked: int, *given: Any) -> int:
        looked.append((current["stream"], asked))
        return NONE

    repeats.look = look
    for stream in (GRAPHS, OTHER):
        current["stream"] = stream
        repeats.keep((), None, (None, None), (SimpleNamespace(device=0), None, None), print)
    assert looked == [(GRAPHS, COUNT), (OTHER, COUNT), (OTHER, WORDS)]


def test_nothing_is_rehearsed_before_torch_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    trees: Any
    for trees in (None, SimpleNamespace(), SimpleNamespace(local=SimpleNamespace())):
        monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
        assert not cuda_arrays.is_rehearsed()


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("spec", [Rows(), Lengths(), Lengths(cumulative=True), Groups(4)], ids=str)
def test_what_tells_a_pattern_is_not_kept(
    spec: SparsitySpec, split: bool, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_detect_ids, "check_tensor", lambda *given: None)
    kernels: Any = SimpleNamespace(slices=lambda name: name, clusters=True)
    told = torch.zeros(64, dtype=torch.int32)
    rows = 63 if spec == Lengths(cumulative=True) else 64
    split = split and not isinstance(spec, Groups)
    find = SlicePlan(kernels, spec, told, (rows, 8), ROWS, False, split, checked).run()
    held = weakref.ref(told)
    del told
    assert held() is None and find is not None


class Emptied(dict[Any, Any]):
    """A cache that another thread empties at once."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def test_tiles_of_experts_that_another_thread_forgets() -> None:
    target = resolve_target("cuda -arch=sm_90a -model=h200")
    store = TileStore.open(None, device=target.device, isa=target.isa)
    experts = CudaExperts(target, store, KernelCache())
    asked: Any = (GroupedProduct("float16", 256, 4, 128, 64, (("act", "silu"),)), None)
    tile = experts._tile(*asked)
    assert experts._tile(*asked) is tile
    experts._tiles = Emptied()
    assert experts._tile(*asked) == tile


@pytest.mark.gpu
@pytest.mark.parametrize("dynamic", [False, True])
def test_layers_in_graphs_of_torch_compile(dynamic: bool) -> None:
    from pit_tvm import torch as pit

    kind: dict[str, Any] = {"device": "cuda", "dtype": torch.float16}
    first, second = pit.LinearRows(64, 128, **kind), pit.LinearRows(128, 64, **kind)
    experts = pit.GroupedLinear(4, 64, 64, **kind)

    def layers(x: Any, mask: Any) -> Any:
        lengths = mask.sum(1)  # memory of the graph
        ids = torch.where(mask, lengths[:, None] % 4, -1)
        return experts(second(first(x, lengths=lengths), lengths=lengths), ids)

    run = torch.compile(layers, mode="reduce-overhead", fullgraph=True, dynamic=dynamic)
    made = torch.Generator("cuda").manual_seed(0)
    for turn in range(12):
        batch = (6, 9)[turn // 6]
        x = torch.randn(batch, 32, 64, generator=made, **kind)
        lengths = torch.randint(0, 33, (batch, 1), generator=made, device="cuda")
        mask = torch.arange(32, device="cuda") < lengths
        with torch.no_grad():
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(run(x, mask), layers(x, mask), rtol=1e-2, atol=1e-2)
