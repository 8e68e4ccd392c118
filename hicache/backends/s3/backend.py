"""The S3 backend: one object per page, in any store that speaks the S3 API.

Pages of a batch move at once, each by one request on a connection of its own. Nothing is tried twice here. A store has
no limit of its own and does not know chains: bound it with a lifecycle rule (docs/backends/s3.md) or a LimitedBackend.

Locking design: pages are moved by the threads of a `WorkerPool` and by the caller, each page by one of them; outcomes
are slots of a list that only that thread writes, errors are appended to lists, both atomic in CPython. Every request
ends by its deadline, so `run` returns soon after it, and no thread has a frame then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from ...frame import Damage, FrameCodec
from ..base import BackendStatistics, GetOutcome, SetOutcome, StorageBackend, Usage
from ..calls import Calls, check_batch, check_keys, parents_of
from ..workers import WorkerPool
from .names import namespace_prefix, object_name, parse_name
from .objects import Objects
from .options import S3Options
from .probing import stored_prefix
from .trouble import RequestFailed, Trouble

# A damaged page is removed even if the deadline has passed: within this time at most.
_SETTLE_S = 0.25
# Counting a namespace takes a request per thousand pages.
_USAGE_S = 60.0


class _Reads:
    """The pages of one `batch_get`. After `run`, `outcomes`, `corrupt` (reasons) and `errors` (classes) are final."""

    def __init__(
        self, codec: FrameCodec, objects: Objects, names: Sequence[str], keys: Sequence[bytes],
        frames: Sequence[memoryview], deadline: float,
    ) -> None:  # fmt: skip
        self._codec = codec
        self._objects = objects
        self._names = names
        self._keys = keys
        self._frames = frames
        self._deadline = deadline
        self.outcomes = [GetOutcome.ERROR] * len(keys)
        self.corrupt: list[str] = []
        self.errors: list[str] = []

    def read(self, position: int) -> None:
        """Read one page, and remove it if it is damaged."""
        name, frame = self._names[position], self._frames[position]
        try:
            got = self._objects.get(name, frame, self._codec.fits, deadline=self._deadline)
            if got is None:
                self.outcomes[position] = GetOutcome.MISS
                return
            damage: Damage | None = Damage.SIZE
            if got.is_read:
                damage = self._codec.accept(self._keys[position], frame, got.size_bytes)
            if damage is None:
                self.outcomes[position] = GetOutcome.HIT
                return
            if damage.is_misfit:
                self.outcomes[position] = GetOutcome.MISS
                self.errors.append(damage.value)
                return
            self.outcomes[position] = GetOutcome.CORRUPT
            self.corrupt.append(damage.value)
            settled = max(self._deadline, time.monotonic() + _SETTLE_S)
            self._objects.remove_damaged(name, got.etag, deadline=settled)
        except RequestFailed as error:
            self.errors.append(error.trouble)


class _Writes:
    """The pages of one `batch_set`. After `run`, `outcomes` and `errors` (classes) are final."""

    def __init__(
        self, codec: FrameCodec, objects: Objects, names: Sequence[str], keys: Sequence[bytes],
        frames: Sequence[memoryview], *, parent: bytes | None, deadline: float,
    ) -> None:  # fmt: skip
        self._codec = codec
        self._objects = objects
        self._names = names
        self._keys = keys
        self._frames = frames
        self._parents = parents_of(keys, parent)
        self._deadline = deadline
        self._is_full = False
        self.outcomes = [SetOutcome.ERROR] * len(keys)
        self.errors: list[str] = []

    def run(self, pool: WorkerPool) -> None:
        """Store the pages; a key that comes twice is stored once."""
        first_of: dict[bytes, int] = {}
        for position, key in enumerate(self._keys):
            first_of.setdefault(key, position)
        todo = list(first_of.values())
        pool.run(len(todo), lambda number: self._write(todo[number]))
        for position, key in enumerate(self._keys):
            first = first_of[key]
            if first != position:
                outcome = self.outcomes[first]
                self.outcomes[position] = SetOutcome.PRESENT if outcome.is_stored else outcome

    def _write(self, position: int) -> None:
        if self._is_full:
            # Behind a page that found no room, one that does would be behind a hole.
            self.outcomes[position] = SetOutcome.REJECTED
            return
        if time.monotonic() >= self._deadline:
            self.errors.append(Trouble.DEADLINE)
            return
        stored = self._codec.seal(self._keys[position], self._frames[position], parent=self._parents[position])
        try:
            is_new = self._objects.put_new(self._names[position], stored, deadline=self._deadline)
            self.outcomes[position] = SetOutcome.STORED if is_new else SetOutcome.PRESENT
        except RequestFailed as error:
            self.errors.append(error.trouble)
            if error.trouble is Trouble.FULL:
                self._is_full = True
                self.outcomes[position] = SetOutcome.REJECTED


class S3Backend(StorageBackend):
    """Pages in a bucket. See the module's docstring; `StorageBackend` says what each verb does.

    Raises BackendUnavailable from the constructor if the bucket cannot be listed, ConfigError if there are no
    credentials or no boto3; it blocks for one request. Open it after a fork and not before.
    """

    def __init__(self, codec: FrameCodec, options: S3Options) -> None:
        super().__init__(codec)
        self.options = options
        self._calls = Calls(codec)
        self._close_lock = threading.Lock()
        self._usage = Usage(0, 0, None)
        self._objects = Objects(options)
        self._pool = WorkerPool(options.connections, "hicache-s3", lambda: self._calls.count(errors=["internal"]))

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [object_name(self.options.prefix, self.codec.namespace, key) for key in keys]

    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend. Exact for a few keys; for many it searches the end, see `stored_prefix`."""
        check_keys(keys)
        with self._calls.enter() as is_open:
            if not is_open:
                return self._calls.refuse()
            names = self._names(keys)
            return stored_prefix(len(keys), lambda some: self._are_there([names[i] for i in some], deadline))

    def _are_there(self, names: Sequence[str], deadline: float) -> list[bool]:
        """Ask for objects at once. What cannot be asked is not there, and counted."""
        found = [False] * len(names)
        errors: list[str] = []

        def ask(position: int) -> None:
            try:
                head = self._objects.head(names[position], deadline=deadline)
                found[position] = head is not None
            except RequestFailed as error:
                errors.append(error.trouble)

        self._pool.run(len(names), ask)
        self._calls.count(errors=errors)
        return found

    def batch_get(
        self, keys: Sequence[bytes], frames: Sequence[memoryview], *, deadline: float
    ) -> list[GetOutcome]:
        """See StorageBackend. One request per page. S3 knows no recency."""
        check_batch(self.codec, keys, frames)
        with self._calls.enter() as is_open:
            if not is_open:
                return self._calls.refuse_gets(len(keys))
            batch = _Reads(self.codec, self._objects, self._names(keys), keys, frames, deadline)
            try:
                self._pool.run(len(keys), batch.read)
            finally:
                self._calls.count(gets=batch.outcomes, errors=batch.errors, corrupt=batch.corrupt)
        return batch.outcomes

    def batch_set(
        self, keys: Sequence[bytes], frames: Sequence[memoryview], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See StorageBackend. One request per page, which the server refuses if the page is there."""
        check_batch(self.codec, keys, frames, parent)
        with self._calls.enter() as is_open:
            if not is_open:
                return self._calls.refuse_sets(len(keys))
            names = self._names(keys)
            batch = _Writes(self.codec, self._objects, names, keys, frames, parent=parent, deadline=deadline)
            try:
                batch.run(self._pool)
            finally:
                self._calls.count(sets=batch.outcomes, errors=batch.errors)
        return batch.outcomes

    def delete(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend. Asks for each page first: removing does not tell what was there."""
        check_keys(keys)
        with self._calls.enter() as is_open:
            if not is_open:
                return self._calls.refuse()
            names = list(dict.fromkeys(self._names(keys)))
            there = [name for name, found in zip(names, self._are_there(names, deadline), strict=True) if found]
            try:
                troubles = self._objects.remove_many(there, deadline=deadline)
            except RequestFailed as error:
                troubles = [error.trouble] * len(there)
            self._calls.count(errors=troubles)
            return len(there) - len(troubles)

    def usage(self) -> Usage:
        """See StorageBackend. Pages and bytes of this namespace, counted by listing them."""
        with self._calls.enter() as is_open:
            if is_open:
                self._count_usage()
        return self._usage

    def _count_usage(self) -> None:
        prefix = self.options.prefix
        pages = size_bytes = 0
        try:
            start = namespace_prefix(prefix, self.codec.namespace)
            for entry in self._objects.list(start, deadline=time.monotonic() + _USAGE_S):
                if parse_name(prefix, entry.name) is not None:
                    pages += 1
                    size_bytes += entry.size_bytes
        except RequestFailed as error:
            self._calls.count(errors=[error.trouble])
            return
        self._usage = Usage(pages, size_bytes, None)

    def statistics(self) -> BackendStatistics:
        """See StorageBackend. `errors` are counted by the classes of `Trouble`."""
        return self._calls.statistics()

    @property
    def requests_max(self) -> int:
        """Requests that may be in flight now: fewer than `connections` after the server asked to slow down."""
        return self._objects.throttle.limit

    def close(self) -> None:
        """See StorageBackend."""
        with self._close_lock:
            if self._calls.close():
                self._pool.close()
                self._objects.close()
