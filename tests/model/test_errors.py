"""Modules that cannot be compiled as they are: every error is typed and says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional

from pit_tvm.errors import DTypeError, PitError, ShapeError, UnsupportedModel
from pit_tvm.model import compile
from pit_tvm.model.draws import check_program
from pit_tvm.model.exporting import export_program
from pit_tvm.model.importer import import_model
from pit_tvm.model.inputs import Inputs

WIDTH = 8
IDS = torch.ones(3, 6, dtype=torch.int64)
EXAMPLE = {"input_ids": IDS, "attention_mask": IDS}

# ``forward(self, x, ids, mask)``: x is ``[batch, tokens, WIDTH]``.
Forward = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], Any]


class Small(nn.Module):
    """Embeddings, a linear layer, and whatever comes then."""

    def __init__(self, rest: Forward) -> None:
        super().__init__()
        self.calls: torch.Tensor
        self.table, self.linear = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.rest = rest

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        """What ``rest`` returns."""
        return self.rest(self, self.linear(self.table(input_ids)), input_ids, attention_mask)


def branching(self: Small, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    return x * 2 if mask.sum() > 5 else x


def counting(self: Small, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    self.calls.add_(1)
    return x * self.calls


def routed(self: Small, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> Any:
    """As transformers computes experts, each of as many rows."""
    weight, ends = self.linear.weight[None].expand(2, -1, -1).bfloat16(), torch.tensor([3, 6])
    rows = functional.grouped_mm(x.reshape(-1, WIDTH).bfloat16(), weight, offs=ends.int())
    return rows.reshape(x.shape)


WRONG: dict[str, tuple[Forward, type[PitError], str]] = {
    "experts": (
        routed,
        UnsupportedModel,
        r"got .*grouped_mm.*; pass the module itself, or export it with experts of ours: pit_tvm",
    ),
    "branch on values": (
        branching,
        UnsupportedModel,
        "model: expected a module that torch.export can trace.*; no branch .* torch.where",
    ),
    "branch as an operator": (
        lambda self, x, ids, mask: torch.cond(
            mask.sum() > 5, lambda y: y * 2, lambda y: y + 1, (x,)
        ),
        UnsupportedModel,
        "expected one chain of operators, got a branch.*torch.where",
    ),
    "number from values": (
        lambda self, x, ids, mask: x * int(mask.sum()),
        UnsupportedModel,
        "got GuardOnDataDependentSymNode.*no extent may depend on values",
    ),
    "selection by a mask": (
        lambda self, x, ids, mask: self.linear(x[mask.bool()]),
        UnsupportedModel,
        "index.Tensor: expected .*, got a boolean mask; multiply",
    ),
    "unknown operators": (
        lambda self, x, ids, mask: torch.fft.fft(x).real,
        UnsupportedModel,
        r"operators that TVM's importer knows, got _fft_r2c.default \(File .*test_errors.py",
    ),
    "all but some tokens": (
        lambda self, x, ids, mask: x[:, 2:-2] * 2,
        UnsupportedModel,
        "Constraints violated.*; the model's code admits only some lengths",
    ),
    "length of a constant": (
        lambda self, x, ids, mask: x + torch.arange(6.0)[:, None],
        ShapeError,
        "dynamic length, got a length of .*6.*; .* torch takes it for the only one",
    ),
    "even lengths": (
        lambda self, x, ids, mask: x.reshape(x.shape[0], x.shape[1] // 2, 2, WIDTH).sum(2),
        UnsupportedModel,
        "trace for every batch and length, got .*; the model's code admits only some lengths",
    ),
    "nothing as an output": (
        lambda self, x, ids, mask: {"x": x, "cache": None},
        UnsupportedModel,
        "model: expected tensors as outputs, got None; give back tensors only",
    ),
    "number as an output": (
        lambda self, x, ids, mask: (x, x.shape[1]),
        UnsupportedModel,
        "model: expected tensors as outputs",
    ),
    "a state that changes": (
        counting,
        UnsupportedModel,
        r"expected a module that leaves its buffers alone, got changes of \['calls'\]; let it take",
    ),
    "an error of its own": (
        lambda self, x, ids, mask: functional.linear(x, torch.ones(2, WIDTH + 1)),
        UnsupportedModel,
        "a module that torch.export can trace for every batch and length, got RuntimeError",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_models_that_cannot_be_compiled(name: str) -> None:
    rest, error, words = WRONG[name]
    with pytest.raises(error, match=words) as caught:
        import_model(Small(rest), EXAMPLE, "attention_mask")
    assert len(str(caught.value)) < 1000


# Operators that draw random numbers, by their names.
DRAWING: dict[str, Forward] = {
    "dropout.default": lambda self, x, ids, mask: functional.dropout(x, 1.0),
    "dropout_.default": lambda self, x, ids, mask: functional.dropout(x * 2, 0.5, inplace=True),
    "alpha_dropout.default": lambda self, x, ids, mask: functional.alpha_dropout(x, 0.5, True),
    "feature_dropout.default": lambda self, x, ids, mask: functional.dropout1d(x, 0.5),
    "scaled_dot_product_attention.default": lambda self, x, ids, mask: (
        functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    ),
    "bernoulli.p": lambda self, x, ids, mask: torch.bernoulli(x, 0.0),
    "randn.default": lambda self, x, ids, mask: x + torch.randn(WIDTH),
    "exponential_.default": lambda self, x, ids, mask: functional.gumbel_softmax(x),
}


@pytest.mark.parametrize("name", DRAWING)
def test_random_numbers_are_refused(name: str) -> None:
    words = rf"draw no random numbers, got {name} \(File .*; switch dropout off"
    with pytest.raises(UnsupportedModel, match=words):
        import_model(Small(DRAWING[name]), EXAMPLE, "attention_mask")


def test_dropout_that_is_off_is_none() -> None:
    def rest(self: Small, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = functional.alpha_dropout(functional.dropout(x, 1.0, self.training), 0.0, True)
        return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.0)

    check_program(export_program(Small(rest).train(), EXAMPLE, "attention_mask"))


# What TVM's importer takes and TVM cannot compile, and words of the error.
LATE: dict[str, tuple[Forward, str]] = {
    "scattered": (
        lambda self, x, ids, mask: x.scatter(2, ids[:, :1, None] * 0, x[:, :1, :1]),
        "loops that can be scheduled for scatter_elements, got ScheduleError: ",
    ),
    "norm of doubles": (
        lambda self, x, ids, mask: functional.layer_norm(x.double(), (WIDTH,)),
        "nn.layer_norm in a form that TVM can lower, got InternalError: .*float16",
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_operators_that_tvm_cannot_compile(name: str) -> None:
    rest, words = LATE[name]
    with pytest.raises(UnsupportedModel, match=f"model: expected {words}") as caught:
        compile(Small(rest), EXAMPLE)
    assert len(str(caught.value)) < 1000 and caught.value.__cause__ is not None


class Named(nn.Module):
    """Parameters of other names than the tokenizer's."""

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The ids of live tokens."""
        return ids * mask


class Open(nn.Module):
    """Parameters without names."""

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """The ids."""
        return inputs["input_ids"] * 2


class Positional(nn.Module):
    """Parameters that have no names for a caller."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, /) -> torch.Tensor:
        """The ids of live tokens."""
        return input_ids * attention_mask


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Named(), r"names of forward's parameters \['ids', 'mask'\], got \['attention_mask'"),
        (Open(), r"parameters \[\], got .*write a module around it"),
    ],
)
def test_names_of_inputs_are_those_of_the_module(model: nn.Module, words: str) -> None:
    with pytest.raises(ShapeError, match=f"example_inputs: .*{words}"):
        import_model(model, EXAMPLE, "attention_mask")


