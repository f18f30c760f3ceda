"""A workload that adds to its output, for as many ids as the caller has."""

# No deferred annotations: TVMScript reads them.
import numpy as np
from tvm.script import tirx as T

from pit_tvm.structs import TileTask

SIZE = 8


@T.prim_func(s_tir=True)
def add_rows(src: T.Buffer((8,), "float32"), rows: T.handle, out: T.Buffer((8,), "float32")):
    """``out[i] += src[ids[i]]``"""
    count = T.int32()
    ids = T.match_buffer(rows, (count,), "int32")
    for i in T.serial(count):
        with T.sblock("out"):
            vi = T.axis.spatial(count, i)
            T.reads(src[ids[vi]], ids[vi])
            T.writes(out[vi])
            out[vi] = out[vi] + src[ids[vi]]


def example(task: TileTask, rng: np.random.Generator) -> tuple[list[np.ndarray], np.ndarray]:
    """Random elements in a random order."""
    src = rng.standard_normal(SIZE).astype(np.float32)
    ids = rng.permutation(SIZE).astype(np.int32)
    return [src, ids], src[ids].astype(np.float64)
