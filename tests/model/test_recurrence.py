"""Recurrent networks and pools over tokens, in whole models against torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence  # noqa: E402

import pit_tvm.model  # noqa: E402
from pit_tvm.errors import UnsupportedModel  # noqa: E402
from pit_tvm.model.recurrence import check_none  # noqa: E402
from pit_tvm.model.tracing import recurrence  # noqa: E402

WIDTH, STATES = 6, 5
CELLS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}


class Model(nn.Module):  # type: ignore[misc]
    """A network, and what ``rest`` makes of it, masked values and the mask."""

    def __init__(self, rest: Any, network: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.network, self.rest = nn.Linear(WIDTH, WIDTH), network, rest

    def forward(self, input: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        x = self.fc(input).relu() * attention_mask[..., None].to(input.dtype)
        return self.rest(self.network, x, attention_mask)


def given(batch: int, tokens: int, dtype: Any = torch.float32) -> dict[str, Any]:
    """Random values, and a mask with holes and a token in each row."""
    rng = torch.Generator().manual_seed(tokens)
    mask = torch.rand(batch, tokens, generator=rng) < 0.7
    mask[:, 0] = True
    x = torch.randn(batch, tokens, WIDTH, generator=rng).to(dtype)
    return {"input": x, "attention_mask": mask.long()}


def check(model: nn.Module, dtype: Any = torch.float32, **close: float) -> Any:
    """The compiled model, after comparing it with torch's."""
    model = model.to(dtype).eval()
    ours = pit_tvm.model.compile(model, given(3, 12, dtype))
    for batch, tokens in ((3, 12), (1, 9), (9, 4), (2, 33)):
        inputs = given(batch, tokens, dtype)
        with torch.no_grad():
            expected = model(**inputs)
        found = ours(**inputs)
        live = inputs["attention_mask"].bool()
        for name, one in expected.items():
            rows = live if one.shape[:2] == live.shape else ...
            torch.testing.assert_close(found[name][rows], one[rows], **close)
    return ours


def network(kind: str, **how: Any) -> nn.Module:
    """One of torch's modules."""
    named = {"nonlinearity": kind.removeprefix("rnn_")} if kind.startswith("rnn_") else {}
    return CELLS[kind](WIDTH, STATES, **named, **how)


