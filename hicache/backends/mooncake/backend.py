"""The Mooncake backend: pages in the memory of many nodes, moved by the library directly from and into frames.

Before storing a page, the backend looks it up, because the library reports success in either case. If two processes
store a page at the same moment, both report it as stored.

The server decides about eviction: it evicts approximately the least recently used page of any chain, so a chain may
lose its middle. A page that was looked up or read has a lease, 10 s by default, during which it is neither evicted nor
deleted. Damaged pages are removed despite their lease; the reader that holds it finds the damage too.

Locking design: verbs run on their callers' threads and share only objects that are thread-safe (`Calls`,
`SessionManager`, `PathSelector`, SupervisedPool). `_usage` is a single reference. The library is closed on a separate
thread after its last call has ended; with `_close_lock`, a second `close` waits for the first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from ...arguments import instance
from ...config.mooncake_storage import MooncakeStorageOptions
from ...errors import BackendUnavailable, InvalidInput
from ...frame import FrameCodec
from ..base import Usage
from ..errors import ErrorKind, StoreError
from ..pages import Damaged, PageReads, PageWrites
from ..store import PageStore
from . import codes
from .admin import Admin, admin_address
from .batches import Writes, read_pages
from .buffers import address_of
from .session import ClientSession, Names, SessionManager, remove_unleased

_log = logging.getLogger(__name__)

# How long `close` waits for the library, which needs 1 s, 4 s without a master, 30 s if a daemon hangs.
_CLOSE_S = 10.0


class MooncakeBackend(PageStore[None]):
    """Pages in a Mooncake store. See the module's docstring; `PageStore` documents the verbs.

    Pages in registered memory move without a copy, unless a daemon moves them. Other pages are copied through bounce
    buffers: their verb returns at its deadline or at most a quarter of a second later, and an unfinished transfer
    continues only in the bounce buffers. A transfer of registered frames cannot be abandoned: the verb returns when the
    library does, after at most three times `timeout` plus 2 s, or 5 s without a master. After such a failure, frames
    are copied until a call succeeds, so that only one verb waits that long.

    The constructor raises ConfigError if the library is missing, BackendUnavailable if the store cannot be joined,
    BackendError without memory for bounce buffers. Open it after a fork, not before.
    """

    def __init__(self, codec: FrameCodec, options: MooncakeStorageOptions) -> None:
        super().__init__(codec)
        self.options = instance("options", options, MooncakeStorageOptions)
        self._admin = Admin(admin_address(options))
        self._sessions = SessionManager(lambda: ClientSession(codec, options))

    def find(self, keys: Sequence[bytes], deadline: float) -> Iterator[bool]:
        """See PageStore. One request for all keys; grants a lease on each stored page."""
        with self._sessions.use() as session:
            names = session.names.of(keys)
            found = session.ask(lambda: session.client.exist(names), deadline)
        for code in found:
            if code < 0:
                self.count(codes.kind_of(code))
            yield code == 1

    def read(self, pages: PageReads[None]) -> None:
        """See PageStore. A page still being written is a miss."""
        with self._sessions.use() as session:
            read_pages(session, pages)
            self._renew_if_lost(pages.errors, session)

    def write(self, pages: PageWrites) -> None:
        """See PageStore. If the store is full, waits up to half a second for it to evict pages."""
        with self._sessions.use() as session:
            Writes(session, pages).run()
            self._renew_if_lost(pages.errors, session)

    def _renew_if_lost(self, errors: list[str], session: ClientSession) -> None:
        """Replace the session if the daemon rejects transfers: it restarted and no longer knows this process's memory.
        """
        if self.options.daemon is not None and codes.kind_of(codes.BAD_PARAMETER) in errors:
            self._sessions.renew(session)

    def remove(self, keys: Sequence[bytes], deadline: float) -> int:
        """See PageStore. Waits, for at most 30 s, until the leases of recently used pages expire."""
        with self._sessions.use() as session:
            removed, errors = remove_unleased(
                session.names.of(keys), deadline,
                lambda some: session.ask(lambda: session.client.remove(some, force=False), deadline),
            )  # fmt: skip
        self.count(*errors)
        return removed

    def remove_damaged(self, damaged: Sequence[Damaged[None]], deadline: float) -> None:
        """See PageStore. Removes pages despite the lease from reading them. If another process has replaced a page
        since, its new page is removed too: the store cannot tell them apart."""
        with self._sessions.use() as session:
            names = session.names.of([one.key for one in damaged])
            found = session.ask(lambda: session.client.remove(names, force=True), deadline)
        self.count(*(codes.kind_of(code) for code in found if code < 0 and code not in codes.MISSES))

    def keys(self, deadline: float) -> Iterator[bytes]:
        """See PageStore. Gets all keys of the store from the master's HTTP server."""
        names = Names(self.options.prefix, self.codec.namespace)
        try:
            found = self._admin.all_keys()
        except BackendUnavailable as error:
            raise StoreError(ErrorKind.ADMIN) from error
        return (key for key in map(names.key_of, found) if key is not None)

    def measure(self) -> Usage:
        """See PageStore. Sends a request to the master's HTTP server. Counts all pages and bytes in the store, since
        they share its capacity."""
        try:
            return self._admin.usage()
        except BackendUnavailable as error:
            raise StoreError(ErrorKind.ADMIN) from error

    def shut(self) -> None:
        """See PageStore. When the last user in this process closes, its segment leaves the store with all its pages.

        Returns after at most 10 s, even if a library call still hangs.
        """
        if not self._sessions.close(_CLOSE_S):
            _log.warning("mooncake store: a library call still hangs; the client is closed when it returns")

    def check(self) -> None:
        """Raise InvariantError if bounce buffers are lost. REQUIRES: no verb and no abandoned library call is running.
        """
        self._sessions.current.paths.check()

    def register_memory(self, memory: memoryview) -> None:
        """See MemoryRegistration. Does nothing if `memory` is already registered, or with a daemon: pages are copied to
        it.

        REQUIRES: `memory` stays valid until the backend is closed. Raises BackendUnavailable if the backend is closed.
        """
        if not memory.nbytes or not memory.c_contiguous or memory.readonly:
            raise InvalidInput("mooncake store: memory to register must be contiguous, writable and not empty")
        if self.options.daemon is not None:
            return
        start = address_of(memory.cast("B"))
        if not self._calls.enter():
            raise BackendUnavailable("mooncake store: it is closed; register memory before closing it")
        try:
            session = self._sessions.current
            if (start, start + memory.nbytes) not in session.paths.registered:
                session.register(start, memory.nbytes)
        finally:
            self._calls.leave()
