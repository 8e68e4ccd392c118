"""Events of the real tree, replayed into an index that then equals it."""

from __future__ import annotations

import pytest

from hicache.cache.recorder import EventRecorder
from hicache.errors import InvariantError
from hicache.events import Cleared, Event, EventStream, Medium, PrefixIndex, Removed, Stored
from hicache.keys import RadixKey, page_keys, token_bytes
from hicache.policies import POLICIES
from hicache.radix import RadixTree
from hicache.tiers import PageAllocator
from tests.events.world import RecordedMachine, pages_of_index, pages_of_tree
from tests.seeds import rng, seeds

pytestmark = pytest.mark.long

STEPS = 300
LARGE_BYTES = 1 << 30


@pytest.mark.parametrize("seed", seeds(15))
@pytest.mark.parametrize("page_size", [1, 16])
def test_an_index_that_follows_random_operations_equals_the_tree_after_each(page_size: int, seed: int) -> None:
    stream = EventStream(LARGE_BYTES)
    machine = RecordedMachine(page_size, rng(seed), stream)
    reader, index = stream.subscribe(), PrefixIndex()
    for _ in range(STEPS):
        machine.step()
        index.apply(reader.drain(1000))
        stream.check()
        index.check()
        assert pages_of_index(index) == pages_of_tree(machine.tree)


@pytest.mark.parametrize("seed", seeds(15))
def test_a_reader_that_falls_behind_meets_a_gap_and_equals_the_tree_again_after_a_snapshot(seed: int) -> None:
    random_numbers = rng(seed)
    stream = EventStream(8 << 10)
    machine = RecordedMachine(4, random_numbers, stream)
    reader, index = stream.subscribe(), PrefixIndex()
    for _ in range(STEPS):
        machine.step()
        machine.recorder.poll(machine.tree)
        stream.check()
        if random_numbers.random() < 0.8:
            continue
        while events := reader.drain(7):
            index.apply(events)
            machine.recorder.poll(machine.tree)
        index.check()
        assert reader.in_sync and pages_of_index(index) == pages_of_tree(machine.tree)
    assert reader.gaps == stream.statistics().snapshots > 0


def everything(stream: EventStream) -> tuple[Event, ...]:
    return stream.subscribe().drain(1 << 30)


def followed(*events: Event) -> PrefixIndex:
    index = PrefixIndex()
    index.apply(events)
    return index


@pytest.mark.parametrize("seed", seeds(8))
def test_an_index_that_missed_one_event_differs_from_the_tree(seed: int) -> None:
    """Negative control of the comparison."""
    stream = EventStream(LARGE_BYTES)
    machine = RecordedMachine(4, rng(seed), stream)
    compared = 0
    for _ in range(STEPS):
        before = stream.statistics().events
        machine.step()
        events = everything(stream)
        # Storage alone may be reported twice.
        if len(events) > before and getattr(events[-1], "medium", None) in (Medium.DEVICE, Medium.HOST):
            assert pages_of_index(followed(*events[:-1])) != pages_of_tree(machine.tree)
            compared += 1
    assert compared > STEPS / 10


def chain(tokens: int) -> list[Event]:
    """Pages of 4 tokens, each stored on the device by an event of its own, then removed last first."""
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
def test_the_check_finds_that_an_event_is_missing(lost: int) -> None:
    """Negative control of the check. Only a loss at the very end is beyond it: nothing contradicts that yet."""
    events = chain(16)
    followed(*events).check()
    del events[lost]
    with pytest.raises(InvariantError):
        followed(*events).check()


def test_the_check_finds_tokens_that_are_not_those_of_the_key() -> None:
    (event, *_) = chain(4)
    assert isinstance(event, Stored)
    with pytest.raises(InvariantError, match="hash"):
        followed(event._replace(tokens=bytes(16))).check()


def test_prefixes_are_found_per_medium() -> None:
    events = chain(16)[:4]
    host = [event._replace(medium=Medium.HOST) for event in events[:2] if isinstance(event, Stored)]
    index = followed(*events, *host)
    keys = page_keys(token_bytes(range(20)), 4)
    assert [index.prefix_pages(keys, medium) for medium in Medium] == [4, 2, 0]
    assert index.prefix_pages(keys[:3], Medium.DEVICE) == 3
    assert index.page(keys[0]).media == {Medium.DEVICE, Medium.HOST}
    assert index.pages() == {Medium.DEVICE: 4, Medium.HOST: 2}


def test_an_index_out_of_sync_is_empty_and_ignores_events_until_it_is_started_over() -> None:
    first, *_ = chain(4)
    index = followed(first)
    index.lose()
    index.apply([first])
    assert len(index) == 0 and not index.in_sync
    index.apply([Cleared(), first])
    assert len(index) == 1 and index.in_sync


def filled_tree(tokens: int = 64) -> tuple[EventStream, RadixTree, RadixKey]:
    stream = EventStream(LARGE_BYTES)
    tree = RadixTree(16, POLICIES["lru"], observer=EventRecorder(stream))
    key = RadixKey(token_bytes(range(tokens)), bytes(range(32)))
    pages = PageAllocator(100).alloc(tokens // 16)
    assert pages is not None
    tree.insert(key, pages)
    return stream, tree, key


def test_a_split_is_no_event() -> None:
    stream, tree, key = filled_tree()
    assert tree.match(RadixKey(key.tokens[:64], key.seed)).pages == 1 and tree.node_count == 2
    assert len(everything(stream)) == 1


def test_a_tree_is_walked_only_if_a_reader_waits_for_it() -> None:
    stream, tree, _ = filled_tree()
    recorder = EventRecorder(stream)
    recorder.poll(tree)
    assert stream.statistics().snapshots == 0
    stream.subscribe().request_snapshot()
    recorder.poll(tree)
    recorder.poll(tree)
    assert stream.statistics().snapshots == 1
