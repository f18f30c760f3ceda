"""Programs in torch's core operators, whatever their views are of."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

from pit_tvm import torch as pit
from pit_tvm.errors import UnsupportedModel
from pit_tvm.model import compile, decomposing
from pit_tvm.model.decomposing import decompose
from pit_tvm.model.exporting import export_program
from tests.model.targets import both


class Viewed(torch.nn.Module):
    """A view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of 2."""
        return x.view(-1, 2)


def exported() -> torch.export.ExportedProgram:
    return torch.export.export(Viewed(), (torch.ones(4, 6),), dynamic_shapes=({0: Dim("n")},))


def targets(program: torch.export.ExportedProgram) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if n.op == "call_function"]


def test_the_program_given_is_left_alone() -> None:
    program = exported()
    before = targets(program)
    assert "aten.view.default" in before
    found = decompose(program)
    assert targets(program) == before
    x = torch.arange(18.0).reshape(3, 6)
    assert torch.equal(found.module()(x), x.view(-1, 2))


def test_nothing_is_said_of_torchs_own_copies(recwarn: pytest.WarningsRecorder) -> None:
    program = exported()
    recwarn.clear()
    decompose(program)
    assert not [w for w in recwarn if issubclass(w.category, FutureWarning)]


def test_what_torch_raises_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("Cannot view a tensor")

    monkeypatch.setattr(decomposing, "expanded", fail)
    with pytest.raises(UnsupportedModel, match="torch can decompose, got ValueError: Cannot view"):
        decompose(exported())


EXTREMES = [0.0, -0.0, 1.0, -3.0, 1e30, -1e-30, float("inf"), float("-inf"), float("nan"), 4.0]


class Decomposed(torch.nn.Module):
    """Operators that TVM's importer lacks, or does not take in this form."""

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Their results side by side, of random numbers and of extremes."""
        width = input.shape[-1]
        x = torch.where(input < 9, torch.tensor(EXTREMES), input)
        turned = torch.where(input < 9, torch.tensor(EXTREMES).roll(1), input)
        channels = input.flatten(0, 1)
        scale = torch.arange(1.0, width + 1)
        found = [
            torch.hypot(x, turned),
            torch.copysign(turned, x),
            torch.copysign(input, -0.0),
            x.signbit(),
            torch.fmax(x, turned),
            torch.fmin(x, turned),
            torch.exp2(input),
            torch.erfc(x),
            torch.erfc(input * 2).log(),
            x / 0.0,
            input / -0.0,
            *torch.var_mean(input, -1, keepdim=True),
            *torch.std_mean(input, -1, correction=0, keepdim=True),
            input.prod(-1, keepdim=True),
            (input > 0).prod(-1, keepdim=True),
            torch.nn.functional.group_norm(channels, 5, scale, -scale).view_as(input),
            torch.nn.functional.group_norm(channels[..., None, None], 2).view_as(input),
        ]
        return torch.cat([each.to(input.dtype) for each in found], -1)


def test_operators_by_others() -> None:
    x = torch.randn(2, 5, len(EXTREMES), generator=torch.Generator().manual_seed(0))
    live = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    got, want = both(Decomposed(), "llvm", x, live)
    got, want = got[live > 0], want[live > 0]
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-5, atol=1e-5)
    signed = slice(len(EXTREMES), 3 * len(EXTREMES))
    assert torch.equal(got[:, signed].signbit(), want[:, signed].signbit())


def test_views_of_parts() -> None:
    class Normed(torch.nn.Module):
        def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            columns = (input * attention_mask[..., None]).transpose(1, 2)
            return torch.nn.functional.instance_norm(columns).transpose(1, 2)

    x = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
    live = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]])
    got, want = both(Normed(), "llvm", x, live)
    torch.testing.assert_close(got[live > 0], want[live > 0], rtol=1e-4, atol=1e-5)


def test_attention_by_our_operator_is_torchs() -> None:
    class Masked(torch.nn.Module):
        def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            heads, live = input.unflatten(-1, (4, 2)).transpose(1, 2), attention_mask.bool()
            return pit.masked_attention(heads, heads[:, :2], heads[:, 2:], live[:, None, None])

    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    live = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0]])
    given = {"input": x, "attention_mask": live}
    program = decompose(export_program(Masked(), given, "attention_mask"))
    assert not any("pit_tvm" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(**given), Masked()(**given))


@pytest.mark.parametrize(("kv_heads", "cap"), [(2, None), (4, None), (4, 0.7)])
def test_attention_with_sinks_is_of_live_tokens(kv_heads: int, cap: float | None) -> None:
    class Sunk(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinks = torch.nn.Parameter(torch.randn(4))

        def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            heads, live = input.unflatten(-1, (4, 2)).transpose(1, 2), attention_mask.bool()
            few = heads[:, :kv_heads]
            mask = live[:, None, None]
            out = pit.masked_attention(heads, few, few + 1, mask, sinks=self.sinks, softcap=cap)
            return out.transpose(1, 2).flatten(2)

    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    live = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 0, 1]])
    model = Sunk()
    told = str(compile(model, {"input": x, "attention_mask": live}).explain())
    if cap is None:  # of all tokens otherwise, but from and to live ones
        assert "1 of them attention, full, over live tokens" in told
        assert "\n0 operators on all" in told
    got, want = both(model, "llvm", x, live)
    torch.testing.assert_close(got[live > 0], want[live > 0], rtol=1e-5, atol=1e-5)


def test_gpt2_with_attention_of_torch() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False
    )
    model = transformers.GPT2Model(config).eval()
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    given = {"input_ids": torch.randint(0, 40, mask.shape), "attention_mask": mask}
    with torch.no_grad():
        expected = model(**given).last_hidden_state
    found = compile(model, given)(**given).last_hidden_state
    live = mask.bool()
    torch.testing.assert_close(found[live], expected[live], rtol=0, atol=1e-5)
    assert not found[~live].any()


class ByPlace(torch.nn.Module):
    """Convolutions, of which the first one treats every token by itself."""

    def __init__(self, **how: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv1d(8, 4, 1, **how)

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.conv(input.mT).relu().mT


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("how", "alone"), [({}, True), ({"bias": False}, True), ({"groups": 2}, False)]
)
def test_convolutions_of_single_tokens_are_linear(
    how: dict[str, object], alone: bool, dtype: torch.dtype
) -> None:
    model = ByPlace(**how).to(dtype).eval()
    live = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [1, 1, 1, 1, 1]])
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    ours = compile(model, {"input": x, "attention_mask": live})
    with torch.no_grad():
        expected = model(x, live)[live > 0]
    got = ours(input=x, attention_mask=live)[live > 0]
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=1e-2 if dtype.itemsize < 4 else 1e-5)
    assert alone == (not any(d.whole for d in ours.decisions))
