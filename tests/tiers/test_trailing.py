"""Trailing pools: slots come, are held and go as in a simple model; the copies of several pools are one."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from hicache.errors import CapacityError, InvalidInput, InvariantError
from hicache.geometry import KVGeometry, PageShape
from hicache.tiers import BlockPool, EngineBlocks, HostPool, HostWindow, KVPool, TrailingPool, create_copy_engine
from hicache.tiers.device import known_device
from hicache.tiers.trailing import PooledCopies
from hicache.types import PageIds
from tests.seeds import seeds

PAGES = 30
MAIN = KVGeometry(layers=2, heads=1, head_dim=8, page_size=4)
STATE_BYTES = 24


def ids(*pages: int) -> PageIds:
    return np.array(pages, dtype=np.int32)


def pool_of(slots: int, trailing_tokens: int = 5, device: torch.device | None = None) -> TrailingPool:
    states = torch.zeros(slots + 1, STATE_BYTES, dtype=torch.uint8, device=device)
    pool = TrailingPool("states", BlockPool(EngineBlocks([[states]], first=1)), trailing_tokens)
    pool.attach(MAIN.page_size, PAGES, MAIN.layers)
    return pool


def test_a_pool_needs_the_pages_of_its_tokens_and_one_more() -> None:
    assert pool_of(3).trailing_pages == 2  # 5 tokens are in 2 pages of 4
    with pytest.raises(CapacityError, match="2 slots, but a request needs 2"):
        pool_of(2)
    with pytest.raises(InvalidInput, match="trailing_tokens"):
        TrailingPool("states", BlockPool(EngineBlocks([[torch.zeros(4, 8)]])), 0)
    with pytest.raises(InvalidInput, match="pool"):
        TrailingPool("states", EngineBlocks([[torch.zeros(4, 8)]]), 1)  # type: ignore[arg-type]


def test_held_slots_stay_and_the_others_go_to_the_next_page_first_those_that_l2_can_fill_again() -> None:
    pool = pool_of(4)
    assert pool.hold(ids(1, 2, 3, 4))
    assert not pool.hold(ids(5))
    pool.release(ids(2, 3))
    pool.release(ids(4), on_host=True)
    assert pool.hold(ids(5))
    assert pool.slots(ids(4)) == 0
    assert pool.hold(ids(2))
    assert pool.hold(ids(6))
    assert pool.slots(ids(3)) == 0
    assert (pool.slots(ids(1, 2, 5, 6)) > 0).all()
    assert not pool.hold(ids(7))
    pool.check()


def test_a_page_that_is_freed_while_its_slot_is_held_is_an_error() -> None:
    pool = pool_of(4)
    pool.hold(ids(1))
    with pytest.raises(InvariantError, match="states: a page is freed"):
        pool.drop(ids(1))


def test_a_slot_awaits_its_copy_once() -> None:
    pool = pool_of(4)
    pool.hold(ids(1))
    pool.hold(ids(1, 2, 3), from_host=True)
    assert pool.take_awaited(ids(1, 2)).tolist() == [False, True]
    assert pool.take_awaited(ids(1, 2, 3)).tolist() == [False, False, True]


class _Model:
    """The slots of a pool as dictionaries. `used` has the number of the last use of each page with a slot."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.holds = Counter[int]()
        self.used: dict[int, int] = {}
        self.on_host: set[int] = set()
        self.uses = 0

    def hold(self, pages: list[int]) -> bool:
        lacking = [page for page in pages if page not in self.used]
        idle = [page for page in self.used if not self.holds[page] and page not in pages]
        missing = len(lacking) - (self.capacity - len(self.used))
        if missing > len(idle):
            return False
        idle.sort(key=lambda page: (page not in self.on_host, self.used[page]))
        for page in idle[: max(missing, 0)]:
            self.drop(page)
        for page in pages:
            self.uses += 1
            self.used[page] = self.uses
            self.holds[page] += 1
        self.on_host.difference_update(lacking)
        return True

    def drop(self, page: int) -> None:
        self.used.pop(page, None)
        self.on_host.discard(page)


