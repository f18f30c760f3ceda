"""Complex numbers that rotate, as DeepSeek-V2 and Llama 4 write positions, against torch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pit_tvm.errors import UnsupportedModel  # noqa: E402
from pit_tvm.model import compile  # noqa: E402

WIDTH = 8


class Rotated(torch.nn.Module):  # type: ignore[misc]
    """What ``rest`` makes of pairs as complex numbers, and of one angle for each position."""

    def __init__(self, rest: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rest, self.fc = rest, torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        x = torch.view_as_complex(self.fc(input).unflatten(-1, (-1, 2)))
        speeds = torch.arange(1.0, WIDTH // 2 + 1)
        angles = torch.arange(input.shape[1])[:, None] / speeds
        return self.rest(x, torch.polar(torch.ones_like(angles), angles))


def given(batch: int, tokens: int) -> dict[str, Any]:
    """Random values and a mask with holes."""
    rng = torch.Generator().manual_seed(tokens)
    mask = torch.rand(batch, tokens, generator=rng) < 0.7
    x = torch.randn(batch, tokens, WIDTH, generator=rng)
    return {"input": x, "attention_mask": mask.long()}


def rotations(x: torch.Tensor, turns: torch.Tensor) -> Any:
    real = torch.view_as_real
    return {
        "turned": real(x * turns).flatten(2),
        "scaled": real(x.unsqueeze(-1) * (turns.unsqueeze(-1) * 0.5)).flatten(2),
        "by real numbers": real(real(x)[..., 0] * x * 2).to("cpu"),
        "by itself": real(x.to("cpu")[:, :, None] * x[:, :, None, :])[:, :, 0],
    }


def test_rotations_are_torchs_on_live_tokens() -> None:
    model = Rotated(rotations).eval()
    ours = compile(model, given(3, 12))
    for batch, tokens in ((3, 12), (1, 9), (4, 5)):
        inputs = given(batch, tokens)
        live = inputs["attention_mask"].bool()
        with torch.no_grad():
            expected = model(**inputs)
        for name, one in ours(**inputs).items():
            torch.testing.assert_close(one[live], expected[name][live], rtol=1e-5, atol=1e-5)
            assert not one[~live].any()
    assert any(d.operator == "stack" and d.live for d in ours.decisions)


OTHERS = {
    "a sum": lambda x, turns: torch.view_as_real(x + turns),
    "a size": lambda x, turns: x.abs(),
    "a constant": lambda x, turns: torch.view_as_real(x * 1j),
    "a part": lambda x, turns: torch.view_as_real(x[..., 1:]),
    "another type": lambda x, turns: torch.view_as_real(x.to(torch.complex128)),
    "an output": lambda x, turns: x * turns,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_complex_numbers_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModel, match="complex"):
        compile(Rotated(OTHERS[name]), given(3, 12))


def test_deepseek_v2() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    heads = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    config = transformers.DeepseekV2Config(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        first_k_dense_replace=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        q_lora_rank=None,
        use_cache=False,
        **heads,
    )
    model = transformers.DeepseekV2Model(config).eval()
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    inputs = {"input_ids": torch.randint(0, 30, mask.shape), "attention_mask": mask}
    ours = compile(model, inputs)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
    live = mask.bool()
    torch.testing.assert_close(ours(**inputs).last_hidden_state[live], expected[live])
    assert not any(d.whole for d in ours.decisions if d.operator == "stack")
