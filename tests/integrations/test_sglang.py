"""HiCache's store for SGLang, tested without SGLang: the contract of interface v1, over pools of all layouts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hicache.backends.base import Direction
from hicache.errors import ConfigError, InvalidInput
from hicache.frame import FrameCodec
from hicache.integrations.sglang.pages import LAYOUTS, HostPages
from hicache.integrations.sglang.storage import HostPoolStorage
from tests.integrations.host_pools import (
    ENGINE,
    HEAD_DIM,
    HEADS,
    LAYERS,
    PAGE_SIZE,
    HostPool,
    Ranks,
    files,
    keys,
    open_storage,
)

POOLS = [(layout, is_mla) for layout in LAYOUTS for is_mla in (False, True) if (layout, is_mla) != ("page_head", True)]
Open = Callable[..., HostPoolStorage]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Open the store of an engine over files, as `register_mem_pool_host` does."""
    made: list[HostPoolStorage] = []

    def open_store(pool: Any, *, capacity: int | None = None, **identity: Any) -> HostPoolStorage:
        made.append(open_storage({"kv": pool}, files(tmp_path, capacity=capacity), **identity))
        return made[-1]

    yield open_store
    for one in made:
        one.close()


# Pages are read into the right places


@pytest.mark.parametrize(("layout", "is_mla"), POOLS)
def test_pages_stored_by_one_engine_are_read_by_another(opened: Open, layout: str, is_mla: bool) -> None:
    first, second = HostPool(layout, is_mla=is_mla), HostPool(layout, is_mla=is_mla)
    first.fill()
    assert opened(first).write(keys(4), first.indices(3, 1, 7, 2), []) == [True] * 4
    store = opened(second)
    assert store.lookup(keys(6)) == 4
    assert store.read(keys(4), second.indices(0, 5, 4, 9)) == [True] * 4
    for source, target in ((3, 0), (1, 5), (7, 4), (2, 9)):
        assert torch.equal(second.page(target), first.page(source))
    for untouched in set(range(16)) - {0, 5, 4, 9}:
        assert not second.page(untouched).any()
    assert store.clear() == 4 and store.lookup(keys(4)) == 0


def test_a_pool_with_separate_tensors_for_k_and_v_is_served(opened: Open) -> None:
    """SGLang has such pools if K and V have different lengths."""

    class Asymmetric(HostPool):
        def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
            starts = indices.tolist()[:: self.page_size]
            rows = [(tensor, tensor[0].nbytes) for tensor in self.kv_buffer]
            parts = [tensor.data_ptr() + start * row for start in starts for tensor, row in rows]
            return parts, [row * self.page_size for _ in starts for _, row in rows]

    pool = Asymmetric("page_first")
    pool.kv_buffer = (torch.rand(pool.size, LAYERS, HEADS, HEAD_DIM), torch.rand(pool.size, LAYERS, HEADS, 3))
    store, before = opened(pool), [tensor.clone() for tensor in pool.kv_buffer]
    assert store.write(keys(2), pool.indices(1, 2), []) == [True, True]
    for tensor in pool.kv_buffer:
        tensor.zero_()
    assert store.read(keys(2), pool.indices(1, 2)) == [True, True]
    for tensor, old in zip(pool.kv_buffer, before, strict=True):
        assert torch.equal(tensor[PAGE_SIZE : 3 * PAGE_SIZE], old[PAGE_SIZE : 3 * PAGE_SIZE])
        assert not tensor[3 * PAGE_SIZE :].any()


def test_a_page_overwritten_in_memory_is_stored_with_its_new_bytes(opened: Open) -> None:
    pool = HostPool("page_first")
    store = opened(pool)
    for seed, chain in enumerate("ab"):
        pool.fill(seed)
        store.write(keys(1, chain), pool.indices(1), [])
    written = pool.page(1)
    assert store.read(keys(1, "b"), pool.indices(2)) == [True]
    assert torch.equal(pool.page(2), written)


def test_pages_are_written_and_read_without_a_copy(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: FrameCodec) -> memoryview:
        raise AssertionError("a page was copied through a frame")

    monkeypatch.setattr(FrameCodec, "scratch_frame", refuse)
    pool = HostPool("layer_first")
    store = opened(pool)
    assert store.write(keys(2), pool.indices(0, 1), []) == [True, True]
    assert store.read(keys(2), pool.indices(2, 3)) == [True, True]


# Pages are copied for an engine that does not transfer them in place


def flat(pool: HostPool, number: int) -> torch.Tensor:
    return pool.page(number).flatten()


