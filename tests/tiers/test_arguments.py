"""Each public call of the pools and token allocators rejects a wrong type with a typed error and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hicache.errors import InvalidInput
from hicache.geometry import KVGeometry
from hicache.tiers import (
    EngineBlocks,
    HostPool,
    HostWindow,
    PageAllocator,
    PagedTokenToKVPoolAllocator,
    RequestToTokenPool,
    TokenToKVPoolAllocator,
    create_copy_engine,
    create_device_pool,
    token_slots,
)

GEOMETRY = KVGeometry(layers=2, heads=1, head_dim=8, page_size=4)
COUNTS: list[Any] = [None, "2", -1, 1.0, math.nan, True, [1], 2**64]
PAGES: list[Any] = [None, 1, "1", [1], (1,), np.array([1]), np.array([1.0]), np.array([[1]], np.int32), torch.ones(1)]
SLOTS: list[Any] = [None, 4, [4], np.array([4]), torch.tensor(4), torch.tensor([4.0]), torch.tensor([True]),
                    torch.tensor([4j])]
DEVICES: list[Any] = [None, 1.5, "gpu", [], b"cpu"]
IDS = np.array([1], np.int32)
ONE, TWO = torch.tensor([1]), torch.tensor([4])


class Pools:
    """One of each, in use."""

    def __init__(self) -> None:
        self.pages = PageAllocator(8, first=1)
        self.host = HostPool(GEOMETRY, 4)
        self.rows = RequestToTokenPool(2, 16)
        self.paged = PagedTokenToKVPoolAllocator(self.pages, 4)
        self.tokens = TokenToKVPoolAllocator(PageAllocator(8, first=1))
        self.blocks = EngineBlocks([[torch.zeros(4, GEOMETRY.layer_bytes, dtype=torch.uint8)]] * GEOMETRY.layers)
        self.copies = create_copy_engine(self.blocks, HostWindow(self.host))
        drafts = self.paged.alloc_drafts(torch.tensor([3]), torch.tensor([6]), torch.tensor([6]), 3)
        assert drafts is not None
        self.drafts = drafts
        assert self.pages.alloc(2) is not None and self.host.alloc(2) is not None and self.rows.alloc(1) == [0]
        assert self.tokens.alloc(2) is not None
        self.rows.write(0, np.array([3], np.int32), 4)

    def image(self) -> tuple[object, ...]:
        self.pages.check()
        self.host.allocator.check()
        return (
            self.pages.free_pages, self.host.allocator.free_pages, self.host.buffer.tobytes(), self.rows.free_rows,
            self.rows.table.tolist(), self.tokens.available_tokens,
        )


Call = Callable[[Pools, Any], object]
CALLS: dict[str, tuple[Call, Sequence[Any]]] = {
    "PageAllocator capacity": (lambda pools, bad: PageAllocator(bad), COUNTS),
    "PageAllocator first": (lambda pools, bad: PageAllocator(4, first=bad), COUNTS),
    "alloc count": (lambda pools, bad: pools.pages.alloc(bad), COUNTS),
    "free pages": (lambda pools, bad: pools.pages.free(bad), PAGES),
    "HostPool shape": (lambda pools, bad: HostPool(bad, 4), [None, 4, "mha", [4]]),
    "HostPool pages": (lambda pools, bad: HostPool(GEOMETRY, bad), [*COUNTS, 0]),
    "HostPool pin": (lambda pools, bad: HostPool(GEOMETRY, 4, pin=bad), [True, "auto", 1]),
    "host alloc": (lambda pools, bad: pools.host.alloc(bad), COUNTS),
    "host free": (lambda pools, bad: pools.host.free(bad), PAGES),
    "host frame": (lambda pools, bad: pools.host.frame(bad), [*COUNTS, 4]),
    "host frames": (lambda pools, bad: pools.host.frames(bad), [*PAGES, np.array([4], np.int32)]),
    "host payload": (lambda pools, bad: pools.host.payload(bad), [*COUNTS, 4]),
    "host piece_slice first": (lambda pools, bad: pools.host.piece_slice(bad), [*COUNTS, 2]),
    "host piece_slice count": (lambda pools, bad: pools.host.piece_slice(1, bad), [*COUNTS, 0, 2]),
    "device geometry": (lambda pools, bad: create_device_pool(bad, 4), [None, 4, "mha", GEOMETRY.shape]),
    "device pages": (lambda pools, bad: create_device_pool(GEOMETRY, bad), [*COUNTS, 0]),
    "device device": (lambda pools, bad: create_device_pool(GEOMETRY, 4, bad), DEVICES),
    "rows requests": (lambda pools, bad: RequestToTokenPool(bad, 16), [*COUNTS, 0]),
    "rows context_tokens": (lambda pools, bad: RequestToTokenPool(2, bad), [*COUNTS, 0]),
    "rows device": (lambda pools, bad: RequestToTokenPool(2, 16, bad), DEVICES),
    "rows alloc": (lambda pools, bad: pools.rows.alloc(bad), COUNTS),
    "rows free": (lambda pools, bad: pools.rows.free(bad), [*COUNTS, 1, 2]),
    "rows write row": (lambda pools, bad: pools.rows.write(bad, np.array([1], np.int32), 4), [*COUNTS, 1, 2]),
    "rows write pages": (lambda pools, bad: pools.rows.write(0, bad, 4), PAGES),
    "rows write page_size": (lambda pools, bad: pools.rows.write(0, np.array([1], np.int32), bad), [*COUNTS, 0]),
    "rows write first_page": (
        lambda pools, bad: pools.rows.write(0, np.array([1], np.int32), 4, first_page=bad), COUNTS,
    ),
    "token_slots pages": (lambda pools, bad: token_slots(bad, 4), PAGES),
    "token_slots page_size": (lambda pools, bad: token_slots(np.array([1], np.int32), bad), [*COUNTS, 0]),
    "paged pages": (lambda pools, bad: PagedTokenToKVPoolAllocator(bad, 4), [None, 8, "pages", object()]),
    "paged page_size": (lambda pools, bad: PagedTokenToKVPoolAllocator(pools.pages, bad), [*COUNTS, 0]),
    "paged device": (lambda pools, bad: PagedTokenToKVPoolAllocator(pools.pages, 4, bad), DEVICES),
    "paged alloc": (lambda pools, bad: pools.paged.alloc(bad), [*COUNTS, 3]),
    "paged free": (lambda pools, bad: pools.paged.free(bad), SLOTS),
    "token alloc": (lambda pools, bad: pools.tokens.alloc(bad), COUNTS),
    "token free": (lambda pools, bad: pools.tokens.free(bad), SLOTS),
    "alloc_extend prefix_lens": (lambda pools, bad: pools.paged.alloc_extend(bad, TWO, ONE, 3), SLOTS),
    "alloc_extend seq_lens": (lambda pools, bad: pools.paged.alloc_extend(ONE, bad, ONE, 3), SLOTS),
    "alloc_extend last_loc": (lambda pools, bad: pools.paged.alloc_extend(ONE, TWO, bad, 3), SLOTS),
    "alloc_extend extend_tokens": (lambda pools, bad: pools.paged.alloc_extend(ONE, TWO, ONE, bad), COUNTS),
    "drafts keep": (lambda pools, bad: pools.drafts.keep(bad), [*SLOTS, torch.tensor([2]), torch.tensor([7])]),
    "alloc_decode seq_lens": (lambda pools, bad: pools.paged.alloc_decode(bad, ONE), [*SLOTS, torch.tensor([0])]),
    "EngineBlocks layers": (
        lambda pools, bad: EngineBlocks(bad), [None, 5, [], "kv", torch.ones(4, 4), {}, [torch.ones(4)]],
    ),
    "EngineBlocks first": (lambda pools, bad: EngineBlocks([[torch.ones(4)]], first=bad), [*COUNTS, 4]),
    "HostWindow host": (lambda pools, bad: HostWindow(bad), [None, 4, "pool"]),
    "HostWindow first_piece": (lambda pools, bad: HostWindow(pools.host, bad), [*COUNTS, 2]),
    "copies blocks": (lambda pools, bad: create_copy_engine(bad, HostWindow(pools.host)), [None, 4, [[torch.ones(4)]]]),
    "copies of another device": (
        lambda pools, bad: create_copy_engine(EngineBlocks([[bad], [bad]]), HostWindow(pools.host)),
        [torch.ones(4, GEOMETRY.layer_bytes, dtype=torch.uint8, device="meta")],
    ),
    "copies window": (lambda pools, bad: create_copy_engine(pools.blocks, bad), [None, 4, "window"]),
    "backup after": (lambda pools, bad: pools.copies.backup(IDS, IDS, after=bad), [5, "now", print]),
    "load after": (lambda pools, bad: pools.copies.load(IDS, IDS, after=bad), [5, "now", print]),
    "alloc_decode last_loc": (lambda pools, bad: pools.paged.alloc_decode(ONE, bad), SLOTS),
}


@pytest.mark.parametrize("name", CALLS, ids=lambda name: name.replace(" ", "-"))
def test_a_wrong_type_is_a_typed_error_and_changes_nothing(name: str) -> None:
    call, arguments = CALLS[name]
    pools = Pools()
    before = pools.image()
    for bad in arguments:
        with pytest.raises(InvalidInput):
            call(pools, bad)
        assert pools.image() == before, type(bad)


def test_an_unknown_layer_is_a_typed_error_without_a_wait() -> None:
    transfer = Pools().copies.load(IDS, IDS)
    assert transfer.wait(20)
    layers: list[Any] = [-1, GEOMETRY.layers, "0", None]
    for bad in layers:
        with pytest.raises(InvalidInput, match="layer"):
            transfer.wait_layer(bad)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusal of a machine without CUDA")
def test_pinned_memory_without_cuda_is_rejected_with_a_hint() -> None:
    for device in ("cuda", "cpu"):
        with pytest.raises(InvalidInput, match="not a CUDA device that torch sees"):
            HostPool(GEOMETRY, 4, pin=torch.device(device))


def test_the_image_shows_the_changes_of_a_call() -> None:
    """Negative control: calls that are not rejected are detected."""
    pools = Pools()
    images = [pools.image()]
    for call in (
        lambda: pools.pages.alloc(1),
        lambda: pools.host.alloc(1),
        lambda: pools.rows.write(0, np.array([5], np.int32), 4),
        lambda: pools.rows.free(0),
        lambda: pools.tokens.alloc(1),
    ):
        call()
        assert pools.image() not in images
        images.append(pools.image())


@pytest.mark.parametrize("two", [np.int64(2), np.uint8(2), np.int32(2)], ids=lambda value: type(value).__name__)
def test_integers_of_numpy_are_integers(two: Any) -> None:
    pages, host, rows = PageAllocator(two, first=two), HostPool(GEOMETRY, two), RequestToTokenPool(two, two * 8)
    assert type(pages.capacity) is int and type(host.pages) is int and host.capacity_bytes == 2 * host.frame_bytes
    taken = pages.alloc(two)
    assert taken is not None and taken.tolist() == [2, 3] and rows.alloc(two) == [0, 1]
    rows.write(two - two, taken, two, first_page=two)
    assert rows.table[0, :8].tolist() == [0, 0, 0, 0, 4, 5, 6, 7]
    rows.free(two // two)
    assert len(host.frame(two // two)) == host.frame_bytes
    paged = PagedTokenToKVPoolAllocator(PageAllocator(4, first=1), two)
    slots = paged.alloc(two)
    assert slots is not None and len(slots) == 2
