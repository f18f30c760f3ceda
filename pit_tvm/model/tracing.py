"""What torch cannot trace for every length, replaced by what it can while a module is exported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..errors import UnsupportedModel, mismatch


@torch.library.custom_op("pit_tvm::recurrence", mutates_args=())
def recurrence(
    gates: Tensor,
    weight: Tensor,
    bias: Tensor,
    state: Tensor,
    memory: Tensor,
    lengths: Tensor,
    kind: str,
    backwards: bool,
) -> Tensor:
    """The states of a cell after every token, ``[batch, tokens, width]``, and behind each its
    memory if the ``kind`` is "lstm"; zeros after the ``lengths`` ``[batch]`` of sequences.

    ``gates`` ``[batch, tokens, n * width]``: what tokens give to its ``n`` gates; ``weight``
    ``[n * width, width]`` and ``bias``: what its state does; ``state`` and ``memory`` ``[batch,
    width]``: those before the first token, which with ``backwards`` is the last one.
    """
    kept, order = [], range(gates.shape[1])
    for token in reversed(order) if backwards else order:
        found = _step(gates[:, token], F.linear(state, weight, bias), state, memory, kind)
        there = (token < lengths)[:, None]
        state, memory = (
            torch.where(there, new, old) for new, old in zip(found, (state, memory), strict=True)
        )
        kept.append(torch.cat(found if kind == "lstm" else found[:1], -1) * there)
    return torch.stack(kept[::-1] if backwards else kept, 1)


def _step(
    given: Tensor, past: Tensor, state: Tensor, memory: Tensor, kind: str
) -> tuple[Tensor, Tensor]:
    """The next state and memory, by what a token and the state before it give to the gates."""
    if kind == "lstm":
        entry, old, new, out = (given + past).chunk(4, -1)
        memory = old.sigmoid() * memory + entry.sigmoid() * new.tanh()
        return out.sigmoid() * memory.tanh(), memory
    if kind == "gru":
        (reset, old, new), (own, kept, last) = given.chunk(3, -1), past.chunk(3, -1)
        old = (old + kept).sigmoid()
        return (1 - old) * (new + (reset + own).sigmoid() * last).tanh() + old * state, memory
    return ((given + past).tanh() if kind == "rnn_tanh" else (given + past).relu()), memory


@recurrence.register_fake
def _(gates: Tensor, weight: Tensor, *others: Any) -> Tensor:
    width = weight.shape[1]
    return gates.new_empty((*gates.shape[:2], 2 * width if "lstm" in others else width))


@torch.library.custom_op("pit_tvm::packed_rows", mutates_args=())
def packed_rows(x: Tensor) -> Tensor:
    """Stands for the rows ``[batch * tokens, width]`` of a packed sequence, which nothing but
    recurrent networks, and what unpacks it, may read."""
    return x.flatten(0, 1).clone()


@packed_rows.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0] * x.shape[1], x.shape[2]))


class _Lengths:
    """Stands for the batch sizes of a packed sequence; what it holds is of whole tokens."""

    def __init__(self, x: Tensor, lengths: Tensor) -> None:
        self.x, self.lengths, self.rows = x, lengths, packed_rows(x)
        self.device = torch.device("cpu")

    def __getitem__(self, step: int) -> int:
        """One sequence, whose state before all tokens stands for that of all: of a number that is
        not known, torch's modules would make a constant."""
        return 1

    def size(self, dim: int) -> int:
        """No steps: of how many there are, the lengths decide."""
        return 0

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Makes torch take it for a tensor where `Traceable` reads it; nothing else does."""
        expected, got = "packed sequences in recurrent networks only", f"one in {func.__name__}"
        raise UnsupportedModel(mismatch("model", expected, got, "pass padded tokens"))


class Traceable(TorchFunctionMode):
    """A mode that replaces functions which fix the number of tokens, where they are called."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """What ``func`` gives."""
        given, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func in _RECURRENT and not given:
            run: Any = _packed if isinstance(args[1], _Lengths) else _padded
            return run(name, *args)
        if func in _OTHERS:
            return _OTHERS[func](*args, **given)
        if name == "avg_pool1d":
            return _mean_pool(*args, **given)
        if name == "max_pool1d" and not given.get("return_indices"):
            return _max_pool(*args, **given)
        return func(*args, **given)


def _mean_pool(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *others: Any, **named: Any
) -> Tensor:
    """Torch's, or the mean of all."""
    if str(kernel_size) == str(x.shape[-1]) and not padding:
        return x.mean(-1, keepdim=True)
    return torch.avg_pool1d(x, kernel_size, stride or kernel_size, padding, *others, **named)


