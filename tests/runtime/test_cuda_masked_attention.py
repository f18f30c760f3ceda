"""Attention by a mask on a GPU: its lists and its product, run by a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pit_tvm.errors import ScheduleError, ShapeError
from pit_tvm.reference import attention as reference
from pit_tvm.runtime import cuda_masked_attention
from pit_tvm.runtime.cuda_head_rows import fits
from pit_tvm.runtime.cuda_listed_mask import tiled_shape
from pit_tvm.runtime.kernel_cache import KernelCache
from pit_tvm.schedules.cuda_masked_attention import AttentionTile, masked_attention
from tests.runtime.cuda_emulation import Emulator
from tests.runtime.emulated_attention import EmulatedAttention, counted, random_mask
from tests.schedules.cuda_text import cuda_text


@pytest.fixture(scope="module")
def attends(emulator: Emulator, cache: KernelCache) -> dict[str, EmulatedAttention]:
    """The class, on numpy's memory, by architectures: warps multiply alone, or as a group."""
    return {arch: EmulatedAttention(cache, emulator, arch) for arch in ("sm_80", "sm_90a")}


@pytest.fixture(scope="module")
def attend(attends: dict[str, EmulatedAttention]) -> EmulatedAttention:
    """That of Hopper."""
    return attends["sm_90a"]


