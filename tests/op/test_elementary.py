"""Accuracy and machine code of elementary functions, spelled as arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm
from tvm import te

from pit_tvm.op.elementary import FUNCTIONS

TRUTH = {
    "exp": np.exp,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
}
TINY = 2.0**-149  # the smallest number of float32


def tensors_of(name, extent=None):
    data = te.placeholder((extent or te.var("p"),), "float32", "data")
    return [data, te.compute(data.shape, lambda p: FUNCTIONS[name](data[p]), name="out")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_relative_error_against_float64(run, rng, name):
    parts = [rng.uniform(-low, low, 5000) for low in (1e-6, 1e-2, 1.5, 5, 80)]
    x = np.concatenate(parts).astype(np.float32)
    truth = TRUTH[name](x.astype(np.float64))
    got = run(tensors_of(name), [x], x.shape).astype(np.float64)
    assert np.all(np.abs(got - truth) <= 2.5e-7 * np.abs(truth))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ends_of_the_range(run, name):
    x = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 3e38, -3e38, 1e-40], np.float32)
    got = run(tensors_of(name), [x], x.shape)
    with np.errstate(over="ignore"):
        truth = TRUTH[name](x.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(got, truth, rtol=2e-7)
    assert np.isnan(got[0])


def test_exponentials_reach_the_smallest_and_the_largest_numbers(run):
    x = np.concatenate([np.linspace(-110, -86, 20001), np.linspace(86, 90, 20001)])
    x = x.astype(np.float32)
    with np.errstate(over="ignore"):
        truth = np.exp(x.astype(np.float64)).astype(np.float32)
    got = run(tensors_of("exp"), [x], x.shape)
    finite = np.isfinite(truth)
    np.testing.assert_allclose(got[finite], truth[finite], rtol=3e-7, atol=TINY)
    assert np.all(got[~finite] == np.inf) and not finite.all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_machine_code_is_vectors_without_library_calls(name):
    target = {"kind": "llvm", "mcpu": "x86-64-v3"}
    func = te.create_prim_func(tensors_of(name, 4096))
    assembly = tvm.compile(tvm.IRModule({"main": func}), target=target).mod.inspect_source("asm")
    assert "vmulps" in assembly and "ymm" in assembly
    for function in ("expf", "erff", "tanhf"):
        assert function not in assembly
