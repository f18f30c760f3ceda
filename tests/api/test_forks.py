"""Processes forked after a kernel ran have no threads to run another."""

from __future__ import annotations

import os

import pytest

from tests.processes import run_python

CODE = """
import os
import numpy as np
import pit_tvm
from pit_tvm import Rows, op
from pit_tvm.errors import BackendUnavailable

operator = pit_tvm.compile(op.matmul(None, 64, 64), sparse={"lhs": Rows()}, dead="zero")
lhs, rhs, rows = np.ones((64, 64), np.float32), np.ones((64, 64), np.float32), np.arange(64)
call = lambda: operator(lhs, rhs, sparsity=rows)
call()
child = os.fork()
if not child:
    refused = 0
    for attempt in (call, lambda: operator.pack(rhs=rhs), lambda: operator.explain(sizes={"m": 9})):
        try:
            attempt()
        except BackendUnavailable as error:
            refused += "spawn" in str(error)
    os._exit(refused)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), call().sum() == 64**3)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_says_that_it_cannot_run() -> None:
    assert run_python(CODE, timeout=120) == ["3", "True"]
