"""The daemon's host pool: one limit over all namespaces, the order of eviction, and pages that are not evicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hicache.backends.base import Usage
from hicache.backends.order import AdaptivePages
from hicache.daemon.hot import EPOCH_BATCHES
from hicache.daemon.pool import DaemonPool, PooledPage, PoolSpace
from hicache.errors import InvalidInput, InvariantError
from hicache.frame import HEADER_BYTES, NO_PARENT
from hicache.frame.header import PARENT
from hicache_lab.conformance import make_keys
from tests.seeds import rng, seeds

UNIT = 4096
PAYLOAD = 2 * UNIT - HEADER_BYTES
ONE, OTHER = bytes(31) + b"\1", bytes(31) + b"\2"


def pool_of(pages: int, *, is_adaptive: bool = False) -> DaemonPool:
    """Return a pool for `pages` pages of two units each."""
    return DaemonPool(pages * 2 * UNIT, unit_bytes=UNIT, is_adaptive=is_adaptive)


def fill(page: PooledPage, parent: bytes | None = None) -> None:
    for buffer in page.buffers:
        buffer[:] = page.key[:1] * len(buffer)
    page.buffers[0][PARENT] = parent or NO_PARENT


def is_whole(page: PooledPage) -> bool:
    first, *others = page.buffers
    return all(not bytes(buffer).strip(page.key[:1]) for buffer in (first[HEADER_BYTES:], *others))


def put(
    pool: DaemonPool, space: PoolSpace, keys: Sequence[bytes], parent: bytes | None = None, twice: bool = True
) -> int:
    """Add the pages of a chain, with a second attempt for each if `twice`. Return how many were added."""
    since, deletions, entered = pool.now(), space.deletions, 0
    for key, above in zip(keys, [parent, *keys], strict=False):
        for _ in range(1 + twice):
            page = pool.reserve(space, key, since=since, deletions=deletions)
            if page is not None:
                fill(page, above)
                entered += pool.publish(space, page)
                break
    pool.use(space, keys)
    pool.check()
    return entered


def present(pool: DaemonPool, space: PoolSpace, keys: Sequence[bytes]) -> list[bytes]:
    return [key for key, is_present in zip(keys, pool.has(space, keys), strict=True) if is_present]


def test_the_memory_of_the_pool_is_allocated_and_touched_at_once() -> None:
    def resident_kib() -> int:
        return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])

    before = resident_kib()
    pool = DaemonPool(64 << 20)
    assert resident_kib() - before > 60 << 10
    assert pool.statistics().capacity_bytes == 64 << 20


@pytest.mark.parametrize("is_adaptive", [False, True])
@pytest.mark.parametrize("seed", seeds(4))
def test_namespaces_with_pages_of_different_sizes_share_one_limit(seed: int, is_adaptive: bool) -> None:
    dice = rng(seed)
    pool = DaemonPool(64 * UNIT, unit_bytes=UNIT, is_adaptive=is_adaptive)
    sizes = [1, UNIT - HEADER_BYTES, UNIT, 5 * UNIT, 17 * UNIT + 3]
    spaces = [pool.open(bytes(31) + bytes([number]), size) for number, size in enumerate(sizes)]
    keys = make_keys(40)
    held: list[tuple[PoolSpace, PooledPage]] = []
    for _ in range(600):
        space, first = dice.choice(spaces), dice.randrange(len(keys))
        some = keys[first : first + dice.randrange(1, 5)]
        action = dice.randrange(9)
        if action < 4:
            pool.offer(space, some)
            put(pool, space, some, keys[first - 1] if first else None)
        elif action == 4:
            held += [(space, page) for page in pool.hold(space, some) if page is not None]
        elif action == 5 and held:
            owner, page = held.pop(dice.randrange(len(held)))
            assert is_whole(page), "the bytes of a held page changed"
            pool.release(owner, [page])
        elif action == 6:
            dice.choice([pool.pin, pool.unpin])(space, some)
        elif action == 8:
            dice.choice([pool.hit, pool.touch])(space, some)
        elif action == 7:
            with pool.deleting(space, some):
                pass
            assert not present(pool, space, some)
        pool.check()
        found = pool.statistics()
        assert found.used_bytes == sum(map(pool.space_bytes, spaces)) <= found.capacity_bytes
    for owner, page in held:
        pool.release(owner, [page])
    for space in spaces:
        pool.close(space)
    pool.check()
    assert pool.statistics().used_bytes == pool.statistics().pinned_bytes == 0


def test_a_unit_with_two_owners_is_detected() -> None:
    """The control of `check`."""
    pool = pool_of(4)
    space = pool.open(ONE, PAYLOAD)
    put(pool, space, make_keys(2))
    one, two = space.pages.values()
    two.extents = one.extents
    with pytest.raises(InvariantError):
        pool.check()


def test_the_least_recently_used_chain_is_evicted_first_and_its_tail_before_its_head() -> None:
    pool = pool_of(8)
    one, other = pool.open(ONE, PAYLOAD), pool.open(OTHER, PAYLOAD)
    old, new = make_keys(4, "old"), make_keys(4, "new")
    put(pool, one, old)
    put(pool, other, new)
    put(pool, other, make_keys(2, "newest"))
    assert (present(pool, one, old), present(pool, other, new)) == (old[:2], new)
    pool.use(one, old[:2])
    put(pool, one, make_keys(3, "more"))
    assert (present(pool, one, old), present(pool, other, new)) == (old[:2], new[:1])


@pytest.mark.parametrize("verb", ["use", "hit"])
def test_a_used_page_is_evicted_after_pages_that_were_not_used_since(verb: str) -> None:
    pool = pool_of(2)
    space, keys = pool.open(ONE, PAYLOAD), make_keys(2)
    for key in keys:
        put(pool, space, [key])
    getattr(pool, verb)(space, keys[:1])
    put(pool, space, make_keys(1, "new"))
    assert present(pool, space, keys) == keys[:1]


def popular_hits(pool: DaemonPool, spaces: Sequence[PoolSpace], turns: int) -> int:
    """Return the hits of the last 100 turns. In each turn, one of ten chains is used by the first namespace, and six
    pages are used once by the last one."""
    chains, hits = [make_keys(3, f"popular {number}") for number in range(10)], 0
    for turn in range(turns):
        popular, once = chains[turn % 10], make_keys(6, f"once {turn}")
        found = present(pool, spaces[0], popular)
        pool.hit(spaces[0], found)
        new, parent = popular[len(found):], found[-1] if found else None
        for space, keys, above in ((spaces[0], new, parent), (spaces[-1], once, None)):
            pool.offer(space, keys)
            put(pool, space, keys, above)
        hits += len(found) if turn >= turns - 100 else 0
    return hits


@pytest.mark.parametrize("namespaces", [1, 2])
@pytest.mark.parametrize("is_adaptive", [False, True])
def test_adaptive_eviction_keeps_popular_chains_that_lru_loses(is_adaptive: bool, namespaces: int) -> None:
    """The control is LRU: between two uses of a popular chain more pages enter than have room."""
    pool = pool_of(60, is_adaptive=is_adaptive)
    hits = popular_hits(pool, [pool.open(name, PAYLOAD) for name in (ONE, OTHER)[:namespaces]], 300)
    assert hits > 200 if is_adaptive else hits == 0


def test_the_same_key_is_another_page_in_another_namespace_for_adaptive_eviction() -> None:
    adaptive, (key, *_) = AdaptivePages(10), make_keys(1)
    one, other = adaptive.of(ONE), adaptive.of(OTHER)
    for number in range(200):  # pages that return after more than ten others: LRU is not the best
        one.use([key])
        one.use(make_keys(12, f"once {number}"))
    assert one.keeps(key, lambda page: None)
    assert not other.keeps(key, lambda page: None)


def test_the_shadows_have_as_many_pages_as_the_pool_also_if_other_sizes_come() -> None:
    pool = pool_of(32, is_adaptive=True)
    small, large = pool.open(ONE, PAYLOAD), pool.open(OTHER, 4 * PAYLOAD)
    shadows = []
    for space in (small, large, small):
        for number in range(3):
            put(pool, space, make_keys(40, f"{space.label} {number}"))
        assert space.order.adaptive is not None
        shadows.append(space.order.adaptive.pages)
    assert shadows[0] == 32 and shadows[1] < 16 and shadows[2] > 24


def test_a_batch_can_evict_all_pages_of_other_namespaces_although_all_are_kept() -> None:
    class KeepsAll(AdaptivePages):
        def keeps(self, key: bytes, parent_of: Callable[[bytes], bytes | None]) -> bool:
            return True

    pool = pool_of(8, is_adaptive=True)
    for number in range(2):
        space = pool.open(bytes([number + 1]) * 32, PAYLOAD)
        put(pool, space, make_keys(4))
        space.order.adaptive = KeepsAll(8)
    assert put(pool, pool.open(bytes(32), PAYLOAD), make_keys(8, "new")) == 8


def test_adaptive_eviction_leaves_held_and_pinned_pages() -> None:
    pool = pool_of(60, is_adaptive=True)
    space, pinned, held = pool.open(ONE, PAYLOAD), make_keys(3, "pinned"), make_keys(3, "held")
    put(pool, space, [*pinned, *held])
    pool.pin(space, pinned)
    holds = [page for page in pool.hold(space, held) if page is not None]
    popular_hits(pool, [space], 200)
    assert present(pool, space, [*pinned, *held]) == [*pinned, *held]
    pool.release(space, holds)


def test_a_batch_does_not_evict_itself() -> None:
    pool = pool_of(3)
    space, keys = pool.open(ONE, PAYLOAD), make_keys(6)
    put(pool, space, make_keys(3, "old"))
    assert put(pool, space, keys) == 3
    assert present(pool, space, keys) == keys[:3]


def test_a_full_pool_admits_a_page_at_its_second_request() -> None:
    pool = pool_of(4)
    space, keys, more = pool.open(ONE, PAYLOAD), make_keys(4), make_keys(4, "more")
    assert put(pool, space, keys, twice=False) == 4, "a pool with room admits every page"
    assert put(pool, space, more, twice=False) == 0
    assert put(pool, space, more[:1], twice=False) == 1
    assert present(pool, space, keys) == keys[:3]


def test_pinned_pages_are_not_evicted_until_they_are_unpinned() -> None:
    pool = pool_of(4)
    space, keys = pool.open(ONE, PAYLOAD), make_keys(2)
    put(pool, space, keys)
    assert pool.pin(space, [*keys, *make_keys(1, "absent")]) == 2
    assert pool.statistics().pinned_bytes == 2 * 2 * UNIT
    for number in range(5):
        put(pool, space, make_keys(3, f"more {number}"))
        assert present(pool, space, keys) == keys
    assert pool.unpin(space, keys) == 2
    assert pool.unpin(space, keys) == 0
    for number in range(2):
        put(pool, space, make_keys(4, f"again {number}"))
    assert present(pool, space, keys) == []
    assert pool.statistics().pinned_bytes == 0


@pytest.mark.parametrize("how", ["pinned", "held"])
def test_an_oldest_page_that_stays_does_not_stop_the_eviction_of_the_next_one(how: str) -> None:
    pool = pool_of(4)
    space, keys, (new,) = pool.open(ONE, PAYLOAD), make_keys(4), make_keys(1, "new")
    for key in keys:
        put(pool, space, [key])
    held = []
    if how == "pinned":
        pool.pin(space, keys[:1])
    else:
        held = pool.hold(space, keys[:1])
    assert put(pool, space, [new]) == 1
    assert present(pool, space, [*keys, new]) == [keys[0], *keys[2:], new]
    assert (pool.statistics().admitted, pool.statistics().evicted) == (5, 1)
    pool.release(space, [page for page in held if page is not None])


def test_pins_are_limited_to_half_of_the_pool_and_end_with_a_deletion() -> None:
    pool = pool_of(4)
    space, keys = pool.open(ONE, PAYLOAD), make_keys(4)
    put(pool, space, keys)
    assert pool.pin(space, keys) == 2
    assert pool.clear(space) == 4
    assert pool.statistics().pinned_bytes == 0


def test_a_namespace_over_its_quota_evicts_its_own_pages() -> None:
    pool = pool_of(8)
    one, other = pool.open(ONE, PAYLOAD), pool.open(OTHER, PAYLOAD)
    theirs = make_keys(4, "theirs")
    put(pool, other, theirs)
    pool.set_quota(one, 2 * 2 * UNIT)
    for number in range(3):
        put(pool, one, make_keys(2, f"ours {number}"))
        assert pool.space_bytes(one) == 4 * UNIT
    assert present(pool, other, theirs) == theirs
    pool.set_quota(other, 3 * UNIT)
    assert present(pool, other, theirs) == theirs[:1]
    pool.set_quota(one, None)
    assert put(pool, one, make_keys(5, "more")) == 5


def test_room_and_capacity_of_a_namespace_are_those_of_the_pool_or_of_its_quota() -> None:
    pool = pool_of(8)
    one, other = pool.open(ONE, PAYLOAD), pool.open(OTHER, PAYLOAD)
    put(pool, other, make_keys(3))
    assert (pool.room(one), pool.usage(one, 1000)) == (5, Usage(0, 0, 8 * 2 * UNIT))
    pool.set_quota(one, 3 * 2 * UNIT)
    put(pool, one, make_keys(1))
    assert (pool.room(one), pool.usage(one, 1000)) == (2, Usage(1, 1000, 3 * 2 * UNIT))
    pool.set_quota(one, 100 * 2 * UNIT)
    assert (pool.room(one), pool.usage(one, 1000)) == (4, Usage(1, 1000, 8 * 2 * UNIT))
    pool.set_quota(one, UNIT)
    assert pool.room(one) == 0


def test_the_number_of_pages_remembered_as_requested_once_is_limited() -> None:
    pool = pool_of(1)
    space = pool.open(ONE, PAYLOAD)
    put(pool, space, make_keys(1, "old"))
    requested = [number.to_bytes(32, "big") for number in range((1 << 16) + 2)]
    for key in requested:
        assert pool.reserve(space, key, since=0, deletions=0) is None
    assert len(pool._asked) == 1 << 16
    entered = [put(pool, space, [key], twice=False) for key in (requested[1], requested[3])]
    assert entered == [0, 1], "the oldest are forgotten"


def test_a_held_page_keeps_its_bytes_until_it_is_released() -> None:
    pool = pool_of(2)
    space, keys = pool.open(ONE, PAYLOAD), make_keys(2)
    put(pool, space, keys)
    (page,) = pool.hold(space, keys[:1])
    assert page is not None
    assert put(pool, space, make_keys(2, "more")) == 1, "only the page that is not held is evicted"
    pool.clear(space)
    assert put(pool, space, make_keys(2, "again")) == 1
    assert is_whole(page) and pool.has(space, keys) == [False, False]
    pool.release(space, [page])
    assert put(pool, space, make_keys(2, "at last")) == 2


@pytest.mark.parametrize("when", ["before", "between", "during", "never"])
def test_a_page_requested_before_a_deletion_is_not_added_after_it(when: str) -> None:
    pool = pool_of(4)
    space, (key, other) = pool.open(ONE, PAYLOAD), make_keys(2)
    deletions = space.deletions
    if when == "before":
        pool.clear(space)
    page = pool.reserve(space, key, since=pool.now(), deletions=deletions)
    assert (page is None) is (when == "before")
    if page is None:
        return
    pool.check()
    fill(page)
    if when == "between":
        with pool.deleting(space, [other]):
            pass
    if when == "during":
        with pool.deleting(space, [key]):
            assert not pool.publish(space, page)
    else:
        assert pool.publish(space, page) is (when == "never")
    pool.use(space, [key])
    pool.check()
    assert (pool.statistics().used_bytes == 0) is (when != "never")


def test_a_page_requested_during_a_deletion_is_not_added_during_or_after_it() -> None:
    """The store may still have the page when the deletion begins."""
    pool = pool_of(4)
    space, (key,) = pool.open(ONE, PAYLOAD), make_keys(1)
    with pool.deleting(space, [key]), pool.deleting(space, [key]):
        deletions = space.deletions
        assert pool.reserve(space, key, since=pool.now(), deletions=deletions) is None
    assert pool.reserve(space, key, since=pool.now(), deletions=deletions) is None
    assert put(pool, space, [key]) == 1, "a page requested after the deletion is added"


def test_a_deletion_that_ends_does_not_end_another_one() -> None:
    pool = pool_of(4)
    space, (key,) = pool.open(ONE, PAYLOAD), make_keys(1)
    with pool.deleting(space, [key]):
        with pool.deleting(space, [key]):
            pass
        assert put(pool, space, [key]) == 0
    assert put(pool, space, [key]) == 1


def test_two_concurrent_reads_of_a_page_leave_one_copy() -> None:
    pool = pool_of(4)
    space, (key,) = pool.open(ONE, PAYLOAD), make_keys(1)
    pages = [pool.reserve(space, key, since=pool.now(), deletions=0) for _ in range(2)]
    published = []
    for page in pages:
        assert page is not None
        fill(page)
        published.append(pool.publish(space, page))
    pool.use(space, [key])
    pool.check()
    assert (published, pool.statistics().pages, pool.space_bytes(space)) == ([True, False], 1, 2 * UNIT)
    assert pool.reserve(space, key, since=pool.now(), deletions=0) is None, "it is in the pool already"


@pytest.mark.parametrize("quota_bytes", [None, 100 * UNIT])
@pytest.mark.parametrize("units", [0, 1])
def test_a_page_larger_than_the_pool_evicts_nothing(units: int, quota_bytes: int | None) -> None:
    pool = DaemonPool(units * UNIT, unit_bytes=UNIT)
    small, large = pool.open(ONE, 1), pool.open(OTHER, PAYLOAD)
    pool.set_quota(large, quota_bytes)
    keys = make_keys(1)
    assert put(pool, small, keys) == units
    assert put(pool, large, keys) == 0
    assert present(pool, small, keys) == keys[:units]


def test_pages_of_one_size_reuse_whole_extents() -> None:
    pool = DaemonPool(100 * UNIT, unit_bytes=UNIT)
    space = pool.open(ONE, 7 * UNIT - HEADER_BYTES)
    for number in range(50):
        put(pool, space, make_keys(5, f"chain {number}"))
    assert {len(page.extents) for page in space.pages.values()} == {1}


def test_a_namespace_has_one_page_size_and_is_emptied_by_its_last_close() -> None:
    pool = pool_of(4)
    space, keys = pool.open(ONE, PAYLOAD), make_keys(2)
    with pytest.raises(InvalidInput):
        pool.open(ONE, PAYLOAD + 1)
    assert pool.open(ONE, PAYLOAD) is space
    put(pool, space, keys)
    pool.close(space)
    assert present(pool, space, keys) == keys
    pool.close(space)
    assert pool.statistics().pages == pool.statistics().used_bytes == 0
    pool.open(ONE, PAYLOAD + 1)


@pytest.mark.parametrize("size", [-1, -UNIT])
def test_a_negative_size_is_rejected(size: int) -> None:
    with pytest.raises(InvalidInput):
        DaemonPool(size)


def test_hits_of_different_tails_count_for_their_shared_head() -> None:
    pool = pool_of(40)
    space = pool.open(ONE, PAYLOAD, "a model")
    head, cold = make_keys(3, "head"), make_keys(2, "cold")
    put(pool, space, head)
    put(pool, space, cold)
    for number in range(6):
        tail = make_keys(2, f"tail {number}")
        put(pool, space, tail, head[-1])
        pool.hit(space, [*head, *tail])
    pool.hit(space, cold)
    (hot,) = pool.hot()
    assert (hot.page, hot.label, hot.pages, hot.hits) == (head[-1].hex()[:8], "a model", 3, 6)


def test_the_number_of_hot_prefixes_is_limited_and_unused_ones_are_dropped() -> None:
    pool = pool_of(200)
    space, keys = pool.open(ONE, PAYLOAD), make_keys(150)
    put(pool, space, keys)
    for rounds in (2, 3):
        for key in keys:
            for _ in range(rounds):
                pool.hit(space, [key])
    assert [prefix.hits for prefix in pool.hot()] == [5] * 16
    assert len(pool._hot._table) == 64
    pool.hit(space, [keys[0]])
    for _ in range(3 * EPOCH_BATCHES):
        pool.hit(space, [keys[1]])
    assert {prefix.page for prefix in pool.hot()} == {keys[1].hex()[:8]}


def test_the_work_of_an_eviction_does_not_grow_with_the_pool() -> None:
    """The test counts steps of the eviction order, because times vary."""
    pool = DaemonPool(4000 * UNIT, unit_bytes=UNIT)
    space = pool.open(ONE, UNIT - HEADER_BYTES)
    put(pool, space, make_keys(4000))
    steps = 0
    oldest = space.order.oldest

    def counted() -> tuple[bytes, int] | None:
        nonlocal steps
        steps += 1
        return oldest()

    space.order.oldest = counted  # type: ignore[method-assign]
    assert put(pool, space, make_keys(100, "more")) == 100
    assert steps == 2 * 100
