"""What a replayed program reads and writes, with Python in place of CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from pit_tvm.model import cuda_replay
from pit_tvm.model.cuda_replay import Replayed, rows_for
from pit_tvm.runtime.live_tokens import live_tokens


class Index:
    """As `CudaIndex` on the CPU."""

    def fill(self, lists: Any, mask: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        """Write the lists of a mask up to its live tokens, and give their number."""
        *made, starts, place = (torch.from_numpy(part) for part in live_tokens(mask.numpy()))
        for to, part in zip(lists[:3], made, strict=True):
            to[: len(part)] = part
        lists[3].copy_(starts)
        lists[4].copy_(place)
        return torch.tensor(len(made[0]))

    def live(self, status: torch.Tensor) -> int:
        """The number."""
        return int(status)


class Program:
    """``ids + 1`` for live tokens and their sum by sequence, as a `TorchProgram` would have it;
    ``runs`` counts how often its body ran."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.runs = 0

    def index(self, ids: Any, mask: Any, make: Callable[..., Any]) -> Any:
        """The index."""
        return make(mask, ids)

    def body(self, ids: Any, mask: Any, index: Any) -> tuple[torch.Tensor, ...]:
        """Live tokens plus 1, and what the mask says in all."""
        self.runs += 1
        return ids.reshape(-1)[index[0].long()] + 1, mask.sum(1)

    def tail(self, ids: Any, mask: Any, index: Any, rows: Any, count: Any) -> list[torch.Tensor]:
        """Rows in their places; ``count`` is returned as it is, and so is the mask."""
        place = index[4].long()
        whole = torch.zeros_like(ids)
        whole[place >= 0] = rows[place[place >= 0]]
        return [whole, count, mask]


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A program that is replayed, and the graphs that were recorded of it, which overwrite each
    other's results."""
    graphs: list[Any] = []

    def recorded(run: Callable[[], Any], *_: Any) -> Any:
        kept = list(run())

        def replay() -> None:
            for graph in graphs:
                for one in graph.kept:
                    one.fill_(-1)
            for one, made in zip(kept, run(), strict=True):
                one.copy_(made)

        graphs.append(cuda_replay._Graph(replay, kept))
        return graphs[-1]

    monkeypatch.setattr(cuda_replay, "_beside", lambda _: nullcontext())
    for name in ("Stream", "MemPool", "synchronize", "current_stream", "current_blas_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda _: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(cuda_replay, "is_capturing", lambda: False)
    monkeypatch.setattr(cuda_replay, "recorded", recorded)
    program: Any = Program()
    index: Any = Index()
    return Replayed(program, index), graphs


def batch(shape: tuple[int, int], share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids and a mask."""
    return torch.randint(1, 1000, shape), (torch.rand(shape) < share).long()


def test_outputs_are_right_and_stay_right(replayed: Any) -> None:
    run, graphs = replayed
    found = []
    for turn in range(40):
        shape = ((20, 30), (7, 64))[turn % 2]
        ids, mask = batch(shape, (0.0, 0.1, 0.5, 0.52, 1.0)[turn % 5])
        found.append((ids, mask, run(ids, mask)))
    for ids, mask, (whole, count, same) in found:  # later calls have not touched them
        assert torch.equal(whole, (ids + 1) * mask)
        assert torch.equal(count, mask.sum(1)) and torch.equal(same, mask)
    assert 2 + 4 <= len(graphs) <= 2 + 16


def test_graphs_are_recorded_when_a_shape_and_a_number_of_rows_come_again(replayed: Any) -> None:
    run, graphs = replayed
    ids, mask = batch((16, 64), 0.5)
    for expected in (0, 2, 2, 2):  # the index, and the rest
        run(ids, mask)
        assert len(graphs) == expected
    few = torch.zeros_like(mask)
    few[0] = 1
    for expected in (2, 3):
        run(ids, few)
        assert len(graphs) == expected
    run(*batch((16, 32), 0.5))
    assert len(graphs) == 3


def test_bodies_run_aside_with_memory_for_cublas_of_the_pool(
    replayed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, graphs = replayed
    log: list[str] = []

    @contextmanager
    def logged(name: str) -> Iterator[None]:
        log.append(f"in {name}")
        yield
        log.append(f"out {name}")

    monkeypatch.setattr(cuda_replay, "_beside", lambda _: logged("side"))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda _: logged("pool"))
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: log.append("claim"))
    ids, mask = batch((16, 64), 0.5)
    body = run._program.body
    run._program.body = lambda *given: (log.append("body"), body(*given))[1]
    aside = ["in side", "in pool", "claim", "out pool", "body", "out side"]
    for expected in (aside, [*aside, "body", "body"], ["body"]):  # recorded, replayed; replayed
        log.clear()
        whole, *_ = run(ids, mask)
        assert torch.equal(whole, (ids + 1) * mask)
        assert log == expected
    assert len(graphs) == 2


def test_what_another_stream_made_is_lent_to_the_current_one(
    replayed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent: list[tuple[torch.Size, Any]] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "current")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda one, to: lent.append((one.shape, to)))
    run, _ = replayed
    ids, mask = torch.ones(3, 40).long(), torch.ones(3, 40).long()
    for _ in range(3):  # as it is; as it is, and recorded; replayed
        run(ids, mask)
    assert lent == 2 * [((120,), "current"), ((3,), "current")]


class Slow(Program):
    """A program whose tail reads what its body made when that has long been given back."""

    def body(self, ids: Any, mask: Any, index: Any) -> tuple[torch.Tensor, ...]:
        """Ones."""
        return (torch.ones(1 << 20, device=ids.device),)

    def tail(self, ids: Any, mask: Any, index: Any, *kept: Any) -> list[torch.Tensor]:
        """Twos, in some milliseconds."""
        torch.cuda._sleep(30_000_000)
        return [kept[0] + 1]


@pytest.mark.gpu
def test_what_the_tail_still_reads_is_not_handed_out() -> None:
    program, index = Slow(), Index()
    program.device = torch.device("cuda", torch.cuda.current_device())
    index.fill, index.live = lambda lists, *_: lists[0], lambda status: 1  # type: ignore
    given: Any = program, index
    run, ones = Replayed(*given), torch.ones(3, 40, dtype=torch.long, device="cuda")
    (found,) = run(ones, ones)
    with torch.cuda.stream(run._side):  # as another stream of the caller's may be
        torch.full((1 << 20,), 7.0, device="cuda")
    torch.cuda.synchronize()
    assert bool((found == 2).all())


def test_batches_without_live_tokens_are_not_recorded(replayed: Any) -> None:
    run, graphs = replayed
    ids, mask = batch((16, 64), 0.0)
    for _ in range(3):
        assert not run(ids, mask)[0].any()
    assert not graphs


def test_many_shapes_and_sizes_are_forgotten(
    replayed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_replay, "_MOST_SHAPES", 2)
    monkeypatch.setattr(cuda_replay, "_MOST_SIZES", 2)
    run, graphs = replayed
    for tokens in (100, 200, 300):
        for live in (100, 300, 500, 100, 300):
            ids, mask = torch.ones(5, tokens).long(), torch.zeros(5, tokens).long()
            mask.view(-1)[: min(live, 5 * tokens)] = 1
            for _ in range(2):
                whole, *_ = run(ids, mask)
                assert torch.equal(whole, 2 * mask)
    assert len(run._batches) <= 2
    assert all(len(batches.graphs) <= 2 for batches in run._batches.values())


@pytest.mark.parametrize(("live", "rows"), [(0, 0), (1, 64), (64, 64), (65, 128), (5000, 5120)])
def test_rows_in_steps(live: int, rows: int) -> None:
    assert rows_for(live, 10**6) == rows
    assert rows_for(live, max(live, 1)) == live


def test_few_rows_are_computed_for_nothing() -> None:
    for live in range(2048, 10**5, 37):
        assert live <= rows_for(live, 10**6) <= live * (1 + 1 / 32)