def _max_pool(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    """Of images one line high, or the largest of all."""
    if str(kernel_size) == str(x.shape[-1]) and not padding:
        return x.amax(-1, keepdim=True)
    sizes = (kernel_size, stride or kernel_size, padding, dilation)
    size, step, beside, apart = (s[0] if isinstance(s, tuple | list) else s for s in sizes)
    lines = F.max_pool2d(x.unsqueeze(-2), (1, size), (1, step), (0, beside), (1, apart), ceil_mode)
    return lines.squeeze(-2)


# --------------------------------------------------------------------------------------------
# Recurrent networks, with the products of all tokens at once


def _padded(kind: str, x: Tensor, before: Any, *how: Any) -> Any:
    """As torch's function of that name."""
    *rest, batch_first = how
    x = x if batch_first else x.transpose(0, 1)
    out, *ends = _recurrent(kind, x, None, before, *rest)
    return out if batch_first else out.transpose(0, 1), *ends


def _packed(kind: str, rows: Tensor, packed: _Lengths, before: Any, *how: Any) -> Any:
    """As torch's function of that name, of packed sequences; ``before``: of one for all."""
    _check_rows(rows, packed)
    given = before if kind == "lstm" else [before]
    states = [one.expand(-1, packed.x.shape[0], -1) for one in given]
    before = states if kind == "lstm" else states[0]
    packed.x, *ends = _recurrent(kind, packed.x, packed.lengths, before, *how)
    packed.rows = packed_rows(packed.x)
    return packed.rows, *ends


def _check_rows(rows: Tensor, packed: _Lengths) -> None:
    if rows is not packed.rows:
        expected, got = "packed sequences as they are", "one with other data"
        raise UnsupportedModel(mismatch("model", expected, got, "change padded tokens"))


def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, _Lengths]:
    x = x if batch_first else x.transpose(0, 1)
    if str(lengths.shape[0]) != str(x.shape[0]):
        expected = "lengths of all sequences of any batch for pack_padded_sequence"
        advice = "compute them, as by attention_mask.sum(1)"
        raise UnsupportedModel(mismatch("model", expected, f"{lengths.shape[0]} numbers", advice))
    packed = _Lengths(x, lengths)
    return packed.rows, packed


def _unpack(
    rows: Tensor, packed: _Lengths, batch_first: bool, filling: float, tokens: Any
) -> tuple[Tensor, Tensor]:
    _check_rows(rows, packed)
    x, lengths = packed.x, packed.lengths
    if str(tokens) != str(x.shape[1]):
        expected = "pad_packed_sequence to as many tokens as before"
        got = f"{tokens or 'as many as the longest sequence has'}"
        raise UnsupportedModel(mismatch("model", expected, got, "pass total_length=x.shape[1]"))
    if filling:
        there = torch.arange(x.shape[1]) < lengths[:, None]
        x = torch.where(there[..., None], x, filling)
    return x if batch_first else x.transpose(0, 1), lengths


def _recurrent(
    kind: str,
    x: Tensor,
    lengths: Tensor | None,
    before: Any,
    weights: Any,
    has_biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    both_ways: bool,
) -> Any:
    """States of the last layer, and those of all layers after the last token."""
    before = before if kind == "lstm" else (before, before)
    ways, each = 2 if both_ways else 1, 4 if has_biases else 2
    if len(weights) != layers * ways * each or (training and dropout):
        expected = "recurrent networks without proj_size, and without dropout at inference"
        raise UnsupportedModel(mismatch("model", expected, kind, "write the cell as a loop"))
    ends: list[Tensor] = []
    for layer in range(layers):
        found = []
        for way in range(ways):
            number = layer * ways + way
            parts = weights[number * each : (number + 1) * each]
            kept, end = _layer(kind, x, lengths, [one[number] for one in before], parts, bool(way))
            found.append(kept[..., : parts[1].shape[1]])
            ends.append(end)
        x = torch.cat(found, -1) if both_ways else found[0]
    last = torch.stack(ends)
    return (x, *last.chunk(2, -1)) if kind == "lstm" else (x, last)


def _layer(
    kind: str,
    x: Tensor,
    lengths: Tensor | None,
    before: Sequence[Tensor],
    weights: Sequence[Tensor],
    backwards: bool,
) -> tuple[Tensor, Tensor]:
    """What one direction of one layer keeps after every token, and after the last one."""
    given, own, *biases = weights
    gates = F.linear(x, given, biases[0] if biases else None)
    bias = biases[1] if biases else own.new_zeros(own.shape[0])
    all_of_them = torch.full((x.shape[0],), torch.iinfo(torch.int64).max)
    many = all_of_them if lengths is None else lengths.long()
    kept = torch.ops.pit_tvm.recurrence(gates, own, bias, *before, many, kind, backwards)
    if backwards or lengths is None:
        return kept, kept[:, 0 if backwards else -1]
    last = (many - 1).clamp(min=0)[:, None, None].expand(-1, 1, kept.shape[2])
    return kept, kept.gather(1, last).squeeze(1)


_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_OTHERS: dict[Any, Callable[..., Any]] = {
    torch._VF._pack_padded_sequence: _pack,
    torch._VF._pad_packed_sequence: _unpack,
}
