"""The kernel cache: in memory, on disk, under threads and processes, and when the disk fails."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import te

from pit_tvm import files
from pit_tvm.errors import BackendUnavailable, ShapeError
from pit_tvm.runtime import kernel_cache
from pit_tvm.runtime.kernel_cache import (
    KernelCache,
    KernelCacheWarning,
    default_directory,
)
from pit_tvm.transform.unalign import unalign

KEY = "ab" * 32


def scale(factor):
    """``out[p] = data[p] * factor``."""
    data = te.placeholder((te.var("p"),), "float32", "data")
    out = te.compute(data.shape, lambda p: data[p] * tvm.tirx.const(factor, "float32"), "out")
    return unalign(te.create_prim_func([data, out]))


def build_scale(factor=3.0):
    return tvm.compile(scale(factor), target="llvm")


def result_of(function):
    """What the kernel gives for four ones, from a poisoned output."""
    out = np.full(4, np.nan, np.float32)
    function(np.ones(4, np.float32), out)
    assert (out == out[0]).all()
    return float(out[0])


def refuse_to_build():
    raise AssertionError("the kernel should have been found")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def full(folder):
    """The folder, with the kernel of KEY in it."""
    assert result_of(KernelCache(folder).get(KEY, build_scale)) == 3
    return folder


# --------------------------------------------------------------------------------------------
# Finding kernels


def test_a_kernel_is_built_once_then_found_in_memory_then_on_disk(folder):
    cache = KernelCache(folder)
    assert result_of(cache.get(KEY, build_scale)) == 3
    assert result_of(cache.get(KEY, refuse_to_build)) == 3
    stats = cache.stats
    assert (stats.builds, stats.memory_hits, stats.disk_hits) == (1, 1, 0)
    assert stats.build_seconds > 0 and stats.export_seconds > 0
    later = KernelCache(folder)
    assert result_of(later.get(KEY, refuse_to_build)) == 3
    assert (later.stats.builds, later.stats.disk_hits) == (0, 1)
    assert [path.name for path in folder.iterdir()] == [f"{KEY}.so"]


def test_two_keys_are_two_kernels(folder):
    cache = KernelCache(folder)
    assert result_of(cache.get("00" * 32, lambda: build_scale(2.0))) == 2
    assert result_of(cache.get("11" * 32, lambda: build_scale(5.0))) == 5


def test_a_kernel_may_have_several_entry_points(folder):
    functions = {
        name: scale(factor).with_attr("global_symbol", name)
        for name, factor in [("first", 2.0), ("second", 7.0)]
    }
    build = lambda: tvm.compile(tvm.IRModule(functions), target="llvm")  # noqa: E731
    for cache in (KernelCache(folder), KernelCache(folder)):
        assert result_of(cache.get(KEY, build, "second")) == 7
        assert result_of(cache.module(KEY, refuse_to_build)["first"]) == 2
    with pytest.raises(AttributeError, match="third"):
        cache.get(KEY, refuse_to_build, "third")


def test_a_process_that_only_loads_gets_the_same_result(full):
    program = (
        "import sys, numpy as np\n"
        "from pathlib import Path\n"
        "from pit_tvm.runtime.kernel_cache import KernelCache\n"
        "cache = KernelCache(Path(sys.argv[1]))\n"
        "function = cache.get(sys.argv[2], lambda: sys.exit('built again'))\n"
        "data, out = np.ones(1, np.float32), np.zeros(1, np.float32)\n"
        "function(data, out)\n"
        "print(out[0], cache.stats.disk_hits)\n"
    )
    root = Path(kernel_cache.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program, str(full), KEY],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["3.0", "1"], done.stderr


@pytest.mark.parametrize("key", ["", "main", "AB" * 32, "../" * 21 + "x", "ab" * 31])
def test_a_key_that_is_no_digest_is_refused(folder, key):
    with pytest.raises(ShapeError, match="make it with content_key"):
        KernelCache(folder).get(key, refuse_to_build)


def test_a_failed_build_is_raised_and_tried_again(folder):
    cache = KernelCache(folder)
    with pytest.raises(ZeroDivisionError):
        cache.get(KEY, lambda: 1 / 0)
    assert result_of(cache.get(KEY, build_scale)) == 3


# --------------------------------------------------------------------------------------------
# Many at once


def test_threads_that_ask_together_build_once(folder):
    cache, builds, barrier = KernelCache(folder), [], threading.Barrier(8)

    def build():
        builds.append(1)
        time.sleep(0.05)
        return build_scale()

    def ask(_):
        barrier.wait()
        return result_of(cache.get(KEY, build))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [3.0] * 8
    assert len(builds) == 1
    assert cache.stats.memory_hits == 7


def test_builds_of_two_kernels_do_not_wait_for_each_other(folder):
    cache, both = KernelCache(folder), threading.Barrier(2)

    def build():
        both.wait(timeout=30)  # breaks if the other build is not running
        return build_scale()

    with ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda key: result_of(cache.get(key, build)), [KEY, "cd" * 32])
        assert list(results) == [3.0, 3.0]


def _ask_repeatedly(folder, rounds, queue):
    cache = KernelCache(Path(folder))
    seen = [result_of(cache.get(f"{i:064x}", lambda i=i: build_scale(i + 1.0))) for i in rounds]
    queue.put((seen, cache.stats.corrupt))


def test_processes_that_share_a_folder_all_get_whole_kernels(folder):
    context = multiprocessing.get_context("fork")
    queue, rounds = context.Queue(), list(range(6))
    workers = [
        context.Process(target=_ask_repeatedly, args=(str(folder), rounds, queue)) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    answers = [queue.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join()
    assert answers == [([i + 1.0 for i in rounds], 0)] * 4
    assert sorted(path.name for path in folder.iterdir()) == [f"{i:064x}.so" for i in rounds]


# --------------------------------------------------------------------------------------------
# A disk that fails


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "foreign"])
def test_a_damaged_file_is_built_again(full, damage):
    path = full / f"{KEY}.so"
    content = bytearray(path.read_bytes())
    if damage == "truncate":
        del content[len(content) // 2 :]
    elif damage == "flip":
        content[len(content) // 3] ^= 1
    else:
        content = bytearray(b"" if damage == "empty" else b"not a kernel" * 1000)
    os.unlink(path)
    path.write_bytes(content)
    cache = KernelCache(full)
    assert result_of(cache.get(KEY, lambda: build_scale(4.0))) == 4
    assert (cache.stats.corrupt, cache.stats.builds) == (1, 1)
    assert path.read_bytes() != content


def test_a_whole_file_that_cannot_be_loaded_is_built_again(folder, monkeypatch):
    class Foreign:
        def export_library(self, file_name):
            Path(file_name).write_bytes(b"a library of another machine")

    with monkeypatch.context() as patch:
        patch.setattr(kernel_cache.runtime, "load_module", lambda path: path)
        kernel_cache._store(Foreign(), folder / f"{KEY}.so")
    cache = KernelCache(folder)
    assert result_of(cache.get(KEY, build_scale)) == 3
    assert cache.stats.corrupt == 1


def assert_works_in_memory_and_warns_once(cache, match):
    with pytest.warns(KernelCacheWarning, match=match) as caught:
        assert result_of(cache.get(KEY, build_scale)) == 3
        assert result_of(cache.get("cd" * 32, lambda: build_scale(5.0))) == 5
        assert result_of(cache.get(KEY, refuse_to_build)) == 3
    assert len(caught) == 1
    assert cache.stats.builds == 2


def test_a_folder_that_is_a_file_leaves_the_memory(tmp_path):
    (tmp_path / "file").write_text("taken")
    cache = KernelCache(tmp_path / "file" / "cache")
    assert_works_in_memory_and_warns_once(cache, "kernels stay in memory")
    assert cache.clear() == (0, 0)


def test_a_read_only_folder_leaves_the_memory(folder, monkeypatch):
    def forbid(**options):  # a real one does not stop the superuser
        raise PermissionError(13, "Permission denied", options["dir"])

    monkeypatch.setattr(kernel_cache.tempfile, "mkstemp", forbid)
    assert_works_in_memory_and_warns_once(KernelCache(folder), "Permission denied")


def test_a_full_disk_leaves_the_memory_and_no_rubbish(folder, monkeypatch):
    def no_space(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    assert_works_in_memory_and_warns_once(KernelCache(folder), "No space left on device")
    assert list(folder.iterdir()) == []


def test_full_temporary_files_leave_the_memory(folder, monkeypatch):
    monkeypatch.setattr(files, "_ROOM", 2**80)
    assert_works_in_memory_and_warns_once(KernelCache(folder), "No space left on device")


@pytest.mark.parametrize("compiler", [None, "/bin/false"])
def test_without_a_linker_kernels_stay_in_memory(folder, monkeypatch, compiler):
    monkeypatch.setattr(kernel_cache.cc, "get_cc", lambda: compiler)
    expected = "C compiler on PATH" if compiler is None else "Compilation error"
    assert_works_in_memory_and_warns_once(KernelCache(folder), expected)


def test_clear_deletes_kernels_and_left_overs_but_functions_stay_valid(full):
    cache = KernelCache(full)
    function = cache.get(KEY, refuse_to_build)
    (full / f"{KEY}x1_z.tmp.so").write_bytes(b"12345")
    (full / "libc.so").write_text("not ours")
    size = (full / f"{KEY}.so").stat().st_size
    assert cache.disk_usage() == (2, size + 5)
    assert cache.clear() == (2, size + 5)
    assert [path.name for path in full.iterdir()] == ["libc.so"]
    assert result_of(function) == 3
    assert result_of(cache.get(KEY, lambda: build_scale(6.0))) == 6
    assert cache.stats.builds == 1


def test_files_that_another_process_deletes_meanwhile_are_not_counted(full, monkeypatch):
    cache, left = KernelCache(full), full / f"{KEY}.so"
    monkeypatch.setattr(cache, "_files", lambda: [full / f"{'0' * 64}.so", left])
    assert cache.disk_usage() == (1, left.stat().st_size)


def test_a_folder_of_nobody_is_refused(monkeypatch):
    monkeypatch.setenv("PIT_TVM_CACHE", "~nobody-of-this-name/x")
    with pytest.raises(BackendUnavailable, match="^kernel cache: expected a folder"):
        KernelCache()


def test_no_warning_when_all_is_well(full):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KernelCache(full).get(KEY, refuse_to_build)
        KernelCache(full / "new").get(KEY, build_scale)


# --------------------------------------------------------------------------------------------
# Where


def test_the_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PIT_TVM_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert KernelCache().directory == tmp_path / "own"
    monkeypatch.delenv("PIT_TVM_CACHE")
    assert default_directory() == tmp_path / "xdg" / "pit-tvm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_directory() == tmp_path / ".cache" / "pit-tvm"
