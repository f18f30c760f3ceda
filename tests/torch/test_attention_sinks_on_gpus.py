"""Sinks of `pit_tvm.torch.masked_attention` on a GPU, against float64, and models with them."""

from __future__ import annotations

import pytest
import torch

import pit_tvm.torch as pit

pytestmark = pytest.mark.gpu
Tensors = list[torch.Tensor]


def _operands(heads: tuple[int, int], rows: tuple[int, int], widths: tuple[int, int]) -> Tensors:
    kinds = (heads[0], rows[0], widths[0]), (heads[1], rows[1], widths[0])
    given = [torch.randn(2, *kind) for kind in (*kinds, (heads[1], rows[1], widths[1]))]
    given.append(torch.randn(heads[0]) * 3)
    given[3][0], given[3][-1] = 50, -50
    return [each.cuda().half() for each in given]


def _exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    mask: torch.Tensor,
    cap: float | None = None,
) -> torch.Tensor:
    share = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(share, dim=1).mT * q.shape[-1] ** -0.5
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    beside = sinks[:, None, None].expand(*q.shape[:3], 1)
    scores = torch.cat([scores.masked_fill(~mask, -torch.inf), beside], dim=-1)
    return scores.softmax(dim=-1)[..., :-1] @ v.repeat_interleave(share, dim=1)


def _masks(queries: int, keys: int) -> Tensors:
    rows, columns = (torch.arange(size, device="cuda") for size in (queries, keys))
    window = (rows[:, None] + keys - queries - columns).abs() < 30
    window[queries // 2] = False
    many = torch.rand(queries, keys, device="cuda") < 0.7
    return [window, many, torch.rand(2, 1, queries, keys, device="cuda") < 0.05]


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "rows", "widths"),
    [
        ((4, 4), (333, 517), (64, 64)),
        ((16, 2), (200, 5000), (128, 72)),  # heads share tiles, and long lists are cut
        ((64, 8), (1, 3000), (64, 64)),
        ((3, 1), (70, 90), (192, 128)),
    ],
)
def test_sinks_weigh_as_in_float64(
    heads: tuple[int, int], rows: tuple[int, int], widths: tuple[int, int], kind: torch.dtype
) -> None:
    *qkv, sinks = _operands(heads, rows, widths)
    exact = [each.double() for each in (*qkv, sinks)]
    for mask in _masks(*rows):
        found = pit.masked_attention(*qkv, mask, sinks=sinks.to(kind))
        assert float((found - _exact(*exact, mask)).abs().max()) < 0.004
        shape = (*qkv[0].shape[:3], rows[1])
        listed = pit.list_mask(mask, shape, gradients=False, kv_heads=heads[1])
        assert torch.equal(pit.masked_attention(*qkv, listed, sinks=sinks.to(kind)), found)


@pytest.mark.parametrize("cap", [None, 0.8])
@pytest.mark.parametrize("width", [64, 128, 192])  # of the last, torch has the gradients
def test_gradients_go_to_sinks(width: int, cap: float | None) -> None:
    given = [one.requires_grad_() for one in _operands((6, 2), (150, 270), (width, 64))]
    exact = [one.detach().double().requires_grad_() for one in given]
    for mask in _masks(150, 270):
        out = pit.masked_attention(*given[:3], mask, sinks=given[3], softcap=cap)
        down = torch.randn_like(out)
        wanted = torch.autograd.grad(_exact(*exact, mask, cap), exact, down.double())
        for mine, theirs in zip(torch.autograd.grad(out, given, down), wanted, strict=True):
            assert mine.dtype == torch.float16
            assert float((mine - theirs).abs().max()) < 0.01 * max(1, float(theirs.abs().max()))


def test_graphs_take_other_sinks() -> None:
    *qkv, sinks = _operands((4, 2), (100, 200), (64, 64))
    mask = _masks(100, 200)[0]
    pit.masked_attention(*qkv, mask, sinks=sinks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = pit.masked_attention(*qkv, mask, sinks=sinks)
    sinks.copy_(torch.randn_like(sinks))
    graph.replay()
    assert torch.equal(found, pit.masked_attention(*qkv, mask, sinks=sinks))


def test_compilers_and_gradients_of_gradients_know_of_sinks() -> None:
    given = [one.requires_grad_() for one in _operands((4, 2), (70, 90), (64, 64))]
    mask = _masks(70, 90)[0]

    def loss(*given: torch.Tensor) -> torch.Tensor:
        *qkv, sinks = given
        return pit.masked_attention(*qkv, mask, sinks=sinks, softcap=3.0).square().sum()  # type: ignore[call-arg]

    wanted = torch.autograd.grad(loss(*given), given, create_graph=True)
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*given), given)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-2, rtol=2e-2)
    again = torch.autograd.grad(sum(one.square().sum() for one in wanted), given)
    assert all(bool(one.isfinite().all()) and bool(one.any()) for one in again)


def test_gpt_oss_takes_it_by_name() -> None:
    transformers = pytest.importorskip("transformers", reason="models are of transformers")
    pit.register_attention()
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    others = {"vocab_size": 99, "num_local_experts": 4, "sliding_window": 40}
    config = transformers.GptOssConfig(**sizes, **heads, **others)
    model = transformers.GptOssForCausalLM(config).cuda().bfloat16()
    exact = transformers.GptOssForCausalLM(config).cuda()
    exact.load_state_dict(model.state_dict())
    model.set_attn_implementation("pit_tvm")
    exact.set_attn_implementation("eager")
    ids, mask = torch.randint(99, (3, 150), device="cuda"), torch.ones(3, 150, device="cuda").long()
    mask[0, :70] = mask[2, :149] = 0
    with torch.no_grad():
        found, wanted = (one(ids, attention_mask=mask).logits for one in (model, exact))
    apart = (found - wanted)[mask.bool()]
    assert float(apart.norm() / wanted[mask.bool()].norm()) < 0.03
    ours, theirs = (
        one.generate(ids, attention_mask=mask, max_new_tokens=3) for one in (model,) * 2
    )
    assert torch.equal(ours, theirs) and ours.shape == (3, 153)
    for one in (model, exact):
        one(ids, attention_mask=mask, labels=ids).loss.backward()
    for (key, mine), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        if key.endswith("sinks"):
            assert float((mine.grad - theirs.grad).norm()) < 0.1 * float(theirs.grad.norm())
