"""`pit_tvm.torch.masked_attention` on a GPU, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pit_tvm.torch as pit
from pit_tvm.errors import DTypeError, ShapeError
from pit_tvm.torch import attention_by_name

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


def _exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    share = q.shape[1] // k.shape[1]
    key, value = (each.double().repeat_interleave(share, dim=1) for each in (k, v))
    scores = q.double() @ key.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = mask.any(dim=-1, keepdim=True)
    return scores.masked_fill(~mask & seen, -torch.inf).softmax(dim=-1) * seen @ value


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, **options: float
) -> None:
    got = pit.masked_attention(q, k, v, mask, **options)
    limit = 0.004 if q.dtype == torch.float16 else 0.03
    assert float((got.double() - _exact(q, k, v, mask, **options)).abs().max()) < limit


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
    for scale in (-0.05, 0.0):
        _check(*given, mask, scale=scale)


@BOTH
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (1, 5000), (64, 20000), (4096, 64), (2050, 3000), (5000, 1)]
)
def test_any_number_of_queries_and_keys(queries: int, keys: int, dtype: torch.dtype) -> None:
    given = _operands(1, (3, 3), queries, keys, (64, 64), dtype)
    _check(*given, _window(queries, keys, 100))
    _check(*given, torch.rand(queries, keys, device="cuda") < 0.01)
    _check(*given, torch.rand(1, keys, device="cuda") < 0.7)


@BOTH
@pytest.mark.parametrize(
    ("heads", "queries"),
    [
        ((8, 2), 1),
        ((40, 1), 1),
        ((71, 1), 1),
        ((6, 6), 1),
        ((8, 2), 5),
        ((32, 8), 16),
        ((40, 1), 2),
        ((14, 2), 300),  # many of them: nine queries of seven heads are a tile
        ((64, 1), 130),
    ],
)
def test_heads_that_share_keys(heads: tuple[int, int], queries: int, dtype: torch.dtype) -> None:
    given = _operands(3, heads, queries, 5000, (128, 72), dtype)
    lengths = torch.tensor([4980, 70, 1300], device="cuda")[:, None] + torch.arange(
        queries, device="cuda"
    )
    padded = (torch.arange(5000, device="cuda") < lengths[..., None])[:, None]
    picked = torch.rand(3, 1, queries, 5000, device="cuda") < 0.1
    apart = torch.rand(3, heads[0], queries, 5000, device="cuda") < 0.1
    for mask in (padded, padded[:, :, :1], picked, picked[:1], apart):
        _check(*given, mask)
        exact = _exact(*given, mask)
        for shared in (None, heads[1]):
            shape = (3, heads[0], queries, 5000)
            listed = pit.list_mask(mask, shape, gradients=shared is None, kv_heads=shared)
            assert _far(pit.masked_attention(*given, listed), exact) < 0.01
        some = [each.detach().requires_grad_() for each in given]
        doubled = [each.detach().double().requires_grad_() for each in given]
        found = torch.autograd.grad(pit.masked_attention(*some, mask).sum(), some)
        wanted = torch.autograd.grad(_exact(*doubled, mask).sum(), doubled)
        assert all(_far(one, want) < 0.01 for one, want in zip(found, wanted, strict=True))


def test_lists_of_few_queries_fit_heads_that_share_keys_as_they_said() -> None:
    q, k, v = _operands(1, (8, 4), 3, 100, (64, 64), torch.float16)
    mask = torch.ones(3, 100, dtype=torch.bool, device="cuda")
    listed = pit.list_mask(mask, (1, 8, 3, 100), gradients=False, kv_heads=2)
    with pytest.raises(ShapeError, match="listed for 4 heads of keys"):
        pit.masked_attention(q, k, v, listed)


def _far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far, of how long it is."""
    return float((found - wanted).norm() / wanted.norm())


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