def test_parameters_may_be_positional() -> None:
    found = import_model(Positional(), EXAMPLE, "attention_mask")
    assert found.inputs == ("input_ids", "attention_mask")


@pytest.mark.parametrize("shape", [(1, 6), (3, 1), (1, 1)])
def test_examples_of_one_sequence_or_one_token_do_not_fix_it(shape: tuple[int, int]) -> None:
    ids = torch.ones(shape, dtype=torch.int64)
    example = {"input_ids": ids, "attention_mask": ids}
    found = import_model(Small(lambda self, x, ids, mask: x), example, "attention_mask")
    assert found.longest is None


BOUNDS: dict[str, tuple[Forward, dict[str, tuple[int, int | None]], tuple[int, int], str]] = {
    "a token": (
        lambda self, x, ids, mask: x[:, 3],
        {"batch": (0, None), "tokens": (4, None)},
        (2, 3),
        "at least 4 tokens, got 3",
    ),
    "a branch on the length": (
        lambda self, x, ids, mask: x * 2 if x.shape[1] > 4 else x,
        {"batch": (0, None), "tokens": (5, None)},
        (2, 4),
        "at least 5 tokens, got 4",
    ),
    "a branch on the batch": (
        lambda self, x, ids, mask: x * 2 if x.shape[0] > 8 else x,
        {"batch": (0, 8), "tokens": (0, None)},
        (9, 6),
        "at most 8 sequences, got 9",
    ),
    "the other branch on the batch": (
        lambda self, x, ids, mask: x * 2 if x.shape[0] > 2 else x,
        {"batch": (3, None), "tokens": (0, None)},
        (2, 6),
        "at least 3 sequences, got 2",
    ),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_what_the_code_admits_bounds_batch_and_length(name: str) -> None:
    rest, bounds, shape, words = BOUNDS[name]
    imported = import_model(Small(rest), EXAMPLE, "attention_mask")
    assert imported.bounds == bounds
    found = Inputs.of(imported, imported.module)
    assert Inputs.from_json(json.loads(json.dumps(found.to_json()))) == found
    ids = np.ones(shape, np.int64)
    with pytest.raises(ShapeError, match=f"attention_mask: expected {words}"):
        found.check({"input_ids": ids, "attention_mask": ids})
    admitted = np.ones((3, 6), np.int64)
    assert len(found.check({"input_ids": admitted, "attention_mask": admitted})) == 2


@pytest.mark.parametrize("shape", [(0, 6), (1, 1), (3, 0)])
def test_the_least_that_torch_traces_is_no_bound(shape: tuple[int, int]) -> None:
    sizes = {0: Dim("batch", min=2), 1: Dim("tokens", min=1, max=9)}
    program = torch.export.export(
        Small(lambda self, x, ids, mask: x),
        (),
        EXAMPLE,
        dynamic_shapes={name: sizes for name in EXAMPLE},
    )
    imported = import_model(program, EXAMPLE, "attention_mask")
    assert imported.bounds == {"batch": (0, None), "tokens": (0, 9)}
    assert Inputs.of(imported, imported.module).sizes(shape)["tokens"] == shape[1]


def test_parts_keep_their_mode() -> None:
    model = Small(lambda self, x, ids, mask: x).train()
    model.table.eval()
    import_model(model, EXAMPLE, "attention_mask")
    assert (model.training, model.linear.training, model.table.training) == (True, True, False)


def test_inputs_are_tensors() -> None:
    example = EXAMPLE | {"input_ids": [[1, 2]]}
    with pytest.raises(DTypeError, match="example_inputs: expected a torch.Tensor as 'input_ids'"):
        import_model(Small(lambda self, x, ids, mask: x), example, "attention_mask")


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ((IDS, IDS), "a mapping of names to tensors, got tuple"),
        (IDS, "a mapping of names to tensors, got Tensor"),
        (EXAMPLE | {1: IDS}, r"a mapping of names to tensors, got names of type \['int'\]"),
        (EXAMPLE | {"attention_mask": IDS.numpy()}, "torch.Tensor as 'attention_mask', got nda"),
        (EXAMPLE | {"attention_mask": [[1]]}, "a torch.Tensor as 'attention_mask', got list"),
        (EXAMPLE | {"attention_mask": None}, "a torch.Tensor as 'attention_mask', got NoneType"),
    ],
    ids=["tuple", "tensor", "number as a name", "array", "list", "none"],
)
def test_examples_are_tensors_by_name(example: Any, words: str) -> None:
    with pytest.raises(DTypeError, match=f"example_inputs: expected .*{words}"):
        compile(Small(lambda self, x, ids, mask: x), example)


