"""Clients that share a store: single flight of reads and writes, hot pages from the pool, and correct outcomes while
stores fail, are detached and attached."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.calls import Call
from hicache.backends.order import AdaptivePages
from hicache.backends.pages import PageReads
from hicache.backends.storage import Storage
from hicache.backends.store import UNGUARDED, Store
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.daemon.flights import Flights
from hicache.daemon.pool import DaemonPool
from hicache.daemon.shared_slot import Attached
from hicache.daemon.sharing import SharedStore
from hicache.errors import InvalidInput
from hicache.frame import HEADER_BYTES, Compression, FrameCodec, PageBuffer
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import (
    CORRUPT,
    GET_ERROR,
    HIT,
    MISS,
    NAMESPACE,
    OTHER_NAMESPACE,
    PAYLOAD_BYTES,
    PRESENT,
    SET_ERROR,
    STORED,
    Subject,
    bare,
    delete,
    empty_frames,
    exists,
    full_frames,
    holds,
    in_parts,
    in_threads,
    load,
    make_keys,
    memory_store,
    memory_subject,
    soon,
    store_chain,
)
from tests.backends._subjects import doorless
from tests.backends._troubled import CODEC, Troubled
from tests.passing import Passing
from tests.seeds import seeds
from tests.waiting import wait_for

REJECTED = SetOutcome.REJECTED
UNIT = 4096
OPENED: list[SharedStore] = []


@pytest.fixture(autouse=True)
def stores_end() -> Iterator[None]:
    yield
    while OPENED:
        store = OPENED.pop()
        assert not attached(store).reads and not attached(store).writes, "a page is still in flight"
        store.close()
        store.pages.pool.check()
        assert not store.pages.pool.statistics().used_bytes, "a page is still held"


def attached(store: SharedStore) -> Attached:
    """Return the store behind the pool and the pages that its calls move."""
    entry = store.slot.store
    return store._alone if entry is None else entry.attached


class Gated(Troubled):
    """A `Troubled` driver whose reads block until `read_gate` is set, and its bare `store`. `gets` counts the reads
    that have started; `after_read` is called at the end of each."""

    def __init__(self, codec: FrameCodec = CODEC, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__()
        self.store = Store(self, codec, UNGUARDED, clock=clock)
        self.subject = memory_subject(self.store, self)
        self.read_gate = threading.Event()
        self.read_gate.set()
        self.gets = 0
        self.after_read: Callable[[], object] = lambda: None

    def read(self, pages: PageReads[bytes]) -> None:
        self.gets += 1
        self.read_gate.wait(30.0)
        super().read(pages)
        self.after_read()


def shared(
    driver: Gated | None, pool_pages: int = 64, codec: FrameCodec = CODEC, clock: Clock = SYSTEM_CLOCK
) -> SharedStore:
    return in_front_of(None if driver is None else driver.store, pool_pages, codec, clock)


def in_front_of(
    inner: Storage | None, pool_pages: int = 64, codec: FrameCodec = CODEC, clock: Clock = SYSTEM_CLOCK
) -> SharedStore:
    units = -(-(HEADER_BYTES + codec.payload_bytes) // UNIT)
    pool = DaemonPool(pool_pages * units * UNIT, unit_bytes=UNIT)
    store = SharedStore(codec, pool, inner, label="test", clock=clock)
    OPENED.append(store)
    return store


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(5) as pool:
        yield pool


def sources(store: SharedStore) -> tuple[int, int, int]:
    """Return the pages from the pool, from the store, and the misses."""
    found = store.sharing()
    return found.pool_hits, found.store_hits, found.misses


@pytest.mark.parametrize("has_store", [False, True])
def test_each_requested_page_counts_once_also_if_only_a_lookup_has_missed_it(has_store: bool) -> None:
    store = in_front_of(memory_store(CODEC, 1 << 20) if has_store else None)
    keys = make_keys(10)
    assert exists(doorless(store), keys) == 0
    assert sources(store) == (0, 0, 10)
    store_chain(doorless(store), keys[:4])
    assert exists(doorless(store), keys) == 4
    assert load(doorless(store), keys[:4]) == [HIT] * 4
    assert sources(store) == (4, 0, 16)
    assert store.batch_has(keys[3:6], deadline=soon()) == [True, False, False]
    assert sources(store) == (4, 0, 18)
    store.delete(keys[3:4], deadline=soon())
    assert load(doorless(store), keys[:4]) == [HIT] * 3 + [MISS], "removed between its lookup and its read"
    assert sources(store) == (7, 0, 19)


def waiting_pages(store: SharedStore, verb: str = "reads") -> int:
    """Return for how many pages calls wait that other calls move."""
    flights: Flights[object] = getattr(attached(store), verb)
    return sum(len(flight.waiters) for flight in list(flights._flights.values()))


def blocked(
    threads: ThreadPoolExecutor, store: SharedStore, inner: Gated, keys: list[bytes], deadline: float = math.inf
) -> Future[list[GetOutcome]]:
    """Store pages behind a shared store, and begin to read them; the read blocks at the gate."""
    store_chain(inner.subject, keys)
    inner.read_gate.clear()
    reading = threads.submit(store.batch_get, keys, empty_frames(CODEC, len(keys)), deadline=deadline)
    wait_for(lambda: inner.gets == 1)
    return reading


def read_at_once(store: SharedStore, inner: Gated, keys: list[bytes], readers: int) -> list[list[GetOutcome]]:
    """Let all readers read the same pages while the read of the first one blocks at the gate."""
    inner.read_gate.clear()
    with ThreadPoolExecutor(readers) as threads:
        calls = [threads.submit(load, doorless(store), keys)]
        wait_for(lambda: inner.gets == 1)
        calls += [threads.submit(load, doorless(store), keys) for _ in range(readers - 1)]
        wait_for(lambda: waiting_pages(store) + len(keys) * (inner.gets - 1) == (readers - 1) * len(keys))
        inner.read_gate.set()
        return [call.result(30.0) for call in calls]


# Reads


@pytest.mark.parametrize(("pool_pages", "is_single"), [(64, True), (0, True), (0, False)])
def test_readers_of_the_same_pages_cause_one_read(
    monkeypatch: pytest.MonkeyPatch, pool_pages: int, is_single: bool
) -> None:
    """The control: without single flight each reader reads."""
    join = Flights.join

    def alone(self: Flights[object], key: bytes, *waiter: object) -> object:
        self._flights.pop(key, None)
        return join(self, key, *waiter)  # type: ignore[arg-type]

    if not is_single:
        monkeypatch.setattr(Flights, "join", alone)
    inner = Gated()
    store, keys = shared(inner, pool_pages), make_keys(4)
    store_chain(inner.subject, keys)
    assert read_at_once(store, inner, keys, 5) == [[HIT] * 4] * 5
    assert inner.gets == (1 if is_single else 5)
    found = store.sharing()
    assert not is_single or (found.store_hits, found.shared_reads, found.misses) == (4, 16, 0)


def test_overlapping_batches_wait_for_each_other_without_a_deadlock(threads: ThreadPoolExecutor) -> None:
    """Three calls overlap; the last one waits for pages of both others."""
    inner = Gated()
    store, keys = shared(inner), make_keys(6)
    store_chain(inner.subject, keys)
    inner.read_gate.clear()
    calls = [threads.submit(load, doorless(store), keys[:4])]
    wait_for(lambda: inner.gets == 1)
    calls.append(threads.submit(load, doorless(store), keys[2:]))
    wait_for(lambda: inner.gets == 2)
    calls.append(threads.submit(load, doorless(store), [keys[5], keys[0]]))
    wait_for(lambda: waiting_pages(store) == 4)
    inner.read_gate.set()
    assert [call.result(30.0) for call in calls] == [[HIT] * 4, [HIT] * 4, [HIT] * 2]
    assert sorted(inner.called("get")) == sorted([tuple(keys[:4]), tuple(keys[4:])])


def test_a_waiting_reader_returns_at_its_own_deadline_and_its_frames_are_not_written_later(
    threads: ThreadPoolExecutor,
) -> None:
    clock = ManualClock()
    inner = Gated(clock=clock)
    store, keys = shared(inner, 0, clock=clock), make_keys(2)
    first = blocked(threads, store, inner, keys)
    frames = empty_frames(CODEC, 2)
    waiting = threads.submit(store.batch_get, keys, frames, deadline=clock() + 1)
    wait_for(lambda: waiting_pages(store) == 2)
    clock.advance(1)
    assert waiting.result(30.0) == [GET_ERROR] * 2
    assert store.statistics().errors == {"deadline": 2}
    inner.read_gate.set()
    first.result(30.0)
    assert frames == empty_frames(CODEC, 2)


def test_a_waiting_reader_with_a_later_deadline_than_the_first_one_reads_itself(threads: ThreadPoolExecutor) -> None:
    clock = ManualClock()
    inner = Gated(clock=clock)
    store, keys = shared(inner, 0, clock=clock), make_keys(2)
    first = blocked(threads, store, inner, keys, clock() + 1)
    waiting = threads.submit(load, doorless(store), keys)
    wait_for(lambda: waiting_pages(store) == 2)
    clock.advance(1)
    inner.read_gate.set()
    assert (first.result(30.0), waiting.result(30.0)) == ([GET_ERROR] * 2, [HIT] * 2)


class Dying(Passing):
    """Storage whose next read raises, after that of the store behind it."""

    dies = True

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        found = super()._get(call, keys, pages)
        if self.dies:
            self.dies = False
            raise RuntimeError("planned")
        return found


def test_an_exception_in_the_first_reader_wakes_the_waiting_ones(threads: ThreadPoolExecutor) -> None:
    inner = Gated()
    store, keys = in_front_of(Dying(inner.store)), make_keys(2)
    first = blocked(threads, store, inner, keys)
    waiting = threads.submit(load, doorless(store), keys)
    wait_for(lambda: waiting_pages(store) == 2)
    inner.read_gate.set()
    with pytest.raises(RuntimeError, match="planned"):
        first.result(30.0)
    assert waiting.result(30.0) == [HIT] * 2


def test_a_damaged_page_is_corrupt_for_one_reader_and_a_miss_for_the_others() -> None:
    inner = Gated()
    store, keys = shared(inner), make_keys(2)
    store_chain(inner.subject, keys)
    inner.poke(CODEC.namespace, keys[1], bytes(CODEC.frame_bytes))
    answers = read_at_once(store, inner, keys, 3)
    assert sorted(answers) == sorted([[HIT, CORRUPT], [HIT, MISS], [HIT, MISS]])
    assert sum(store.statistics().corrupt.values()) == 1


def test_a_key_that_occurs_twice_in_a_batch_does_not_wait_for_itself() -> None:
    inner = Gated()
    store, (one, two) = shared(inner, 0), make_keys(2)
    store_chain(doorless(store), [one, two])
    assert load(doorless(store), [one, one, two, one]) == [HIT] * 4
    assert inner.called("get") == [(one, two)]


# The pool


def test_a_page_in_the_pool_is_a_hit_even_if_the_store_has_lost_it() -> None:
    inner = Gated()
    store, keys = shared(inner), make_keys(5)
    store_chain(doorless(store), keys)
    inner.store.delete(keys[:4], deadline=soon())
    assert (exists(doorless(store), keys), load(doorless(store), keys)) == (5, [HIT] * 5)
    assert store.batch_has(keys[::-1], deadline=soon()) == [True] * 5
    assert inner.called("get") == []
    assert store.sharing().pool_hits == 5


def test_a_lookup_finds_a_chain_whose_pages_are_partly_in_the_pool_and_partly_in_the_store() -> None:
    inner = Gated()
    store, keys = shared(inner, 6), make_keys(6)
    store_chain(doorless(store), keys)
    pages = store.pages
    with pages.pool.deleting(pages.space, [keys[1], keys[2], keys[5]]):
        inner.store.delete([keys[0], keys[3]], deadline=soon())
    assert exists(doorless(store), keys) == 6
    inner.store.delete([keys[5]], deadline=soon())
    assert exists(doorless(store), keys) == 5


def test_a_page_that_does_not_match_its_checksum_is_not_added_to_the_pool() -> None:
    """Its owner has changed the page after it was sealed."""
    inner = Gated()
    store, (key, other) = shared(inner), make_keys(2)
    frames = full_frames(CODEC, [key, other])
    for frame, one in zip(frames, (key, other), strict=True):
        CODEC.seal(one, frame)
    frames[0][HEADER_BYTES] ^= 1
    assert store.batch_set([key, other], frames, parent=None, deadline=soon()) == [STORED] * 2
    assert store.pages.pool.has(store.pages.space, [key, other]) == [False, True]
    assert load(doorless(store), [key, other]) == [CORRUPT, HIT]


@pytest.mark.parametrize("form", ["plain", "zstd", "gcm", "gmac"])
@pytest.mark.parametrize("pooled", [True, False])
def test_pages_from_the_pool_are_plain_with_every_format_of_the_store(form: str, pooled: bool) -> None:
    key = [b"k" * 32]
    codec = {
        "plain": CODEC,
        "zstd": FrameCodec(NAMESPACE, PAYLOAD_BYTES, compression=Compression()),
        "gcm": FrameCodec(NAMESPACE, PAYLOAD_BYTES, encryption_keys=key),
        "gmac": FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=key),
    }[form]
    inner = Gated(codec)
    store, keys = shared(inner, 64, codec), make_keys(3)
    assert store_chain(doorless(store), keys) == [STORED] * 3
    if not pooled:
        store.pages.pool.clear(store.pages.space)
        assert load(doorless(store), keys) == [HIT] * 3
    pages: list[PageBuffer] = [*empty_frames(codec, 2), in_parts(codec, empty_frames(codec, 1)[0])]
    assert store.batch_get(keys, pages, deadline=soon()) == [HIT] * 3
    assert store.sharing().pool_hits == 3
    plain = FrameCodec(NAMESPACE, PAYLOAD_BYTES) if codec.transforms else codec
    for one, page in zip(keys, pages, strict=True):
        assert holds(codec, one, page) and plain.accept(one, page, codec.frame_bytes) is None


# Stores


def set_at_once(store: SharedStore, inner: Gated, keys: list[bytes]) -> list[list[SetOutcome]]:
    """Let a second client store the same pages while the write of the first one blocks at the gate."""
    inner.gate.clear()
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(store_chain, doorless(store), keys)]
        wait_for(lambda: inner.at_gate == 1)
        calls.append(threads.submit(store_chain, doorless(store), keys))
        wait_for(lambda: waiting_pages(store, "writes") == len(keys))
        inner.gate.set()
        return [call.result(30.0) for call in calls]


# Warm-up


def in_pool(store: SharedStore, keys: Sequence[bytes]) -> list[bool]:
    return store.pages.pool.has(store.pages.space, keys)


def test_a_warm_up_reads_into_free_room_evicts_nothing_and_is_not_counted() -> None:
    driver = Gated()
    store, old, new = shared(driver, pool_pages=5), make_keys(3, "old"), make_keys(4, "new")
    store_chain(driver.subject, new)
    store_chain(doorless(store), old)
    before = store.sharing()
    for _ in range(2):  # a second request for a page does not evict for a warm-up either
        store.warm(new, soon())
        assert in_pool(store, old) == [True] * 3 and in_pool(store, new) == [True, True, False, False]
        assert store.pages.pool.statistics().evicted == 0 and store.sharing() == before
        store.pages.pool.check()
    assert store.pages.pool.room(store.pages.space) == 0
    store.pages.pool.set_quota(store.pages.space, 1)
    assert store.pages.pool.room(store.pages.space) == 0


def test_a_reader_gets_a_page_that_a_warm_up_is_reading(threads: ThreadPoolExecutor) -> None:
    driver, keys = Gated(), make_keys(3)
    store_chain(driver.subject, keys)
    store = shared(driver)
    driver.read_gate.clear()
    warming = threads.submit(store.warm, keys, soon())
    wait_for(lambda: driver.gets == 1)
    reader = threads.submit(load, doorless(store), keys)
    wait_for(lambda: waiting_pages(store) == 3)
    driver.read_gate.set()
    assert reader.result(30) == [HIT] * 3 and driver.gets == 1
    warming.result(30)
    assert store.sharing().shared_reads == 3 and in_pool(store, keys) == [True] * 3


def test_a_warm_up_of_a_failing_store_leaves_the_pool_as_it_is() -> None:
    driver, keys = Gated(), make_keys(2)
    store = shared(driver)
    store.warm(keys, soon())  # not stored
    driver.down = True
    store.warm(keys, soon())
    assert in_pool(store, keys) == [False, False]


def test_two_clients_that_store_a_page_at_once_cause_one_write() -> None:
    inner = Gated()
    store, keys = shared(inner), make_keys(3)
    assert set_at_once(store, inner, keys) == [[STORED] * 3, [PRESENT] * 3]
    assert inner.called("set") == [tuple(keys)]
    assert store.sharing().shared_writes == 3


def test_a_client_that_waited_for_a_failed_write_writes_itself() -> None:
    inner = Gated()
    store, keys = shared(inner, 0), make_keys(3)
    inner.fail_calls = 1
    assert set_at_once(store, inner, keys) == [[SET_ERROR] * 3, [STORED] * 3]
    assert inner.called("set") == [tuple(keys)] * 2
    assert inner.parents() == [None, None]


def test_a_waiting_writer_returns_at_its_own_deadline(threads: ThreadPoolExecutor) -> None:
    clock = ManualClock()
    inner = Gated(clock=clock)
    store, keys = shared(inner, 0, clock=clock), make_keys(2)
    inner.gate.clear()
    threads.submit(store_chain, doorless(store), keys)
    wait_for(lambda: inner.at_gate == 1)
    frames = full_frames(CODEC, keys)
    waiting = threads.submit(store.batch_set, keys, frames, parent=None, deadline=clock() + 1)
    wait_for(lambda: waiting_pages(store, "writes") == 2)
    clock.advance(1)
    assert waiting.result(30.0) == [SET_ERROR] * 2
    assert store.statistics().errors == {"deadline": 2}
    inner.gate.set()


def test_a_page_that_only_the_pool_has_is_stored_again() -> None:
    inner = Gated()
    store, keys = shared(inner), make_keys(2)
    store_chain(doorless(store), keys)
    inner.store.delete(keys, deadline=soon())
    assert store_chain(doorless(store), keys) == [STORED] * 2
    assert inner.count == 2


# The pool alone


def test_without_a_store_the_pool_is_the_store() -> None:
    store, keys = shared(None, 8), make_keys(4)
    assert store_chain(doorless(store), keys) == [STORED] * 4
    assert store_chain(doorless(store), [keys[0], keys[0]]) == [PRESENT] * 2
    assert (exists(doorless(store), keys), load(doorless(store), keys)) == (4, [HIT] * 4)
    assert (store.usage().pages, store.usage().bytes) == (4, 4 * CODEC.frame_bytes)
    assert delete(doorless(store), keys[2:]) == 2
    assert load(doorless(store), keys) == [HIT, HIT, MISS, MISS]
    assert store.clear(deadline=soon()) == 2
    assert store.usage().pages == 0
    assert store.stores == () and store.statistics().errors == {}


def test_without_a_store_a_damaged_page_is_an_error() -> None:
    store, (key,) = shared(None), make_keys(1)
    (frame,) = full_frames(CODEC, [key])
    CODEC.seal(key, frame)
    frame[HEADER_BYTES] ^= 1
    assert store.batch_set([key], [frame], parent=None, deadline=soon()) == [SET_ERROR]
    assert (store.statistics().errors, exists(doorless(store), [key])) == ({"checksum": 1}, 0)


# Removals



class Uses(AdaptivePages):
    """Records the uses that it is told of."""

    def __init__(self) -> None:
        super().__init__(1)
        self.seen: list[list[bytes]] = []

    def use(self, keys: Sequence[bytes], parent: bytes | None = None) -> None:
        self.seen.append(list(keys))


@pytest.mark.parametrize("pool_pages", [0, 2, 64])
def test_each_request_counts_its_pages_once_head_first_for_adaptive_eviction(pool_pages: int) -> None:
    inner = Gated()
    pool = DaemonPool(pool_pages * -(-(HEADER_BYTES + CODEC.payload_bytes) // UNIT) * UNIT, unit_bytes=UNIT,
                      is_adaptive=True)
    store = SharedStore(CODEC, pool, inner.store, label="test")
    OPENED.append(store)
    store._space.order.adaptive = uses = Uses()
    keys = make_keys(6)
    store_chain(doorless(store), keys[:4])
    with pool.deleting(store._space, keys[:1]):
        pass
    assert load(doorless(store), keys) == [HIT] * 4 + [MISS] * 2
    pooled = [key for key, there in zip(keys, pool.has(store._space, keys), strict=True) if there]
    store.batch_touch(keys, deadline=soon())
    store.warm(keys, soon())
    assert uses.seen == [keys[:4], keys[:4], pooled], "written, read, touched"


@pytest.mark.parametrize("verb", ["delete", "clear"])
def test_a_read_in_flight_does_not_restore_a_deleted_page(threads: ThreadPoolExecutor, verb: str) -> None:
    inner = Gated()
    store, keys = shared(inner), make_keys(2)
    store_chain(inner.subject, keys)
    has_read, may_return = threading.Event(), threading.Event()

    def wait() -> None:
        has_read.set()
        may_return.wait(30.0)

    inner.after_read = wait
    reading = threads.submit(load, doorless(store), keys)
    wait_for(has_read.is_set)
    removed = delete(doorless(store), keys) if verb == "delete" else store.clear(deadline=soon())
    assert removed == 2
    inner.after_read = lambda: None
    later = threads.submit(load, doorless(store), keys)
    wait_for(lambda: later.done() or waiting_pages(store) > 0)
    may_return.set()
    assert later.result(30.0) == [MISS] * 2, "a call waited for a read that began before the deletion"
    reading.result(30.0)
    assert (exists(doorless(store), keys), load(doorless(store), keys)) == (0, [MISS] * 2)


class SlowlyRemoving(Gated):
    """A driver that calls `before_removal` before it removes pages."""

    before_removal: Callable[[], object]

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[bytes] | None = None
    ) -> tuple[int, Sequence[str]]:
        self.before_removal()
        return super().remove(namespace, keys, deadline, found)


def test_a_read_that_begins_during_a_deletion_does_not_restore_the_page(threads: ThreadPoolExecutor) -> None:
    """The store still has the page when the read begins, and no longer when the read ends."""
    inner = SlowlyRemoving()
    store, keys = shared(inner), make_keys(2)
    store_chain(inner.subject, keys)
    has_read, may_return = threading.Event(), threading.Event()
    readings: list[Future[list[GetOutcome]]] = []

    def wait() -> None:
        has_read.set()
        may_return.wait(30.0)

    def read() -> None:
        inner.after_read = wait
        readings.append(threads.submit(load, doorless(store), keys))
        wait_for(has_read.is_set)
        inner.after_read = lambda: None

    inner.before_removal = read
    assert delete(doorless(store), keys) == 2
    later = threads.submit(load, doorless(store), keys)
    wait_for(lambda: later.done() or waiting_pages(store) > 0)
    may_return.set()
    assert later.result(30.0) == [MISS] * 2, "a call waited for a read that began before the end of the deletion"
    assert readings[0].result(30.0) == [HIT] * 2
    assert (exists(doorless(store), keys), load(doorless(store), keys)) == (0, [MISS] * 2)


@pytest.mark.parametrize("verb", ["delete", "clear"])
def test_a_removal_covers_pool_and_store_and_does_not_count_a_page_twice(verb: str) -> None:
    inner = Gated()
    store, keys = shared(inner), make_keys(5)
    store_chain(doorless(store), keys[:3])
    inner.store.delete(keys[:1], deadline=soon())
    store_chain(inner.subject, keys[3:])
    removed = delete(doorless(store), keys) if verb == "delete" else store.clear(deadline=soon())
    # A clear gets a number from the pool and one from the store, and does not know how many pages are in both.
    assert removed == (5 if verb == "delete" else 4)
    assert (inner.count, load(doorless(store), keys)) == (0, [MISS] * 5)


# Stores that are detached and attached


def test_calls_in_flight_end_with_the_store_they_began_with_when_it_is_replaced(threads: ThreadPoolExecutor) -> None:
    old, new = Gated(), Gated()
    store, keys, more = shared(old, 2), make_keys(3), make_keys(3, "more")
    store_chain(doorless(store), keys)
    store_chain(old.subject, more)
    old.fail_pages = set(more[2:])
    old.read_gate.clear()
    reading = threads.submit(load, doorless(store), more)
    wait_for(lambda: old.gets == 1)
    store.slot.replace(lambda: new.store)
    wait_for(lambda: store.stores == (new.store,))
    assert load(doorless(store), more) == [MISS] * 3, "a call of the new store waited for one of the old store"
    assert old.closes == 0
    before = store.statistics().errors
    old.store.batch_exists(more, deadline=soon(-1))
    assert store.statistics().errors != before, "errors of the old store do not count while its calls are in flight"
    old.read_gate.set()
    assert reading.result(30.0) == [HIT, HIT, MISS]
    assert load(doorless(store), keys) == [HIT, HIT, MISS], "the pool has lost its pages"
    wait_for(lambda: old.closes == 1)


def test_the_errors_of_replaced_stores_stay_in_the_totals() -> None:
    inner = Gated()
    store, keys = shared(inner), make_keys(2)
    inner.down = True
    assert exists(doorless(store), keys) == 0
    totals = store.statistics().errors
    assert totals == {"down": 1}
    store.slot.replace(None)
    assert store.statistics().errors == totals and store.stores == ()
    assert (exists(doorless(store), keys), store_chain(doorless(store), keys)) == (0, [STORED] * 2)
    second = Gated()
    store.slot.replace(lambda: second.store)
    wait_for(lambda: store.stores == (second.store,))
    assert store.statistics().errors == totals
    second.down = True
    assert store_chain(doorless(store), keys) == [PRESENT] * 2
    assert store.statistics().errors == {"down": 3}
    assert load(doorless(store), keys) == [HIT] * 2


def test_a_store_of_another_namespace_is_rejected() -> None:
    for codec in (FrameCodec(OTHER_NAMESPACE, PAYLOAD_BYTES), FrameCodec(NAMESPACE, PAYLOAD_BYTES + 1)):
        with pytest.raises(InvalidInput):
            SharedStore(CODEC, DaemonPool(0), memory_store(codec))
        store = shared(None)
        store.slot.replace(lambda codec=codec: memory_store(codec))  # type: ignore[misc]
        wait_for(lambda store=store: store.slot.open_failures > 0)  # type: ignore[misc]
        assert store.stores == ()


# All at once


class Kept(Troubled):
    """A driver that keeps its pages when it is closed, for the next store."""

    def close(self) -> None:
        self.closes += 1


@pytest.mark.parametrize("pool_pages", [0, 3, 64])
@pytest.mark.parametrize("seed", seeds(2))
def test_threads_that_share_a_store_read_whole_pages_or_none(seed: int, pool_pages: int) -> None:
    """Threads read, store and delete two chains while another detaches and attaches the store. Each read compares the
    bytes of its hits."""
    inner = Kept()
    store = in_front_of(bare(inner, CODEC), pool_pages)
    chains = [make_keys(8, name) for name in ("one", "other")]
    ended = threading.Event()

    def use(number: int) -> None:
        dice = random.Random(seed + number)
        if number == 0:
            while not ended.is_set():
                if store.stores:
                    store.slot.replace(None)
                else:
                    store.slot.start(bare(inner, CODEC))
            return
        try:
            churn_all(doorless(store), chains[number % 2], dice)
        finally:
            if number == 1:
                ended.set()

    in_threads(7, use)
    if not store.stores:
        store.slot.start(bare(inner, CODEC))
    for keys in chains:
        delete(doorless(store), keys)
        assert load(doorless(store), keys) == [MISS] * 8
    assert inner.count == 0 and store.statistics().corrupt == {}


def churn_all(store: Subject, keys: list[bytes], dice: random.Random, rounds: int = 150) -> None:
    for _ in range(rounds):
        first = dice.randrange(len(keys))
        some = keys[first : first + dice.randrange(1, 6)]
        action = dice.randrange(12)
        if action < 4:
            parent = keys[first - 1] if first else None
            assert set(store_chain(store, some, parent)) <= {STORED, PRESENT, REJECTED, SET_ERROR}
        elif action < 10:
            assert set(load(store, some)) <= {HIT, MISS}
        elif action == 10:
            assert 0 <= exists(store, some) <= len(some)
        else:
            delete(store, some)