def _check_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, **options: float
) -> None:
    given = [each.detach().requires_grad_() for each in (q, k, v)]
    out = pit.masked_attention(*given, mask, **options)
    down = torch.randn_like(out)
    found = torch.autograd.grad(out, given, down)
    exact = [each.detach().double().requires_grad_() for each in (q, k, v)]
    wanted = torch.autograd.grad(_exact(*exact, mask, **options), exact, down.double())
    limit = 0.004 if q.dtype == torch.float16 else 0.03
    for mine, want in zip(found, wanted, strict=True):
        assert mine.shape == want.shape
        apart = (mine.double() - want).abs().max() / want.abs().max().clamp(min=1)
        assert float(apart) < limit


@BOTH
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (80, 36), (7, 5), (192, 64)])
def test_gradients_of_any_width(widths: tuple[int, int], dtype: torch.dtype) -> None:
    given = _operands(2, (4, 2), 333, 517, widths, dtype)
    for mask in (
        _window(333, 517, 30),
        torch.rand(2, 4, 333, 517, device="cuda") < 0.05,
        torch.rand(2, 1, 1, 517, device="cuda") < 0.5,
        torch.zeros(1, device="cuda", dtype=torch.bool),
        torch.ones(333, 1, device="cuda", dtype=torch.bool),
    ):
        _check_gradients(*given, mask)
    _check_gradients(*given, mask, scale=-0.05)


@BOTH
@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (1, 5000), (64, 9000), (4096, 64), (2050, 3000), (5000, 1)]
)
def test_gradients_of_any_number(queries: int, keys: int, dtype: torch.dtype) -> None:
    given = _operands(1, (3, 3), queries, keys, (64, 64), dtype)
    _check_gradients(*given, _window(queries, keys, 100))
    _check_gradients(*given, torch.rand(queries, keys, device="cuda") < 0.01)


def test_equal_steps_give_equal_gradients() -> None:
    q, k, v = (
        each.detach().requires_grad_()
        for each in _operands(1, (12, 12), 2048, 2048, (64, 64), torch.bfloat16)
    )
    mask = _window(2048, 2048, 60)
    first = torch.autograd.grad(pit.masked_attention(q, k, v, mask).sum(), (q, k, v))
    for _ in range(10):
        again = torch.autograd.grad(pit.masked_attention(q, k, v, mask).sum(), (q, k, v))
        assert all(map(torch.equal, first, again))


def test_compilers_and_gradients_of_gradients() -> None:
    q, k, v = _operands(1, (4, 2), 130, 200, (64, 64), torch.float16)
    mask = torch.rand(130, 200, device="cuda") < 0.2
    step = torch.compile(lambda *given: pit.masked_attention(*given) * 2, fullgraph=True)
    assert torch.equal(step(q, k, v, mask), pit.masked_attention(q, k, v, mask) * 2)
    q, k, v = (each.detach().requires_grad_() for each in (q, k, v))
    wanted = torch.autograd.grad((pit.masked_attention(q, k, v, mask) * 2).sum(), (q, k, v))
    found = torch.autograd.grad(step(q, k, v, mask).sum(), (q, k, v))
    for mine, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, want)
    (first,) = torch.autograd.grad(pit.masked_attention(q, k, v, mask).sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.float().square().sum(), v)
    exact = [each.detach().double().requires_grad_() for each in (q, k, v)]
    (first,) = torch.autograd.grad(_exact(*exact, mask).sum(), exact[0], create_graph=True)
    (want,) = torch.autograd.grad(first.square().sum(), exact[2])
    assert float((second.double() - want).abs().max()) < 0.01


