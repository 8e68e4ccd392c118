"""The Mooncake backend: pages in the memory of many nodes, moved by the library from and into the frames themselves.

Whether a page is there is asked before it is stored: the library calls it a success either way. A page that another
process stores at the same moment is reported as stored by both.

What the server decides: it evicts near the least recently used page, whatever chain it belongs to, so a chain may lose
its middle; and a page that was looked up or read has a lease, 10 s by default, in which it is neither evicted nor
deleted. Damaged pages are removed in spite of their lease; the reader that holds it finds the damage too.

Locking design: verbs run on their callers' threads and share only what has its own lock or none to need (`Calls`,
`SessionManager`, `PathSelector`, SupervisedPool). `_usage` is one reference. The library is closed on a thread of its
own, when its last call has ended; `_close_lock` has two calls of `close` wait for the same.
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

# What `close` waits for the library: that takes 1 s, 4 s without a master, 30 s if a daemon hangs.
_CLOSE_S = 10.0


class MooncakeBackend(PageStore[None]):
    """Pages in a Mooncake store. See the module's docstring; `PageStore` says what each verb does.

    Pages in registered memory go as they are, with no copy, unless a daemon moves them. Other pages are copied through
    bounce buffers: their verb returns at its deadline or a quarter of a second later, and what it has started then goes
    on in the bounce buffers alone. A read or store of registered frames cannot be left: such a verb returns when the
    library does, by its own limits at most three times `timeout` and 2 s, or 5 s without a master. After such a failure
    frames are copied until a call has succeeded, so that one verb waits so long and those behind it do not.

    Raises ConfigError if the library is missing, BackendUnavailable if the store cannot be joined, BackendError without
    memory for bounce buffers. Open it after a fork and not before.
    """

    def __init__(self, codec: FrameCodec, options: MooncakeStorageOptions) -> None:
        super().__init__(codec)
        self.options = instance("options", options, MooncakeStorageOptions)
        self._admin = Admin(admin_address(options))
        self._sessions = SessionManager(lambda: ClientSession(codec, options))

    def find(self, keys: Sequence[bytes], deadline: float) -> Iterator[bool]:
        """See PageStore. One request for all of them; each page that is there has a lease then."""
        with self._sessions.use() as session:
            names = session.names.of(keys)
            found = session.ask(lambda: session.client.exist(names), deadline)
        for code in found:
            if code < 0:
                self.count(codes.kind_of(code))
            yield code == 1

    def read(self, pages: PageReads[None]) -> None:
        """See PageStore. A page that is being written is a miss."""
        with self._sessions.use() as session:
            read_pages(session, pages)
            self._renew_if_lost(pages.errors, session)

    def write(self, pages: PageWrites) -> None:
        """See PageStore. Waits for up to half a second for a full store to make room."""
        with self._sessions.use() as session:
            Writes(session, pages).run()
            self._renew_if_lost(pages.errors, session)

    def _renew_if_lost(self, errors: list[str], session: ClientSession) -> None:
        """Replace the session if the daemon refuses transfers: it was restarted and has lost this process's memory."""
        if self.options.daemon is not None and codes.kind_of(codes.BAD_PARAMETER) in errors:
            self._sessions.renew(session)

    def remove(self, keys: Sequence[bytes], deadline: float) -> int:
        """See PageStore. Waits for the leases of pages that were looked up or read lately, 30 s at most."""
        with self._sessions.use() as session:
            removed, errors = remove_unleased(
                session.names.of(keys), deadline,
                lambda some: session.ask(lambda: session.client.remove(some, force=False), deadline),
            )  # fmt: skip
        self.count(*errors)
        return removed

    def remove_damaged(self, damaged: Sequence[Damaged[None]], deadline: float) -> None:
        """See PageStore. In spite of the lease that reading them has granted. What another process has stored under the
        name since then goes too: the store cannot tell."""
        with self._sessions.use() as session:
            names = session.names.of([one.key for one in damaged])
            found = session.ask(lambda: session.client.remove(names, force=True), deadline)
        self.count(*(codes.kind_of(code) for code in found if code < 0 and code not in codes.MISSES))

    def keys(self, deadline: float) -> Iterator[bytes]:
        """See PageStore. Asks the master's HTTP server for all keys of the store."""
        names = Names(self.options.prefix, self.codec.namespace)
        try:
            found = self._admin.all_keys()
        except BackendUnavailable as error:
            raise StoreError(ErrorKind.ADMIN) from error
        return (key for key in map(names.key_of, found) if key is not None)

    def measure(self) -> Usage:
        """See PageStore. The whole store's pages and bytes, since all that is in it shares the capacity; asks the
        master's HTTP server."""
        try:
            return self._admin.usage()
        except BackendUnavailable as error:
            raise StoreError(ErrorKind.ADMIN) from error

    def shut(self) -> None:
        """See PageStore. The last one of this process takes its segment out of the store, with the pages in it.

        Returns after 10 s at the latest; a call that hangs in the library then ends by itself.
        """
        if not self._sessions.close(_CLOSE_S):
            _log.warning("mooncake store: a library call still hangs; the client is closed when it returns")

    def check(self) -> None:
        """Raise InvariantError if bounce buffers are lost. REQUIRES: no verb runs, and no call that one has left."""
        self._sessions.current.paths.check()

    def register_memory(self, memory: memoryview) -> None:
        """See MemoryRegistration. `memory` must stay until the backend is closed. What is registered stays so. With a
        daemon it changes nothing: pages are copied to it.

        Raises BackendUnavailable if the backend is closed.
        """
        if not memory.nbytes or not memory.c_contiguous or memory.readonly:
            raise InvalidInput("mooncake store: the memory to register must be contiguous, writable and not empty")
        if self.options.daemon is not None:
            return
        start = address_of(memory.cast("B"))
        if not self._calls.enter():
            raise BackendUnavailable("mooncake store: is closed, and has no use for memory")
        try:
            session = self._sessions.current
            if (start, start + memory.nbytes) not in session.paths.registered:
                session.register(start, memory.nbytes)
        finally:
            self._calls.leave()
