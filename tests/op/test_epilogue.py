"""Accuracy and machine code of the activations."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import s_tir, te
from tvm.target import codegen

from pit_tvm.op.arguments import resolve_dtypes
from pit_tvm.op.epilogue import ACTIVATIONS, epilogue
from pit_tvm.reference.ops import activate

TARGETS = ["llvm", {"kind": "llvm", "mcpu": "x86-64-v3"}, {"kind": "llvm", "mcpu": "x86-64-v4"}]
# Relative errors for x > -5, where float32 itself is not the limit.
LIMITS = {"relu": 0.0, "relu2": 1e-7, "gelu": 1e-6, "gelu_tanh": 2.5e-6, "silu": 5e-7}


def tensors_of(activation, lanes=None):
    data = te.placeholder((lanes or te.var("p"),), "float32", "data")
    dtypes = resolve_dtypes("float32")
    out = te.compute(data.shape, lambda p: epilogue(data[p], None, activation, dtypes), name="out")
    return [data, out]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("target", TARGETS, ids=["sse2", "avx2", "avx512"])
def test_relative_error_against_float64(run, rng, activation, target):
    if target != "llvm" and not runs_here(target["mcpu"]):
        pytest.skip(reason=f"this processor has no {target['mcpu']}")
    x = np.concatenate(
        [rng.uniform(-5, 5, 20000), rng.uniform(-1e-3, 1e-3, 500), rng.uniform(5, 1e4, 500)]
    ).astype(np.float32)
    truth = activate(x.astype(np.float64), activation)
    got = run(tensors_of(activation), [x], x.shape, target).astype(np.float64)
    assert np.all(np.abs(got - truth) <= LIMITS[activation] * np.abs(truth))


def runs_here(level):
    host = tvm.target.Target({"kind": "llvm", "mcpu": codegen.llvm_get_system_cpu()})
    features = {str(feature) for feature in codegen.llvm_get_cpu_features(host)}
    return {"x86-64-v3": {"avx2", "fma"}, "x86-64-v4": {"avx512f", "avx512vl"}}[level] <= features


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_negative_tail_fades_without_a_step(run, activation):
    x = -np.linspace(5, 100, 5001, dtype=np.float32)
    truth = activate(x.astype(np.float64), activation)
    got = run(tensors_of(activation), [x], x.shape)
    assert np.all(got <= 0)
    assert np.all(np.abs(got - truth) <= 2e-5 * np.abs(truth) + 1e-35)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_special_values(run, activation):
    x = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 3e38, -3e38, 1e-40], np.float32)
    got = run(tensors_of(activation), [x], x.shape)
    assert np.isnan(got[0])
    assert got[1] == np.inf
    assert got[3] == got[4] == 0
    large, tiny = (np.inf, 0.0) if activation == "relu2" else (x[5], x[7])
    assert got[5] == large
    np.testing.assert_allclose(got[[2, 6]], 0, atol=1e-35)
    np.testing.assert_allclose(got[7], tiny, rtol=1e-5 if activation == "relu" else 0.51)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("vectorised", [False, True], ids=["by llvm", "by the schedule"])
def test_machine_code_is_vectors_without_library_calls(activation, vectorised):
    schedule = s_tir.Schedule(te.create_prim_func(tensors_of(activation, lanes=4096)))
    if vectorised:
        (loop,) = schedule.get_loops(schedule.get_sblock("out"))
        schedule.vectorize(schedule.split(loop, [None, 8])[1])
    target = {"kind": "llvm", "mcpu": "x86-64-v3"}
    assembly = tvm.compile(schedule.mod, target=target).mod.inspect_source("asm")
    assert "vmaxps" in assembly and "ymm" in assembly
    for function in ("expf", "erff", "tanhf", "floorf", "roundf"):
        assert function not in assembly
