"""Numbers that a model makes of its extents, and parts of tokens by steps, against torch."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from pit_tvm.errors import ShapeError, UnsupportedModel  # noqa: E402
from pit_tvm.model import compile  # noqa: E402

WIDTH, LEAST = 6, 8
Given = dict[str, Any]


class Model(torch.nn.Module):  # type: ignore[misc]
    """What ``rest`` makes of masked values and the mask."""

    def __init__(self, rest: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rest, self.fc = rest, torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        live = attention_mask[..., None].to(input.dtype)
        return self.rest(self.fc(input) * live, live)


def given(batch: int, tokens: int) -> Given:
    """Random values and a mask with holes."""
    rng = torch.Generator().manual_seed(tokens)
    mask = torch.rand(batch, tokens, generator=rng) < 0.7
    return {
        "input": torch.randn(batch, tokens, WIDTH, generator=rng),
        "attention_mask": mask.long(),
    }


def sizes(x: torch.Tensor, live: torch.Tensor) -> Any:
    batch, tokens = x.shape[:2]
    return {
        "a root": x * tokens**-0.5 + x / torch.sym_sqrt(tokens) * live,
        "a quotient": x * (1 / tokens) + (tokens / batch - 1.5) * live,
        "with a sign": x * -(tokens / 2) + x * (tokens * 0.5 + 0.25),
        "a bound": x.clamp(max=tokens / 300),
        "a filling": torch.full((tokens,), 1 / tokens)[:, None] * live,
        "spread": torch.cat([x.std(1), x.var(1, unbiased=False), *torch.std_mean(x, 1)], -1),
        "spread of all": x.var() + x.std((0, 1), keepdim=True),
        "narrow": x.half().std(1),
        "longer": F.interpolate(x.mT, scale_factor=3),
        "as long as others": F.interpolate(x[:, :-2].mT, size=tokens, mode="linear").mT * live,
        "of one length": F.interpolate(x.mT, size=5),
        "to one length": F.interpolate(x.mT, size=5, mode="linear"),
        "unwritten": (torch.empty_like(x).fill_(2.0) + x) * live,
        "leaky": F.rrelu(x, 0.1, 0.4) + F.rrelu(x * 2, inplace=True),
    }


def parts(x: torch.Tensor, live: torch.Tensor) -> Any:
    return {
        "every other": x[:, ::2].contiguous() @ x.mT[:, :, 1::3],
        "windows": F.conv1d(x.mT, torch.ones(2, WIDTH, 3), stride=2),
        "means": F.avg_pool1d(x.mT, 2),
        "pieces": x.unfold(1, 4, 4),
    }


@pytest.mark.parametrize("rest", [sizes, parts])
def test_sizes_and_parts_are_torchs(rest: Any) -> None:
    model = Model(rest).eval()
    ours = compile(model, given(3, 12))
    for batch, tokens in ((3, 12), (1, 9), (4, 17), (2, 100), (5, LEAST)):
        inputs = given(batch, tokens)
        with torch.no_grad():
            expected = model(**inputs)
        found = ours(**inputs)
        for name, one in expected.items():
            assert found[name].dtype == one.dtype, name
            close = {"rtol": 1e-3, "atol": 1e-3} if one.dtype is torch.half else {}
            torch.testing.assert_close(found[name], one, msg=f"{name}: {tokens}", **close)


def test_what_has_too_few_tokens_for_its_parts_is_refused() -> None:
    ours = compile(Model(parts), given(3, 12))
    with pytest.raises(ShapeError, match=f"attention_mask: expected at least {LEAST} tokens, got"):
        ours(**given(2, LEAST - 1))


def test_the_spread_of_one_token_is_no_number() -> None:
    ours = compile(Model(lambda x, live: x.std(1)), given(3, 12))
    assert ours(**given(2, 1)).isnan().all()


def test_code_for_every_other_length_says_what_helps() -> None:
    expected = re.escape(
        "after a slice with a step, as x[:, ::2], .contiguous() makes it admit all"
    )
    with pytest.raises(UnsupportedModel, match=expected):
        compile(Model(lambda x, live: F.linear(x[:, ::2], torch.ones(WIDTH, WIDTH))), given(3, 12))
