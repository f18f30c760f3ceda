"""Few rows, captured in a process in which torch has multiplied nothing yet."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

PROGRAM = """
import torch
from pit_tvm import torch as pit

x, weight = (torch.randn(shape, device="cuda").half() for shape in ((8, 16, 768), (3072, 768)))
lengths, graph = torch.full((8,), 8, device="cuda"), torch.cuda.CUDAGraph()
stream = torch.cuda.Stream()
with torch.no_grad(), torch.cuda.stream(stream):
    for _ in range(40):  # live rows, which take the host less
        pit.linear_rows(x, weight, lengths=lengths)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):  # dense and zeros, which take the GPU less
        out = pit.linear_rows(x, weight, lengths=lengths)
    x.normal_(), lengths.fill_(5), out.fill_(torch.nan)
    graph.replay()
want = x.double() @ weight.double().T
want[:, 5:] = 0
assert (out.double() - want).norm() < 2e-3 * want.norm() and not out[:, 5:].any()
"""


def test_a_dense_product_is_captured_first() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
