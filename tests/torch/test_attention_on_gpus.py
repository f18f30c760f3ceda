"""`pit_tvm.torch.masked_attention` on a GPU, against float64."""

from __future__ import annotations

import pytest
import torch

import pit_tvm.torch as pit
from pit_tvm.errors import DTypeError

pytestmark = pytest.mark.gpu
BOTH = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def _operands(
    batch: int,
    heads: tuple[int, int],
    queries: int,
    keys: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    q = torch.randn(batch, queries, heads[0], widths[0], device="cuda", dtype=dtype)
    k = torch.randn(batch, keys, heads[1], widths[0], device="cuda", dtype=dtype)
    v = torch.randn(batch, heads[1], keys, widths[1], device="cuda", dtype=dtype)
    return q.transpose(1, 2), k.transpose(1, 2), v


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    share = q.shape[1] // k.shape[1]
    key, value = (each.double().repeat_interleave(share, dim=1) for each in (k, v))
    scores = q.double() @ key.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(dim=-1).nan_to_num(0) @ value


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> None:
    got = pit.masked_attention(q, k, v, mask)
    limit = 0.004 if q.dtype == torch.float16 else 0.03
    assert float((got.double() - _exact(q, k, v, mask)).abs().max()) < limit


def _window(queries: int, keys: int, far: int) -> torch.Tensor:
    rows, columns = (torch.arange(size, device="cuda") for size in (queries, keys))
    mask = (rows[:, None] - columns).abs() <= far
    mask[:, torch.randperm(keys, device="cuda")[:9]] = True
    mask[torch.randperm(queries, device="cuda")[:5]] = True
    mask[torch.randperm(queries, device="cuda")[:5]] = False
    return mask


@BOTH
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128), (256, 256), (80, 36), (7, 5)])
def test_heads_of_any_width(widths: tuple[int, int], dtype: torch.dtype) -> None:
    given = _operands(2, (4, 2), 333, 517, widths, dtype)
    for mask in (
        _window(333, 517, 30),
        torch.rand(2, 4, 333, 517, device="cuda") < 0.05,
        torch.rand(2, 1, 1, 517, device="cuda") < 0.5,
        torch.zeros(1, device="cuda", dtype=torch.bool),
        torch.ones(333, 1, device="cuda", dtype=torch.bool),
    ):
        _check(*given, mask)


@BOTH
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (1, 5000), (64, 20000), (4096, 64), (2050, 3000), (5000, 1)]
)
def test_any_number_of_queries_and_keys(queries: int, keys: int, dtype: torch.dtype) -> None:
    given = _operands(1, (3, 3), queries, keys, (64, 64), dtype)
    _check(*given, _window(queries, keys, 100))
    _check(*given, torch.rand(queries, keys, device="cuda") < 0.01)
    _check(*given, torch.rand(1, keys, device="cuda") < 0.7)


def test_equal_calls_give_equal_bits() -> None:
    given = _operands(1, (12, 12), 2048, 2048, (64, 64), torch.bfloat16)
    mask = _window(2048, 2048, 60)
    first = pit.masked_attention(*given, mask)
    for _ in range(20):
        assert torch.equal(pit.masked_attention(*given, mask), first)


def test_graphs_take_other_masks() -> None:
    q, k, v = _operands(1, (4, 4), 700, 700, (64, 64), torch.float16)
    mask = _window(700, 700, 20)
    pit.masked_attention(q, k, v, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pit.masked_attention(q, k, v, mask)
    for far in (1, 300, 50):
        mask.copy_(_window(700, 700, far))
        q.copy_(torch.randn_like(q))
        out.fill_(torch.nan)
        graph.replay()
        assert float((out.double() - _exact(q, k, v, mask)).abs().max()) < 0.004


def test_streams_have_lists_of_their_own() -> None:
    given = _operands(1, (4, 4), 1500, 1500, (64, 64), torch.float16)
    masks = [_window(1500, 1500, far) for far in (5, 200)]
    wanted = [pit.masked_attention(*given, mask) for mask in masks]
    streams = [torch.cuda.Stream() for _ in masks]
    torch.cuda.synchronize()
    made: list[list[torch.Tensor]] = [[], []]
    for _ in range(30):
        for found, mask, stream in zip(made, masks, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(pit.masked_attention(*given, mask))
    torch.cuda.synchronize()
    for found, want in zip(made, wanted, strict=True):
        assert all(torch.equal(each, want) for each in found)


def test_compilers_and_gradients() -> None:
    q, k, v = _operands(1, (4, 2), 130, 200, (64, 64), torch.float16)
    mask = torch.rand(130, 200, device="cuda") < 0.2
    step = torch.compile(lambda *given: pit.masked_attention(*given) * 2, fullgraph=True)
    assert torch.equal(step(q, k, v, mask), pit.masked_attention(q, k, v, mask) * 2)
    q = q.detach().requires_grad_()
    torch.autograd.backward(pit.masked_attention(q, k, v, mask).sum())
    exact = q.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(_exact(exact, k, v, mask).sum(), exact)
    assert q.grad is not None and float((q.grad.double() - want).abs().max()) < 0.01


def test_refuses_float32() -> None:
    given = _operands(1, (1, 1), 3, 3, (8, 8), torch.float32)
    with pytest.raises(DTypeError, match="q: expected one of"):
        pit.masked_attention(*given, torch.ones(3, 3, device="cuda", dtype=torch.bool))
