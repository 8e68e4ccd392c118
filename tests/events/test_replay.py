"""An index that replays the events of a real tree equals the tree."""

from __future__ import annotations

import numpy as np
import pytest

from hicache.cache.recorder import EventRecorder
from hicache.errors import InvariantError
from hicache.events import Cleared, Event, EventStream, Medium, Removed, Stored
from hicache.keys import PageChain, RadixKey, page_keys, token_bytes
from hicache.policies import POLICIES
from hicache.radix import RadixTree
from hicache.tiers import PageAllocator
from tests.events.world import DescribedIndex, RecordedMachine, pages_of_index
from tests.seeds import rng, seeds

pytestmark = pytest.mark.long

STEPS = 300
LARGE_BYTES = 1 << 30


@pytest.mark.parametrize("seed", seeds(15))
@pytest.mark.parametrize("page_size", [1, 16])
def test_an_index_that_follows_random_operations_equals_the_tree_after_each(page_size: int, seed: int) -> None:
    stream = EventStream(LARGE_BYTES)
    machine = RecordedMachine(page_size, rng(seed), stream)
    reader, index = stream.subscribe(), DescribedIndex()
    for _ in range(STEPS):
        machine.step()
        index.apply(reader.drain(1000))
        stream.check()
        index.check()
        assert pages_of_index(index) == machine.told()


@pytest.mark.parametrize("seed", seeds(15))
def test_a_slow_reader_gets_a_gap_and_equals_the_tree_again_after_a_snapshot(seed: int) -> None:
    random_numbers = rng(seed)
    stream = EventStream(8 << 10)
    machine = RecordedMachine(4, random_numbers, stream)
    reader, index = stream.subscribe(), DescribedIndex()
    for _ in range(STEPS):
        machine.step()
        machine.recorder.poll(machine.tree)
        stream.check()
        if random_numbers.random() < 0.8:
            continue
        while (events := reader.drain(7)) or not reader.in_sync:
            index.apply(events)
            machine.recorder.poll(machine.tree)
        index.check()
        assert machine.is_known(index)
    assert reader.gaps == stream.statistics().snapshots > 0


def followed_in_slices(seed: int, *, deaf: bool = False) -> list[bool]:
    """Make snapshots one node at a time, with operations on the tree in between. Return for each whether the index
    equals the tree at its end. With `deaf`, snapshots ignore pages that are removed in between."""
    random_numbers = rng(seed)
    stream = EventStream(LARGE_BYTES)
    machine = RecordedMachine(4, random_numbers, stream, slice_s=0.0)
    reader, index, right = stream.subscribe(), DescribedIndex(), list[bool]()
    for _ in range(STEPS):
        machine.step()
    for _ in range(20):
        reader.request_snapshot()
        machine.recorder.poll(machine.tree)
        index.apply(reader.drain(random_numbers.randrange(1, 9)))
        while not reader.in_sync:
            machine.step()
            if deaf and (walk := machine.recorder._walk) is not None:
                walk.removed = lambda event, node: None  # type: ignore[method-assign]
            if random_numbers.random() < 0.7:
                machine.recorder.poll(machine.tree)
            index.apply(reader.drain(random_numbers.randrange(1, 9)))
            if not deaf:
                index.check()
        index.apply(reader.drain(1000))
        right.append(machine.is_known(index))
    return right


@pytest.mark.parametrize("seed", seeds(15))
def test_a_snapshot_made_in_slices_equals_the_tree_at_its_end_despite_changes(seed: int) -> None:
    assert all(followed_in_slices(seed))


def test_a_snapshot_without_the_changes_in_between_does_not_equal_the_tree() -> None:
    """Negative control."""
    assert not all(right for seed in range(5) for right in followed_in_slices(seed, deaf=True))


def test_one_step_adds_one_slice_of_a_large_tree_to_a_snapshot() -> None:
    stream = EventStream(LARGE_BYTES)
    tree = RadixTree(1, POLICIES["lru"], observer=(recorder := EventRecorder(stream, slice_s=0.0)))
    for number in range(50):
        tree.insert(RadixKey.of([number]), np.array([number], np.int32))
    reader = stream.subscribe()
    reader.request_snapshot()
    recorder.poll(tree)
    assert [type(event) for event in reader.drain(100)] == [Cleared, Stored] and not reader.in_sync
    for _ in range(49):
        recorder.poll(tree)
    assert len(reader.drain(100)) == 49 and stream.statistics().snapshots == 1
    assert reader.in_sync


def test_clearing_the_cache_ends_a_snapshot_and_later_requests_get_the_next() -> None:
    stream = EventStream(LARGE_BYTES)
    tree = RadixTree(1, POLICIES["lru"], observer=(recorder := EventRecorder(stream, slice_s=0.0)))
    for number in range(5):
        tree.insert(RadixKey.of([number]), np.array([number], np.int32))
    readers = [stream.subscribe(), stream.subscribe()]
    for reader in readers:
        reader.request_snapshot()
        recorder.poll(tree)
    recorder.cleared()
    recorder.poll(RadixTree(1, POLICIES["lru"]))
    for reader in readers:
        index = DescribedIndex()
        while events := reader.drain(100):
            index.apply(events)
        assert reader.in_sync and len(index) == 0
    assert stream.statistics().snapshots == 2


