"""`Store` over drivers that fail in the middle, report too few outcomes, or raise wrong exceptions."""

from __future__ import annotations

import array
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from hicache.backends.base import SetOutcome, StoredPage
from hicache.backends.errors import StoreError
from hicache.backends.memory import MemoryDriver
from hicache.backends.pages import SETTLE_S, PageReads, PageWrites
from hicache.backends.store import UNGUARDED, Store
from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.errors import InvalidInput
from hicache.frame import HEADER_BYTES, Compression, FrameCodec, PageView, unseal
from hicache_lab.clocks import ManualClock
from hicache_lab.conformance import (
    CORRUPT,
    GET_ERROR,
    HIT,
    MISS,
    NAMESPACE,
    PAYLOAD_BYTES,
    PRESENT,
    SET_ERROR,
    STORED,
    bare,
    empty_frames,
    full_frames,
    holds,
    make_keys,
    memory_store,
    soon,
)
from hicache_lab.faults import FaultOptions, FaultyDriver
from tests.waiting import wait_for

from ._files import OPENED

CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
KEYS = make_keys(4)
REJECTED = SetOutcome.REJECTED


class _Failing(MemoryDriver):
    """A driver with functions replaced by a test; a replacement gets the original function and its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.instead: dict[str, Callable[..., Any]] = {}
        self.closes = 0

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__(name)
        instead = {} if name in ("instead", "__dict__") else self.__dict__.get("instead", {})
        return partial(instead[name], own) if name in instead else own

    def close(self) -> None:
        self.closes += 1
        super().close()


def filled(clock: Clock = SYSTEM_CLOCK, /, **instead: Callable[..., Any]) -> tuple[_Failing, Store]:
    """Return a driver with the pages of KEYS, and its store; its functions are replaced after these are stored."""
    driver = _Failing()
    OPENED.append(store := Store(driver, CODEC, UNGUARDED, clock=clock))
    assert store.batch_set(KEYS, full_frames(CODEC, KEYS), parent=None, deadline=soon()) == [STORED] * 4
    driver.instead = instead
    return driver, store


def fail(*_: Any) -> Any:
    raise StoreError("away")


def cut_off(own: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    """Yield only the first answer."""
    yield next(iter(own(*arguments)))


def broken_off(own: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
    yield next(iter(own(*arguments)))
    raise StoreError("away")


@pytest.mark.parametrize(("find", "reason"), [(cut_off, "internal"), (broken_off, "away"), (fail, "away")])
def test_a_missing_answer_of_a_lookup_is_not_stored_and_one_error(find: Callable[..., Any], reason: str) -> None:
    _, store = filled(find=find)
    told = 0 if find is fail else 1
    assert store.batch_has(KEYS, deadline=soon()) == [True] * told + [False] * (4 - told)
    assert store.statistics().errors == {reason: 1}
    assert store.batch_exists(KEYS, deadline=soon()) == told
    assert store.statistics().errors == {reason: 2}


def test_a_prefix_lookup_stops_at_the_hole() -> None:
    asked: list[bool] = []

    def find(own: Callable[..., list[bool]], *arguments: Any) -> Iterator[bool]:
        for there in own(*arguments):
            asked.append(there)
            yield there

    _, store = filled(find=find)
    store.delete(KEYS[1:2], deadline=soon())
    assert store.batch_exists(KEYS, deadline=soon()) == 1
    assert asked == [True, False]
    assert store.batch_has(KEYS, deadline=soon()) == [True, False, True, True]
    assert store.statistics().errors == {}


def test_a_call_that_ends_early_fails_the_remaining_pages() -> None:
    def read(own: Callable[..., None], pages: PageReads[bytes]) -> None:
        pages.miss(2)
        raise StoreError("away")

    def write(own: Callable[..., None], pages: PageWrites) -> None:
        pages.stored(0)
        raise StoreError("away")

    _, store = filled(read=read, write=write)
    assert store.batch_get(KEYS, empty_frames(CODEC, 4), deadline=soon()) == [GET_ERROR, GET_ERROR, MISS, GET_ERROR]
    assert store.statistics().errors == {"away": 3}
    frames = full_frames(CODEC, KEYS)
    assert store.batch_set(KEYS, frames, parent=None, deadline=soon()) == [STORED] + [SET_ERROR] * 3
    assert store.statistics().errors == {"away": 6}


def test_a_failure_after_the_last_page_is_counted_once() -> None:
    def then_fail(own: Callable[..., None], pages: Any) -> None:
        own(pages)
        raise StoreError("away")

    _, store = filled(read=then_fail, write=then_fail)
    assert store.batch_get(KEYS, empty_frames(CODEC, 4), deadline=soon()) == [HIT] * 4
    assert store.statistics().errors == {"away": 1}
    assert store.batch_set(KEYS, full_frames(CODEC, KEYS), parent=None, deadline=soon()) == [PRESENT] * 4
    assert store.statistics().errors == {"away": 2}


def test_a_page_without_a_reported_outcome_is_an_internal_error() -> None:
    _, store = filled(read=lambda own, pages: None, write=lambda own, pages: None)
    assert store.batch_get(KEYS, empty_frames(CODEC, 4), deadline=soon()) == [GET_ERROR] * 4
    assert store.batch_set(KEYS, full_frames(CODEC, KEYS), parent=None, deadline=soon()) == [SET_ERROR] * 4
    assert store.statistics().errors == {"internal": 8}


def test_damage_that_cannot_be_removed_is_corrupt_and_counts_one_error() -> None:
    driver, store = filled(remove=fail)
    driver.poke(CODEC.namespace, KEYS[1], bytes(CODEC.frame_bytes))
    assert store.batch_get(KEYS, empty_frames(CODEC, 4), deadline=soon()) == [HIT, CORRUPT, HIT, HIT]
    found = store.statistics()
    assert (found.errors, found.corrupt) == ({"away": 1}, {"not_a_frame": 1})


def test_damage_is_removed_even_after_the_deadline() -> None:
    """Removal has its own deadline: otherwise a damaged page found last would stay forever."""
    left_s: list[float] = []

    def read(own: Callable[..., None], pages: PageReads[bytes]) -> None:
        own(pages)
        clock.advance(1.0)  # as if reading had taken all the time

    def remove(own: Callable[..., Any], space: bytes, keys: Sequence[bytes], deadline: float, found: Any) -> Any:
        left_s.append(deadline - clock())
        return own(space, keys, deadline, found)

    clock = ManualClock()
    driver, store = filled(clock, read=read, remove=remove)
    driver.poke(CODEC.namespace, KEYS[1], bytes(CODEC.frame_bytes))
    store.batch_get(KEYS, empty_frames(CODEC, 4), deadline=clock() + 1.0)
    assert left_s == [pytest.approx(SETTLE_S)]
    assert driver.peek(CODEC.namespace, KEYS[1]) is None


@pytest.mark.parametrize("pages", [fail, broken_off])
def test_a_failed_listing_counts_one_error(pages: Callable[..., Any]) -> None:
    _, store = filled(pages=pages)
    assert store.clear(deadline=soon()) == 0
    assert store.statistics().errors == {"away": 1}


@pytest.mark.parametrize("verb", ["find", "read", "write", "remove", "pages"])
def test_close_returns_after_a_verb_that_raised(verb: str) -> None:
    def crash(*_: Any) -> Any:
        raise ZeroDivisionError

    driver, store = filled(**{verb: crash})
    driver.poke(CODEC.namespace, KEYS[0], bytes(CODEC.frame_bytes))
    calls: dict[str, Callable[[], object]] = {
        "find": lambda: store.batch_has(KEYS, deadline=soon()),
        "write": lambda: store.batch_set(KEYS, full_frames(CODEC, KEYS), parent=None, deadline=soon()),
        "pages": lambda: store.clear(deadline=soon()),
    }
    calls.get(verb, lambda: store.batch_get(KEYS, empty_frames(CODEC, 4), deadline=soon()))()
    assert set(store.statistics().errors) == {"raised_ZeroDivisionError"}
    with ThreadPoolExecutor(1) as threads:
        threads.submit(store.close).result(10)


def test_close_waits_for_each_verb() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def wait(own: Callable[..., Any], *arguments: Any) -> Any:
        entered.set()
        assert go_on.wait(10)
        return own(*arguments)

    _, store = filled(read=wait)
    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit(store.batch_get, KEYS, empty_frames(CODEC, 4), deadline=soon())
        assert entered.wait(10)
        closing = threads.submit(store.close)
        wait_for(lambda: store._admission._closed)
        assert not closing.done()
        go_on.set()
        closing.result(10)
        assert reading.result(10) == [HIT] * 4


def in_lengths(lengths: Sequence[int]) -> PageView:
    return PageView(memoryview(bytearray(HEADER_BYTES)), [memoryview(bytearray(length)) for length in lengths])


@pytest.mark.parametrize("compression", [None, Compression()])
@pytest.mark.parametrize("lengths", [
    [0, PAYLOAD_BYTES, 0], [1, 0, PAYLOAD_BYTES - 2, 1], [1] * 2000 + [PAYLOAD_BYTES - 2000]
])
def test_parts_may_be_empty_and_many(lengths: Sequence[int], compression: Compression | None) -> None:
    codec = FrameCodec(NAMESPACE, PAYLOAD_BYTES, compression=compression)
    store = memory_store(codec)
    store.batch_set(KEYS, full_frames(codec, KEYS), parent=None, deadline=soon())
    pages = [in_lengths(lengths) for _ in KEYS]
    assert store.batch_get(KEYS, pages, deadline=soon()) == [HIT] * 4
    assert all(holds(codec, key, page) for key, page in zip(KEYS, pages, strict=True))
    store.clear(deadline=soon())
    assert store.batch_set(KEYS, pages, parent=None, deadline=soon()) == [STORED] * 4
    frames = empty_frames(codec, 4)
    assert store.batch_get(KEYS, frames, deadline=soon()) == [HIT] * 4
    assert all(holds(codec, key, frame) for key, frame in zip(KEYS, frames, strict=True))
    damaging = Store(FaultyDriver(store.driver, FaultOptions(damage_share=1.0)), codec, UNGUARDED)
    assert damaging.batch_get(KEYS, pages, deadline=soon()) == [CORRUPT] * 4
    assert damaging.statistics().corrupt == {"injected": 4}
    damaging.close()


def test_memory_of_signed_bytes_is_rejected_before_any_transfer() -> None:
    store, (key,) = memory_store(CODEC), KEYS[:1]
    signed = PageView(memoryview(bytearray(HEADER_BYTES)), [memoryview(array.array("b", bytes(PAYLOAD_BYTES)))])
    for page in (signed, memoryview(array.array("b", bytes(CODEC.frame_bytes)))):
        with pytest.raises(InvalidInput, match="cast"):
            store.batch_set([key], [page], parent=None, deadline=soon())
        with pytest.raises(InvalidInput, match="cast"):
            store.batch_get([key], [page], deadline=soon())


def test_an_unsealed_header_is_reused_for_another_payload() -> None:
    store, (key,) = memory_store(CODEC), KEYS[:1]
    page = in_lengths([PAYLOAD_BYTES])
    for byte in (b"\1", b"\2"):
        unseal(page.header)
        page.parts[0][:] = byte * PAYLOAD_BYTES
        assert store.batch_set([key], [page], parent=None, deadline=soon()) == [STORED]
        assert store.batch_get([key], empty_frames(CODEC, 1), deadline=soon()) == [HIT]
        store.clear(deadline=soon())
    # A page with another key's header is always sealed again.
    other = make_keys(1, "other")
    page.parts[0][:] = b"\3" * PAYLOAD_BYTES
    assert store.batch_set(other, [page], parent=None, deadline=soon()) == [STORED]
    assert store.batch_get(other, empty_frames(CODEC, 1), deadline=soon()) == [HIT]


def test_bytes_read_behind_a_payload_are_never_written() -> None:
    driver, (key,) = MemoryDriver(), KEYS[:1]
    store = bare(driver, CODEC)
    page, end = in_lengths([PAYLOAD_BYTES]), HEADER_BYTES + PAYLOAD_BYTES
    store.batch_set([key], full_frames(CODEC, [key]), parent=None, deadline=soon())
    stored = (driver.peek(CODEC.namespace, key) or b"")[:end]
    driver.poke(CODEC.namespace, key, stored.ljust(CODEC.frame_bytes, b"\xee"))
    assert store.batch_get([key], [page], deadline=soon()) == [HIT]
    store.clear(deadline=soon())
    assert store.batch_set([key], [page], parent=None, deadline=soon()) == [STORED]
    assert (driver.peek(CODEC.namespace, key) or b"")[end:] == bytes(CODEC.frame_bytes - end)


@pytest.mark.parametrize("kind", ["read", "write"])
def test_no_page_is_started_after_the_deadline(kind: str) -> None:
    clock = ManualClock()
    deadline = clock() + 1.0
    pages = (
        PageReads[bytes](CODEC, KEYS, empty_frames(CODEC, 4), deadline, clock)
        if kind == "read"
        else PageWrites(CODEC, KEYS, full_frames(CODEC, KEYS), None, deadline, clock)
    )
    started = []
    for position in pages:
        started.append(position)
        if position == 1:
            clock.advance(1.0)  # as if the page had taken all the time
    assert started == [0, 1]


def test_behind_the_first_page_without_room_all_are_rejected() -> None:
    pages = PageWrites(CODEC, KEYS, full_frames(CODEC, KEYS), None, soon())
    pages.stored(0)
    pages.reject(1, "full")
    pages.reject(3)
    assert list(pages) == []
    assert pages.finish() == [STORED, REJECTED, REJECTED, REJECTED]
    assert pages.errors == ["full"]


def test_a_store_that_is_closed_twice_closes_its_driver_once() -> None:
    driver, store = filled()
    store.close()
    store.close()
    assert driver.closes == 1


def test_pages_not_cleared_by_the_deadline_stay_and_count_one_error() -> None:
    def pages(own: Callable[..., Iterator[StoredPage]], namespace: str, deadline: float) -> Iterator[StoredPage]:
        clock.advance(1.0)
        yield from own(namespace, deadline)

    clock = ManualClock()
    _, store = filled(clock, pages=pages)
    assert store.clear(deadline=clock() + 1.0) == 0
    assert store.statistics().errors == {"deadline": 1}
    assert store.batch_has(KEYS, deadline=soon()) == [True] * 4
