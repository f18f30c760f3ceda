"""Whole models on a GPU against transformers in float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers
from torch.export import Dim

import pit_tvm.model
from pit_tvm.errors import BackendUnavailable, DTypeError, PitError, ShapeError

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
}
LIMITS = {torch.float16: 5e-3, torch.bfloat16: 4e-2}


def bert() -> torch.nn.Module:
    """A small BERT."""
    config = transformers.BertConfig(intermediate_size=256, **SIZES)
    return transformers.BertModel(config)


def opt() -> torch.nn.Module:
    """A small OPT."""
    options = {"ffn_dim": 256, "word_embed_proj_dim": 128, "use_cache": False}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**options, **SIZES))


def llama() -> torch.nn.Module:
    """A small Llama."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False, **SIZES))


def batch(batch: int, tokens: int) -> dict[str, torch.Tensor]:
    """Random ids, all live."""
    ids = torch.randint(3, 1000, (batch, tokens))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a GPU")
def test_without_a_gpu_no_model_is_looked_at() -> None:
    with pytest.raises(BackendUnavailable, match="CUDA device"):
        pit_tvm.model.compile("no such model", target="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("make", [bert, opt, llama])
def test_a_model_may_be_on_the_gpu(make: Callable[[], torch.nn.Module], exported: bool) -> None:
    module = make().eval().half().cuda()
    given = {name: each.cuda() for name, each in batch(3, 16).items()}
    program: Any = module
    if exported:
        sizes = dict.fromkeys(given, {0: Dim("batch"), 1: Dim("tokens", max=128)})
        program = torch.export.export(module, (), given, dynamic_shapes=sizes, strict=False)
    compiled = pit_tvm.model.compile(program, batch(3, 16), target="cuda")
    inputs = {name: each.cuda() for name, each in batch(5, 40).items()}
    with torch.no_grad():
        expected = module(**inputs)[0]
    torch.testing.assert_close(compiled(**inputs)[0], expected, rtol=1e-2, atol=1e-2)
    assert all(p.is_cuda for p in module.parameters())
    assert not exported or all(p.is_cuda for p in program.state_dict.values())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [bert, opt])
