"""Containers of a model's outputs, as torch describes them and as a file does."""

from __future__ import annotations

import json
from collections import OrderedDict, deque, namedtuple
from typing import Any

import pytest
from torch.utils import _pytree as pytree

from pit_tvm.errors import SavedModelError
from pit_tvm.model import NamedOutputs
from pit_tvm.model.outputs import Outputs

Pair = namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    "value",
    [
        1,
        (1, 2),
        [1, [2], ()],
        {"a": 1, "b": (2, 3)},
        {3: 1},
        OrderedDict(z=1, a=2),
        Pair([1], {"x": 2}),
    ],
    ids=str,
)
def test_plain_containers_come_back_as_they_were(value: Any) -> None:
    leaves, spec = pytree.tree_flatten(value)
    outputs = Outputs.of(spec)
    again = Outputs.from_json(json.loads(json.dumps(outputs.to_json())))
    assert again == outputs
    for tree in (outputs, again):
        assert tree.build(leaves) == value


def test_named_outputs_of_transformers() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.BaseModelOutputWithPooling(last_hidden_state=1, hidden_states=(2, 3))
    leaves, spec = pytree.tree_flatten(value)
    found = Outputs.of(spec).build(leaves)
    assert isinstance(found, NamedOutputs)
    assert found.last_hidden_state == found["last_hidden_state"] == found[0] == 1
    assert found[1] == (2, 3) and found[-1:] == ((2, 3),) and len(found) == 2
    assert found.to_tuple() == value.to_tuple()
    with pytest.raises(AttributeError, match="no output 'pooler_output'"):
        _ = found.pooler_output
    with pytest.raises(KeyError):
        _ = found["pooler_output"]


def test_a_container_without_names_is_refused() -> None:
    _, spec = pytree.tree_flatten([deque([1, 2])])
    with pytest.raises(SavedModelError, match="outputs: expected tuples, .* got deque"):
        Outputs.of(spec)