def test_mask_must_be_an_input_of_the_program() -> None:
    program = torch.export.export(Positional(), (IDS, IDS))
    with pytest.raises(ShapeError, match="mask: expected an input of the program, .*, got 'mask'"):
        import_model(program, EXAMPLE | {"mask": IDS}, "mask")


def test_causes_are_kept() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        import_model(Small(branching), EXAMPLE, "attention_mask")
    assert caught.value.__cause__ is not None


def test_slices_of_tokens_do_not_meet_others() -> None:
    with pytest.raises(
        UnsupportedModel, match="expected multiply of operands .*; slices of tokens"
    ):
        compile(Small(lambda self, x, ids, mask: x[:, -1] * mask[:, -1:]), EXAMPLE)


def test_models_of_other_kinds() -> None:
    words = "model: .*ExportedProgram, .* or a file .onnx, got"
    for model, got in (("nofile", "'nofile'; .*model.load"), (3, "int$"), (nn.ReLU, "type$")):
        with pytest.raises(UnsupportedModel, match=f"{words} {got}"):
            import_model(model, EXAMPLE, "attention_mask")
        with pytest.raises(UnsupportedModel, match=f"{words} {got}"):
            compile(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_modules_of_torch_script() -> None:
    model = torch.jit.trace(Positional(), (IDS, IDS))
    with pytest.raises(UnsupportedModel, match="^model: expected a module in Python, .*made of"):
        compile(model, EXAMPLE)


@pytest.mark.parametrize("example", [None, {}])
def test_modules_need_examples(example: Any) -> None:
    with pytest.raises(ShapeError, match="^example_inputs: expected tensors by the names .* batch"):
        compile(Small(branching), example)


def test_the_mask_is_one_of_the_examples() -> None:
    with pytest.raises(
        ShapeError, match=r"^mask: expected one of \['input_ids'\], got 'attention_"
    ):
        compile(Small(branching), {"input_ids": IDS})


@pytest.mark.parametrize("name, value", [("dump", 3), ("activation_threshold", "a")])
def test_options_of_another_kind_are_named(name: str, value: Any) -> None:
    with pytest.raises(PitError, match=f"^{name}: expected"):
        compile(nn.ReLU(), **{name: value})