@pytest.mark.parametrize(("layout", "is_mla"), POOLS)
def test_pages_written_as_tensors_are_read_in_place_and_the_other_way_round(
    opened: Open, layout: str, is_mla: bool
) -> None:
    first, second = HostPool(layout, is_mla=is_mla), HostPool(layout, is_mla=is_mla)
    first.fill()
    one, two = opened(first), opened(second)
    assert one.write_flat(keys(3), [flat(first, page) for page in (3, 1, 7)])
    assert two.read(keys(3), second.indices(0, 5, 4)) == [True] * 3
    assert all(torch.equal(second.page(target), first.page(source)) for source, target in ((3, 0), (1, 5), (7, 4)))
    assert one.write(keys(2, "b"), first.indices(8, 9), []) == [True] * 2
    target = torch.zeros_like(flat(first, 0))
    found = two.read_flat(keys(3, "b"), [target, None, None])
    assert found[0] is target and torch.equal(target, flat(first, 8)) and found[2] is None
    assert found[1] is not None and found[1].dtype is first.dtype and torch.equal(found[1], flat(first, 9))


def test_a_damaged_page_and_one_of_a_closed_or_stale_store_do_not_arrive(opened: Open, tmp_path: Path) -> None:
    current = True
    pool = HostPool("page_first")
    pool.fill()
    store = opened(pool, is_current=lambda: current)
    pages = [flat(pool, number) for number in range(3)]
    assert store.write_flat(keys(3), pages)
    (file,) = (tmp_path / "pages").rglob(keys(3)[1])
    data = bytearray(file.read_bytes())
    data[300] ^= 1
    file.write_bytes(data)
    assert [page is None for page in store.read_flat(keys(3), [None] * 3)] == [False, True, False]
    current = False
    assert store.read_flat(keys(1), [None]) == [None] and not store.write_flat(keys(1), pages[:1])
    closed = opened(pool)
    closed.close()
    assert closed.read_flat(keys(1), [None]) == [None] and not closed.write_flat(keys(1), pages[:1])


@pytest.mark.parametrize("bad", [
    None, 4096, [1.0], torch.zeros(PAGE_SIZE * LAYERS * HEADS * HEAD_DIM), torch.zeros(2, PAGE_SIZE * 24).t(),
    torch.zeros(2 * PAGE_SIZE * LAYERS * HEADS * HEAD_DIM, device="meta"),
], ids=["none", "address", "list", "half", "not contiguous", "meta"])
def test_anything_but_the_tensor_of_one_page_is_rejected_and_nothing_is_stored(opened: Open, bad: Any) -> None:
    store, good = opened(HostPool("page_first")), torch.zeros(2 * PAGE_SIZE * LAYERS * HEADS * HEAD_DIM)
    with pytest.raises(InvalidInput):
        store.write_flat(keys(2), [good, bad])
    with pytest.raises(InvalidInput):
        store.write_flat(keys(2), [good])
    if bad is not None:
        with pytest.raises(InvalidInput):
            store.read_flat(keys(1), [bad])
    assert store.lookup(keys(2)) == 0


# Missing pages are reported page by page


def test_a_read_reports_each_page(opened: Open, tmp_path: Path) -> None:
    pool = HostPool("page_first")
    pool.fill()
    store = opened(pool)
    wanted = keys(5)
    store.write([wanted[0], wanted[1], wanted[3]], pool.indices(0, 1, 3), [])
    assert store.lookup(wanted) == 2
    (file,) = (tmp_path / "pages").rglob(wanted[1])
    data = bytearray(file.read_bytes())
    data[300] ^= 1
    file.write_bytes(data)
    assert store.read(wanted, pool.indices(8, 9, 10, 11, 12)) == [True, False, False, True, False]
    assert torch.equal(pool.page(8), pool.page(0))


def test_a_full_store_reports_how_many_pages_of_a_prompt_it_stored(opened: Open) -> None:
    pool = HostPool("page_first")
    store = opened(pool, capacity=3 * 4096)
    stored = store.write(keys(8), pool.indices(*range(8)), [])
    assert stored == sorted(stored, reverse=True) and 0 < sum(stored) < 8
    assert store.lookup(keys(8)) == sum(stored)


def test_the_pages_before_a_batch_outlive_the_batch(opened: Open) -> None:
    """The parent comes from SGLang's prefix keys. Without them the store treats each batch as a separate prompt."""
    wanted = keys(3)
    for prefix, expected in ((wanted[:1], 2), (None, 0)):
        pool = HostPool("page_first")
        store = opened(pool, capacity=3 * 4096, engine=replace(ENGINE, weights=str(prefix)))
        store.write(wanted[:1], pool.indices(0), [])
        store.write(wanted[1:], pool.indices(1, 2), prefix)
        store.write(keys(1, "another prompt"), pool.indices(3), [])
        assert store.lookup(wanted) == expected


