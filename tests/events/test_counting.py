"""A subscriber may count: each page is stored on a medium and removed from it in turn."""

from __future__ import annotations

import pytest

from hicache.cache.recorder import EventRecorder
from hicache.events import Cleared, Event, EventReader, EventStream, Medium, Removed, Stored
from hicache.keys import page_keys, token_bytes
from hicache.radix import Node, RadixTree
from tests.cache.random_engine import RandomEngine, small_world
from tests.cache.test_random_host import RandomHost
from tests.cache.test_random_sessions import RandomTalks
from tests.cache.world import World, codec, memory_backend, prompt
from tests.events.counting import CountingSubscriber
from tests.events.world import RecordedMachine
from tests.seeds import rng, seeds

LARGE_BYTES = 1 << 30
TOKENS = token_bytes(range(16))
KEYS = tuple(page_keys(TOKENS, 4))
RUN = Stored(Medium.STORAGE, KEYS, None, b"", TOKENS, 4)


def counted(reader: EventReader) -> CountingSubscriber:
    """Return a subscriber that has counted all events of `reader`."""
    subscriber = CountingSubscriber()
    while events := reader.drain(100):
        subscriber.apply(events)
    return subscriber


def require_right(subscriber: CountingSubscriber, tree: RadixTree) -> None:
    """Assert that no event was wrong, and that the counts are those of the tree."""
    assert not subscriber.wrong
    nodes = list(tree.nodes())
    assert subscriber.pages(Medium.DEVICE) == keys_of(tree, [node for node in nodes if node.device is not None])
    assert subscriber.pages(Medium.HOST) == keys_of(tree, [node for node in nodes if node.host is not None])
    # Only the ends: the tree does not notice that storage has lost a page within a run, and the events report it.
    assert subscriber.pages(Medium.STORAGE) >= set(tree.stored.ends())


def keys_of(tree: RadixTree, nodes: list[Node]) -> set[bytes]:
    return {key for node in nodes for key in tree.page_keys(node)}


def test_a_page_that_is_read_again_from_storage_is_announced_there_once() -> None:
    world = World(backend=memory_backend())
    world.cache.record_events(stream := EventStream(LARGE_BYTES))
    for rid in ("a", "b", "c"):
        assert world.serve(rid, prompt(1, 2, 3)).storage_hit_tokens == (0 if rid == "a" else 12)
        world.settle()
        world.cache.evict(16)
        world.host.free(world.cache.tree.evict_host(32))  # so that the next request reads from storage
    subscriber = counted(stream.subscribe())
    assert not subscriber.wrong
    assert subscriber.seen["stored host"] == 9 and subscriber.seen["stored storage"] == 3
    world.close()


@pytest.mark.long
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("seed", seeds(4))
def test_a_long_random_run_of_an_engine_can_be_counted(seed: int, policy: str) -> None:
    """The store evicts, so pages leave it and are stored again. Snapshots replace the counts."""
    world = small_world(memory_backend(40 * codec().frame_bytes), policies={"write_policy": policy})
    world.cache.record_events(stream := EventStream(LARGE_BYTES))
    engine, reader, subscriber = RandomEngine(rng(seed), world), stream.subscribe(), CountingSubscriber()
    for step in range(400):
        engine.act()
        subscriber.apply(reader.drain(50))
        if step % 200 == 150:
            reader.request_snapshot()
    engine.settle()
    while events := reader.drain(100):
        subscriber.apply(events)
    require_right(subscriber, world.cache.tree)
    assert subscriber.seen["stored storage"] > 0
    world.close()


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds(8))
def test_a_random_run_of_a_host_cache_can_be_counted(seed: int) -> None:
    engine = RandomHost(seed)
    engine.cache.record_events(stream := EventStream(LARGE_BYTES))
    reader = stream.subscribe()
    engine.run()
    require_right(counted(reader), engine.cache.tree)


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds(4))
def test_a_random_run_of_conversations_can_be_counted(seed: int) -> None:
    engine = RandomTalks(rng(seed))
    engine.talks.cache.record_events(stream := EventStream(LARGE_BYTES))
    reader = stream.subscribe()
    engine.run()
    engine.talks.close()
    require_right(counted(reader), engine.talks.cache.tree)


