"""Fixtures that many tests share, and shortcuts through TVM's script parser."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pit_tvm.quick_script import quick_script
from pit_tvm.runtime.kernel_cache import KernelCache
from tests.runtime.cuda_emulation import Emulator, missing


@pytest.fixture(scope="session", autouse=True)
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where kernels lie that tests share, those of another worker included: not among the user's,
    but in a folder that PIT_TVM_CACHE names, as for tests on a GPU, or else in the session's."""
    own = tmp_path_factory.getbasetemp()
    apart = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "kernels"
    folder = Path(os.environ.get("PIT_TVM_CACHE", apart)).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIT_TVM_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """Compiles CUDA for this CPU; what kernels and tests share is compiled once."""
    reason = missing()
    if reason:
        pytest.skip(reason=reason)
    return Emulator(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="session")
def cache(kernel_folder: Path) -> KernelCache:
    """The kernels in `kernel_folder`."""
    return KernelCache(kernel_folder)


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh random numbers; pytest shows the seed of a test that fails."""
    seed = int(np.random.default_rng().integers(2**32))
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def poisoned() -> Callable[..., np.ndarray]:
    """Makes outputs that show what was not written: ``poisoned(shape, dtype)``.

    Floating-point elements are NaN; integers are 85, a value no test expects by chance.
    """

    def make(shape: tuple[int, ...], dtype: np.typing.DTypeLike = np.float32) -> np.ndarray:
        fill = 85 if np.issubdtype(dtype, np.integer) else np.nan
        return np.full(shape, fill, dtype)

    return make


def pytest_configure(config: pytest.Config) -> None:
    """Let TVM's script parser take shortcuts: pytest's stack is deep, and kernels are many."""
    shortcut = contextlib.ExitStack()
    shortcut.enter_context(quick_script())
    config.add_cleanup(shortcut.close)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Take modules and tests out of what is searched for garbage: they are many, and stay. And
    search less often: tracing a model makes objects by the million, few of which are garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        # What torch writes for its tools of every extent and guard, if anybody listens: pytest
        # listens to all who tell nobody else.
        logging.getLogger("torch.__trace").propagate = True


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a CUDA device where there is none."""
    if item.get_closest_marker("gpu") is not None:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
