"""A model's program on a GPU, replayed as CUDA graphs of torch.

Hundreds of kernels for some thousand tokens take a GPU less time than the host needs to launch
them. Between the index, for whose number of live tokens the host waits anyway, and the results,
whose memory is the caller's, nothing but that number changes from batch to batch; so what is
between is recorded once for a number, and then launched at once. So is what makes the index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..runtime.cuda_arrays import is_capturing
from .cuda_index import CudaIndex, Lists, empty_lists, first
from .torch_program import TorchProgram

# Rows are a multiple of the larger of these: at most one in 32 is computed for nothing.
_STEP, _SHARE = 64, 32
# Batches of different shapes that are remembered, and numbers of rows for each.
_MOST_SHAPES, _MOST_SIZES = 16, 64


@dataclass(eq=False)
class _Graph:
    """``kept``: where ``replay`` leaves what the tail reads, until another graph is replayed."""

    replay: Callable[[], None]
    kept: list[torch.Tensor]


@dataclass(eq=False)
class _Batches:
    """Batches of one shape: where recorded kernels find their inputs and index, what makes the
    index, and for each number of rows the graph, or None where it was seen once."""

    inputs: list[torch.Tensor]
    lists: Lists
    index: _Graph | None = None
    graphs: dict[int, _Graph | None] = field(default_factory=dict)


def rows_for(live: int, most: int) -> int:
    """Rows that are computed for ``live`` tokens, of ``most`` that there may be."""
    step = max(_STEP, (1 << live.bit_length() >> 1) // _SHARE)
    return min(most, -(-live // step) * step)


class Replayed:
    """Runs ``program`` as it runs itself, but for some rows more that nothing reads.

    The index is recorded when a shape of batch comes for the second time, the rest when a number of
    rows does. Calls share memory, and take turns (`InTurn`).
    """

    def __init__(self, program: TorchProgram, index: CudaIndex) -> None:
        self._program, self._index = program, index
        self._batches: dict[tuple[torch.Size, ...], _Batches] = {}
        self._side, self._pool = torch.cuda.Stream(program.device), torch.cuda.MemPool()

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Run; torch's current device must be the program's. While the stream is recorded already,
        the program is recorded as it is."""
        if is_capturing():
            return self._program(*inputs)
        batches = self._batches_like(inputs)
        torch._foreach_copy_(batches.inputs, list(inputs))
        rows = rows_for(self._live(batches), batches.lists[0].numel())
        lists = first(batches.lists, rows)
        graph = self._graph_for(batches, rows, lists)
        if graph is None:
            kept = self._body(batches, lists)
        else:
            graph.replay()
            kept = graph.kept
        outputs = self._program.tail(*batches.inputs, lists, *kept)
        ours = {_memory(t) for t in (*batches.inputs, *batches.lists, *kept)}
        return [out.clone() if _memory(out) in ours else out for out in outputs]

    def _batches_like(self, inputs: Sequence[torch.Tensor]) -> _Batches:
        key = tuple(each.shape for each in inputs)
        if key not in self._batches:
            if len(self._batches) >= _MOST_SHAPES:
                self._forget()
            with torch.inference_mode(False):
                ours = [torch.empty_like(each) for each in inputs]
                lists = self._program.index(*ours, lambda mask, *_: empty_lists(mask))
            self._batches[key] = _Batches(ours, lists)
        return self._batches[key]

    def _live(self, batches: _Batches) -> int:
        """Make the index of a batch; its number of live tokens."""

        def fill() -> Sequence[torch.Tensor]:
            index = partial(self._index.fill, batches.lists)
            return (self._program.index(*batches.inputs, index),)

        if batches.index is None:
            if not batches.graphs:  # no batch of this shape came before
                return self._index.live(*fill())
            batches.index = recorded(fill, self._side, self._pool)
        batches.index.replay()
        return self._index.live(*batches.index.kept)

    def _graph_for(self, batches: _Batches, rows: int, lists: Lists) -> _Graph | None:
        """The graph for a number of rows; None when they come for the first time."""
        if rows == 0:
            return None
        if rows not in batches.graphs:
            if len(batches.graphs) >= _MOST_SIZES:
                torch.cuda.synchronize(self._program.device)
                batches.graphs.clear()
            batches.graphs[rows] = None
        elif batches.graphs[rows] is None:
            batches.graphs[rows] = self._record(batches, lists)
        return batches.graphs[rows]

    def _record(self, batches: _Batches, lists: Lists) -> _Graph:
        self._body(batches, lists)  # so that nothing is compiled or sampled while it is recorded
        body = partial(self._program.body, *batches.inputs, lists)
        return recorded(body, self._side, self._pool)

    def _body(self, batches: _Batches, lists: Lists) -> Sequence[torch.Tensor]:
        """Run the body on the stream that graphs are recorded on, since cuBLAS keeps memory for
        each. This one's is of the pool: torch.compile frees it for all streams when it records
        graphs of its own, and ours still write it."""
        with _beside(self._side):
            with torch.cuda.use_mem_pool(self._pool):
                torch.cuda.current_blas_handle()
            kept = self._program.body(*batches.inputs, lists)
        for one in kept:  # others may have that stream too: torch has 32, and gives them in turn
            one.record_stream(torch.cuda.current_stream())
        return kept

    def _forget(self) -> None:
        """Drop all graphs and their memory, after the last call that uses them."""
        torch.cuda.synchronize(self._program.device)
        self._batches.clear()


@contextmanager
def _beside(side: torch.cuda.Stream) -> Iterator[None]:
    """On the stream ``side``, in turn with the current one."""
    current = torch.cuda.current_stream()
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        current.wait_stream(side)


def recorded(
    run: Callable[[], Sequence[torch.Tensor]], side: torch.cuda.Stream, pool: Any
) -> _Graph:
    """What launches at once what ``run`` launches, recorded on the stream ``side``, and what that
    gives. Its memory is of ``pool``: graphs that share it overwrite each other's results."""
    graph = torch.cuda.CUDAGraph()
    with _beside(side):
        graph.capture_begin(pool=pool.id, capture_error_mode="thread_local")
        try:
            made = [one.contiguous() for one in run()]
        finally:
            graph.capture_end()
    return _Graph(graph.replay, [_borrowed(one) for one in made])


@dataclass(frozen=True)
class _Bytes:
    """Memory as torch takes it from other libraries (the CUDA array interface)."""

    __cuda_array_interface__: dict[str, Any]


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The contiguous ``tensor``, without a share in its memory."""
    if not tensor.numel():
        return tensor
    place = {"shape": (tensor.nbytes,), "typestr": "|u1", "data": (tensor.data_ptr(), False)}
    found = torch.as_tensor(_Bytes({**place, "version": 3}), device=tensor.device)
    return found.view(tensor.dtype).view(tensor.shape)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
