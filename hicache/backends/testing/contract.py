"""The conformance suite of storage backends. Every backend must pass it.

    class TestMine(BackendContract):
        @pytest.fixture
        def open_store(self, tmp_path):
            def open_it(codec):
                backend = MyBackend(codec, ...)
                return Store(backend, read=..., write=...)
            return open_it

`open_store` opens the same store, initially empty, once per call, each time for a given codec. `read` and `write`
access the raw stored bytes of a key directly, so that a store is not tested through itself. A store that exists only as
long as one backend, such as memory, passes `SoleBackendContract`: all tests except those with two openings.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from ...errors import InvalidInput
from ...frame import HEADER_BYTES, NO_PARENT, FrameCodec, FrameHeader, PageBuffer, PageView, TagKind
from ..base import Recency, touch
from .bounds import BoundsContract
from .encodings import EncodingsContract
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
    OpenStore,
    Store,
    churn,
    delete,
    empty_frames,
    exists,
    forged,
    full_frames,
    holds,
    in_parts,
    in_threads,
    load,
    make_keys,
    sealed,
    soon,
    store_chain,
)

# The offsets at which a bit of a page is flipped.
_FLIPS = {
    "magic": 0, "tag": 10, "key": 60, "namespace": 125, "payload start": HEADER_BYTES,
    "payload end": HEADER_BYTES + PAYLOAD_BYTES - 1,
}  # fmt: skip
# The kinds of wrong objects in the place of a page.
DAMAGES = (
    *_FLIPS, "empty", "cut", "one byte less", "one byte more", "doubled", "zeros", "text", "another key",
    "another namespace", "its own parent", "without a tag",
)  # fmt: skip


def damaged(codec: FrameCodec, keys: list[bytes], raw: bytes, damage: str) -> bytes:
    """Return the object `raw` of `keys[1]` with `damage`, one of DAMAGES."""
    if damage in _FLIPS:
        flipped = bytearray(raw)
        flipped[_FLIPS[damage]] ^= 0x10
        return bytes(flipped)
    return {
        "empty": b"", "cut": raw[: HEADER_BYTES + 10], "one byte less": raw[:-1], "one byte more": raw + b"\0",
        "doubled": raw + raw, "zeros": bytes(len(raw)), "text": b"x" * len(raw),
        "another key": sealed(codec, keys[2:])[0],
        "another namespace": sealed(FrameCodec(OTHER_NAMESPACE, PAYLOAD_BYTES), keys[1:2])[0],
        "its own parent": forged(codec, keys[1], parent=keys[1]),
        "without a tag": sealed(FrameCodec(NAMESPACE, PAYLOAD_BYTES, tag=TagKind.NONE), keys[1:2])[0],
    }[damage]  # fmt: skip


class SoleBackendContract(BoundsContract, EncodingsContract):
    """The contract of a backend whose store no other backend can open. Subclass `BackendContract` otherwise."""

    # Walks of the state machine, about forty calls each; a subclass for a slow store may set fewer.
    machine_examples: ClassVar[int] = 20

    def test_storing_again_is_present_and_changes_nothing(self, store: Store) -> None:
        keys = make_keys(3)
        store_chain(store, keys)
        before = [store.read(key) for key in keys]
        assert store_chain(store, keys) == [PRESENT] * 3
        assert [store.read(key) for key in keys] == before

    def test_a_batch_of_old_and_new_pages_stores_the_new_ones(self, store: Store) -> None:
        keys = make_keys(6)
        store_chain(store, [keys[1], keys[4]])
        assert load(store, keys) == [MISS, HIT, MISS, MISS, HIT, MISS]
        assert store_chain(store, keys) == [STORED, PRESENT, STORED, STORED, PRESENT, STORED]
        assert load(store, keys) == [HIT] * 6

    def test_a_repeated_key_is_stored_once_with_the_parent_of_its_first_position(self, store: Store) -> None:
        one, two, three = make_keys(3)
        assert store_chain(store, [one, one, two, one, three]) == [STORED, PRESENT, STORED, PRESENT, STORED]
        assert load(store, [one, two, three]) == [HIT] * 3
        assert store.backend.usage().pages == 3
        headers = [FrameHeader.parse(store.read(key) or b"") for key in (one, two, three)]
        assert [header and header.parent_key for header in headers] == [NO_PARENT, one, one]

    def test_empty_batches_are_fine(self, store: Store) -> None:
        assert store.backend.batch_set([], [], parent=None, deadline=soon()) == []
        assert store.backend.batch_get([], [], deadline=soon()) == []
        assert store.backend.batch_has([], deadline=soon()) == []
        assert (exists(store, []), delete(store, [])) == (0, 0)

    @pytest.mark.parametrize("hole", [0, 1, 3, 6, 7, 8])
    def test_exists_stops_at_the_first_hole(self, store: Store, hole: int) -> None:
        keys = make_keys(8)
        assert exists(store, keys) == 0
        store_chain(store, keys[:hole] + keys[hole + 1 :])
        assert exists(store, keys) == hole

    def test_single_pages_can_be_looked_up(self, store: Store) -> None:
        keys = make_keys(5)
        store_chain(store, [keys[0], keys[3]])
        asked = [keys[4], keys[3], keys[1], keys[0], keys[3]]
        assert store.backend.batch_has(asked, deadline=soon()) == [False, True, False, True, True]
        assert store.backend.batch_has(asked, deadline=soon(-1)) == [False] * 5

    def test_delete_removes_and_counts_stored_pages(self, store: Store) -> None:
        keys = make_keys(4)
        store_chain(store, keys[:3])
        assert delete(store, keys[1:]) == 2
        assert load(store, keys) == [HIT, MISS, MISS, MISS]
        assert store.read(keys[1]) is None
        assert store_chain(store, keys) == [PRESENT, STORED, STORED, STORED]
        assert load(store, keys) == [HIT] * 4

    def test_deleting_twice_counts_once(self, store: Store) -> None:
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

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_a_wrong_object_is_corrupt_and_removed(self, store: Store, damage: str) -> None:
        keys = make_keys(3)
        store_chain(store, keys)
        store.write(keys[1], damaged(store.backend.codec, keys, store.read(keys[1]) or b"", damage))
        assert load(store, keys) == [HIT, CORRUPT, HIT]
        assert sum(store.backend.statistics().corrupt.values()) == 1
        assert store.read(keys[1]) is None
        assert load(store, keys) == [HIT, MISS, HIT]
        assert store_chain(store, keys) == [PRESENT, STORED, PRESENT]
        assert load(store, keys) == [HIT, HIT, HIT]

    def test_without_a_tag_a_flipped_payload_goes_through(self, open_store: OpenStore) -> None:
        """The control of the test above: the tag detects the damage."""
        codec = FrameCodec(NAMESPACE, PAYLOAD_BYTES, tag=TagKind.NONE)
        store = open_store(codec)
        (key,) = make_keys(1)
        store_chain(store, [key])
        raw = bytearray(store.read(key) or b"")
        raw[HEADER_BYTES + 5] ^= 1
        store.write(key, bytes(raw))
        (frame,) = empty_frames(codec, 1)
        assert store.backend.batch_get([key], [frame], deadline=soon()) == [HIT]
        assert not holds(codec, key, frame)
        store.backend.close()

    def test_after_its_deadline_a_verb_does_nothing_and_counts_that(self, store: Store) -> None:
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
        assert (found.gets[GET_ERROR], found.sets[SET_ERROR]) == (3, 3)
        assert load(store, keys) == [HIT, HIT, MISS]

    def test_a_miss_is_not_an_error(self, store: Store) -> None:
        """The control of the test above: a missing page differs from a failed lookup."""
        keys = make_keys(3)
        assert load(store, keys) == [MISS] * 3
        assert (exists(store, keys), delete(store, keys)) == (0, 0)
        assert dict(store.backend.statistics().errors) == {}

    def test_a_deadline_may_be_infinite(self, store: Store) -> None:
        keys = make_keys(2)
        frames = full_frames(store.backend.codec, keys)
        assert store.backend.batch_set(keys, frames, parent=None, deadline=math.inf) == [STORED] * 2
        assert store.backend.batch_exists(keys, deadline=math.inf) == 2
        assert store.backend.batch_get(keys, frames, deadline=math.inf) == [HIT] * 2
        assert store.backend.delete(keys, deadline=math.inf) == 2

    def test_wrong_arguments_are_rejected(self, store: Store) -> None:
        backend, codec, keys = store.backend, store.backend.codec, make_keys(2)
        frames = full_frames(codec, keys)
        view = in_parts(codec, frames[1])
        wrong: list[list[PageBuffer]] = [
            [frames[0]],
            [frames[0], memoryview(bytearray(codec.frame_bytes - 1))],
            [frames[0], PageView(view.header[1:], view.parts)],
            [frames[0], PageView(view.header, view.parts[1:])],
            [frames[0], PageView(view.header, [*view.parts, memoryview(bytearray(1))])],
            [frames[0], PageView(view.header, [memoryview(bytes(PAYLOAD_BYTES))])],
        ]
        for bad in wrong:
            with pytest.raises(InvalidInput):
                backend.batch_get(keys, bad, deadline=soon())
            with pytest.raises(InvalidInput):
                backend.batch_set(keys, bad, parent=None, deadline=soon())
        for parent in (*keys, b"short"):  # a page would be its own ancestor, directly or through the batch
            with pytest.raises(InvalidInput):
                backend.batch_set(keys, frames, parent=parent, deadline=soon())
        with pytest.raises(InvalidInput):
            backend.batch_set([keys[0], b"short"], frames, parent=None, deadline=soon())
        for verb in (backend.batch_exists, backend.batch_has, backend.delete):
            for key in (b"", b"short", b"../../etc/passwd"):
                with pytest.raises(InvalidInput):
                    verb([key], deadline=soon())
        assert backend.usage().pages == 0

    def test_a_touch_moves_no_data_and_returns_only_missing_pages(self, store: Store) -> None:
        keys = make_keys(5)
        store_chain(store, keys[:3])
        before = store.backend.statistics()
        missing = touch(store.backend, [*keys, keys[4]], deadline=soon())
        assert sorted(missing) in ([], sorted(keys[3:])), "returned other keys than the missing ones"
        assert touch(store.backend, [], deadline=soon()) == []
        assert store.backend.statistics() == before
        assert load(store, keys) == [HIT] * 3 + [MISS] * 2
        if not isinstance(store.backend, Recency):
            return
        assert touch(store.backend, keys, deadline=soon(-1)) == [], "a failed touch returned keys"
        with pytest.raises(InvalidInput):
            touch(store.backend, [b"short"], deadline=soon())
        store.backend.close()
        assert touch(store.backend, keys, deadline=soon()) == []

    def test_statistics_count_outcomes_and_bytes(self, store: Store) -> None:
        keys, size = make_keys(4), store.backend.codec.frame_bytes
        store_chain(store, keys[:3])
        store_chain(store, keys[:1])
        load(store, keys)
        found = store.backend.statistics()
        assert (found.sets[STORED], found.sets[PRESENT]) == (3, 1)
        assert (found.gets[HIT], found.gets[MISS]) == (3, 1)
        assert (found.read_bytes, found.written_bytes) == (3 * size, 3 * size)
        assert (dict(found.errors), dict(found.corrupt), found.evicted_pages) == ({}, {}, 0)

    def test_verbs_after_close_report_errors(self, store: Store) -> None:
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
            before = self._closed_errors(store)
            assert is_refused()
            assert self._closed_errors(store) > before

    @staticmethod
    def _closed_errors(store: Store) -> int:
        """Return the number of verbs rejected because the backend or its guard is closed."""
        errors = store.backend.statistics().errors
        return errors.get("closed", 0)

    def test_threads_on_the_same_keys_see_whole_pages_or_none(self, store: Store, seed: int) -> None:
        keys = make_keys(12)
        in_threads(6, lambda number: churn(store, keys, random.Random(seed + number), rounds=40))
        delete(store, keys)
        assert store.backend.usage().pages == 0

    def test_a_random_walk_matches_the_memory_backend(self, open_store: OpenStore) -> None:
        run_machine(open_store, examples=self.machine_examples, reopens=False)

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

    def test_close_during_use_waits_and_loses_nothing(self, store: Store) -> None:
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


class BackendContract(SoleBackendContract):
    """The contract of a store that several backends open at once, as engines do, and that outlives them. Subclass it in
    a test module and add the fixture `open_store`."""

    @pytest.fixture
    def second(self, open_store: OpenStore, codec: FrameCodec) -> Iterator[Store]:
        """Open the store of the fixture `store` a second time."""
        second = open_store(codec)
        yield second
        second.backend.close()

    def test_two_openings_see_each_others_pages(self, store: Store, second: Store) -> None:
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

    def test_closing_one_opening_leaves_the_other(self, store: Store, second: Store) -> None:
        keys = make_keys(3)
        store_chain(second, keys)
        second.backend.close()
        assert load(second, keys) == [GET_ERROR] * 3
        assert load(store, keys) == [HIT] * 3

    def test_pages_outlive_the_backend_that_stored_them(self, open_store: OpenStore, codec: FrameCodec) -> None:
        keys = make_keys(3)
        first = open_store(codec)
        store_chain(first, keys)
        first.backend.close()
        again = open_store(codec)
        assert (exists(again, keys), load(again, keys)) == (3, [HIT] * 3)
        assert again.backend.usage().pages == 3
        again.backend.close()

    def test_threads_of_two_openings_see_whole_pages_or_none(self, store: Store, second: Store, seed: int) -> None:
        keys, openings = make_keys(12), (store, second)
        in_threads(4, lambda number: churn(openings[number % 2], keys, random.Random(seed + number), rounds=25))
        delete(store, keys)
        assert (exists(second, keys), second.backend.usage().pages) == (0, 0)
        assert store.backend.statistics().corrupt == second.backend.statistics().corrupt == {}

    def test_a_random_walk_matches_the_memory_backend(self, open_store: OpenStore) -> None:
        run_machine(open_store, examples=self.machine_examples, reopens=True)