def test_models_of_transformers_learn_with_it() -> None:
    transformers = pytest.importorskip("transformers", reason="models are of transformers")
    pit.register_attention()
    sizes = {"hidden_size": 256, "intermediate_size": 300, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    model = model.to("cuda", torch.bfloat16)
    ids, mask = torch.randint(500, (3, 200), device="cuda"), torch.ones(3, 200, device="cuda")
    mask[0, 70:] = mask[2, 150:] = 0
    found = {}
    for name in ("sdpa", "pit_tvm"):
        model.set_attn_implementation(name)
        model.zero_grad()
        labels = ids.masked_fill(mask == 0, -100)
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        found[name] = [each.grad.float().clone() for each in model.parameters()]
    for theirs, mine in zip(*found.values(), strict=True):
        assert float((mine - theirs).norm() / theirs.norm().clamp(min=1e-6)) < 0.05


def test_models_read_what_lives_of_long_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="models are of transformers")
    pit.register_attention()
    monkeypatch.setattr(attention_by_name, "_MANY", 2**12)
    sizes = {"hidden_size": 256, "intermediate_size": 300, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 500}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    model = model.to("cuda", torch.float16).eval()
    ids, mask = torch.randint(500, (3, 200), device="cuda"), torch.ones(3, 200, device="cuda")
    mask[0, :130] = mask[2, :40] = 0
    seen: list[int] = []
    inner = attention_by_name.masked_attention

    def record(q: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
        seen.append(q.shape[2])
        return inner(q, *others, **options)

    monkeypatch.setattr(attention_by_name, "masked_attention", record)
    found = {}
    for name in ("sdpa", "pit_tvm"):
        model.set_attn_implementation(name)
        with torch.inference_mode():
            cached = model(ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True).past_key_values
            last = model(ids[:, -1:], attention_mask=mask, past_key_values=cached)
        found[name] = last.logits.float()
    assert seen == [199, 199, 1, 1]
    assert _far(found["pit_tvm"], found["sdpa"]) < 0.01


def test_layers_share_lists() -> None:
    q, k, v = _operands(2, (4, 2), 700, 900, (64, 64), torch.bfloat16)
    mask = _window(700, 900, 40)
    wanted = pit.masked_attention(q, k, v, mask)
    fewer = pit.list_mask(mask, (2, 4, 700, 900), gradients=False, kv_heads=2)
    assert torch.equal(pit.masked_attention(q, k, v, fewer), wanted)
    listed = pit.list_mask(mask, (2, 4, 700, 900))  # of heads alone, for gradients
    assert _far(alone := pit.masked_attention(q, k, v, listed), wanted) < 0.01
    step = torch.compile(lambda *given: pit.masked_attention(*given) * 2, fullgraph=True)
    assert torch.equal(step(q, k, v, listed), alone * 2)
    assert torch.equal(step(q, k, v, fewer), wanted * 2)
    given = [each.detach().requires_grad_() for each in (q, k, v)]
    for seen in (listed, pit.list_mask(mask, (2, 4, 700, 900), gradients=True)):
        found = torch.autograd.grad(pit.masked_attention(*given, seen).sum(), given)
        want = torch.autograd.grad(pit.masked_attention(*given, mask).sum(), given)
        assert all(map(torch.equal, found, want))
    with torch.no_grad():
        listed = pit.list_mask(mask, (2, 4, 700, 900))
    with pytest.raises(ShapeError, match="lists for gradients.*gradients=True"):
        pit.masked_attention(*given, listed)


def test_graphs_of_steps_take_other_masks() -> None:
    given = [
        each.detach().requires_grad_()
        for each in _operands(1, (4, 4), 500, 600, (64, 64), torch.float16)
    ]
    mask, down = _window(500, 600, 20), torch.randn(1, 4, 500, 64, device="cuda").half()

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(pit.masked_attention(*given, mask), given, down)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for far in (1, 300):
        mask.copy_(_window(500, 600, far))
        graph.replay()
        for mine, want in zip(found, step(), strict=True):
            assert torch.equal(mine, want)


def test_refuses_float32() -> None:
    given = _operands(1, (1, 1), 3, 3, (8, 8), torch.float32)
    with pytest.raises(DTypeError, match="q: expected one of"):
        pit.masked_attention(*given, torch.ones(3, 3, device="cuda", dtype=torch.bool))
