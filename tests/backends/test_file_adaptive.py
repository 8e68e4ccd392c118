"""The eviction policy `adaptive` of a file store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.base import SetOutcome
from hicache.backends.order import OPEN_MAX
from hicache.tournament import PASSED_MAX
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import HIT, NAMESPACE, STORED, Subject, exists, full_frames, load, make_keys, store_chain

from ._files import CODEC, PAGE, check, file_driver, open_file

PAGES = 64
POPULAR = [make_keys(8, f"popular {number}") for number in range(3)]


def request(store: Subject, keys: Sequence[bytes], clock: ManualClock) -> int:
    """Read a chain, store the pages that were missing, and return the number of hits."""
    clock.advance(2.0)
    frames, deadline = full_frames(CODEC, keys), clock() + 60
    hits = store.backend.batch_get(keys, frames, deadline=deadline).count(HIT)
    if hits < len(keys):
        parent = keys[hits - 1] if hits else None
        stored = store.backend.batch_set(keys[hits:], frames[hits:], parent=parent, deadline=deadline)
        assert set(stored) == {STORED}
    return hits


def scan(store: Subject, clock: ManualClock, rounds: int) -> list[int]:
    """Use popular chains, each followed by one-off chains; return their hits."""
    hits = []
    for number in range(rounds):
        hits.append(request(store, POPULAR[number % len(POPULAR)], clock))
        for other in range(3):
            request(store, make_keys(8, f"once {number} {other}"), clock)
    return hits


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_a_scan_does_not_evict_pages_that_are_used_again_and_again(root: Path, policy: str) -> None:
    """The control: with lru it does."""
    clock = ManualClock()
    store = open_file(root, capacity=PAGES * PAGE, eviction_policy=policy, clock=clock)
    hits = scan(store, clock, 60)
    assert sum(hits[-9:]) == (9 * 8 if policy == "adaptive" else 0)
    check(store, root)


def test_tails_are_evicted_before_heads(root: Path) -> None:
    clock = ManualClock()
    store = open_file(root, capacity=PAGES * PAGE, eviction_policy="adaptive", clock=clock)
    chains = [*POPULAR, *(make_keys(8, f"once 0 {other}") for other in range(3))]
    for number in range(40):
        scan(store, clock, 1)
        for keys in chains:
            found = store.backend.batch_has(keys, deadline=clock() + 60)
            assert found == sorted(found, reverse=True), number


def test_the_batches_of_a_read_and_the_write_after_it_count_as_one_use(root: Path) -> None:
    store, keys = open_file(root, capacity=PAGES * PAGE, eviction_policy="adaptive"), make_keys(9)
    store_chain(store, keys[:6])
    other = open_file(root, capacity=PAGES * PAGE, eviction_policy="adaptive")
    load(other, keys[:3])
    load(other, keys[3:7])
    store_chain(other, keys[6:], parent=keys[5])
    adaptive = file_driver(other)._adaptive
    assert adaptive is not None
    assert list(adaptive._open.values()) == [[adaptive._number(NAMESPACE + key) for key in keys]]


def test_there_is_room_also_if_all_pages_should_stay(root: Path) -> None:
    store = open_file(root, capacity=8 * PAGE, eviction_policy="adaptive")
    asked: list[bytes] = []

    def keeps(name: bytes, parent_of: object) -> bool:
        asked.append(name)
        return True

    file_driver(store)._capacity.keeps = keeps
    old, new = make_keys(8, "old"), make_keys(5, "new")
    store_chain(store, old)
    assert store_chain(store, new) == [STORED] * 5
    assert exists(store, old) == 3
    assert len(asked) == 5 * PASSED_MAX
    assert store_chain(store, make_keys(9, "long")) == [STORED] * 8 + [SetOutcome.REJECTED]
    check(store, root)


def test_on_a_full_disk_the_oldest_page_is_evicted_whether_or_not_it_should_stay(small_disk: Path) -> None:
    """So that the journal need not grow: only the batch that finds the disk full loses pages, as with lru."""
    root = small_disk / "s"
    store, asked = open_file(root), []

    def keeps(name: bytes, parent_of: object) -> bool:
        asked.append(name)
        return True

    file_driver(store)._capacity.keeps = keeps
    rejected = [
        number for number in range(200)
        if SetOutcome.REJECTED in store_chain(store, make_keys(10, f"chain {number}"))
    ]
    assert len(rejected) == 1 and not asked
    assert store.backend.statistics().evicted_pages > 100
    check(store, root)
    store.backend.close()


def test_in_a_large_store_a_page_is_kept_with_the_sample_before_it_in_its_chain(root: Path) -> None:
    """The pages of another process are unknown."""
    limits: dict[str, Any] = {"capacity": (1 << 17) * PAGE, "eviction_policy": "adaptive"}
    mine, others = make_keys(64, "mine"), make_keys(64, "others")
    store = open_file(root, **limits)
    store_chain(store, mine)
    store_chain(open_file(root, **limits), others)
    driver = file_driver(store)
    assert driver._adaptive is not None
    sampled = [not driver._adaptive._number(key) & 3 for key in mine]
    for number in range(OPEN_MAX):
        driver._compete(NAMESPACE, make_keys(1, f"later {number}"))
    driver._adaptive._tournament._best = 1
    with driver._store.transaction(driver._clock() + 10) as index:
        kept = [driver._keeps(NAMESPACE + key, index.parent_of) for key in mine]
        assert not any(driver._keeps(NAMESPACE + key, index.parent_of) for key in others)
    first = sampled.index(True)
    assert kept == [False] * first + [True] * (64 - first)


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_only_the_chosen_policy_remembers_pages(root: Path, policy: str) -> None:
    """Bounded by the capacity, see `Tournament`."""
    store = open_file(root, capacity=4 * PAGE, eviction_policy=policy)
    for number in range(30):
        store_chain(store, make_keys(3, f"chain {number}"))
    adaptive = file_driver(store)._adaptive
    assert (adaptive is not None) == (policy == "adaptive")
    if adaptive is not None:
        adaptive._tournament.check()