def _listed(attend: EmulatedAttention, mask: np.ndarray, queries: int) -> list[list[set[int]]]:
    """Of each plane and query the keys that its tile's list lets it see."""
    lists, _ = attend.lists.of_queries(torch.from_numpy(mask), (*mask.shape[:2], queries))
    counts = counted(lists)
    ordered = lists.order.numpy()
    rows = ordered if lists.ordered else np.arange(ordered.shape[1])[None]
    planes, tiles = counts.shape
    seen: list[list[set[int]]] = [[set() for _ in range(queries)] for _ in range(planes)]
    all_ids, all_bits = (each.numpy() for each in (lists.ids, lists.bits))
    for plane, tile in np.ndindex(planes, tiles):
        count = counts[plane, tile]
        filled = -(-count // 64) * 64
        ids, bits = all_ids[plane, tile], all_bits[plane, tile]
        assert len(set(ids[:count])) == count
        assert not bits[:, count:filled].any()
        words = np.ascontiguousarray(bits[:, :count].T).view(np.uint8)
        own = np.unpackbits(words, axis=1, bitorder="little").astype(bool)
        assert own.any(axis=1).all()
        for place in range(64):
            row = int(rows[min(plane, len(rows) - 1), tile * 64 + place])
            if 0 <= row < queries:
                seen[plane][row] |= set(ids[:count][own[:, place]].tolist())
            elif mask.shape[2] > 1:
                assert not own[:, place].any()
    return seen


@pytest.mark.parametrize(
    "shape",
    [
        *((2, 1, 100, 1040), (1, 3, 70, 37), (1, 1, 64, 5000), (1, 1, 1030, 16), (2, 2, 1, 5001)),
        (1, 1, 70, 9000),  # three CTAs share a tile
    ],
)
def test_lists_name_what_each_query_sees(
    attend: EmulatedAttention, rng: np.random.Generator, shape: tuple[int, ...]
) -> None:
    mask = random_mask(rng, shape)
    queries = shape[2] if shape[2] > 1 else 9
    found = _listed(attend, mask, queries)
    wanted = np.broadcast_to(mask, (*shape[:2], queries, shape[3])).reshape(-1, queries, shape[3])
    for plane, rows in enumerate(found):
        assert rows == [set(np.flatnonzero(row).tolist()) for row in wanted[plane]]


def test_queries_that_see_many_keys_share_tiles(
    attend: EmulatedAttention, rng: np.random.Generator
) -> None:
    mask = np.zeros((1, 1, 300, 640), bool)
    mask[..., :40] = True
    many = rng.permutation(300)[:50]
    mask[:, :, many] = True
    lists, _ = attend.lists.of_queries(torch.from_numpy(mask), (1, 1, 300))
    assert counted(lists)[0].tolist() == [640, 40, 40, 40, 40]


@pytest.mark.parametrize(
    ("arch", "shape", "heads", "widths", "planes"),
    [
        ("sm_90a", (2, 4, 70, 130), 2, (64, 64), (2, 1)),
        ("sm_80", (1, 2, 130, 300), 2, (40, 56), (1, 2)),
        ("sm_90a", (1, 1, 64, 70), 1, (136, 72), (1, 1)),
        ("sm_90a", (1, 2, 70, 300), 1, (128, 120), (1, 1)),  # one slot of values
        ("sm_90a", (1, 1, 64, 200), 1, (256, 248), (1, 1)),  # and of keys
        ("sm_80", (1, 1, 20, 200), 1, (192, 200), (1, 1)),
        ("sm_80", (2, 2, 1, 90), 2, (33, 7), (2, 2)),
        ("sm_90a", (3, 6, 1, 700), 2, (64, 64), (3, 1)),  # heads of a query share tiles
        ("sm_80", (1, 40, 1, 900), 1, (33, 40), (1, 1)),
        ("sm_90a", (2, 14, 30, 200), 2, (64, 64), (2, 1)),  # nine queries of seven heads
        ("sm_80", (1, 128, 3, 150), 1, (64, 64), (1, 1)),  # one query of half the heads
    ],
)
def test_agrees_with_the_reference(
    attends: dict[str, EmulatedAttention],
    rng: np.random.Generator,
    arch: str,
    shape: tuple[int, int, int, int],
    heads: int,
    widths: tuple[int, int],
    planes: tuple[int, int],
) -> None:
    batch, all_heads, queries, keys = shape
    mask = random_mask(rng, (*planes, queries, keys))
    # Heads side by side, and one behind the other.
    q = rng.standard_normal((batch, queries, all_heads, widths[0])).astype(np.float16)
    rising = np.linspace(0.3, 2, keys)[:, None]  # later scores are larger
    k = (rising * rng.standard_normal((batch, heads, keys, widths[0]))).astype(np.float16)
    v = rng.standard_normal((batch, heads, keys, widths[1])).astype(np.float16)
    unseen = ~mask.any(axis=(0, 1, 2))
    k[..., unseen, :], v[..., unseen, :] = np.nan, np.inf  # nobody reads them
    query = torch.from_numpy(q).transpose(1, 2)
    out = torch.full((batch, queries, all_heads, widths[1]), torch.nan, dtype=torch.float16)
    given = [torch.from_numpy(one.copy()) for one in (k, v, mask)]
    attends[arch].by_mask(query, *given, 0.3, out.transpose(1, 2))
    k[..., unseen, :], v[..., unseen, :] = 0, 0
    wanted = reference.masked_attention(query.numpy(), k, v, mask, 0.3)
    np.testing.assert_allclose(out.transpose(1, 2).numpy(), wanted, atol=4e-3)


@pytest.mark.parametrize("heads", [20, 65])  # of one tile, and more than that
def test_lists_of_single_queries_serve_heads_that_share_keys(
    attend: EmulatedAttention, rng: np.random.Generator, heads: int
) -> None:
    q, k, v = (
        rng.standard_normal((1, own, rows, 64)).astype(np.float16)
        for own, rows in ((heads, 1), (1, 150), (1, 150))
    )
    mask = rng.random((1, 1, 1, 150)) < 0.3
    out = torch.full((1, heads, 1, 64), torch.nan, dtype=torch.float16)
    lists, _ = attend.lists.of_queries(torch.from_numpy(mask), (1, heads, 1))
    attend(*map(torch.from_numpy, (q, k, v)), lists, 0.125, out)
    wanted = reference.masked_attention(q, k, v, mask, 0.125)
    np.testing.assert_allclose(out.numpy(), wanted, atol=4e-3)


@pytest.mark.parametrize("inner", ["queries", "heads"])  # what lies side by side
@pytest.mark.parametrize("rows", [1, 5])  # of the mask
def test_few_queries_of_heads_that_share_keys_are_one_tile(
    attend: EmulatedAttention, rng: np.random.Generator, inner: str, rows: int
) -> None:
    k, v = (torch.from_numpy(rng.standard_normal((2, 2, 300, 64))).half() for _ in "kv")
    shape = (2, 5, 8, 64) if inner == "heads" else (2, 8, 5, 64)
    q = torch.from_numpy(rng.standard_normal(shape)).half()
    out = torch.full(shape, torch.nan, dtype=torch.float16)
    if inner == "heads":
        q, out = q.transpose(1, 2), out.transpose(1, 2)
    mask = torch.from_numpy(rng.random((2, 1, rows, 300)) < 0.1)
    mask[0, :, 0] = False
    tiled = tiled_shape((*q.shape[:3], 300), 2, mask.shape[:3])
    lists, _ = attend.lists.of_queries(mask, tiled)
    assert lists.tiled(q.shape[:3], 2) == tiled == (2, 2, 5, 4) and lists.work.shape[0] == 2
    attend(q, k, v, lists, 0.125, out)
    wanted = reference.masked_attention(*(one.numpy() for one in (q, k, v, mask)), 0.125)
    np.testing.assert_allclose(out.numpy(), wanted, atol=4e-3)
    if rows > 1:
        with pytest.raises(ShapeError, match="listed for 4 heads of keys, got one of 5 rows"):
            lists.tiled(q.shape[:3], 4)


def test_missing_numbers_spread_to_who_sees_them(
    attend: EmulatedAttention, rng: np.random.Generator
) -> None:
    q, k, v = (rng.standard_normal((1, 1, 4, 64)).astype(np.float16) for _ in range(3))
    k[0, 0, 1, 0] = np.nan
    mask = np.eye(4, dtype=bool)[None, None]
    out = torch.full((1, 1, 4, 64), 7.0, dtype=torch.float16)
    attend.by_mask(*map(torch.from_numpy, (q, k, v, mask)), 1.0, out)
    assert torch.isnan(out[0, 0, 1]).all()
    np.testing.assert_allclose(out[0, 0, [0, 2, 3]].numpy(), v[0, 0, [0, 2, 3]], atol=1e-3)


def test_no_keys_give_zeros(attend: EmulatedAttention) -> None:
    q, none = torch.ones((1, 1, 3, 8), dtype=torch.float16), torch.ones((1, 1, 0, 8)).half()
    out = torch.full((1, 1, 3, 8), torch.nan, dtype=torch.float16)
    attend.by_mask(q, none, none, torch.ones((1, 1, 3, 0), dtype=torch.bool), 1.0, out)
    assert not out.any()


def test_long_lists_are_computed_in_parts(
    attend: EmulatedAttention, rng: np.random.Generator
) -> None:
    mask = rng.random((1, 2, 130, 800)) < 0.01
    mask[:, :, rng.permutation(130)[:9]] = True  # a tile with many keys, and others with few
    q, k, v = (rng.standard_normal((1, 2, n, 64)).astype(np.float16) for n in (130, 800, 800))
    out = torch.full((1, 2, 130, 64), torch.nan, dtype=torch.float16)
    given = [torch.from_numpy(one) for one in (q, k, v, mask)]
    lists, _ = attend.lists.of_queries(given[3], (1, 2, 130))
    counts, slots = counted(lists), lists.slots(3)
    for plane, work in enumerate(lists.work.numpy()):
        steps = -(-counts[plane] // 64)
        alive = work[work[:, 0] >= 0]
        for number, whole in enumerate(steps):
            mine = alive[alive[:, 0] == number]
            assert (mine[:, 4] == np.arange(len(mine))).all() and (mine[:, 5] == len(mine)).all()
            assert mine[0, 1] == 0 and (mine[1:, 1] == mine[:-1, 2]).all()
            assert mine[-1, 2] == whole and ((mine[:, 3] >= 0) == (len(mine) > 1)).all()
        cut = alive[alive[:, 3] >= 0]
        assert len(cut) and len(set(cut[:, 3] + cut[:, 4])) == len(cut) <= slots
    for _ in range(2):  # counters are as they were
        attend.by_mask(*given, 0.125, out)
        wanted = reference.masked_attention(q, k, v, mask, 0.125)
        np.testing.assert_allclose(out.numpy(), wanted, atol=4e-3)
        out.fill_(torch.nan)


@pytest.mark.parametrize("shared", [3, 20, 40])  # parts are added up by four, two, one at once
def test_a_long_list_of_single_queries_is_computed_in_parts(
    attend: EmulatedAttention, rng: np.random.Generator, shared: int
) -> None:
    mask = rng.random((2, 1, 1, 1000)) < 0.9
    mask[1, ..., 100:] = False  # one long list, and one that stays whole
    q, k, v = (
        rng.standard_normal((2, own, rows, 64)).astype(np.float16)
        for own, rows in ((2 * shared, 1), (2, 1000), (2, 1000))
    )
    out = torch.full((2, 2 * shared, 1, 64), torch.nan, dtype=torch.float16)
    given = [torch.from_numpy(one) for one in (q, k, v, mask)]
    lists, _ = attend.lists.of_queries(given[3], (2, 2, 1, shared))
    parts = lists.work.numpy()[..., 5] * (lists.work.numpy()[..., 0] >= 0)
    assert parts[0].max() > 2 and parts[1].max() == 1
    attend.by_mask(*given, 0.125, out)
    wanted = reference.masked_attention(q, k, v, mask, 0.125)
    np.testing.assert_allclose(out.numpy(), wanted, atol=4e-3)


@pytest.mark.parametrize(
    ("planes", "heads", "steps", "parts"),
    [
        (1, 8, 512, 32),  # 256 of 264 that run at once
        (16, 8, 64, 2),
        (1, 1, 512, 47),  # to add up more would take longer
        (10, 128, 64, 1),  # many rounds of CTAs anyway
        (1, 8, 2, 1),
    ],
)
def test_parts_of_single_lists_run_at_once(
    attend: EmulatedAttention, planes: int, heads: int, steps: int, parts: int
) -> None:
    slots = 66
    count = torch.full((planes, 1), steps * 64, dtype=torch.int32)
    work = torch.full((planes, 1 + slots, 6), 2**30, dtype=torch.int32)
    attend.lists.kernel("deal")(count, 1, 1, planes * heads, 4, slots, work)
    alive = work[..., 0] >= 0
    assert (alive.sum(dim=1) == parts).all() and (work[alive][:, 5] == parts).all()
    length = (work[..., 2] - work[..., 1])[alive]
    assert length.max() - length.min() <= 1 and length.sum() == planes * steps


def test_refuses_wide_heads(attend: EmulatedAttention) -> None:
    q = torch.ones((1, 1, 3, 264), dtype=torch.float16)
    with pytest.raises(ShapeError, match="at most 256"):
        attend.by_mask(
            q, q, q, torch.ones((1, 1, 3, 3), dtype=torch.bool), 1.0, torch.empty_like(q)
        )


@pytest.mark.parametrize("shape", [(1, 1, 2**18, 2**18), (2**10, 1, 1, 2**21)])
def test_refuses_masks_whose_lists_no_kernel_can_count(
    attend: EmulatedAttention, shape: tuple[int, ...]
) -> None:
    one = torch.zeros((1, 1, 1, 1), dtype=torch.float16)
    q = one.expand(shape[0], 1, shape[2], 64)
    mask = torch.zeros((1, 1, 1, 1), dtype=torch.bool).expand(shape)
    k = one.expand(shape[0], 1, shape[3], 64)
    with pytest.raises(ShapeError, match="mask: expected lists"):
        attend.by_mask(q, k, k, mask, 1.0, q)


@pytest.mark.parametrize(
    "tile",
    [
        AttentionTile("float32", 64, 64, False),
        AttentionTile("float16", 32, 64, False),
        AttentionTile("float16", 64, 320, False),
    ],
)
def test_refuses_tiles_that_cannot_be_built(tile: AttentionTile) -> None:
    with pytest.raises(ScheduleError, match="masked_attention"):
        masked_attention(tile)


def test_kernels_overlap_and_never_wait_for_the_host() -> None:
    for grouped, product, ctas in ((False, "mma.sync", 3), (True, "wgmma.mma_async", 4)):
        text = cuda_text(masked_attention(AttentionTile("bfloat16", 64, 64, grouped)))
        assert "griddepcontrol.wait" in text and product in text
        assert f"__launch_bounds__(128, {ctas})" in text


@pytest.mark.parametrize(
    ("widths", "slots", "ctas"),
    [
        ((64, 64), (2, 2), 4),
        ((128, 128), (2, 1), 3),
        ((192, 128), (2, 2), 2),
        ((192, 192), (2, 1), 2),
        ((256, 256), (1, 1), 2),
    ],
)
def test_slots_leave_room_for_other_ctas(
    widths: tuple[int, int], slots: tuple[int, int], ctas: int
) -> None:
    tile = AttentionTile("bfloat16", *widths, grouped=True)
    assert (tile.slots, tile.ctas) == (slots, ctas)


@pytest.mark.parametrize(
    ("shape", "kv_heads", "planes", "tiled"),
    [
        ((2, 8, 5000, 5000), 8, (2, 1, 5000), (2, 8, 5000, 1)),
        ((2, 8, 5000, 5000), 2, (2, 1, 5000), (2, 2, 5000, 4)),
        ((2, 8, 5000, 5000), 2, (2, 8, 5000), (2, 8, 5000, 1)),  # each head sees its own keys
        ((2, 8, 5000, 5000), 2, (2, 1, 1), (2, 8, 5000, 1)),  # all queries see the same
        ((2, 8, 16, 5000), 2, (2, 1, 1), (2, 2, 16, 4)),  # and are one tile
        ((1, 40, 5000, 5000), 1, (1, 1, 5000), (1, 2, 5000, 20)),  # 40 would leave 24 rows empty
        ((1, 40, 1, 5000), 1, (1, 1, 1), (1, 1, 1, 40)),
        ((1, 128, 4096, 4096), 1, (1, 1, 4096), (1, 4, 4096, 32)),  # lists of 128 MB at most
        ((16, 128, 4096, 4096), 1, (16, 1, 4096), (16, 64, 4096, 2)),
        ((1, 71, 300, 300), 1, (1, 1, 300), (1, 71, 300, 1)),
        ((1, 8, 0, 10), 2, (1, 1, 0), (1, 8, 0, 1)),
    ],
)
def test_heads_that_see_the_same_share_tiles(
    shape: tuple[int, ...], kv_heads: int, planes: tuple[int, ...], tiled: tuple[int, ...]
) -> None:
    assert tiled_shape(shape, kv_heads, planes) == tiled


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_traces_how_queries_are_tiles(dynamic: bool) -> None:
    def tiled(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q.new_zeros(tiled_shape((*q.shape[:3], k.shape[2]), k.shape[1], (1, 1, q.shape[2])))

    torch._dynamo.reset()
    traced = torch.compile(tiled, fullgraph=True, dynamic=dynamic, backend="eager")
    for queries in (3, 300, 70):
        q, k = torch.zeros(2, 8, queries, 4), torch.zeros(2, 2, 90, 4)
        assert traced(q, k).shape == (2, 2, queries, 4)


@pytest.mark.parametrize("near", [1, 2**14, 2**24])
def test_heads_whose_ctas_run_side_by_side_change_nothing(
    attend: EmulatedAttention,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    near: int,
) -> None:
    monkeypatch.setattr(cuda_masked_attention, "_NEAR", near)
    q = rng.standard_normal((5, 3, 70, 64)).astype(np.float16)  # 15 do not come out even
    k, v = (rng.standard_normal((5, 3, 40, 64)).astype(np.float16) for _ in range(2))
    mask = random_mask(rng, (5, 3, 70, 40))
    out = torch.full(q.shape, torch.nan, dtype=torch.float16)
    attend.by_mask(*map(torch.from_numpy, (q, k, v, mask)), 0.125, out)
    wanted = reference.masked_attention(q, k, v, mask, 0.125)
    np.testing.assert_allclose(out.numpy(), wanted, atol=4e-3)


def test_scores_of_later_steps_may_be_larger_by_any_factor(
    attend: EmulatedAttention, rng: np.random.Generator
) -> None:
    q = rng.standard_normal((1, 1, 64, 64)).astype(np.float16)
    rising = np.repeat([1e-3, 1, 40, 0, 300], 64)[:, None]
    k = (rising * rng.standard_normal((320, 64))).astype(np.float16)[None, None]
    v = rng.standard_normal((1, 1, 320, 64)).astype(np.float16)
    mask = np.ones((1, 1, 64, 320), bool)
    mask[..., :20, :190] = False  # these see none of the first steps
    mask[..., 20:40, 100:] = False
    mask[..., 63, :] = False  # and this one none
    out = torch.full(q.shape, torch.nan, dtype=torch.float16)
    attend.by_mask(*map(torch.from_numpy, (q, k, v, mask)), 1.0, out)
    wanted = reference.masked_attention(q, k, v, mask, 1.0)
    np.testing.assert_allclose(out.numpy(), wanted, atol=4e-3)
    assert not out[..., 63, :].any()


def test_rows_that_kernels_cannot_count_are_copied() -> None:
    for apart, counted_in_pieces in ((2**33, False), (2**32, True)):
        rows = torch.empty_strided((1, 1, 3, 8), (0, 0, apart, 1), device="meta")
        assert fits(rows) == counted_in_pieces
