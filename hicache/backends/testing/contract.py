"""The conformance suite of storage backends. A backend is one if it passes.

    class TestMine(BackendContract):
        @pytest.fixture
        def open_store(self, tmp_path):
            def open_it(codec):
                backend = MyBackend(codec, ...)
                return Store(backend, read=..., write=...)
            return open_it

`open_store` opens the same, at first empty, store again and again, each time as a given codec sees it. `read` and
`write` are a side door to the raw stored bytes of a key, so that a store is not tested through itself. A store that
lives and dies with one backend, as memory does, passes `SoleBackendContract`: all but what two openings see of each
other.
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
import time
from typing import ClassVar

import pytest

from ...errors import InvalidInput
from ...frame import HEADER_BYTES, NO_PARENT, FrameCodec, FrameHeader, TagKind
from .bounds import BoundsContract
from .forms import FormsContract
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
    empty_frames,
    exists,
    forged,
    full_frames,
    holds,
    in_threads,
    load,
    make_keys,
    soon,
    store_chain,
)
from .parts import PartsContract


class SoleBackendContract(BoundsContract, FormsContract, PartsContract):
    """What holds for every backend, also if nobody else can open its store. Subclass `BackendContract` if they can."""

    # Walks of the state machine; each takes some forty calls, so a subclass for a slow store may have fewer.
    machine_examples: ClassVar[int] = 20

    def test_a_stored_page_comes_back_byte_for_byte(self, store: Store) -> None:
        keys = make_keys(5)
        assert store_chain(store, keys) == [STORED] * 5
        assert load(store, keys) == [HIT] * 5

    def test_the_stored_object_is_the_sealed_frame(self, store: Store) -> None:
        keys = make_keys(1)
        frames = full_frames(store.backend.codec, keys)
        parent = hashlib.sha256(b"parent").digest()
        store.backend.batch_set(keys, frames, parent=parent, deadline=soon())
        raw = store.read(keys[0])
        assert raw is not None
        assert raw == frames[0]
        assert store.backend.codec.check(keys[0], memoryview(raw)) is None
        assert parent in raw[:HEADER_BYTES]

    def test_storing_again_is_present_and_changes_nothing(self, store: Store) -> None:
        keys = make_keys(3)
        store_chain(store, keys)
        before = [store.read(key) for key in keys]
        assert store_chain(store, keys) == [PRESENT] * 3
        assert [store.read(key) for key in keys] == before

    def test_a_batch_of_old_and_new_pages_stores_the_new_ones(self, store: Store) -> None:
        keys = make_keys(6)
        store_chain(store, [keys[1], keys[4]])
        assert store_chain(store, keys) == [STORED, PRESENT, STORED, STORED, PRESENT, STORED]
        assert load(store, keys) == [HIT] * 6

    def test_a_key_twice_in_a_batch_is_stored_once(self, store: Store) -> None:
        (key,) = make_keys(1)
        assert store_chain(store, [key, key]) == [STORED, PRESENT]
        assert store.backend.usage().pages == 1

    def test_a_key_that_comes_twice_has_the_parent_of_its_first_place(self, store: Store) -> None:
        one, two, three = make_keys(3)
        assert store_chain(store, [one, one, two, one, three]) == [STORED, PRESENT, STORED, PRESENT, STORED]
        assert load(store, [one, two, three]) == [HIT] * 3
        headers = [FrameHeader.parse(store.read(key) or b"") for key in (one, two, three)]
        assert [header and header.parent_key for header in headers] == [NO_PARENT, one, one]

    def test_empty_batches_are_fine(self, store: Store) -> None:
        assert store.backend.batch_set([], [], parent=None, deadline=soon()) == []
        assert store.backend.batch_get([], [], deadline=soon()) == []
        assert store.backend.batch_exists([], deadline=soon()) == 0
        assert store.backend.delete([], deadline=soon()) == 0

    @pytest.mark.parametrize("hole", [0, 1, 3, 6, 7])
    def test_exists_stops_at_the_first_hole(self, store: Store, hole: int) -> None:
        keys = make_keys(8)
        store_chain(store, keys[:hole] + keys[hole + 1 :])
        assert store.backend.batch_exists(keys, deadline=soon()) == hole

    def test_exists_of_all_and_of_none(self, store: Store) -> None:
        keys = make_keys(8)
        assert store.backend.batch_exists(keys, deadline=soon()) == 0
        store_chain(store, keys)
        assert store.backend.batch_exists(keys, deadline=soon()) == 8

    def test_missing_pages_are_misses_among_hits(self, store: Store) -> None:
        keys = make_keys(5)
        store_chain(store, [keys[0], keys[2], keys[4]])
        assert load(store, keys) == [HIT, MISS, HIT, MISS, HIT]

    def test_delete_removes_and_counts_what_was_there(self, store: Store) -> None:
        keys = make_keys(4)
        store_chain(store, keys[:3])
        assert store.backend.delete(keys[1:], deadline=soon()) == 2
        assert load(store, keys) == [HIT, MISS, MISS, MISS]
        assert store.read(keys[1]) is None

    def test_a_deleted_page_can_be_stored_again(self, store: Store) -> None:
        keys = make_keys(2)
        store_chain(store, keys)
        store.backend.delete(keys, deadline=soon())
        assert store_chain(store, keys) == [STORED, STORED]
        assert load(store, keys) == [HIT, HIT]

    @pytest.mark.parametrize("where", ["magic", "tag", "key", "namespace", "payload start", "payload end"])
    def test_a_flipped_bit_makes_a_page_corrupt_and_removes_it(self, store: Store, where: str) -> None:
        offset = {
            "magic": 0, "tag": 10, "key": 60, "namespace": 125, "payload start": HEADER_BYTES,
            "payload end": HEADER_BYTES + PAYLOAD_BYTES - 1,
        }[where]  # fmt: skip
        keys = make_keys(3)
        store_chain(store, keys)
        raw = bytearray(store.read(keys[1]) or b"")
        raw[offset] ^= 0x10
        self._refuses(store, keys, bytes(raw))

    @pytest.mark.parametrize("change", ["empty", "cut", "one byte less", "one byte more", "doubled", "zeros", "text"])
    def test_an_object_of_other_bytes_is_corrupt_and_removed(self, store: Store, change: str) -> None:
        keys = make_keys(3)
        store_chain(store, keys)
        raw = store.read(keys[1])
        assert raw is not None
        damaged = {
            "empty": b"", "cut": raw[: HEADER_BYTES + 10], "one byte less": raw[:-1], "one byte more": raw + b"\0",
            "doubled": raw + raw, "zeros": bytes(len(raw)), "text": b"x" * len(raw),
        }[change]  # fmt: skip
        self._refuses(store, keys, damaged)

    def test_the_page_of_another_key_is_corrupt_and_removed(self, store: Store) -> None:
        keys = make_keys(3)
        store_chain(store, keys)
        self._refuses(store, keys, store.read(keys[2]) or b"")

    def test_the_page_of_another_namespace_is_corrupt_and_removed(self, store: Store) -> None:
        keys = make_keys(3)
        store_chain(store, keys)
        other = FrameCodec(OTHER_NAMESPACE, PAYLOAD_BYTES)
        (frame,) = full_frames(other, [keys[1]])
        other.seal(keys[1], frame)
        self._refuses(store, keys, bytes(frame))

    def test_a_page_that_names_itself_as_its_parent_is_corrupt_and_removed(self, store: Store) -> None:
        keys = make_keys(3)
        store_chain(store, keys)
        self._refuses(store, keys, forged(store.backend.codec, keys[1], parent=keys[1]))

    def test_a_page_without_a_tag_is_not_believed_by_a_reader_that_wants_one(self, store: Store) -> None:
        keys = make_keys(3)
        store_chain(store, keys)
        weak = FrameCodec(NAMESPACE, PAYLOAD_BYTES, tag=TagKind.NONE)
        (frame,) = full_frames(weak, [keys[1]])
        weak.seal(keys[1], frame)
        self._refuses(store, keys, bytes(frame))

    def _refuses(self, store: Store, keys: list[bytes], raw: bytes) -> None:
        """With `raw` in place of `keys[1]`: that one is corrupt, counted, removed, and can be stored again."""
        store.write(keys[1], raw)
        assert load(store, keys) == [HIT, CORRUPT, HIT]
        assert sum(store.backend.statistics().corrupt.values()) == 1
        assert store.read(keys[1]) is None
        assert load(store, keys) == [HIT, MISS, HIT]
        assert store_chain(store, keys) == [PRESENT, STORED, PRESENT]
        assert load(store, keys) == [HIT, HIT, HIT]

    def test_without_a_tag_a_flipped_payload_goes_through(self, open_store: OpenStore) -> None:
        """The control of the tests above: it is the tag that finds the damage."""
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

    def test_a_keyed_reader_believes_only_pages_made_with_its_key(self, open_store: OpenStore) -> None:
        keyed = open_store(FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=[b"k" * 32]))
        keys = make_keys(3)
        store_chain(keyed, keys)
        assert load(keyed, keys) == [HIT] * 3
        for number, codec in enumerate([
            FrameCodec(NAMESPACE, PAYLOAD_BYTES), FrameCodec(NAMESPACE, PAYLOAD_BYTES, mac_keys=[b"x" * 32]),
        ]):  # fmt: skip
            (frame,) = full_frames(codec, [keys[number]])
            codec.seal(keys[number], frame)
            keyed.write(keys[number], bytes(frame))
        assert load(keyed, keys) == [CORRUPT, CORRUPT, HIT]
        keyed.backend.close()

    def test_after_its_deadline_a_verb_does_nothing(self, store: Store) -> None:
        keys = make_keys(3)
        store_chain(store, keys[:2])
        past = time.monotonic() - 1.0
        frames = full_frames(store.backend.codec, keys)
        assert store.backend.batch_exists(keys, deadline=past) == 0
        assert store.backend.batch_get(keys, frames, deadline=past) == [GET_ERROR] * 3
        assert store.backend.batch_set(keys, frames, parent=None, deadline=past) == [SET_ERROR] * 3
        assert store.backend.delete(keys, deadline=past) == 0
        assert load(store, keys) == [HIT, HIT, MISS]

    def test_a_deadline_may_be_infinite(self, store: Store) -> None:
        keys = make_keys(2)
        frames = full_frames(store.backend.codec, keys)
        assert store.backend.batch_set(keys, frames, parent=None, deadline=math.inf) == [STORED] * 2
        assert store.backend.batch_exists(keys, deadline=math.inf) == 2
        assert store.backend.batch_get(keys, frames, deadline=math.inf) == [HIT] * 2
        assert store.backend.delete(keys, deadline=math.inf) == 2

    def test_wrong_arguments_are_refused(self, store: Store) -> None:
        keys, codec = make_keys(2), store.backend.codec
        frames = full_frames(codec, keys)
        short = memoryview(bytearray(codec.frame_bytes - 1))
        with pytest.raises(InvalidInput):
            store.backend.batch_get(keys, frames[:1], deadline=soon())
        with pytest.raises(InvalidInput):
            store.backend.batch_set(keys, frames[:1], parent=None, deadline=soon())
        with pytest.raises(InvalidInput):
            store.backend.batch_get(keys, [frames[0], short], deadline=soon())
        with pytest.raises(InvalidInput):
            store.backend.batch_set([keys[0], b"short"], frames, parent=None, deadline=soon())
        for number in range(2):  # a page would hang on itself, at once or by way of the batch
            with pytest.raises(InvalidInput):
                store.backend.batch_set(keys, frames, parent=keys[number], deadline=soon())
        with pytest.raises(InvalidInput):
            store.backend.batch_set(keys, frames, parent=b"short", deadline=soon())
        with pytest.raises(InvalidInput):
            store.backend.batch_exists([b"../../etc/passwd"], deadline=soon())
        with pytest.raises(InvalidInput):
            store.backend.delete([b""], deadline=soon())
        assert store.backend.usage().pages == 0

    def test_usage_follows_what_is_stored(self, store: Store) -> None:
        keys, size = make_keys(4), store.backend.codec.frame_bytes
        assert (store.backend.usage().pages, store.backend.usage().bytes) == (0, 0)
        store_chain(store, keys)
        store_chain(store, keys)
        assert (store.backend.usage().pages, store.backend.usage().bytes) == (4, 4 * size)
        store.backend.delete(keys[3:], deadline=soon())
        assert (store.backend.usage().pages, store.backend.usage().bytes) == (3, 3 * size)

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
        keys = make_keys(2)
        store_chain(store, keys)
        store.backend.close()
        store.backend.close()
        frames = full_frames(store.backend.codec, keys)
        closed = self._closed_errors(store)
        assert store.backend.batch_exists(keys, deadline=soon()) == 0
        assert closed < (closed := self._closed_errors(store))
        assert store.backend.batch_get(keys, frames, deadline=soon()) == [GET_ERROR] * 2
        assert closed < (closed := self._closed_errors(store))
        assert store.backend.batch_set(keys, frames, parent=None, deadline=soon()) == [SET_ERROR] * 2
        assert closed < (closed := self._closed_errors(store))
        for nothing in (
            store.backend.delete(keys, deadline=soon()), store.backend.clear(deadline=soon()),
            any(store.backend.batch_has(keys, deadline=soon())),
        ):  # fmt: skip
            assert not nothing
        assert self._closed_errors(store) == closed + 3

    @staticmethod
    def _closed_errors(store: Store) -> int:
        """How often a verb was refused because the backend, or the guard before it, is closed."""
        errors = store.backend.statistics().errors
        return errors.get("closed", 0) + errors.get("guard_closed", 0)

    def test_threads_on_the_same_keys_see_whole_pages_or_none(self, store: Store, seed: int) -> None:
        keys = make_keys(12)
        in_threads(6, lambda number: churn(store, keys, random.Random(seed + number), rounds=40))
        store.backend.delete(keys, deadline=soon())
        assert store.backend.usage().pages == 0

    def test_a_random_walk_goes_as_in_memory(self, open_store: OpenStore) -> None:
        run_machine(open_store, examples=self.machine_examples, reopens=False)

    def test_two_namespaces_in_one_store_never_see_each_other(self, open_store: OpenStore) -> None:
        """The same keys in both: a page of one is a miss in the other, and goes without the other."""
        codecs = [FrameCodec(namespace, PAYLOAD_BYTES) for namespace in (NAMESPACE, OTHER_NAMESPACE)]
        ours, theirs = (open_store(codec) for codec in codecs)
        keys = make_keys(4)
        assert store_chain(ours, keys) == [STORED] * 4
        assert (exists(theirs, keys), load(theirs, keys)) == (0, [MISS] * 4)
        assert theirs.backend.delete(keys, deadline=soon()) == 0
        assert store_chain(theirs, keys[:3]) == [STORED] * 3
        assert ours.backend.delete(keys[1:], deadline=soon()) == 3
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
