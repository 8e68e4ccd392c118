"""The index of a remote tree against sets and a plain loop, under random events; its size, and the work of a lookup."""

from __future__ import annotations

import hashlib
import random
import tracemalloc
from collections.abc import Sequence
from itertools import combinations

import pytest

from hicache.events import Cleared, Event, EventStream, Medium, PrefixIndex, Removed, Stored
from hicache.events.stream import EventReader
from tests.seeds import rng, seeds

STEPS = 300
BRANCHES, DEPTH = 2, 7
PAGES = 22_000  # a dictionary has just grown
PAGE_BYTES_MAX = 150
SETS = [media for count in (1, 2, 3) for media in combinations(Medium, count)]


def chain_of(draw: random.Random) -> list[bytes]:
    """Return the page keys of a random prompt; prompts share prefixes."""
    keys = list[bytes]()
    for _ in range(DEPTH):
        keys.append(hashlib.sha256((keys[-1] if keys else b"") + bytes([draw.randrange(BRANCHES)])).digest())
    return keys


class Oracle:
    """The pages on each medium as sets, and the order of those that are only on storage as a list."""

    def __init__(self, stored_pages_max: int) -> None:
        self.on: dict[Medium, set[bytes]] = {medium: set() for medium in Medium}
        self._alone = list[bytes]()
        self._stored_pages_max = stored_pages_max

    def apply(self, event: Event) -> None:
        if isinstance(event, Cleared):
            for pages in self.on.values():
                pages.clear()
        elif isinstance(event, Stored):
            self.on[event.medium].update(event.keys)
        else:
            self.on[event.medium].difference_update(event.keys)
        alone = self.on[Medium.STORAGE] - self.on[Medium.DEVICE] - self.on[Medium.HOST]
        self._alone = [key for key in self._alone if key in alone]
        # A run becomes alone in its order.
        self._alone += [key for key in getattr(event, "keys", ()) if key in alone and key not in self._alone]
        if (beyond := len(self._alone) - self._stored_pages_max) > 0:
            self.on[Medium.STORAGE].difference_update(self._alone[: beyond + self._stored_pages_max // 256])
            del self._alone[: beyond + self._stored_pages_max // 256]

    def prefix_pages(self, keys: Sequence[bytes], *media: Medium) -> int:
        for number, key in enumerate(keys):
            if not any(key in self.on[medium] for medium in media):
                return number
        return len(keys)


def random_event(draw: random.Random, oracle: Oracle) -> Event:
    """Return an event that a tree could make: on the device and the host, pages leave after those that follow them."""
    keys, medium = chain_of(draw), draw.choice(list(Medium))
    if draw.random() < 0.01:
        return Cleared()
    if draw.random() < 0.5:
        end = DEPTH if medium is Medium.STORAGE else oracle.prefix_pages(keys, Medium.DEVICE, medium)
        begin = draw.randint(0, min(DEPTH - 1, end))
        stored = keys[begin : draw.randint(begin + 1, DEPTH)]
        return Stored(medium, tuple(stored), keys[begin - 1] if begin else None, b"", b"", 1)
    if medium is Medium.STORAGE:
        return Removed(medium, tuple(draw.sample(keys, draw.randint(1, DEPTH))))
    device, host = oracle.on[Medium.DEVICE], oracle.on[Medium.HOST]
    gone = list[bytes]()
    for key in sorted(oracle.on[medium]):
        after = {hashlib.sha256(key + bytes([branch])).digest() for branch in range(BRANCHES)}
        if medium is Medium.DEVICE:
            is_needed = not after.isdisjoint(device if key in host else device | host)
        else:
            is_needed = key not in device and not after.isdisjoint(device | host)
        if not is_needed and draw.random() < 0.5:
            gone.append(key)
    return Removed(medium, tuple(gone))


@pytest.mark.parametrize("stored_pages_max", [3, 1_000_000])
@pytest.mark.parametrize("seed", seeds(8))
def test_an_index_answers_as_sets_and_a_plain_loop_would(seed: int, stored_pages_max: int) -> None:
    draw, oracle, index = rng(seed), Oracle(stored_pages_max), PrefixIndex(stored_pages_max=stored_pages_max)
    for _ in range(STEPS):
        event = random_event(draw, oracle)
        oracle.apply(event)
        index.apply([event])
        index.check()
        assert {medium: index.keys(medium) for medium in Medium} == oracle.on
        assert index.pages() == {medium: len(pages) for medium, pages in oracle.on.items() if pages}
        assert len(index) == len(set().union(*oracle.on.values()))
        keys = chain_of(draw)
        assert index.media(keys[3]) == {medium for medium in Medium if keys[3] in oracle.on[medium]}
        for media in SETS:
            assert index.prefix_pages(keys, *media) == oracle.prefix_pages(keys, *media)


def test_prefixes_are_found_per_medium_and_on_any_of_several() -> None:
    index, keys = PrefixIndex(), distinct(6)
    for medium, pages in ((Medium.DEVICE, keys[:4]), (Medium.HOST, keys[:2]), (Medium.STORAGE, keys[4:5])):
        index.apply([Stored(medium, tuple(pages), None, b"", b"", 1)])
    assert [index.prefix_pages(keys, medium) for medium in Medium] == [4, 2, 0]
    assert index.prefix_pages(keys[:3], Medium.DEVICE) == 3 and index.prefix_pages([], *Medium) == 0
    assert index.prefix_pages(keys, Medium.DEVICE, Medium.HOST) == 4 and index.prefix_pages(keys, *Medium) == 5
    assert index.media(keys[0]) == {Medium.DEVICE, Medium.HOST} and index.media(keys[5]) == frozenset()
    assert index.pages() == {Medium.DEVICE: 4, Medium.HOST: 2, Medium.STORAGE: 1}


def test_an_index_limits_the_pages_that_are_only_on_storage() -> None:
    index, (first, second, third, fourth) = PrefixIndex(stored_pages_max=2), distinct(4)
    index.apply([Stored(Medium.DEVICE, (first,), None, b"", b"", 1)])
    index.apply([Stored(Medium.STORAGE, (key,), None, b"", b"", 1) for key in (first, second, third, fourth)])
    assert index.keys(Medium.STORAGE) == {first, third, fourth}  # the first is on the device too
    index.apply([Removed(Medium.DEVICE, (first,))])
    assert index.keys(Medium.STORAGE) == {fourth, first} and second not in index.keys(Medium.STORAGE)
    index.check()


def test_a_full_index_and_a_full_reader_forget_some_pages_at_once() -> None:
    """So that they rarely look for the first key of a dictionary whose first keys are deleted."""
    keys = distinct(513)
    index, stream = PrefixIndex(stored_pages_max=512), EventStream(1 << 30)
    events = [Stored(Medium.STORAGE, (key,), None, b"", b"", 1) for key in keys]
    for event in events:
        stream.put(event)
    index.apply(events)
    assert index.keys(Medium.STORAGE) == set(keys[3:])
    *_, last = EventReader(stream, storage_pages_max=512).drain(1000)
    assert last == Removed(Medium.STORAGE, tuple(keys[:3]))


def test_an_index_out_of_sync_is_empty_and_ignores_events_until_it_is_started_over() -> None:
    (key,) = distinct(1)
    index, event = PrefixIndex(), Stored(Medium.DEVICE, (key,), None, b"", b"", 1)
    index.apply([event])
    index.lose()
    index.apply([event])
    assert len(index) == 0 and not index.in_sync
    index.apply([Cleared(), event])
    assert len(index) == 1 and index.in_sync


@pytest.mark.parametrize("media", SETS)
def test_a_page_takes_at_most_150_bytes_on_whatever_media_it_is(media: tuple[Medium, ...]) -> None:
    index = PrefixIndex()
    tracemalloc.start()
    try:
        for medium in media:
            for key in distinct(PAGES):
                index.apply([Stored(medium, (key,), None, b"", bytes(256), 64)])
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == PAGES
    assert held_bytes <= PAGE_BYTES_MAX * PAGES


class CountedKey(bytes):
    """A page key that counts how often it is looked for."""

    looked_for = 0

    def __hash__(self) -> int:
        CountedKey.looked_for += 1
        return bytes.__hash__(self)


@pytest.mark.parametrize("there", [0, 1, 700, 1000])
def test_a_lookup_on_the_device_tries_few_pages_of_a_long_prompt(there: int) -> None:
    index, keys = PrefixIndex(), distinct(1000)
    if there:
        index.apply([Stored(Medium.DEVICE, tuple(keys[:there]), None, b"", b"", 1)])
    CountedKey.looked_for = 0
    for media in ((Medium.DEVICE,), (Medium.DEVICE, Medium.HOST)):
        assert index.prefix_pages([CountedKey(key) for key in keys], *media) == there
    assert CountedKey.looked_for <= 2 * 11


def distinct(pages: int) -> list[bytes]:
    """Return the keys of different pages, as new objects."""
    return [number.to_bytes(32, "big") for number in range(pages)]
