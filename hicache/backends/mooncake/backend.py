"""The Mooncake backend: pages in the memory of many nodes, moved by the library from and into the frames themselves.

Whether a page is there is asked before it is stored: the library calls it a success either way. A page that another
process stores at the same moment is reported as stored by both.

What the server decides: it evicts near the least recently used page, whatever chain it belongs to, so a chain may lose
its middle; and a page that was looked up or read has a lease, 10 s by default, in which it is neither evicted nor
deleted. Damaged pages are removed in spite of their lease; the reader that holds it finds the damage too.

Locking design: verbs run on their callers' threads and share only what has its own lock or none to need (`Calls`,
`Links`, `Staging`, `Runner`, `Roads`). `_usage` is one reference. The library is closed on a thread of its own, when
its last call has ended; `_close_lock` has two calls of `close` wait for the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from ...errors import BackendUnavailable, InvalidInput
from ...frame import FrameCodec
from ..base import BackendStatistics, GetOutcome, SetOutcome, StorageBackend, Usage
from ..calls import Calls, check_batch, check_keys
from . import codes
from .admin import Admin
from .batches import Reads, Writes
from .lanes import address_of
from .link import Link, Links
from .options import MooncakeOptions
from .removal import remove_unleased

_log = logging.getLogger(__name__)

# What `close` waits for the library: that takes 1 s, 4 s without a master, 30 s if a daemon hangs.
_CLOSE_S = 10.0


class MooncakeBackend(StorageBackend):
    """Pages in a Mooncake store. See the module's docstring; `StorageBackend` says what each verb does.

    Frames are copied through staging memory. A verb returns at its deadline or a quarter of a second later; what it has
    started then goes on in that memory alone. Raises ConfigError if the library is missing, BackendUnavailable if the
    store cannot be joined, BackendError without memory for staging. Open it after a fork and not before.
    """

    def __init__(self, codec: FrameCodec, options: MooncakeOptions) -> None:
        super().__init__(codec)
        self.options = options
        self._calls = Calls(codec)
        self._admin = Admin(options.admin_address)
        self._usage = Usage(0, 0, None)
        self._close_lock = threading.Lock()
        self._links = Links(lambda: Link(codec, options))

    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend. One request for all of them; each page that is there has a lease then."""
        check_keys(keys)
        with self._calls.enter() as is_open:
            if not is_open:
                return self._calls.refuse()
            if not keys:
                return 0
            with self._links.use() as link:
                parts = link.parts
                names = parts.names.of(keys)
                found = parts.ask(lambda: parts.client.exist(names), deadline)
            if isinstance(found, str):
                self._calls.count(errors=[found])
                return 0
            stored = next((position for position, code in enumerate(found) if code != 1), len(found))
            if stored < len(found) and found[stored] < 0:
                self._calls.count(errors=[codes.class_of(found[stored])])
            return stored

    def batch_get(
        self, keys: Sequence[bytes], frames: Sequence[memoryview], *, deadline: float
    ) -> list[GetOutcome]:
        """See StorageBackend. A page that is being written is a miss."""
        check_batch(self.codec, keys, frames)
        with self._calls.enter() as is_open:
            if not is_open:
                return self._calls.refuse_gets(len(keys))
            with self._links.use() as link:
                batch = Reads(link.parts, keys, frames, deadline)
                try:
                    batch.run()
                finally:
                    self._calls.count(gets=batch.outcomes, errors=batch.errors, corrupt=batch.corrupt)
                self._look_at(batch.errors, link)
        return batch.outcomes

    def batch_set(
        self, keys: Sequence[bytes], frames: Sequence[memoryview], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See StorageBackend. Waits for up to half a second for a full store to make room."""
        check_batch(self.codec, keys, frames, parent)
        with self._calls.enter() as is_open:
            if not is_open:
                return self._calls.refuse_sets(len(keys))
            outcomes: list[SetOutcome] = []
            with self._links.use() as link:
                batch = Writes(link.parts, keys, frames, parent, deadline)
                try:
                    outcomes = batch.run()
                finally:
                    self._calls.count(sets=outcomes, errors=batch.errors)
                self._look_at(batch.errors, link)
        return outcomes

    def _look_at(self, errors: list[str], link: Link) -> None:
        """A daemon that refuses transfers has been started anew, and needs to be joined anew."""
        if self.options.daemon is not None and codes.class_of(codes.BAD_PARAMETER) in errors:
            self._links.renew(link)

    def delete(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """See StorageBackend. Waits for the leases of pages that were looked up or read lately, 30 s at most."""
        check_keys(keys)
        with self._calls.enter() as is_open:
            if not is_open:
                return self._calls.refuse()
            if not keys:
                return 0
            with self._links.use() as link:
                parts = link.parts
                removed, errors = remove_unleased(
                    parts.names.of(list(dict.fromkeys(keys))), deadline,
                    lambda some: parts.ask(lambda: parts.client.remove(some, force=False), deadline),
                )  # fmt: skip
            self._calls.count(errors=errors)
        return removed

    def usage(self) -> Usage:
        """See StorageBackend. The whole store's pages and bytes, since all that is in it shares the capacity; asks the
        master's HTTP server."""
        with self._calls.enter() as is_open:
            if is_open:
                try:
                    self._usage = self._admin.usage()
                except BackendUnavailable:
                    self._calls.count(errors=["admin"])
        return self._usage

    def statistics(self) -> BackendStatistics:
        """See StorageBackend. What the server evicts is not told to anyone: `evicted_pages` stays 0."""
        return self._calls.statistics()

    def close(self) -> None:
        """See StorageBackend. The last one of this process takes its segment out of the store, with the pages in it.

        Returns after 10 s at the latest; what then still hangs in the library ends by itself.
        """
        with self._close_lock:
            if not self._calls.close():
                return
            if not self._links.close(_CLOSE_S):
                _log.warning("mooncake store: a library call still hangs; the client is closed when it returns")

    def check(self) -> None:
        """Raise InvariantError if staging memory is lost. REQUIRES: no verb runs, and no call that one has left."""
        self._links.current.staging.check()


class RegisteringMooncakeBackend(MooncakeBackend):
    """The backend of a process that moves its pages itself: those in registered memory go as they lie, with no copy.

    A read or store of registered frames cannot be left: such a verb returns when the library does, by its own limits at
    most three times `timeout_s` and 2 s, or 5 s without a master. After such a failure frames are copied until a call
    has succeeded, so that one verb waits so long and those behind it do not.
    """

    def register_memory(self, memory: memoryview) -> None:
        """See MemoryRegistration. `memory` must stay until the backend is closed. What is registered stays so.

        Raises BackendUnavailable if the backend is closed.
        """
        if not memory.nbytes or not memory.c_contiguous or memory.readonly:
            raise InvalidInput("mooncake store: the memory to register must be contiguous, writable and not empty")
        start = address_of(memory.cast("B"))
        with self._calls.enter() as is_open:
            if not is_open:
                raise BackendUnavailable("mooncake store: is closed, and has no use for memory")
            link = self._links.current
            if (start, start + memory.nbytes) not in link.parts.roads.registered:
                link.register(start, memory.nbytes)
