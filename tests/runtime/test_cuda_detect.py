"""Detection on CUDA: every kernel compiles without a GPU; lists are the reference's with one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tvm

from pit_tvm.errors import AxisError, BackendUnavailable, DTypeError, ShapeError
from pit_tvm.reference.index import index_lists
from pit_tvm.runtime.cuda_build import build_cuda, cuda_source, find_nvcc
from pit_tvm.runtime.cuda_detect import CudaDetector
from pit_tvm.runtime.cuda_detect_blocks import map_blocks
from pit_tvm.runtime.cuda_detect_plan import MOST_BAND
from pit_tvm.runtime.cuda_dispatch import all_modules
from pit_tvm.runtime.cuda_fill import CudaFill
from pit_tvm.runtime.cuda_modules import cached_modules
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.structs import (
    BitMask,
    BlockMask,
    Groups,
    Index,
    Lengths,
    Mask,
    MicroTile,
    Rows,
    SparsitySpec,
    Values,
)

torch = pytest.importorskip("torch")

MODULES = all_modules()
ROWS = MicroTile("lhs", "m", 0, (1, 0))
WHOLE = [ROWS, MicroTile("lhs", "k", 1, (0, 1))]
CPU_CASES: list[tuple[SparsitySpec, Any]] = [
    (Mask(), torch.zeros(4, 4, dtype=torch.bool)),
    (Rows(), torch.zeros(4, dtype=torch.int32)),
    (Groups(2), np.zeros(4, np.int32)),
]


@pytest.mark.parametrize("name", MODULES)
def test_every_kernel_compiles_to_machine_code(name: str) -> None:
    try:
        find_nvcc()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    module = MODULES[name]()
    library = build_cuda(module, tirx=True)
    for var in module.functions:
        assert f"{var.name_hint}_kernel" in library.source
        assert callable(library.mod[var.name_hint])


@pytest.mark.parametrize(
    ("name", "count"), [("cuda-mask", 28), ("cuda-slices", 21), ("cuda-blocks", 5)]
)
def test_a_handful_of_kernels_serves_all_shapes(name: str, count: int) -> None:
    assert len(MODULES[name]().functions) == count


@pytest.mark.parametrize(("bits", "load"), [(1, "ldcs"), (8, "ldcs"), (16, "ldg")])
def test_a_mask_does_not_take_the_cache_from_operands(bits: int, load: str) -> None:
    source = cuda_source(tvm.IRModule({"main": map_blocks(bits)}), tirx=True)
    assert set(re.findall(r"pit_(ld\w+)16\(", source)) == {load}


@pytest.mark.parametrize(("spec", "value"), CPU_CASES)
def test_what_is_not_on_the_device_is_refused(spec: SparsitySpec, value: Any) -> None:
    with pytest.raises(DTypeError, match="CUDA tensor"):
        CudaDetector(no_module).detect(spec, value, (4, 4), ROWS)


def no_module(name: str, build: Callable[[], tvm.IRModule]) -> Any:
    """Stands for kernels that a refused call must not ask for."""
    raise AssertionError(name)


# --------------------------------------------------------------------------------------------
# On a GPU


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    return cached_modules(KernelCache(tmp_path_factory.mktemp("kernels")))


@pytest.fixture(scope="module")
def detector(modules: Callable[..., Any]) -> CudaDetector:
    return CudaDetector(modules)


def lists(index: Index) -> list[np.ndarray]:
    """The live part of every list, on the host."""
    ids = index.ids.cpu().numpy().reshape(-1, index.ids.shape[-1])
    return [row[:n] for row, n in zip(ids, index.count.cpu().numpy().reshape(-1), strict=True)]


def assert_lists(index: Index, expected: list[np.ndarray]) -> None:
    """Equal lists, order included."""
    found = lists(index)
    assert index.ids.dtype == index.count.dtype == torch.int32
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        assert np.array_equal(got, want)


def assert_bits(index: Any, expected: list[np.ndarray], entries: int, grain: int = 1) -> None:
    """The lists as bits, of ``entries`` of ``grain`` positions."""
    bits = np.unpackbits(index.lines.cpu().numpy().view(np.uint8), axis=1, bitorder="little")
    want = np.zeros((len(expected), entries), np.uint8)
    for line, ids in zip(want, expected, strict=True):
        line[ids // grain] = 1
    assert np.array_equal(bits[:, :entries], want)


def others(expected: list[np.ndarray], extent: int) -> list[np.ndarray]:
    """What lists of positions below ``extent`` leave out."""
    return [np.setdiff1d(np.arange(extent), each) for each in expected]


def patterns(rng: np.random.Generator, shape: tuple[int, int]) -> Iterator[np.ndarray]:
    """Masks with nothing, everything, one element, blocks and scattered elements live."""
    yield np.zeros(shape, np.bool_)
    yield np.ones(shape, np.bool_)
    one = np.zeros(shape, np.bool_)
    one[tuple(rng.integers(extent) for extent in shape)] = True
    yield one
    blocks = rng.random((shape[0] // 7 + 1, shape[1] // 5 + 1)) < 0.2
    yield np.kron(blocks, np.ones((7, 5), np.bool_))[: shape[0], : shape[1]]
    yield rng.random(shape) < 0.03


def forms(mask: np.ndarray, rng: np.random.Generator) -> Iterator[tuple[SparsitySpec, Any, Any]]:
    """Ways to pass a mask: specification, array for the reference, tensor."""
    tensor = torch.from_numpy(mask.copy())
    yield Mask(), mask, tensor.cuda()
    yield Mask(), mask, (tensor.to(torch.uint8) * 2).cuda()
    wide = torch.ones(mask.shape[0], mask.shape[1] + 3, dtype=torch.bool, device="cuda")
    wide[:, 1:-2] = tensor.cuda()
    yield Mask(), mask, wide[:, 1:-2]
    packed = np.packbits(mask, axis=-1, bitorder="little")
    yield BitMask(), packed, torch.from_numpy(packed).cuda()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int64):
        values = torch.where(tensor, -1.0, -0.0).to(dtype)
        if dtype.is_floating_point and mask.any():
            values[tuple(np.argwhere(mask)[0])] = float("nan")
        yield Values(), mask.astype(np.float32), values.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1), (64, 256), (61, 333), (300, 17), (5, 20000)])
def test_masks_and_values(detector: CudaDetector, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    bands = [MicroTile("lhs", "k", 1, (high, 1)) for high in (32, MOST_BAND)]
    tiles = [*WHOLE, *bands]
    tiles += [MicroTile("lhs", "m", 0, (1, width)) for width in (9, 128)]
    for mask in patterns(rng, shape):
        for spec, host, tensor in forms(mask, rng):
            for tile in tiles:
                expected = index_lists(spec, host, shape, tile)
                alone = detector.detect(spec, tensor, shape, tile)
                assert_lists(alone, expected)
                live, dead = detector.detect_split(spec, tensor, shape, tile)
                assert_lists(live, expected)
                if tile in bands:
                    assert_bits(alone, expected, shape[1])
                    assert_bits(live, expected, shape[1])
                assert_lists(dead, others(expected, shape[tile.dim]))


@pytest.mark.gpu
@pytest.mark.parametrize("columns_first", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 1), (64, 256), (61, 1333), (300, 17), (5, 20000), (9000, 40), (0, 8), (8, 0)]
)
def test_both_axes_of_a_mask(
    detector: CudaDetector, shape: tuple[int, int], columns_first: bool
) -> None:
    rng, tiles = np.random.default_rng(0), tuple(WHOLE[::-1] if columns_first else WHOLE)
    masks = patterns(rng, shape) if min(shape) else [np.zeros(shape, np.bool_)]
    for mask in masks:
        tensor = torch.from_numpy(mask.copy())
        wide = torch.ones(shape[0], shape[1] + 3, dtype=torch.bool, device="cuda")
        wide[:, 1:-2] = tensor.cuda()
        for value in (tensor.cuda(), (tensor.to(torch.uint8) * 2).cuda(), wide[:, 1:-2]):
            for split in (False, True):
                found = detector.detect_axes(Mask(), value, shape, tiles, split=split)
                expected = [index_lists(Mask(), mask, shape, tile) for tile in tiles]
                assert_lists(found[0], expected[0])
                assert_lists(found[2], expected[1])
                if split:
                    assert_lists(found[1], others(expected[0], shape[tiles[0].dim]))


@pytest.mark.gpu
@pytest.mark.parametrize("extents", [(1, 1), (32, 32), (3, 50)])
def test_block_masks(detector: CudaDetector, extents: tuple[int, int]) -> None:
    shape, spec = (130, 333), BlockMask(*extents)
    blocks = np.random.default_rng(0).random([-(-s // e) for s, e in zip(shape, extents)]) < 0.1  # noqa: B905
    for tile in (*WHOLE, MicroTile("lhs", "k", 1, (20, 1)), MicroTile("lhs", "m", 0, (1, 70))):
        index = detector.detect(spec, torch.from_numpy(blocks).cuda(), shape, tile)
        expected = index_lists(spec, blocks, shape, tile)
        assert_lists(index, expected)
        if tile.extents[0] == 20:
            assert_bits(index, expected, -(-shape[1] // extents[1]), extents[1])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0, 0), (0, 8), (8, 0)])
def test_empty_operands(detector: CudaDetector, shape: tuple[int, int]) -> None:
    mask = torch.zeros(shape, dtype=torch.bool, device="cuda")
    for tile in (*WHOLE, MicroTile("lhs", "k", 1, (4, 1)), MicroTile("lhs", "m", 0, (1, 4))):
        expected = index_lists(Mask(), mask.cpu().numpy(), shape, tile)
        assert_lists(detector.detect(Mask(), mask, shape, tile), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [0, 1, 3000, 200_000])
def test_row_ids(detector: CudaDetector, rows: int, dtype: torch.dtype) -> None:
    ids = np.random.default_rng(0).permutation(rows)[: rows // 2]
    tensor = torch.from_numpy(ids).to(dtype).cuda()
    asked = (Rows(), tensor, (rows, 8), ROWS)
    assert_lists(detector.detect(*asked), [ids])
    assert_lists(detector.detect(*asked, deterministic=True), [np.sort(ids)])
    live, dead = detector.detect_split(*asked)
    assert_lists(live, [np.sort(ids)])
    assert_lists(dead, others([ids], rows))


@pytest.mark.gpu
@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize(("batch", "padded"), [(0, 0), (1, 10_000), (300, 70), (4, 0)])
def test_lengths(detector: CudaDetector, batch: int, padded: int, cumulative: bool) -> None:
    lengths = np.random.default_rng(0).integers(0, padded + 1, batch)
    given = np.concatenate([[0], np.cumsum(lengths)]) if cumulative else lengths
    shape, spec = (batch * padded, 8), Lengths(cumulative=cumulative)
    live, dead = detector.detect_split(spec, torch.from_numpy(given).cuda(), shape, ROWS)
    expected = index_lists(Lengths(), lengths, shape, ROWS)
    assert_lists(live, expected)
    assert_lists(dead, others(expected, shape[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [0, 1, 64, 1024, 1100])
@pytest.mark.parametrize(
    ("tokens", "choices"), [(0, 1), (700, 1), (8192, 1), (65_536, 1), (100_000, 4)]
)
def test_groups(detector: CudaDetector, groups: int, tokens: int, choices: int) -> None:
    rng = np.random.default_rng(0)
    even = rng.integers(-1, max(groups, 1), tokens * choices)
    for ids in (even, np.full_like(even, groups - 1)):
        tensor = torch.from_numpy(ids).cuda().view(tokens, choices)
        index = detector.detect(Groups(groups), tensor, (tokens, 8), ROWS)
        assert_lists(index, [np.flatnonzero(ids == group) for group in range(groups)])


@pytest.mark.gpu
def test_ids_out_of_range_are_dropped_or_refused(
    detector: CudaDetector, modules: Callable[..., Any]
) -> None:
    rows = torch.tensor([3, -1, 8, 2**31 - 1, 0], device="cuda")
    lengths = torch.tensor([2, 5, -1], device="cuda")
    groups = torch.tensor([0, 2, 9, -2, 1, -1, 0, 0, 0], device="cuda")
    calls = [
        (Rows(), rows, (8, 4), [[3, 0]]),
        (Lengths(), lengths, (12, 4), [[0, 1]]),
        (Groups(2), groups, (9, 4), [[0, 6, 7, 8], [4]]),
    ]
    for spec, value, shape, expected in calls:
        assert_lists(detector.detect(spec, value, shape, ROWS), [np.array(e) for e in expected])
    checked = CudaDetector(modules, checked=True)
    for spec, value, shape, _ in calls:
        with pytest.raises(ShapeError, match="at position"):
            checked.detect(spec, value, shape, ROWS)
    with pytest.raises(ShapeError, match="occur once"):
        checked.detect(Rows(), torch.tensor([1, 2, 1], device="cuda"), (8, 4), ROWS)


@pytest.mark.gpu
def test_graph_replays_with_other_contents(detector: CudaDetector) -> None:
    shape, tile = (512, 768), MicroTile("lhs", "k", 1, (32, 1))
    mask = torch.zeros(shape, dtype=torch.bool, device="cuda")
    detector.detect_split(Mask(), mask, shape, ROWS)
    detector.detect(Mask(), mask, shape, tile)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bands = detector.detect(Mask(), mask, shape, tile)
        live, dead = detector.detect_split(Mask(), mask, shape, ROWS)
    for density in (0.001, 0.0, 0.3):
        mask.copy_(torch.rand(shape, device="cuda") < density)
        graph.replay()
        host = mask.cpu().numpy()
        assert_lists(bands, index_lists(Mask(), host, shape, tile))
        expected = index_lists(Mask(), host, shape, ROWS)
        assert_lists(live, expected)
        assert_lists(dead, others(expected, shape[0]))


@pytest.mark.gpu
def test_wrong_arrays_are_refused(modules: Callable[..., Any]) -> None:
    detector = CudaDetector(no_module)
    mask = torch.zeros(4, 6, dtype=torch.bool, device="cuda")
    with pytest.raises(ShapeError, match="shape"):
        detector.detect(Mask(), mask, (4, 7), ROWS)
    with pytest.raises(ShapeError, match="contiguous rows"):
        detector.detect(Mask(), mask.t(), (6, 4), ROWS)
    with pytest.raises(AxisError, match="one slot"):
        detector.detect_split(
            Groups(2), torch.zeros(4, dtype=torch.int32, device="cuda"), (4, 6), ROWS
        )
    with pytest.raises(DTypeError, match="int32 or int64"):
        detector.detect(Rows(), torch.zeros(4, device="cuda"), (4, 6), ROWS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("cols", [1, 7, 64, 333, 3000])
def test_rows_of_no_group_are_cleared(
    modules: Callable[..., Any], cols: int, dtype: torch.dtype
) -> None:
    ids = torch.randint(-3, 8, (150, 2), device="cuda").to(dtype)
    out = torch.full((300, cols), 7.0, dtype=torch.float16, device="cuda")
    expected = out.clone()
    expected[((ids < 0) | (ids >= 5)).view(-1)] = 0
    CudaFill(modules).clear_ungrouped(out, ids, 5)
    assert torch.equal(out, expected)
    with pytest.raises(ShapeError, match="ids"):
        CudaFill(modules).clear_ungrouped(out, ids[1:], 5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8])
@pytest.mark.parametrize("cols", [1, 7, 64, 333, 3000])
@pytest.mark.parametrize("gap", [0, 3])
def test_listed_rows_are_filled(
    modules: Callable[..., Any], cols: int, dtype: torch.dtype, gap: int
) -> None:
    fill = CudaFill(modules)
    memory = torch.full((200 * (cols + gap) + 5,), 85, dtype=dtype, device="cuda")
    for row in (None, torch.arange(cols, device="cuda").to(dtype)):
        expected = memory.clone()
        out, wanted = (
            each[gap : gap + 200 * (cols + gap)].view(200, cols + gap)[:, :cols]
            for each in (memory, expected)
        )
        ids = torch.full((1, 256), 7, dtype=torch.int32, device="cuda")
        ids[0, :4] = torch.tensor([199, -1, 200, 3])
        count = torch.tensor([4], dtype=torch.int32, device="cuda")
        fill.fill_rows(out, Index(ids, count), row)
        wanted[torch.tensor([199, 3])] = 0 if row is None else row
        assert torch.equal(memory, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("short", "long"), [(1, 8), (7, 8), (333, 336), (3001, 3008)])
def test_rows_are_padded_and_cropped(
    modules: Callable[..., Any], short: int, long: int, dtype: torch.dtype
) -> None:
    fill = CudaFill(modules)
    src = torch.randn(3, 50, short, device="cuda").to(dtype)
    padded = torch.full((3, 50, long), float("nan"), dtype=dtype, device="cuda")
    fill.pad_copy(src, padded)
    assert torch.equal(padded[..., :short], src) and not padded[..., short:].any()
    back = torch.full_like(src, float("nan"))
    fill.pad_copy(padded, back)
    assert torch.equal(back, src)
    with pytest.raises(ShapeError, match="leading extents"):
        fill.pad_copy(src[0], padded)