@pytest.mark.parametrize("seed", seeds(20))
def test_slots_are_those_of_a_simple_model(seed: int) -> None:
    numbers = random.Random(seed)
    pool = pool_of(numbers.randint(3, 12))
    model = _Model(pool.pool.pages)
    held: list[list[int]] = []
    for _ in range(300):
        action = numbers.random()
        if action < 0.5 or not held:
            pages = numbers.sample(range(1, PAGES), numbers.randint(1, 4))
            expected = model.hold(pages)
            assert pool.hold(ids(*pages)) == expected
            if expected:
                held.append(pages)
        elif action < 0.9:
            pages = held.pop(numbers.randrange(len(held)))
            on_host = numbers.random() < 0.3
            pool.release(ids(*pages), on_host=on_host)
            model.holds.subtract(pages)
            model.on_host.update(pages if on_host else [])
        else:
            page = numbers.randrange(1, PAGES)
            if not model.holds[page]:
                pool.drop(ids(page))
                model.drop(page)
        assert {page for page in range(1, PAGES) if pool.slots(ids(page))[0]} == model.used.keys()
        assert pool.holds == model.holds.total()
        pool.check()


@pytest.mark.parametrize("present", [False, True], ids=["others without slots", "others with slots"])
def test_slots_and_holds_move_to_pages_with_the_same_content(present: bool) -> None:
    pool = pool_of(8)
    pool.hold(ids(1, 2))
    if present:
        pool.hold(ids(11, 12))
        pool.release(ids(11, 12))
    before = pool.slots(ids(1, 2)).tolist()
    pool.replace(ids(1, 2, 3), ids(11, 12, 13))
    assert (pool.slots(ids(11, 12)).tolist() == before) != present
    assert pool.holds == 2
    pool.drop(ids(1, 2))  # the holds have moved
    pool.release(ids(11, 12))
    assert pool.holds == 0
    pool.check()


CUDA = pytest.param(
    "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)


@pytest.mark.parametrize("name", ["cpu", CUDA])
def test_the_copies_of_several_pools_are_one_copy_with_layers_numbered_through(name: str) -> None:
    device = known_device(name)
    trailing = pool_of(6, device=device)
    pin = device if device.type == "cuda" else None
    host = HostPool(PageShape(MAIN.page_size, (*MAIN.shape.pieces, *trailing.pieces)), 6, pin=pin)
    l1 = torch.zeros(2, PAGES, MAIN.layer_bytes, dtype=torch.uint8, device=device)
    main = KVPool(MAIN, EngineBlocks([[layer] for layer in l1], first=1))
    state = trailing.pool.blocks.layers[0][0]
    copies = PooledCopies(
        create_copy_engine(main.blocks, HostWindow(host, 0, 2)),
        [(trailing, create_copy_engine(trailing.pool.blocks, HostWindow(host, 2, 1)))],
    )
    trailing.hold(ids(7, 8))
    slots = trailing.slots(ids(7, 8)).tolist()
    l1[:, 7], l1[:, 8], state[slots[0]], state[slots[1]] = 17, 18, 27, 28
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert copies.backup(ids(7, 8), ids(2, 5)).wait(10.0)

    def part(page: int, piece: int) -> set[int]:
        return set(host.buffer[page, host.piece_slice(piece)].tolist())

    assert [part(2, piece) for piece in range(3)] == [{17}, {17}, {27}]
    assert [part(5, piece) for piece in range(3)] == [{18}, {18}, {28}]
    trailing.hold(ids(9), from_host=True)
    transfer = copies.load(ids(2, 5), ids(9, -9))  # page 9 from frame 2, and its slot from frame 5
    for layer in range(3):
        transfer.wait_layer(layer)
    assert (l1[:, 9] == 17).all()
    assert (state[trailing.slots(ids(9))[0]] == 28).all()
    assert transfer.wait(10.0)
    assert transfer.error is None
    assert transfer.seconds is not None
    assert copies.close(10.0)