def test_pages_that_leave_the_tree_stay_indexed_until_storage_loses_them() -> None:
    stream, tree, _ = filled_tree()
    (node,) = tree.nodes()
    keys = tree.page_keys(node)
    tree.stored.add(node)
    tree.evict_device(4)
    assert tree.node_count == 0
    index = followed(*everything(stream))
    assert index.pages() == {Medium.STORAGE: 4}
    tree.stored.forget(keys[2:])  # as a store evicts, tails first
    index = followed(*everything(stream))
    assert index.keys(Medium.STORAGE) == set(keys[:2])
    index.check()


def test_a_reader_starts_over_after_a_change_of_store() -> None:
    stream, tree, _ = filled_tree()
    reader, index = stream.subscribe(), DescribedIndex()
    (node,) = tree.nodes()
    tree.stored.add(node)
    tree.evict_device(4)
    tree.stored.forget_all()
    assert isinstance(tree.observer, EventRecorder)
    tree.observer.poll(tree)
    while events := reader.drain(100):
        index.apply(events)
    assert reader.in_sync and len(index) == 0


def test_events_are_recorded_without_hashing_and_a_page_that_leaves_unhashed_has_its_key() -> None:
    stream, tree, key = filled_tree()
    (node,) = tree.nodes()
    chain = tree.run_keys(node)
    tree.match(key.head(16))  # which splits the node
    tree.evict_device(3)
    assert isinstance(chain, PageChain) and chain.hashed is None
    stored, removed = everything(stream)
    whole = page_keys(key.tokens, 16, key.seed)
    assert isinstance(stored, Stored) and (stored.keys, stored.seed) == (tuple(whole), key.seed)
    assert removed == Removed(Medium.DEVICE, tuple(whole[1:]))


def test_a_store_and_an_event_share_the_hashing() -> None:
    stream, tree, _ = filled_tree()
    (node,) = tree.nodes()
    chain = tree.stored.begin(node)
    everything(stream)
    assert chain.hashed is not None
    tree.stored.end(node, chain, stored=False)
    assert node.page_keys == b"".join(chain.hashed) and tree.run_keys(node) == node.page_keys


def everything(stream: EventStream) -> tuple[Event, ...]:
    return stream.subscribe().drain(1 << 30)


def followed(*events: Event) -> DescribedIndex:
    index = DescribedIndex()
    index.apply(events)
    return index


@pytest.mark.parametrize("seed", seeds(8))
def test_an_index_that_missed_one_event_differs_from_the_tree(seed: int) -> None:
    """Negative control of the comparison."""
    stream = EventStream(LARGE_BYTES)
    machine = RecordedMachine(4, rng(seed), stream)
    compared = 0
    for _ in range(STEPS):
        before = len(everything(stream))
        machine.step()
        events = everything(stream)
        if len(events) > before and not isinstance(events[-1], Cleared):
            assert pages_of_index(followed(*events[:-1])) != machine.told()
            compared += 1
    assert compared > STEPS / 10


def chain(tokens: int) -> list[Event]:
    """Return events that store pages of 4 tokens on the device one by one, and then remove them, last page first."""
    whole = token_bytes(range(tokens))
    keys = page_keys(whole, 4)
    stored = [
        Stored(
            Medium.DEVICE, (key,), keys[number - 1] if number else None, b"", whole[16 * number : 16 * number + 16], 4
        )
        for number, key in enumerate(keys)
    ]
    return [*stored, *(Removed(Medium.DEVICE, event.keys) for event in reversed(stored))]


@pytest.mark.parametrize("lost", range(7))
def test_the_check_detects_a_missing_event(lost: int) -> None:
    """Negative control of the check. It cannot detect a loss of the last event, which no later event contradicts."""
    events = chain(16)
    followed(*events).check()
    del events[lost]
    with pytest.raises(InvariantError):
        followed(*events).check()


def test_the_check_detects_tokens_that_do_not_match_the_key() -> None:
    (event, *_) = chain(4)
    assert isinstance(event, Stored)
    with pytest.raises(InvariantError, match="hash"):
        followed(event._replace(tokens=bytes(16))).check()


def filled_tree(tokens: int = 64) -> tuple[EventStream, RadixTree, RadixKey]:
    stream = EventStream(LARGE_BYTES)
    tree = RadixTree(16, POLICIES["lru"], observer=EventRecorder(stream))
    key = RadixKey(token_bytes(range(tokens)), bytes(range(32)))
    pages = PageAllocator(100).alloc(tokens // 16)
    assert pages is not None
    tree.insert(key, pages)
    return stream, tree, key


def test_a_split_creates_no_event() -> None:
    stream, tree, key = filled_tree()
    assert tree.match(RadixKey(key.tokens[:64], key.seed)).pages == 1 and tree.node_count == 2
    assert len(everything(stream)) == 1


def test_a_tree_is_walked_only_for_a_reader_that_waits_for_a_snapshot() -> None:
    stream, tree, _ = filled_tree()
    recorder = EventRecorder(stream)
    recorder.poll(tree)
    assert stream.statistics().snapshots == 0
    stream.subscribe().request_snapshot()
    recorder.poll(tree)
    recorder.poll(tree)
    assert stream.statistics().snapshots == 1