@pytest.mark.long
@pytest.mark.parametrize("seed", seeds(5))
def test_a_snapshot_made_in_slices_can_be_counted_with_the_changes_in_between(seed: int) -> None:
    random_numbers, stream = rng(seed), EventStream(LARGE_BYTES)
    machine = RecordedMachine(4, random_numbers, stream, slice_s=0.0)
    reader, subscriber = stream.subscribe(), CountingSubscriber()
    for step in range(800):
        machine.step()
        if step % 100 == 50:
            reader.request_snapshot()
        if random_numbers.random() < 0.7:
            machine.recorder.poll(machine.tree)
        subscriber.apply(reader.drain(random_numbers.randrange(1, 30)))
    while (events := reader.drain(100)) or not reader.in_sync:
        subscriber.apply(events)
        machine.recorder.poll(machine.tree)
    require_right(subscriber, machine.tree)


def drained(*events: Event, storage_pages_max: int = 100) -> list[Event]:
    """Return the events that a reader returns, one at a time."""
    stream = EventStream(LARGE_BYTES)
    reader = EventReader(stream, storage_pages_max=storage_pages_max)
    for event in events:
        stream.put(event)
    found: list[Event] = []
    while some := reader.drain(1):
        assert len(some) == 1
        found += some
    return found


def test_of_a_run_with_known_pages_only_the_others_are_announced() -> None:
    middle = RUN.part(1, 2)
    assert drained(middle, RUN) == [middle, RUN.part(0, 1), RUN.part(2, 4)]
    assert RUN.part(2, 4) == Stored(Medium.STORAGE, KEYS[2:], KEYS[1], b"", TOKENS[32:], 4)


def test_a_loss_names_only_pages_that_were_announced_and_each_once() -> None:
    lost = Removed(Medium.STORAGE, (KEYS[1], KEYS[3], KEYS[1]))
    assert drained(RUN.part(0, 2), lost, lost, RUN.part(1, 2)) == [
        RUN.part(0, 2), Removed(Medium.STORAGE, (KEYS[1],)), RUN.part(1, 2),
    ]


def test_after_a_clear_all_pages_are_announced_again() -> None:
    assert drained(RUN, Cleared(), RUN, RUN) == [RUN, Cleared(), RUN]


def test_a_page_may_be_on_several_media_at_a_time() -> None:
    events = [RUN._replace(medium=medium) for medium in Medium]
    assert drained(*events) == events


def test_beyond_the_limit_the_pages_stored_first_are_reported_as_removed() -> None:
    first, second, third, fourth = (RUN.part(page, page + 1) for page in range(4))
    gone = [Removed(Medium.STORAGE, event.keys) for event in (second, first)]
    # The second event of the first page makes the other page the oldest one.
    assert drained(first, second, first, third, fourth, storage_pages_max=2) == [
        first, second, third, gone[0], fourth, gone[1],
    ]


def test_the_events_of_a_tree_alone_announce_pages_on_storage_again() -> None:
    """Negative control: the recorder does not remember pages that have left the tree; the reader does."""
    world = World(backend=memory_backend())
    world.cache.record_events(stream := EventStream(LARGE_BYTES))
    for rid in ("a", "b"):
        world.serve(rid, prompt(1, 2))
        world.settle()
        world.cache.evict(16)
        world.host.free(world.cache.tree.evict_host(32))
    subscriber = CountingSubscriber()
    subscriber.apply(EventReader(stream)._next_events(100))
    assert len(subscriber.wrong) == 2
    assert isinstance(world.cache.tree.observer, EventRecorder)
    world.close()