def test_missing_prefix_keys_are_reported_once_with_the_flag(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    pool = HostPool("page_first")
    store = opened(pool)
    with caplog.at_level(logging.WARNING):
        store.write(keys(1), pool.indices(0), [])
        assert "hicache_storage_pass_prefix_keys" not in caplog.text
        for _ in range(2):
            store.write(keys(1), pool.indices(0), None)
    assert caplog.text.count("hicache_storage_pass_prefix_keys") == 1


def test_storage_is_not_used_after_a_possible_change_of_weights(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    current = True
    pool = HostPool("page_first")
    store = opened(pool, is_current=lambda: current)
    assert store.write(keys(2), pool.indices(0, 1), []) == [True, True]
    current = False
    assert store.lookup(keys(2)) == 0
    assert store.read(keys(2), pool.indices(0, 1)) == [False, False]
    assert store.write(keys(1, "b"), pool.indices(0), []) == [False]
    assert caplog.text.count("detach and attach") == 1
    current = True
    assert store.lookup(keys(2)) == 0  # the weights of pages computed in between are unknown


def test_storage_that_is_down_or_closed_is_a_miss(opened: Open) -> None:
    pool = HostPool("page_first")
    store = opened(pool)
    store.write(keys(2), pool.indices(0, 1), [])
    store.close()
    assert store.lookup(keys(2)) == 0
    assert store.read(keys(2), pool.indices(0, 1)) == [False, False]
    assert store.write(keys(2), pool.indices(0, 1), []) == [False, False]
    assert store._storage.statistics().skipped == {Direction.READ: 2, Direction.WRITE: 1}


def test_each_transfer_is_reported_once_to_sglangs_metrics(opened: Open) -> None:
    pool = HostPool("page_first")
    store = opened(pool)
    store.write(keys(2), pool.indices(0, 1), [])
    store.read(keys(3), pool.indices(0, 1, 2))
    store.read(keys(1, "missing"), pool.indices(0))
    assert [(one.is_read, one.pages) for one in store.take_transfers()] == [(False, 2), (True, 2)]
    assert store.take_transfers() == []


# Namespaces

CHANGES: dict[str, dict[str, Any]] = {
    "layout": {"pool": HostPool("page_first_direct")},
    "dtype": {"pool": HostPool("page_first", dtype=torch.float64)},
    "fp8 stored as bytes": {"engine": replace(ENGINE, kv_cache_dtype="fp8_e5m2")},
    "weights": {"engine": replace(ENGINE, weights="others")},
    "weight version": {"engine": replace(ENGINE, weight_version="2")},
    "overrides": {"engine": replace(ENGINE, overrides={"rope_theta": 1})},
    "scales": {"engine": replace(ENGINE, kv_scales="abc")},
    "quantisation": {"engine": replace(ENGINE, quantization="fp8")},
    "SGLang": {"engine": replace(ENGINE, version="0.6.0")},
    "tp": {"ranks": Ranks(tp_rank=1, tp_size=2)},
    "pp": {"ranks": Ranks(pp_rank=1, pp_size=2)},
    "cp": {"ranks": Ranks(attn_cp_rank=1, attn_cp_size=2)},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_engine_that_differs_finds_no_pages(opened: Open, change: dict[str, Any]) -> None:
    pool = HostPool("page_first")
    opened(pool).write(keys(2), pool.indices(0, 1), [])
    assert opened(**{"pool": pool, **change}).lookup(keys(2)) == 0
    assert opened(pool, engine=replace(ENGINE, label="another name")).lookup(keys(2)) == 2


def test_ranks_share_pages_for_mla_only(opened: Open) -> None:
    for is_mla, expected in ((True, 2), (False, 0)):
        pool = HostPool("page_first", is_mla=is_mla)
        opened(pool, ranks=Ranks(0, 2, is_mla_model=is_mla)).write(keys(2), pool.indices(0, 1), [])
        assert opened(pool, ranks=Ranks(1, 2, is_mla_model=is_mla)).lookup(keys(2)) == expected


# Errors


def changed(**fields: Any) -> HostPool:
    pool = HostPool("page_first")
    for name, value in fields.items():
        setattr(pool, name, value)
    return pool


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layout": "page_unified"}, "--hicache-mem-layout: 'page_unified'"),
        ({"page_size": 2048}, "--page-size: 2048"),
        ({"kv_buffer": None}, "does not keep its pages in tensors"),
        ({"kv_buffer": torch.zeros(4, 8).t()}, "does not keep its pages in tensors"),
    ],
)
def test_an_unsupported_pool_is_rejected_with_the_flag(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HostPages(changed(**fields))


def test_addresses_outside_the_pool_are_rejected() -> None:
    pool = HostPool("page_first")
    pages = HostPages(pool)
    with pytest.raises(InvalidInput, match="outside"):
        pages.views(pool.indices(16), 1)
    with pytest.raises(InvalidInput, match="7 host indices for 1 pages"):
        pages.views(torch.arange(7), 1)


@pytest.mark.parametrize("key", ["", "0" * 63, "g" * 64, "0" * 66])
def test_an_invalid_key_is_rejected_and_not_in_the_message(opened: Open, key: str) -> None:
    with pytest.raises(InvalidInput, match="64 hexadecimal digits") as raised:
        opened(HostPool("page_first")).lookup([key])
    assert not key or key not in str(raised.value)
