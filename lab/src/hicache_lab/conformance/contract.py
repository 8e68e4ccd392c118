"""The conformance suite of drivers. Every driver must pass it, in a bare store.

    class TestMine(DriverContract):
        @pytest.fixture
        def open_store(self, tmp_path):
            def open_it(codec):
                return Subject(bare(MyDriver(codec, tmp_path), codec), read=..., write=...)
            return open_it

`open_store` opens the same store, initially empty, once per call, each time for a given codec. `read` and `write`
access the raw stored bytes of a key directly, so that a store is not tested through itself. A store that exists only as
long as one driver, such as memory, passes `SoleDriverContract`: all tests except those with two openings. Storage of
several stores passes the same tests. `StoreContract` has the rules that the shell keeps for all drivers.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from hicache.backends.driver import Touches
from hicache.backends.pages import PageReads
from hicache.backends.store import Store
from hicache.frame import NO_PARENT, Compression, FrameCodec, FrameHeader, frame_bytes

from .bounds import BoundsContract
from .damage import damaged
from .machine import run_machine
from .pages import (
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
    WAIT_S,
    ContractFixtures,
    OpenStore,
    Subject,
    churn,
    delete,
    empty_frames,
    exists,
    full_frames,
    in_threads,
    load,
    make_keys,
    soon,
    store_chain,
)


def _closed_errors(store: Subject) -> int:
    """Return the number of verbs rejected because the storage is closed."""
    return store.backend.statistics().errors.get("closed", 0)


class SoleDriverContract(BoundsContract):
    """The contract of a driver whose store no other driver can open. Subclass `DriverContract` otherwise."""

    # Walks of the state machine, about forty calls each; a subclass for a slow store may set fewer.
    machine_examples: ClassVar[int] = 20
    # Calls of each thread in the tests with threads; a subclass for a store that waits before it deletes may set fewer.
    churn_rounds: ClassVar[int] = 40
    # True if the random walk closes the store and opens it again.
    reopens: ClassVar[bool] = False
    # False for a driver that cannot tell a damaged object from one that has replaced it since.
    tells_replaced: ClassVar[bool] = True

    def test_storing_again_is_present_and_changes_nothing(self, store: Subject) -> None:
        keys = make_keys(3)
        store_chain(store, keys)
        before = [store.read(key) for key in keys]
        assert store_chain(store, keys) == [PRESENT] * 3
        assert [store.read(key) for key in keys] == before

    def test_a_batch_of_old_and_new_pages_stores_the_new_ones(self, store: Subject) -> None:
        keys = make_keys(6)
        store_chain(store, [keys[1], keys[4]])
        assert load(store, keys) == [MISS, HIT, MISS, MISS, HIT, MISS]
        assert store_chain(store, keys) == [STORED, PRESENT, STORED, STORED, PRESENT, STORED]
        assert load(store, keys) == [HIT] * 6

    def test_a_repeated_key_is_stored_once_with_the_parent_of_its_first_position(self, store: Subject) -> None:
        one, two, three = make_keys(3)
        assert store_chain(store, [one, one, two, one, three]) == [STORED, PRESENT, STORED, PRESENT, STORED]
        assert load(store, [one, two, three]) == [HIT] * 3
        assert store.backend.usage().pages == 3
        headers = [FrameHeader.parse(store.read(key) or b"") for key in (one, two, three)]
        assert [header and header.parent_key for header in headers] == [NO_PARENT, one, one]

    def test_empty_batches_are_fine(self, store: Subject) -> None:
        assert store.backend.batch_set([], [], parent=None, deadline=soon()) == []
        assert store.backend.batch_get([], [], deadline=soon()) == []
        assert store.backend.batch_has([], deadline=soon()) == []
        assert (exists(store, []), delete(store, [])) == (0, 0)

    def test_exists_stops_at_the_first_hole(self, store: Subject) -> None:
        keys = make_keys(8)
        assert exists(store, keys) == 0
        store_chain(store, keys)
        for hole in (8, 3, 0):
            delete(store, keys[hole : hole + 1])
            assert exists(store, keys) == hole

    def test_single_pages_can_be_looked_up(self, store: Subject) -> None:
        keys = make_keys(5)
        store_chain(store, [keys[0], keys[3]])
        asked = [keys[4], keys[3], keys[1], keys[0], keys[3]]
        assert store.backend.batch_has(asked, deadline=soon()) == [False, True, False, True, True]
        assert store.backend.batch_has(asked, deadline=soon(-1)) == [False] * 5

    def test_delete_removes_and_counts_stored_pages(self, store: Subject) -> None:
        keys = make_keys(4)
        store_chain(store, keys[:3])
        assert delete(store, keys[1:]) == 2
        assert load(store, keys) == [HIT, MISS, MISS, MISS]
        assert store.read(keys[1]) is None
        assert store_chain(store, keys) == [PRESENT, STORED, STORED, STORED]
        assert load(store, keys) == [HIT] * 4

    def test_deleting_twice_counts_once(self, store: Subject) -> None:
        keys = make_keys(3)
        store_chain(store, keys)
        assert delete(store, [keys[2], keys[2]]) == 1
        assert delete(store, [keys[2]]) == 0
        assert load(store, keys) == [HIT, HIT, MISS]

    def test_clear_removes_all_pages_of_one_namespace(self, open_store: OpenStore, codec: FrameCodec) -> None:
        ours, theirs = open_store(codec), open_store(FrameCodec(bytes(31) + b"\1", PAYLOAD_BYTES))
        keys = make_keys(7)
        store_chain(ours, keys)
        store_chain(theirs, keys[:4])
        assert ours.backend.clear(deadline=soon(-1)) == 0
        assert ours.backend.clear(deadline=soon()) == 7
        assert (load(ours, keys), load(theirs, keys)) == ([MISS] * 7, [HIT] * 4 + [MISS] * 3)
        assert ours.backend.clear(deadline=soon()) == 0
        assert store_chain(ours, keys) == [STORED] * 7
        ours.backend.close()
        theirs.backend.close()

    def test_a_wrong_object_is_corrupt_and_removed(self, store: Subject) -> None:
        keys, before = make_keys(3), 0
        store_chain(store, keys)
        for damage in ("payload end", "cut", "doubled", "another key"):
            store.write(keys[1], damaged(store.backend.codec, keys, store.read(keys[1]) or b"", damage))
            assert load(store, keys) == [HIT, CORRUPT, HIT], damage
            found = store.backend.statistics()
            assert sum(found.corrupt.values()) == found.gets[CORRUPT] > before  # on each store that had the page
            before = found.gets[CORRUPT]
            assert store.read(keys[1]) is None
            assert load(store, keys) == [HIT, MISS, HIT]
            assert store_chain(store, keys) == [PRESENT, STORED, PRESENT]
            assert load(store, keys) == [HIT, HIT, HIT]

    def test_a_damaged_object_that_was_replaced_since_is_not_removed(self, store: Subject) -> None:
        if not isinstance(store.backend, Store):
            return  # storage of several stores removes nothing itself
        driver, codec, keys = store.backend.driver, store.backend.codec, make_keys(2)
        store_chain(store, keys)
        for key in keys:
            store.write(key, damaged(codec, make_keys(3), store.read(key) or b"", "payload end"))
        reads: PageReads[Any] = PageReads(codec, keys, empty_frames(codec, 2), soon())
        driver.read(reads)
        assert sorted(one.key for one in reads.damaged) == sorted(keys)
        store.write(keys[0], damaged(codec, make_keys(3), bytes(codec.frame_bytes), "text"))
        found = [one.found for one in reads.damaged]
        driver.remove(codec.namespace, [one.key for one in reads.damaged], soon(), found)
        assert (store.read(keys[0]) is not None) is self.tells_replaced
        assert store.read(keys[1]) is None

    def test_a_compressed_page_is_stored_counted_and_read_in_its_own_length(self, open_store: OpenStore) -> None:
        """The stored object is the encoded page, which is shorter than a frame."""
        codec = FrameCodec(NAMESPACE, PAYLOAD_BYTES, compression=Compression())
        store, keys = open_store(codec), make_keys(4)
        assert (store.backend.usage().pages, store.backend.usage().bytes) == (0, 0)
        assert store_chain(store, keys) == [STORED] * 4
        stored = [store.read(key) or b"" for key in keys]
        for raw in stored:
            header = FrameHeader.parse(raw)
            assert header is not None and len(raw) == frame_bytes(header.stored_bytes) < codec.frame_bytes
        assert store_chain(store, keys) == [PRESENT] * 4
        assert (store.backend.usage().pages, store.backend.usage().bytes) == (4, sum(map(len, stored)))
        assert load(store, keys) == [HIT] * 4
        delete(store, keys[3:])
        assert (store.backend.usage().pages, store.backend.usage().bytes) == (3, sum(map(len, stored[:3])))
        store.backend.close()

    def test_after_its_deadline_a_verb_does_nothing(self, store: Subject) -> None:
        keys = make_keys(3)
        store_chain(store, keys[:2])
        past, frames = soon(-1), full_frames(store.backend.codec, keys)
        errors = [0]
        calls: list[Callable[[], bool]] = [
            lambda: store.backend.batch_exists(keys, deadline=past) == 0,
            lambda: store.backend.batch_get(keys, frames, deadline=past) == [GET_ERROR] * 3,
            lambda: store.backend.batch_set(keys, frames, parent=None, deadline=past) == [SET_ERROR] * 3,
            lambda: store.backend.delete(keys, deadline=past) == 0,
        ]
        for is_refused in calls:
            assert is_refused()
            errors.append(sum(store.backend.statistics().errors.values()))
        assert errors == sorted(set(errors)), "a rejected call was not counted"
        found = store.backend.statistics()
        assert found.gets[GET_ERROR] >= 3 <= found.sets[SET_ERROR]  # storage of several stores asks each of them
        assert load(store, keys) == [HIT, HIT, MISS]

    def test_a_miss_is_not_an_error(self, store: Subject) -> None:
        """The control of the test above: a missing page differs from a failed lookup."""
        keys = make_keys(3)
        assert load(store, keys) == [MISS] * 3
        assert (exists(store, keys), delete(store, keys)) == (0, 0)
        assert dict(store.backend.statistics().errors) == {}

    def test_a_deadline_may_be_infinite(self, store: Subject) -> None:
        keys = make_keys(2)
        frames = full_frames(store.backend.codec, keys)
        assert store.backend.batch_set(keys, frames, parent=None, deadline=math.inf) == [STORED] * 2
        assert store.backend.batch_exists(keys, deadline=math.inf) == 2
        assert store.backend.batch_get(keys, frames, deadline=math.inf) == [HIT] * 2
        assert store.backend.delete(keys, deadline=math.inf) == 2

    def test_a_touch_returns_only_missing_pages(self, store: Subject) -> None:
        keys = make_keys(5)
        store_chain(store, keys[:3])
        before = store.backend.statistics()
        missing = store.backend.batch_touch([*keys, keys[4]], deadline=soon())
        assert sorted(missing) in ([], sorted(keys[3:])), "returned other keys than the missing ones"
        assert store.backend.batch_touch([], deadline=soon()) == []
        if isinstance(store.backend, Store):  # levels make copies in the background, which count
            assert store.backend.statistics() == before
        assert load(store, keys) == [HIT] * 3 + [MISS] * 2
        if not (isinstance(store.backend, Store) and isinstance(store.backend.driver, Touches)):
            return
        assert store.backend.batch_touch(keys, deadline=soon(-1)) == [], "a failed touch returned keys"
        store.backend.close()
        assert store.backend.batch_touch(keys, deadline=soon()) == []

    def test_verbs_after_close_report_errors(self, store: Subject) -> None:
        backend, keys = store.backend, make_keys(2)
        store_chain(store, keys)
        backend.close()
        backend.close()
        frames = full_frames(backend.codec, keys)
        calls: list[Callable[[], bool]] = [
            lambda: exists(store, keys) == 0,
            lambda: backend.batch_has(keys, deadline=soon()) == [False] * 2,
            lambda: backend.batch_get(keys, frames, deadline=soon()) == [GET_ERROR] * 2,
            lambda: backend.batch_set(keys, frames, parent=None, deadline=soon()) == [SET_ERROR] * 2,
            lambda: delete(store, keys) == 0,
            lambda: backend.clear(deadline=soon()) == 0,
        ]
        for is_refused in calls:
            before = _closed_errors(store)
            assert is_refused()
            assert _closed_errors(store) > before

    def test_threads_see_whole_pages_or_none(self, store: Subject, seed: int) -> None:
        keys = make_keys(12)
        in_threads(6, lambda number: churn(store, keys, random.Random(seed + number), rounds=self.churn_rounds))
        delete(store, keys)
        assert store.backend.usage().pages == 0

    def test_a_random_walk_matches_the_memory_driver(self, open_store: OpenStore) -> None:
        run_machine(open_store, examples=self.machine_examples, reopens=self.reopens)

    def test_two_namespaces_in_one_store_never_see_each_other(self, open_store: OpenStore) -> None:
        """Both use the same keys: a page of one is a miss in the other, and its removal does not affect the other."""
        codecs = [FrameCodec(namespace, PAYLOAD_BYTES) for namespace in (NAMESPACE, OTHER_NAMESPACE)]
        ours, theirs = (open_store(codec) for codec in codecs)
        keys = make_keys(4)
        assert store_chain(ours, keys) == [STORED] * 4
        assert (exists(theirs, keys), load(theirs, keys)) == (0, [MISS] * 4)
        assert delete(theirs, keys) == 0
        assert store_chain(theirs, keys[:3]) == [STORED] * 3
        assert delete(ours, keys[1:]) == 3
        assert (load(ours, keys), load(theirs, keys)) == ([HIT, MISS, MISS, MISS], [HIT, HIT, HIT, MISS])
        ours.backend.close()
        assert load(theirs, keys[:3]) == [HIT] * 3
        theirs.backend.close()

    def test_close_during_use_waits_and_loses_nothing(self, store: Subject) -> None:
        keys = make_keys(12)
        running = threading.Barrier(4)

        def use(number: int) -> None:
            if number == 3:
                running.wait(WAIT_S)
                store.backend.close()
                return
            store_chain(store, keys[number * 4 : number * 4 + 4])
            running.wait(WAIT_S)
            while HIT in load(store, keys) or STORED in store_chain(store, keys):
                pass

        in_threads(4, use)
        assert load(store, keys) == [GET_ERROR] * 12


class DriverContract(SoleDriverContract):
    """The contract of a store that several drivers open at once, as engines do, and that outlives them. Subclass it in
    a test module and add the fixture `open_store`."""

    reopens = True

    @pytest.fixture
    def second(self, open_store: OpenStore, codec: FrameCodec) -> Iterator[Subject]:
        """Open the store of the fixture `store` a second time."""
        second = open_store(codec)
        yield second
        second.backend.close()

    def test_two_openings_see_each_others_pages(self, store: Subject, second: Subject) -> None:
        keys, size = make_keys(4), store.backend.codec.frame_bytes
        assert store_chain(store, keys[:2]) == [STORED] * 2
        assert (exists(second, keys), load(second, keys)) == (2, [HIT, HIT, MISS, MISS])
        assert store_chain(second, keys) == [PRESENT, PRESENT, STORED, STORED]
        assert load(store, keys) == [HIT] * 4
        for one in (store, second):
            assert (one.backend.usage().pages, one.backend.usage().bytes) == (4, 4 * size)
        assert delete(second, keys[1:]) == 3
        assert (exists(store, keys), load(store, keys)) == (1, [HIT, MISS, MISS, MISS])
        assert delete(store, keys) == 1

    def test_closing_one_opening_leaves_the_other(self, store: Subject, second: Subject) -> None:
        keys = make_keys(3)
        store_chain(second, keys)
        second.backend.close()
        assert load(second, keys) == [GET_ERROR] * 3
        assert load(store, keys) == [HIT] * 3

    def test_pages_outlive_the_driver_that_stored_them(self, open_store: OpenStore, codec: FrameCodec) -> None:
        keys = make_keys(3)
        first = open_store(codec)
        store_chain(first, keys)
        first.backend.close()
        again = open_store(codec)
        assert (exists(again, keys), load(again, keys)) == (3, [HIT] * 3)
        assert again.backend.usage().pages == 3
        again.backend.close()

    def test_threads_of_two_openings_see_whole_pages_or_none(self, store: Subject, second: Subject, seed: int) -> None:
        keys, openings = make_keys(12), (store, second)
        rounds = self.churn_rounds
        in_threads(4, lambda number: churn(openings[number % 2], keys, random.Random(seed + number), rounds))
        delete(store, keys)
        assert (exists(second, keys), second.backend.usage().pages) == (0, 0)
        assert store.backend.statistics().corrupt == second.backend.statistics().corrupt == {}


class SampleContract(ContractFixtures):
    """One test of each kind, for another connection, topology or composition of a driver that passes the whole
    contract. What depends on the driver's own code alone, such as sizes of pages and damage, is not repeated here."""

    machine_examples: ClassVar[int] = 5
    churn_rounds: ClassVar[int] = 10
    reopens: ClassVar[bool] = True
    late = SoleDriverContract.late

    test_single_pages_can_be_looked_up = SoleDriverContract.test_single_pages_can_be_looked_up
    test_clear_removes_all_pages_of_one_namespace = SoleDriverContract.test_clear_removes_all_pages_of_one_namespace
    test_a_wrong_object_is_corrupt_and_removed = SoleDriverContract.test_a_wrong_object_is_corrupt_and_removed
    test_after_its_deadline_a_verb_does_nothing = SoleDriverContract.test_after_its_deadline_a_verb_does_nothing
    test_a_touch_returns_only_missing_pages = SoleDriverContract.test_a_touch_returns_only_missing_pages
    test_verbs_after_close_report_errors = SoleDriverContract.test_verbs_after_close_report_errors
    test_threads_see_whole_pages_or_none = SoleDriverContract.test_threads_see_whole_pages_or_none
    test_a_random_walk_matches_the_memory_driver = SoleDriverContract.test_a_random_walk_matches_the_memory_driver
    test_a_long_batch_is_found_exactly_and_read = SoleDriverContract.test_a_long_batch_is_found_exactly_and_read
    test_a_late_read_no_longer_writes_the_frames = SoleDriverContract.test_a_late_read_no_longer_writes_the_frames
    test_a_late_store_no_longer_reads_the_frames = SoleDriverContract.test_a_late_store_no_longer_reads_the_frames
    test_a_batch_may_mix_frames_and_pages_in_parts = SoleDriverContract.test_a_batch_may_mix_frames_and_pages_in_parts
