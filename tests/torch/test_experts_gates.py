"""Gates of transformers' experts, recognised by what they compute."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from pit_tvm import torch as pit
from pit_tvm.torch import experts as under_test

EXPERTS, HIDDEN, INTER, TOKENS = 4, 16, 24, 9
NAME = "pit_tvm_test"
FORM = "silu", pit.Gate(7.0, 1.702, 1.0, interleaved=True)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(under_test, "_FORMS", {})
    pit.register_experts(NAME)
    yield
    del ALL_EXPERTS_FUNCTIONS._global_mapping[NAME]


def make(kind: type = GptOssExperts, **changes: float) -> Any:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTER, "num_local_experts": EXPERTS}
    config = transformers.GptOssConfig(**sizes, hidden_act="silu")
    module: Any = kind(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    vars(module).update(changes)
    module.config._experts_implementation = NAME
    return module


def data() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.rand(TOKENS, EXPERTS).argsort(-1)[:, :2]
    return torch.randn(TOKENS, HIDDEN), ids, torch.rand(TOKENS, 2)


def check(module: Any, run: Any = None) -> None:
    """It gives what transformers' own code gives."""
    given, exact = data(), copy.deepcopy(module)
    exact.config._experts_implementation = "eager"
    found = (module if run is None else run)(*given)
    torch.testing.assert_close(found, exact(*given), rtol=1e-4, atol=1e-4)


def reads_more(self: Any, rows: torch.Tensor) -> torch.Tensor:
    gate, other = rows.chunk(2, -1)
    return torch.nn.functional.silu(gate) * other * (1 + self.num_experts)


def raises(self: Any, rows: torch.Tensor) -> torch.Tensor:
    if rows.dtype == torch.float64:
        raise ValueError("not in this type")
    return rows[..., ::2] * rows[..., 1::2]


def slips(self: Any, rows: torch.Tensor) -> torch.Tensor:
    gate, other = rows.chunk(2, -1)
    return torch.nn.functional.silu(gate.clamp(max=self.limit)) * other


def teaches_less(self: Any, rows: torch.Tensor) -> torch.Tensor:
    gate, other = rows.chunk(2, -1)
    return torch.nn.functional.silu(gate).detach() * other


def has_another_shape(self: Any, rows: torch.Tensor) -> torch.Tensor:
    return rows[..., :INTER]


def is_limited_late(self: Any, rows: torch.Tensor) -> torch.Tensor:
    gate, other = rows.chunk(2, -1)
    gate = torch.nn.functional.silu(gate).clamp(max=self.limit)
    return gate * other.clamp(-self.limit, self.limit)


def limits(self: Any, rows: torch.Tensor) -> torch.Tensor:
    gate, other = rows.chunk(2, -1)
    return torch.nn.functional.silu(gate.clamp(max=self.limit)) * other.clamp(
        -self.limit, self.limit
    )


def own(gate: Any) -> type:
    """A class that has this gate."""
    return type("Own", (GptOssExperts,), {"_apply_gate": gate})


OTHERS = (is_limited_late, reads_more, raises, slips, teaches_less, has_another_shape)


@pytest.mark.parametrize("gate", OTHERS)
def test_other_gates_are_called(gate: Any) -> None:
    module = make(own(gate), limit=0.4)
    assert under_test._form_of(module) is None
    check(module)


def test_gates_may_change_with_their_module() -> None:
    module = make()
    assert under_test._form_of(module) == FORM
    check(module)
    module.limit, module.alpha = 0.25, 1
    form = "silu", pit.Gate(0.25, 1.0, 1.0, interleaved=True)
    assert under_test._form_of(module) == form
    check(module)
    module._apply_gate = lambda rows: rows.chunk(2, -1)[0]
    assert under_test._form_of(module) is None
    del module._apply_gate, module.limit
    assert under_test._form_of(module) is None
    assert len(under_test._FORMS) == 3 and not any(
        isinstance(each, torch.nn.Module) for key in under_test._FORMS for each in key
    )


def test_gates_are_told_by_limits_however_small_or_large() -> None:
    for limit in (1e-3, 0.1, 20.0, 1e6):
        module = make(own(limits), limit=limit)
        assert under_test._form_of(module) == ("silu", pit.Gate(limit))
    assert under_test._form_of(make(own(limits), limit=torch.inf)) == ("silu", pit.Gate())
    assert under_test._form_of(make(own(limits), limit=-1.0)) is None


@contextmanager
def narrow() -> Iterator[None]:
    torch.set_default_dtype(torch.float16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        narrow,
        FakeTensorMode,
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
)
def test_modes_of_the_caller_change_nothing(mode: Callable[[], Any]) -> None:
    module = make()
    with mode():
        assert under_test._form_of(module) == FORM
    assert under_test._FORMS[GptOssExperts._apply_gate, None, ("limit", 7.0), ("alpha", 1.702)] == (
        FORM
    )


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_experts_are_one_layer(dynamic: bool | None) -> None:
    torch._dynamo.reset()
    seen: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append([str(node.target) for node in graph.graph.nodes])
        return graph

    with torch.no_grad():
        for limit in (7.0, 0.5, 0.25):
            module = make(limit=limit)
            traced = torch.compile(module, fullgraph=True, backend=backend, dynamic=dynamic)
            check(module, traced)
            assert "pit_tvm.moe_feed_forward" in seen[-1]
        module = make(own(slips))
        check(module, torch.compile(module, fullgraph=True, backend=backend, dynamic=dynamic))
        assert seen[-1].count("pit_tvm.grouped_linear") == 2


@pytest.mark.parametrize("strict", [False, True])
def test_exported_experts_are_one_layer(strict: bool) -> None:
    module = make(limit=0.3)
    with torch.no_grad():
        program = torch.export.export(module, data(), strict=strict)
        assert "pit_tvm.moe_feed_forward" in str(program.graph)
        check(module, program.module())


def test_experts_of_classes_alike_are_told_apart() -> None:
    def doubled(self: Any, rows: torch.Tensor) -> torch.Tensor:
        return 2 * GptOssExperts._apply_gate(self, rows)

    names: dict[str, Any] = {"_apply_gate": doubled}
    twice = use_experts_implementation(is_concatenated=False, is_transposed=True, has_bias=True)(
        type("GptOssExperts", (GptOssExperts,), names)
    )
    assert under_test._form_of(make()) == FORM
    assert under_test._form_of(make(twice)) is None
    check(make(twice))
