"""What scripts need before they can begin: packages, a GPU, and numbers of threads."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

from pit_tvm.errors import BackendUnavailable, mismatch


def require(option: str, packages: Sequence[str], extra: str) -> None:
    """Raise BackendUnavailable unless the packages are installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        advice = f"pip install 'pit-tvm[{extra}]'"
        what = f"the packages {', '.join(packages)}"
        raise BackendUnavailable(mismatch(option, what, f"no {', '.join(missing)}", advice))


def require_gpu(option: str, advice: str) -> None:
    """Raise BackendUnavailable unless torch finds a GPU; ``advice``: what to do without one."""
    import torch

    if not torch.cuda.is_available():
        raise BackendUnavailable(mismatch(option, "a CUDA device", "none", advice))


def limit_threads(threads: int) -> None:
    """Tell libraries how many threads to use: they read it when they are imported, so before."""
    for name in ("OMP", "OPENBLAS", "MKL", "TVM"):
        os.environ[f"{name}_NUM_THREADS"] = str(threads)
