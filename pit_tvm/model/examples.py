"""Models for the command line: example configurations with random weights, and exported files."""

from __future__ import annotations

import contextlib
import logging
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import tvm
from torch.utils import _pytree as pytree
from tvm.relax.frontend.torch import from_exported_program

from ..errors import BackendUnavailable, DTypeError, SavedModelError, ShapeError, mismatch
from ..quick_stacks import quick_stacks
from .faults import CODE_FAULTS
from .onnx_model import is_onnx, read_onnx

MASK = "attention_mask"
_DTYPES = ("", "float32", "float16", "bfloat16")
_LOGGERS = ("torch.export", "torch.export.pt2_archive._package")
# What a file raises beside them that is no whole one of torch's.
_DAMAGE = (EOFError, OSError, pickle.PickleError, zipfile.BadZipFile)
_BATCH, _TOKENS = 2, 6  # of example inputs; both are dynamic


@dataclass(frozen=True)
class Example:
    """A module, an ``ExportedProgram`` of one, or an ONNX model; its inputs by name, none for ONNX;
    which is the mask ``[batch, tokens]``: "" for a model without tokens or with a fixed batch.
    """

    model: Any
    inputs: Mapping[str, torch.Tensor]
    mask: str = MASK


def find_model(name: str, dtype: str = "", mask: str = MASK) -> Example:
    """An example by its name in `EXAMPLES`, or the model in a file of ``torch.export.save`` or
    ``.onnx``.

    ``dtype`` "float16" and the like converts an example's weights; "" leaves them float32.

    Raises
    ------
    SavedModelError
        The file is missing or damaged, or ``name`` is neither a file nor an example.
    UnsupportedModel
        A file ``.onnx`` is damaged.
    BackendUnavailable
        The package transformers is not there, or for ONNX onnx.
    ShapeError
        ``dtype`` is given for a file, which has types of its own.
    DTypeError
        ``dtype`` is none that examples come in.
    """
    if name in EXAMPLES:
        if dtype not in _DTYPES:
            raise DTypeError(mismatch("--dtype", " or ".join(_DTYPES[1:]), repr(dtype)))
        torch.manual_seed(0)
        found = EXAMPLES[name]()
        model = found.model.eval()
        return replace(found, model=model.to(getattr(torch, dtype)) if dtype else model)
    if dtype:
        raise ShapeError(mismatch("--dtype", "none for a file", dtype))
    return _from_file(name, mask)


def as_graph(example: Example) -> tvm.IRModule:
    """The model in Relax at its example's shapes: ``main`` over its inputs, weights constant."""
    program = example.model
    with torch.no_grad(), quick_stacks():
        if not isinstance(program, torch.export.ExportedProgram):
            program = torch.export.export(program, (), dict(example.inputs), strict=False)
        return from_exported_program(program, keep_params_as_input=False)


def _from_file(name: str, mask: str) -> Example:
    expected = f"one of {', '.join(EXAMPLES)}, or a file of torch.export.save or .onnx"
    try:
        there = Path(name).is_file()
    except OSError as error:
        raise SavedModelError(mismatch("model", expected, error)) from error
    if not there:
        raise SavedModelError(mismatch("model", expected, repr(name)))
    if is_onnx(name):
        return Example(read_onnx(name), {}, mask)
    with contextlib.suppress(ImportError):  # whose outputs most such files hold
        import transformers.modeling_outputs  # noqa: F401
    try:
        with _unlogged():
            program = torch.export.load(name)
    except (*CODE_FAULTS, *_DAMAGE) as error:
        # Nor are there "warnings above" that torch refers to.
        got = str(error).partition(" Please check the warnings above")[0]
        raise SavedModelError(mismatch(f"model {name}", expected, got)) from error
    if program.example_inputs is None:
        raise SavedModelError(mismatch(f"model {name}", "a program with example inputs", "none"))
    names = program.graph_signature.user_inputs
    inputs = dict(zip(names, pytree.tree_leaves(program.example_inputs), strict=True))
    return Example(program, inputs, mask if mask in inputs else "")


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """torch logs the traceback of what it raises in other words."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


# --------------------------------------------------------------------------------------------
# Examples


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        advice = "pip install 'pit-tvm[transformers]'"
        text = mismatch("example models", "the package transformers", "none", advice)
        raise BackendUnavailable(text) from error
    return transformers


def _tokens(number: int = _TOKENS) -> dict[str, torch.Tensor]:
    ones = torch.ones(_BATCH, number, dtype=torch.int64)
    return {"input_ids": ones, MASK: ones.clone()}


def bert(**config: Any) -> Example:
    """BERT's encoder with its pooled first token; without options the base model."""
    library = _transformers()
    return Example(library.BertModel(library.BertConfig(**config)), _tokens())


def opt(**config: Any) -> Example:
    """OPT with its logits, all tokens at once; without options the smallest model, of 125M."""
    library = _transformers()
    made = library.OPTForCausalLM(library.OPTConfig(use_cache=False, **config))
    return Example(made, _tokens())


def resnet(size: int = 224, **config: Any) -> Example:
    """ResNet on two images of ``size`` by ``size``."""
    library = _transformers()
    images = torch.zeros(_BATCH, 3, size, size)
    made = library.ResNetModel(library.ResNetConfig(**config))
    return Example(made, {"pixel_values": images}, mask="")


def switch(tokens: int = 128, **config: Any) -> Example:
    """The encoder of a Switch transformer, on two sequences of ``tokens``."""
    library = _transformers()
    model = library.SwitchTransformersEncoderModel(library.SwitchTransformersConfig(**config))
    for block in model.encoder.block:
        feed_forward = block.layer[-1]
        if feed_forward.is_sparse:
            feed_forward.mlp = AllExperts(feed_forward.mlp)
    return Example(model, _tokens(tokens), mask="")


class AllExperts(torch.nn.Module):
    """A Switch layer as tensors: every expert sees every token, and the routing picks afterwards.

    The layer itself loops over experts in Python, which no exporter follows; values are equal.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.classifier = layer.router.classifier
        self.capacity = layer.router.expert_capacity
        experts = list(layer.experts.values())
        self.act = experts[0].act
        self.up = torch.nn.Parameter(torch.stack([e.wi.weight.T for e in experts]))
        self.down = torch.nn.Parameter(torch.stack([e.wo.weight.T for e in experts]))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[batch, tokens, width]`` to the same."""
        weights = self.classifier(hidden_states).softmax(-1)
        best, number = weights.max(-1, keepdim=True)
        picked = (number == torch.arange(weights.shape[-1])).to(torch.int64)
        picked = picked * (picked.cumsum(-2) <= self.capacity)
        rows = hidden_states.reshape(1, -1, hidden_states.shape[-1])
        values = torch.matmul(self.act(torch.matmul(rows, self.up)), self.down)
        gates = (picked * best).reshape(-1, picked.shape[-1]).T.unsqueeze(-1)
        return (gates * values).sum(0).reshape(hidden_states.shape)


_MINILM: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
}
_RESNET_18: dict[str, Any] = {
    "hidden_sizes": [64, 128, 256, 512],
    "depths": [2, 2, 2, 2],
    "layer_type": "basic",
}

#: Examples by name. ``switch-base`` has the first two of its encoder's layers, and 8 experts.
EXAMPLES: Mapping[str, Callable[[], Example]] = MappingProxyType(
    {
        "bert-base": bert,
        "minilm": lambda: bert(**_MINILM),
        "opt-125m": opt,
        "resnet-18": lambda: resnet(**_RESNET_18),
        "switch-base": lambda: switch(num_layers=2, num_sparse_encoder_layers=1),
    }
)
