"""What calls of the GPU's k-axis family pack, turn and hand to the kernel, without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pit_tvm
from pit_tvm.runtime import cuda_bind
from pit_tvm.runtime.cuda_columns import ColumnsKernels
from pit_tvm.runtime.cuda_detect import CudaDetector
from pit_tvm.runtime.cuda_fill import CudaFill
from pit_tvm.runtime.cuda_watch import CountWatch
from tests.runtime.cuda_products import find_on_cpu, memory, roundings, tiled
from tests.runtime.test_cuda_blocks import LINEAR, TURNED, operator

torch = pytest.importorskip("torch")


def spec_of(height: int, side: str, options: dict[str, Any]) -> pit_tvm.Mask:
    """Bands of ``height`` of the sparse operand as it is stored."""
    k_last = "transpose_rhs" in options if side == "rhs" else "transpose_lhs" not in options
    return pit_tvm.Mask(height, 1) if k_last else pit_tvm.Mask(1, height)


@pytest.mark.parametrize(
    ("side", "options", "high"),
    [
        ("lhs", {**LINEAR, "bias": True}, 200),
        ("rhs", {"bias": True}, 200),
        ("rhs", {**TURNED, **LINEAR}, 200),
        ("rhs", LINEAR, 200),
        ("lhs", {**TURNED, **LINEAR}, 100),  # turned rows would be no whole pieces of 16 bytes
    ],
)
def test_calls_pack_turn_and_flip_what_the_kernel_takes(
    monkeypatch: pytest.MonkeyPatch, side: str, options: dict[str, Any], high: int
) -> None:
    wide, k, band = 24, 48, 32
    rng = np.random.default_rng(4)
    mask = (rng.random((-(-high // band), k)) >= 0.6).repeat(band, axis=0)[:high]
    sparse, beside = rng.standard_normal((high, k)) * mask, rng.standard_normal((wide, k))
    lhs, rhs = (sparse, beside) if side == "lhs" else (beside, sparse)
    made = [lhs.T if "transpose_lhs" in options else lhs]
    made += [rhs if "transpose_rhs" in options else rhs.T]
    made += [rng.standard_normal(len(rhs))] * ("bias" in options)
    arrays = [torch.from_numpy(array.astype(np.float16, order="C")) for array in made]
    spec, moved = spec_of(band, side, options), []

    def pack(self: Any, dtype: str, height: int) -> Any:
        def run(source: Any, ids: Any, count: Any, packed: Any) -> None:
            left, lists, out = np.pad(memory(source), ((0, height), (0, 0))), ids, memory(packed)
            capacity = memory(lists).shape[1]
            for slot, live in enumerate(memory(count)):
                rows = left[slot * height : (slot + 1) * height, memory(ids)[slot, :live]]
                out[slot * capacity : slot * capacity + live] = rows.T
            moved.append("pack")

        return run

    def turn(self: Any, dtype: str, beside: bool = False) -> Any:
        def run(source: Any, turned: Any) -> None:
            assert moved == ["pack"] * beside
            assert not any(size % 8 for size in turned.shape)
            memory(turned)[...] = memory(source).T
            moved.append("turn")

        return run

    def product(self: Any, tile: Any, groups: int, **given: Any) -> Any:
        def run(own: Any, ids: Any, count: Any, dense: Any, *rest: Any) -> None:
            left, lists, (right,), *bias, out = map(memory, (own, ids, dense, *rest))
            sums = np.zeros((len(lists) * band, right.shape[1]))
            for slot, live in enumerate(memory(count)):
                rows, columns = lists[slot, :live], slice(slot * band, (slot + 1) * band)
                first = slot * lists.shape[1]
                tile = left[first : first + live] if given["packed"] else left[rows, columns]
                sums[slot * band :][: tile.shape[1]] = tile.T.astype(float) @ right[rows]
            sums = sums.T if given["flip"] else sums
            out[...] = sums[: out.shape[0], : out.shape[1]] + (bias[0] if bias else 0.0)

        return run

    def pad_copy(self: Any, source: Any, made: Any) -> None:
        made[:, : source.shape[1]] = source[:, : made.shape[1]]

    monkeypatch.setattr(CudaDetector, "prepared", find_on_cpu)
    monkeypatch.setattr(CountWatch, "due", lambda self: False)
    monkeypatch.setattr(cuda_bind, "check_tensor", lambda *given, **options: None)
    monkeypatch.setattr(CudaFill, "pad_copy", pad_copy)
    for name, fake in (("pack", pack), ("turn", turn), ("product", product)):
        monkeypatch.setattr(ColumnsKernels, name, fake)
    stored = mask.T if spec.extents[0] == 1 else mask
    value = torch.from_numpy(np.ascontiguousarray(stored))
    out = torch.full((len(lhs), len(rhs)), torch.nan, dtype=torch.float16)
    operator(spec, side, **options)._dispatcher.run(arrays, value, out, choose=tiled)
    form = operator(spec, side, **options)._dispatcher.form
    assert moved == ["pack"] * form.packed + ["turn"] * form.turns
    bias = arrays[2].double().numpy() if "bias" in options else 0.0
    want = lhs.astype(np.float16).astype(float) @ rhs.astype(np.float16).astype(float).T
    assert roundings(out, want + bias) < 2