def whole(net: Any, x: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    out, ends = net(x if net.batch_first else x.transpose(0, 1))
    ends = ends if isinstance(ends, tuple) else (ends,)
    out = out if net.batch_first else out.transpose(0, 1)
    return {"out": out, **{f"end {n}": one for n, one in enumerate(ends)}}


def packed(net: Any, x: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    first = net.batch_first
    x = x if first else x.transpose(0, 1)
    rows = pack_padded_sequence(x, mask.sum(1).cpu(), batch_first=first, enforce_sorted=False)
    out, ends = net(rows)
    tokens = x.shape[1 if first else 0]
    out, lengths = pad_packed_sequence(out, first, padding_value=0.5, total_length=tokens)
    ends = ends if isinstance(ends, tuple) else (ends,)
    out = out if first else out.transpose(0, 1)
    found = {f"end {n}": one for n, one in enumerate(ends)}
    return {"sum": out.sum(1), "lengths": lengths, **found}


DEEP = {"batch_first": True, "bidirectional": True, "num_layers": 2, "dropout": 0.5}
FIRST, TURNED = {"batch_first": True}, {"bidirectional": True, "bias": False}
NETWORKS = [
    ("lstm", whole, DEEP),
    ("gru", whole, TURNED),
    ("rnn_tanh", whole, FIRST),
    ("lstm", packed, FIRST),
    ("gru", packed, TURNED),
    ("rnn_relu", packed, DEEP),
]


@pytest.mark.parametrize(("kind", "rest", "how"), NETWORKS)
def test_networks_are_torchs(kind: str, rest: Any, how: dict[str, Any]) -> None:
    ours = check(Model(rest, network(kind, **how)), rtol=1e-5, atol=1e-5)
    (reason,) = {d.reason for d in ours.decisions if d.operator == "pit_tvm.recurrence"}
    assert "takes a state from token to token, dead ones too" in reason
    # What comes before is of live tokens, because they are masked.
    assert any(d.operator == "nn.relu" and d.live for d in ours.decisions)


def test_in_16_bits() -> None:
    model = Model(whole, network("gru", batch_first=True))
    check(model, torch.bfloat16, rtol=2e-2, atol=2e-2)


def test_states_before_the_first_token() -> None:
    def begun(net: Any, x: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        state = x[None, :, 0, :STATES].contiguous()
        return {"out": net(x, (state, state * 2))[0]}

    check(Model(begun, network("lstm", batch_first=True)), rtol=1e-5, atol=1e-5)


def test_a_saved_network(tmp_path: Path) -> None:
    ours = check(Model(whole, network("lstm", batch_first=True)), rtol=1e-5, atol=1e-5)
    ours.save(tmp_path / "saved")
    inputs = given(4, 7)
    found = pit_tvm.model.load(tmp_path / "saved")(**inputs)
    for name, one in ours(**inputs).items():
        assert torch.equal(torch.as_tensor(found[name]), one)


def test_the_operator_for_torch_is_what_it_stands_for() -> None:
    torch.manual_seed(0)
    for kind in CELLS:
        net, x = network(kind, batch_first=True), torch.randn(3, 4, WIDTH)
        with torch.no_grad():
            gates = nn.functional.linear(x, net.weight_ih_l0, net.bias_ih_l0)
            zeros, lengths = torch.zeros(3, STATES), torch.tensor([4, 2, 3])
            states = [net.weight_hh_l0, net.bias_hh_l0, zeros, zeros, lengths]
            found = recurrence(gates, *states, kind, False)[..., :STATES]
            rows = pack_padded_sequence(x, lengths, True, enforce_sorted=False)
            expected = pad_packed_sequence(net(rows)[0], True)[0]
        torch.testing.assert_close(found, expected)


def pools(_: Any, x: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    x = x.mT
    return {
        "same": nn.functional.max_pool1d(x, 3, 1, 1).mT,
        "half": nn.MaxPool1d(2)(x),
        "by twos": torch.max_pool1d(x, (3,), stride=(2,), padding=1),
        "of all": nn.functional.max_pool1d(x[..., 1:], x.shape[2] - 1),
        "mean of all": nn.functional.avg_pool1d(x, x.shape[2]),
        "means": nn.functional.avg_pool1d(x, 3, 2, padding=1, count_include_pad=False),
        "apart": nn.functional.max_pool1d(x, 2, 1, dilation=2),
    }


def test_pools_are_torchs() -> None:
    check(Model(pools), rtol=0, atol=1e-6)


def rows_of(x: torch.Tensor, mask: torch.Tensor) -> Any:
    return pack_padded_sequence(x, mask.sum(1).cpu(), batch_first=True, enforce_sorted=False)


def changed(net: Any, x: torch.Tensor, mask: torch.Tensor) -> Any:
    rows = rows_of(x, mask)
    return net(PackedSequence(rows.data * 2, *rows[1:]))[1]


REFUSED = {
    "as packed sequences are": (changed, {}, "packed sequences as they are, got one with other"),
    "read otherwise": (lambda net, x, mask: rows_of(x, mask).data.mean(0), {}, "packed_rows"),
    "of the longest": (
        lambda net, x, mask: pad_packed_sequence(net(rows_of(x, mask))[0], True)[0],
        {},
        "pass total_length=x.shape",
    ),
    "of one batch": (
        lambda net, x, mask: net(pack_padded_sequence(x, [3] * 5, True))[1],
        {},
        "lengths of all sequences of any batch for pack_padded_sequence, got 5 numbers",
    ),
    "projected": (lambda net, x, mask: net(x)[0], {"proj_size": 2}, "without proj_size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    rest, how, match = REFUSED[name]
    net = nn.LSTM(WIDTH, STATES, batch_first=True, **how)
    with pytest.raises(UnsupportedModel, match=match):
        pit_tvm.model.compile(Model(rest, net), given(3, 12))


def test_programs_that_torch_exported_say_what_helps() -> None:
    model = Model(whole, network("lstm", batch_first=True)).eval()
    with torch.no_grad():
        program = torch.export.export(model, (), given(3, 12))
    with pytest.raises(UnsupportedModel, match="mkldnn_rnn_layer.*; pass the module itself"):
        pit_tvm.model.compile(program, given(3, 12))


def test_gpus_have_none() -> None:
    model = Model(whole, network("gru", batch_first=True)).eval()
    imported = pit_tvm.model.importer.import_model(model, given(3, 12), "attention_mask")
    with pytest.raises(UnsupportedModel, match="operators that run on a GPU, got a recurrent"):
        check_none(imported.module["main"])