def test_live_tokens_equal_those_of_transformers(
    make: Callable[[], torch.nn.Module], dtype: torch.dtype
) -> None:
    module = make().eval().to(dtype)
    compiled = pit_tvm.model.compile(module, batch(3, 16), target="cuda")
    wide = copy.deepcopy(module).float().cuda()
    for shape, share in (((5, 40), 0.6), ((1, 7), 1.0), ((17, 100), 0.3), ((2, 128), 0.5)):
        inputs = batch(*shape)
        mask = (torch.rand(shape) < share).long()
        mask[0], mask[-1] = 1, 0 if shape[0] > 1 else 1
        inputs = {"input_ids": inputs["input_ids"].cuda(), "attention_mask": mask.cuda()}
        with torch.no_grad():
            expected = wide(**inputs)[0]
        found = compiled(**inputs)[0]
        live = inputs["attention_mask"].bool()
        error = (found.float() - expected)[live].abs().max() / expected[live].abs().max()
        assert error < LIMITS[dtype]
        assert not found[~live].any()
    nothing = {name: torch.zeros(4, 8, dtype=torch.long, device="cuda") for name in inputs}
    assert not compiled(**nothing)[0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("make", [bert, opt])
def test_batches_that_come_again_are_replayed(make: Callable[[], torch.nn.Module]) -> None:
    module = make().eval().half()
    compiled = pit_tvm.model.compile(module, batch(3, 16), target="cuda")
    wide = copy.deepcopy(module).float().cuda()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results = []
    for turn in range(24):  # some 8 numbers of rows of two shapes: most come again
        shape = ((17, 100), (40, 33))[turn % 2]
        mask = (torch.rand(shape) < (0.2, 0.21, 0.6, 1.0)[turn % 4]).long().cuda()
        inputs = {"input_ids": batch(*shape)["input_ids"].cuda(), "attention_mask": mask}
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[turn // 2 % 2]), torch.inference_mode(turn % 3 == 0):
            results.append((inputs, compiled(**inputs)[0]))
    torch.cuda.synchronize()
    for inputs, found in results:  # none was written over by a later call
        with torch.no_grad():
            expected = wide(**inputs)[0]
        live = inputs["attention_mask"].bool()
        error = (found.float() - expected)[live].abs().max() / expected[live].abs().max()
        assert error < LIMITS[torch.float16]
        assert not found[~live].any()


@pytest.mark.gpu
def test_threads_take_turns() -> None:
    module = bert().eval().half()
    compiled = pit_tvm.model.compile(module, batch(3, 16), target="cuda")
    inputs = [{n: v.cuda() for n, v in batch(8, 64).items()} for _ in range(6)]
    for one in inputs:
        one["attention_mask"][:, 40:] = 0
    expected = [compiled(**one)[0] for one in inputs]

    def again(one: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [compiled(**one)[0] for _ in range(5)]
            torch.cuda.current_stream().synchronize()
        return torch.stack(found)

    with ThreadPoolExecutor(6) as pool:
        for found, right in zip(pool.map(again, inputs), expected, strict=True):
            torch.testing.assert_close(found, right.expand_as(found), rtol=5e-3, atol=5e-3)


@pytest.fixture(scope="module")
def compiled() -> Any:
    """A small BERT, compiled."""
    return pit_tvm.model.compile(bert().half().eval(), batch(3, 16), target="cuda")


@pytest.mark.gpu
def test_a_recorded_call_takes_other_masks(compiled: Any) -> None:
    inputs = {name: value.cuda() for name, value in batch(6, 32).items()}
    with torch.cuda.stream(torch.cuda.Stream()):
        compiled(**inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(**inputs)[0]
    for share in (0.5, 0.0, 1.0, 0.1):
        inputs["attention_mask"].copy_(torch.rand(6, 32) < share)
        inputs["input_ids"].copy_(torch.randint(3, 1000, (6, 32)))
        out.fill_(float("nan"))
        graph.replay()
        expected = compiled(**inputs)[0]
        torch.testing.assert_close(out, expected, rtol=5e-3, atol=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_call_that_is_recorded_first_leaves_nothing_unwritten(cuda_graphs: bool) -> None:
    module = bert().half().eval()
    ours = pit_tvm.model.compile(module, batch(3, 16), target="cuda", cuda_graphs=cuda_graphs)
    few, many = ({n: v.cuda() for n, v in batch(*s).items()} for s in ((1, 8), (64, 100)))
    with torch.cuda.stream(torch.cuda.Stream()):
        ours(**few)  # loads the kernels
        padded = many | {"attention_mask": torch.zeros_like(many["attention_mask"])}
        padded["attention_mask"][0] = 1
        ours(**padded)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # of more rows than any call had, and never replayed
        ours(**many)
    wide = copy.deepcopy(module).float().cuda()
    with torch.no_grad():
        expected = wide(**many)[0]
    for _ in range(3):
        found = ours(**many)[0]
        error = (found.float() - expected).abs().max() / expected.abs().max()
        assert error < LIMITS[torch.float16]


class Deep(torch.nn.Module):
    """Sums so deep that cuBLAS adds them up in memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = torch.nn.Embedding(1000, 16384), torch.nn.Linear(16384, 60)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """A few columns of each token."""
        return torch.tanh(self.layer(self.table(input_ids)))


def pools_of(stream: torch.cuda.Stream) -> set[tuple[int, int]]:
    """Where the memory of a stream lies that is held in pieces as large as cuBLAS's."""
    return {
        tuple(segment["segment_pool_id"])
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if segment["stream"] == stream.cuda_stream
        and block["state"] == "active_allocated"
        and block["size"] >= 4 << 20
    }


@pytest.mark.gpu
def test_recorded_graphs_outlive_the_memory_of_cublas() -> None:
    compiled: Any = pit_tvm.model.compile(Deep().half().eval(), batch(3, 16), target="cuda")
    inputs = {name: value.cuda() for name, value in batch(4, 16).items()}
    replayed = compiled._run._run
    expected = []
    for _ in range(3):  # as it is; as it is, and recorded; replayed
        expected.append(compiled(**inputs))
        torch.cuda.synchronize()
        assert pools_of(replayed._side) == {replayed._pool.id}
    torch._C._cuda_clearCublasWorkspaces()  # as torch.compile does, before it records a graph
    assert not pools_of(replayed._side)
    with torch.cuda.stream(replayed._side):
        others = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    found = compiled(**inputs)
    torch.testing.assert_close(found, expected[-1])
    assert all(bool((other == 7).all()) for other in others)


@pytest.mark.gpu
def test_longer_sequences_than_the_positions_are_refused() -> None:
    compiled = pit_tvm.model.compile(opt().half().eval(), batch(3, 16), target="cuda")
    ids = torch.randint(3, 1000, (3, 150), device="cuda")
    mask = torch.zeros_like(ids)
    mask[1, 20:148] = 1  # as many as there are positions
    assert torch.isfinite(compiled(input_ids=ids, attention_mask=mask)[0]).all()
    mask[1, 148] = 1
    with pytest.raises(ShapeError, match="at most 128 live tokens"):
        compiled(input_ids=ids, attention_mask=mask)


class InTheWay(torch.nn.Module):
    """Operators that order tokens, choose elements, or compute in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = torch.nn.Embedding(1000, 16), torch.nn.Linear(16, 16)
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """By token: sums with sorted tokens, the best elements, counts."""
        x = self.layer(self.table(input_ids))
        halves = torch.chunk(x, 2, -1)
        x = self.norm(torch.cat([halves[1], -halves[0]], -1).float()).to(x.dtype) + x
        best, _ = torch.topk(x, 3, -1)
        counts = torch.cumsum(attention_mask.int(), 1)
        return self.layer(x + torch.sort(x, 1)[0]), best, counts


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_operators_in_the_way_run_as_they_are(cuda_graphs: bool) -> None:
    module = InTheWay().eval().half()
    module.norm.float()
    compiled = pit_tvm.model.compile(module, batch(3, 16), target="cuda", cuda_graphs=cuda_graphs)
    assert "  argsort -> " in compiled.explain()
    module = module.cuda()
    for _ in range(3):
        inputs = {n: v.cuda() for n, v in batch(5, 12).items()}
        inputs["attention_mask"][1, 7:] = 0
        live = inputs["attention_mask"].bool()
        with torch.no_grad():
            expected = module(**inputs)
        for found, wanted in zip(compiled(**inputs), expected, strict=True):
            assert not found[~live].any()
            rtol, atol = (0, 0) if wanted.dtype == torch.int64 else (1e-2, 1e-2)
            torch.testing.assert_close(
                found[live].float(), wanted[live].float(), rtol=rtol, atol=atol
            )


class Constants(torch.nn.Module):
    """Embeddings, and a table that depends on no input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(1000, 8)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """Both."""
        return self.table(input_ids), self.table.weight


@pytest.mark.gpu
def test_results_that_are_constants_are_the_callers() -> None:
    module = Constants().half().eval()
    compiled = pit_tvm.model.compile(module, batch(3, 16), target="cuda")
    for _ in range(4):
        rows, table = compiled(**{n: v.cuda() for n, v in batch(4, 9).items()})
        assert torch.equal(table.cpu(), module.table.weight) and rows.shape == (4, 9, 8)
        table.zero_()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"input_ids": torch.full((2, 4), 1000)}, ShapeError),
        ({"attention_mask": torch.full((2, 4), 2)}, ShapeError),
        ({"attention_mask": torch.ones(2, 4, 1, dtype=torch.long)}, ShapeError),
        ({"input_ids": torch.full((2, 5), 7)}, ShapeError),
        ({"input_ids": torch.full((2, 4), 7, dtype=torch.int32)}, DTypeError),
        ({"input_ids": torch.full((4, 2), 7).T}, ShapeError),
        ({"other": torch.ones(2, 4)}, ShapeError),
    ],
)
def test_bad_inputs(compiled: Any, change: dict[str, Any], error: type[PitError]) -> None:
    good = {name: value.cuda() for name, value in batch(2, 4).items()}
    bad = good | {name: value.cuda() for name, value in change.items()}
    expected = [compiled(**good)[0] for _ in range(3)][-1]  # the index is recorded by now
    for _ in range(2):
        with pytest.raises(error):
            compiled(**bad)
    torch.testing.assert_close(compiled(**good)[0], expected, rtol=5e-3, atol=5e-3)


@pytest.mark.gpu
def test_tensors_of_the_cpu_are_refused(compiled: Any) -> None:
    with pytest.raises(DTypeError, match="cuda"):
        compiled(**batch(2, 4))
