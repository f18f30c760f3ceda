"""Runs the generated text of a CUDA kernel on the CPU: what its warps compute, and when."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_HEAD = re.compile(r'extern "C" __global__ void __launch_bounds__\((\d+)\) \w+\(([^)]*)\) \{')
_SHARED = "extern __shared__ __align__(64) uchar buf_dyn_shmem_ptr[];"


def kernel_on_cpu(source: str, folder: Path) -> Callable[..., None]:
    """The one kernel of ``source``, with warps along threadIdx.y: a function of the grid's sizes
    ``(x, y, z)``, of whether asynchronous copies come as ``late`` as they may, and of arrays and
    numbers by the names of the kernel's parameters, without the ending ``_ptr``."""
    (head,) = _HEAD.finditer(source)
    threads, parameters = int(head[1]), head[2].replace("__restrict__ ", "").split(", ")
    names = [p.split()[-1] for p in parameters]
    text = source[head.start() :]
    text = text[: text.index("\n}\n") + 3].replace('extern "C" __global__', "static")
    text = text.replace(_SHARED, "uchar* buf_dyn_shmem_ptr = shared_memory;")
    header = Path(__file__).with_suffix(".h")
    call = f"main_kernel({', '.join(names)});"
    entry = (
        f'extern "C" void run({head[2]}, int x, int y, int z, int late) {{\n'
        f"  launch({{x, y, z}}, {threads // 32}, late, [&] {{ {call} }});\n}}\n"
    )
    unit, library = folder / "kernel.cpp", folder / "kernel.so"
    unit.write_text(f'#include "{header}"\n{text}{entry}')
    command = ["g++", "-O1", "-std=c++17", "-w", "-shared", "-fPIC", "-o", library, unit]
    subprocess.run([str(part) for part in command], check=True)
    run = ctypes.CDLL(str(library)).run

    def launch(grid: tuple[int, int, int], *, late: bool, **values: Any) -> None:
        run(*(_argument(values[name.removesuffix("_ptr")]) for name in names), *grid, int(late))

    return launch


def _argument(value: Any) -> Any:
    return value.ctypes.data_as(ctypes.c_void_p) if isinstance(value, np.ndarray) else int(value)
