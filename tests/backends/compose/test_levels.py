"""Behaviour specific to levels: pages moving between levels, the cost of a failing level, random use by threads."""

from __future__ import annotations

import itertools
import random
import threading

import pytest

from hicache.backends.base import GetOutcome, SetOutcome, Usage
from hicache.backends.compose import Levels
from hicache.backends.compose.levels import LOOKUPS_MAX
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.frame import FrameHeader
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import (
    HIT,
    MISS,
    PRESENT,
    STORED,
    Subject,
    empty_frames,
    full_frames,
    holds,
    in_threads,
    load,
    make_keys,
    memory_subject,
    soon,
    store_chain,
)
from tests.seeds import rng, seeds
from tests.waiting import wait_for

from .._troubled import CODEC, Troubled
from ._parts import COPIES, OPENED, PAGE, named, settle, stores_of

REJECTED = SetOutcome.REJECTED


class World:
    """Memory levels; `first_pages` limits the size of the first."""

    def __init__(
        self, levels: int = 2, *, first_pages: int | None = None, promote: bool = True,
        copies: int | None = COPIES, clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        capacity = None if first_pages is None else first_pages * PAGE
        self.levels = [Troubled(capacity_bytes=capacity), *(Troubled() for _ in range(levels - 1))]
        self.stores = stores_of(self.levels)
        self.backend = Levels(CODEC, named(*self.stores), promote=promote, cascade_bytes_max=copies, clock=clock)
        OPENED.append(self.backend)
        self.store = memory_subject(self.backend, self.levels[0])

    def settle(self) -> None:
        settle(self.backend)

    def on(self, level: int, keys: list[bytes]) -> list[bool]:
        """Return which of the pages a level has."""
        return [self.levels[level].peek(CODEC.namespace, key) is not None for key in keys]

    def put_on(self, level: int, keys: list[bytes], parent: bytes | None = None) -> None:
        """Store pages only on one level, not through the composition."""
        store_chain(self.subject(level), keys, parent)

    def subject(self, level: int) -> Subject:
        """Return one level alone."""
        return memory_subject(self.stores[level], self.levels[level])


def test_a_stored_page_reaches_every_level_with_its_parent() -> None:
    world, keys = World(3), make_keys(4)
    assert store_chain(world.store, keys[1:], keys[0]) == [STORED] * 3
    world.settle()
    for level in range(3):
        assert world.on(level, keys) == [False, True, True, True]
        for before, key in itertools.pairwise(keys):
            raw = world.levels[level].peek(CODEC.namespace, key)
            assert raw is not None and raw == world.levels[0].peek(CODEC.namespace, key)
            header = FrameHeader.parse(raw)
            assert header is not None and header.parent_key == before


def test_a_run_is_copied_in_one_call_and_a_hole_ends_it() -> None:
    world, keys = World(), make_keys(6)
    world.put_on(0, [keys[2]])
    world.levels[1].gate.clear()
    store_chain(world.store, make_keys(1, "another"))  # keeps the thread busy until the others are queued
    assert store_chain(world.store, keys) == [STORED, STORED, PRESENT, STORED, STORED, STORED]
    world.levels[1].gate.set()
    world.settle()
    assert world.levels[1].called("set")[1:] == [tuple(keys[:2]), tuple(keys[3:])]
    assert [parent for verb, _, parent in world.levels[1].calls if verb == "set"][1:] == [None, keys[2]]


def test_a_page_found_below_is_read_and_promoted() -> None:
    world, keys = World(3), make_keys(4)
    world.put_on(2, keys)
    assert load(world.store, keys) == [HIT] * 4
    world.settle()
    assert world.on(0, keys) == world.on(1, keys) == [True] * 4
    assert load(world.store, keys) == [HIT] * 4
    for level in world.levels[1:]:
        assert level.called("get") == [tuple(keys)], "the copies read nothing, and the second read only the first level"
    assert world.backend.copies()["part-0"].copied == 4


def test_a_page_is_not_promoted_to_a_level_that_failed_to_read_it() -> None:
    """That level may have the page. The page that it misses is the control."""
    world, keys = World(), make_keys(2)
    world.put_on(1, keys)
    world.levels[0].fail_pages = set(keys[:1])
    assert load(world.store, keys) == [HIT] * 2
    world.settle()
    assert world.levels[0].called("set") == [(keys[1],)]


def test_a_damaged_page_that_a_failed_level_may_have_is_an_error() -> None:
    """The control: once the failed level answers, the page is corrupt. It is removed then."""
    world, keys = World(), make_keys(2)
    world.put_on(0, keys)
    for key in keys:
        world.levels[0].poke(CODEC.namespace, key, bytes(PAGE))
    world.levels[1].down = True
    assert load(world.store, keys[:1]) == [GetOutcome.ERROR]
    world.levels[1].down = False
    assert load(world.store, keys) == [MISS, GetOutcome.CORRUPT]


def test_a_promoted_page_keeps_its_parent_so_that_tails_leave_first() -> None:
    world, keys = World(first_pages=5), make_keys(5)
    world.put_on(1, keys)
    load(world.store, keys)
    world.settle()
    world.put_on(0, make_keys(2, "new"))
    assert world.on(0, keys) == [True] * 3 + [False] * 2
    world.levels[0].check()


def test_lower_levels_are_asked_only_for_missing_pages() -> None:
    world, keys = World(promote=False), make_keys(5)
    world.put_on(0, [keys[0], keys[3]])
    world.put_on(1, keys[:3])
    assert load(world.store, keys) == [HIT, HIT, HIT, HIT, MISS]
    assert world.levels[1].called("get") == [(keys[1], keys[2], keys[4])]
    world.settle()
    assert world.on(0, keys) == [True, False, False, True, False], "without promotion, pages stay on their level"


def test_a_damaged_page_is_served_from_below_and_repaired() -> None:
    world, keys = World(), make_keys(3)
    store_chain(world.store, keys)
    world.settle()
    world.levels[0].poke(CODEC.namespace, keys[1], b"x" * PAGE)
    assert load(world.store, keys) == [HIT] * 3
    world.settle()
    assert world.levels[0].peek(CODEC.namespace, keys[1]) == world.levels[1].peek(CODEC.namespace, keys[1])
    assert sum(world.stores[0].statistics().corrupt.values()) == 1


def test_a_lookup_follows_a_prefix_from_level_to_level_and_back() -> None:
    world, keys = World(), make_keys(8)
    world.put_on(0, keys[:3] + keys[5:7])
    world.put_on(1, keys[2:5])
    assert world.backend.batch_exists(keys, deadline=soon()) == 7
    assert world.levels[1].called("find")[0] == tuple(keys[3:]), "level 1 is asked from the first hole on"


def test_a_lookup_of_a_scattered_prefix_takes_a_limited_number_of_calls() -> None:
    world, keys = World(), make_keys(60)
    world.put_on(0, keys[::2])
    world.put_on(1, keys[1::2])
    assert world.backend.batch_exists(keys, deadline=soon()) == LOOKUPS_MAX
    assert sum(len(level.called("find")) for level in world.levels) == LOOKUPS_MAX


def test_a_lookup_asks_each_level_once_if_one_has_the_whole_prefix() -> None:
    world, keys = World(), make_keys(6)
    world.put_on(0, keys[:4])
    assert world.backend.batch_exists(keys, deadline=soon()) == 4
    assert [level.called("find") for level in world.levels] == [[tuple(keys)], [tuple(keys[4:])]]


def test_a_page_that_the_first_level_rejects_is_stored_on_the_next() -> None:
    world, keys = World(first_pages=3), make_keys(5)
    assert store_chain(world.store, keys) == [STORED] * 5
    assert world.on(1, keys)[3:] == [True, True], "within the call"
    assert ("set", tuple(keys[3:]), keys[2]) in world.levels[1].calls
    world.settle()
    assert world.on(0, keys) == [True] * 3 + [False] * 2
    assert world.on(1, keys) == [True] * 5
    assert world.backend.batch_exists(keys, deadline=soon()) == 5


def test_a_level_that_is_down_is_skipped_and_heals_by_itself() -> None:
    world, keys = World(), make_keys(4)
    store_chain(world.store, keys[:2])
    world.settle()
    world.levels[0].down = True
    assert world.backend.batch_exists(keys, deadline=soon()) == 2
    assert load(world.store, keys[:2]) == [HIT] * 2
    assert store_chain(world.store, keys[2:], keys[1]) == [STORED] * 2
    assert load(world.store, keys) == [HIT] * 4
    world.levels[0].down = False
    assert load(world.store, keys) == [HIT] * 4
    world.settle()
    assert world.on(0, keys) == [True] * 4, "promoted once the level works again"


def test_a_lower_level_that_is_down_costs_its_own_pages_only() -> None:
    world, keys = World(), make_keys(4)
    world.levels[1].down = True
    assert store_chain(world.store, keys[:3]) == [STORED] * 3
    world.settle()
    assert load(world.store, keys) == [HIT, HIT, HIT, GetOutcome.ERROR], "the last page may be on the failed level"
    assert world.backend.copies()["part-1"].failed == 3
    world.levels[1].down = False
    assert load(world.store, keys) == [HIT, HIT, HIT, MISS]


def test_a_hanging_level_is_abandoned_at_the_deadline() -> None:
    world, keys = World(), make_keys(2)
    world.put_on(1, keys)
    world.levels[0].hanging = True
    frames = empty_frames(CODEC, 2)
    deadline = soon(0.05)
    outcomes = world.backend.batch_get(keys, frames, deadline=deadline)
    assert outcomes == [GetOutcome.ERROR] * 2
    world.levels[0].released.set()


def test_all_levels_down_is_an_error_and_not_an_exception() -> None:
    world, keys = World(), make_keys(2)
    for level in world.levels:
        level.down = True
    assert world.backend.batch_exists(keys, deadline=soon()) == 0
    assert load(world.store, keys) == [GetOutcome.ERROR] * 2
    assert store_chain(world.store, keys) == [SetOutcome.ERROR] * 2
    assert world.backend.delete(keys, deadline=soon()) == 0


def test_copies_beyond_the_limit_are_dropped_and_counted() -> None:
    world, keys = World(copies=3 * PAGE), make_keys(8)
    world.levels[1].gate.clear()
    assert store_chain(world.store, keys) == [STORED] * 8
    assert world.backend.copies()["part-1"].waiting == 3
    world.levels[1].gate.set()
    world.settle()
    copies = world.backend.copies()["part-1"]
    assert (copies.copied, copies.dropped) == (3, 5)
    assert world.on(1, keys) == [True] * 3 + [False] * 5, "the head of the chain is kept"
    assert load(world.store, keys) == [HIT] * 8


def test_a_stored_page_is_read_back_from_its_level_when_its_copy_is_written() -> None:
    world, keys = World(3, first_pages=2), make_keys(4)
    world.levels[2].gate.clear()
    frames = full_frames(CODEC, keys)
    assert world.backend.batch_set(keys, frames, parent=None, deadline=soon()) == [STORED] * 4
    for frame in frames:
        frame[:] = b"\xee" * PAGE  # the caller may overwrite its frame
    world.levels[2].gate.set()
    world.settle()
    assert world.on(2, keys) == [True] * 4
    assert world.levels[0].called("get") == [tuple(keys[:2])] * 2, "for each of the levels below"
    assert world.levels[1].called("get") == [tuple(keys[2:])], "the pages that fell to the second level"
    assert load(world.subject(2), keys) == [HIT] * 4


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_a_page_lost_by_its_level_and_the_tail_after_it_are_not_copied(harm: str) -> None:
    world, keys = World(), make_keys(5)
    world.levels[1].gate.clear()
    store_chain(world.store, make_keys(1, "another"))  # keeps the thread busy until the page is damaged
    store_chain(world.store, keys)
    if harm == "gone":
        world.stores[0].delete(keys[2:3], deadline=soon())
    else:
        world.levels[0].poke(CODEC.namespace, keys[2], b"x" * PAGE)
    world.levels[1].gate.set()
    world.settle()
    assert world.on(1, keys) == [True, True, False, False, False]
    copies = world.backend.copies()["part-1"]
    assert (copies.copied, copies.failed) == (3, 3)


def test_a_page_that_its_level_evicts_before_the_copy_below_is_made_is_reported() -> None:
    world, keys, others, told = World(3, first_pages=4), make_keys(4), make_keys(3, "others"), list[bytes]()
    world.backend.watch_evictions(told.extend)
    for level in world.levels[1:]:
        level.gate.clear()
    store_chain(world.store, make_keys(1, "first"))  # keeps the threads busy
    store_chain(world.store, keys[:3])
    store_chain(world.store, others)
    evicted = [key for key in keys[:3] if world.on(0, [key]) == [False]]
    assert set(told) >= set(evicted) and len(evicted) >= 2
    for level in world.levels[1:]:
        level.gate.set()
    world.settle()
    everywhere = [any(world.on(level, [key])[0] for level in range(3)) for key in keys[:3]]
    assert everywhere == [key not in told for key in keys[:3]], "a page on no level was not reported"


def test_a_page_that_another_engine_evicts_before_the_copy_below_is_made_is_reported() -> None:
    world, keys, told = World(), make_keys(4), list[bytes]()
    world.backend.watch_evictions(told.extend)
    world.levels[1].gate.clear()
    store_chain(world.store, make_keys(1, "first"))  # keeps the thread busy
    store_chain(world.store, keys)
    world.stores[0].delete(keys[2:], deadline=soon())  # this engine is not told of it
    world.levels[1].gate.set()
    world.settle()
    assert world.on(1, keys) == [True, True, False, False]
    assert told == keys[2:]


@pytest.mark.parametrize("copies", [3 * PAGE, None])
def test_a_page_whose_copy_was_dropped_is_reported_when_its_level_evicts_it(copies: int | None) -> None:
    world, keys, told = World(first_pages=8, copies=copies), make_keys(8), list[bytes]()
    world.backend.watch_evictions(told.extend)
    world.levels[1].gate.clear()
    assert store_chain(world.store, keys) == [STORED] * 8
    world.levels[1].gate.set()
    world.settle()
    below = world.on(1, keys)
    assert below == [copies is not None] * 3 + [False] * 5
    store_chain(world.store, make_keys(8, "others"))
    assert told == [key for key, there in zip(keys, below, strict=True) if not there][::-1]


def test_a_deleted_page_does_not_come_back_from_the_queue() -> None:
    world, keys, others = World(), make_keys(4), make_keys(2, "other")
    world.levels[1].gate.clear()
    for chain in (make_keys(1, "in flight"), keys, others):
        store_chain(world.store, chain)
    assert world.backend.delete(keys[1:], deadline=soon()) == 3
    world.levels[1].gate.set()
    world.settle()
    assert world.on(0, keys) == [True, False, False, False]
    assert world.on(1, keys) == [False] * 4, "the copy of a run is dropped as a whole"
    assert world.on(1, others) == [True] * 2


def test_a_deletion_waits_for_the_copy_in_flight() -> None:
    clock, keys = ManualClock(), make_keys(2)
    world = World(clock=clock)
    world.levels[1].gate.clear()
    store_chain(world.store, keys)
    wait_for(lambda: world.levels[1].at_gate == 1)
    deleted = threading.Event()

    def delete() -> None:
        world.backend.delete(keys, deadline=soon())
        deleted.set()

    thread = threading.Thread(target=delete)
    thread.start()
    wait_for(lambda: bool(clock._waiting))
    assert not deleted.is_set()
    world.levels[1].gate.set()
    thread.join(30.0)
    assert world.on(0, keys) == world.on(1, keys) == [False, False]


def test_a_page_on_several_levels_counts_once() -> None:
    world, keys = World(3), make_keys(6)
    world.put_on(0, keys[1:3])
    world.put_on(1, keys[2:4])
    world.put_on(2, keys[2:5])
    assert world.backend.delete([*keys, keys[1]], deadline=soon()) == 4
    assert [store.usage().pages for store in world.stores] == [0, 0, 0]


def test_usage_is_that_of_the_fullest_level() -> None:
    world, keys = World(first_pages=2), make_keys(4)
    world.put_on(0, keys[:2])
    world.put_on(1, keys)
    assert world.backend.usage() == Usage(4, 4 * PAGE, None)


def test_a_copy_that_raises_is_counted_and_the_next_one_is_made() -> None:
    world, keys = World(), make_keys(2)
    below = world.levels[1]
    below.raises = RuntimeError("a bug")
    assert store_chain(world.store, keys[:1]) == [STORED]
    world.settle()
    below.raises = None
    assert store_chain(world.store, keys[1:], keys[0]) == [STORED]
    world.settle()
    assert [below.peek(CODEC.namespace, key) is not None for key in keys] == [False, True]
    copies = world.backend.copies()["part-1"]
    assert (copies.failed, copies.copied) == (1, 1)


def test_closing_writes_waiting_copies_and_then_closes_each_level_once() -> None:
    world, keys = World(), make_keys(5)
    world.levels[1].gate.clear()
    store_chain(world.store, keys)
    closer = threading.Thread(target=world.backend.close)
    closer.start()
    world.levels[1].gate.set()
    closer.join(30.0)
    world.backend.close()
    assert world.levels[1].held_at_close == set(keys)
    assert [level.closes for level in world.levels] == [1, 1]


def test_closing_abandons_a_hanging_level_and_counts_the_remaining_copies() -> None:
    world, keys = World(copies=6 * PAGE), make_keys(3)
    world.levels[1].hanging = True
    store_chain(world.store, keys[:1])
    for key in keys[1:]:
        store_chain(world.store, [key])
    world.backend.close()
    copies = world.backend.copies()["part-1"]
    assert copies.copied == 0 and copies.failed + copies.dropped == 3 and copies.waiting == 0


# Among threads


CHAINS = [make_keys(12, f"chain {number}") for number in range(4)]
ROUNDS = 120


def use(backend: Levels, parts: list[Troubled], dice: random.Random) -> None:
    """Call random verbs, and overwrite each frame as soon as its call has returned. Sometimes a part damages a page or
    is down for a moment."""
    for _ in range(ROUNDS):
        chain, part = dice.choice(CHAINS), dice.choice(parts)
        first = dice.randrange(12)
        keys = chain[first : first + dice.randrange(1, 8)]
        frames: list[memoryview] = []
        (action,) = dice.choices(["set", "get", "exists", "delete", "damage", "outage"], [8, 8, 1, 1, 1, 1])
        if action == "set":
            frames = full_frames(CODEC, keys)
            parent = chain[first - 1] if first else None
            outcomes = backend.batch_set(keys, frames, parent=parent, deadline=soon())
            assert all(type(outcome) is SetOutcome for outcome in outcomes)
        elif action == "get":
            frames = empty_frames(CODEC, len(keys))
            found = backend.batch_get(keys, frames, deadline=soon())
            for key, frame, outcome in zip(keys, frames, found, strict=True):
                assert outcome is not GetOutcome.HIT or holds(CODEC, key, frame), "a wrong page was served"
        elif action == "exists":
            assert 0 <= backend.batch_exists(keys, deadline=soon()) <= len(keys)
        elif action == "delete":
            assert 0 <= backend.delete(keys, deadline=soon()) <= len(keys)
        elif action == "outage":
            part.down = not part.down
        elif part.peek(CODEC.namespace, keys[0]) is not None:
            part.poke(CODEC.namespace, keys[0], bytes(PAGE))
        for frame in frames:
            frame[:] = b"\xee" * PAGE


@pytest.mark.usefixtures("threads_switch_often")
@pytest.mark.parametrize("seed", seeds(3))
def test_random_use_by_threads_serves_no_wrong_and_no_deleted_page(seed: int) -> None:
    parts = [Troubled(capacity_bytes=15 * PAGE), Troubled()]
    stores = stores_of(parts)
    backend = Levels(CODEC, named(*stores), cascade_bytes_max=9 * PAGE)
    in_threads(4, lambda number: use(backend, parts, rng(10 * seed + number)))
    for part in parts:
        part.down = False
    for chain in CHAINS:
        backend.delete(chain, deadline=soon())
    settle(backend)
    assert [store.usage().pages for store in stores] == [0, 0]
    for part in parts:
        part.check()
    backend.close()
    assert all(copies.waiting == 0 for copies in backend.copies().values())
