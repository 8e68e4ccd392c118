"""The Mooncake driver: pages in the memory of many nodes, moved by the library directly from and into frames.

Before storing a page, the driver looks it up, because the library reports success in either case. If two processes
store a page at the same moment, both report it as stored.

The server decides about eviction: it evicts approximately the least recently used page of any chain, so a chain may
lose its middle. A page that was looked up or read has a lease, 10 s by default, during which it is neither evicted nor
deleted. Damaged pages are removed despite their lease; the reader that holds it finds the damage too.

Locking design: calls run on their callers' threads and share only objects that are thread-safe (`SessionManager`,
`PathSelector`, SupervisedPool). The library is closed on a separate thread after its last call has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from ...arguments import instance
from ...clock import SYSTEM_CLOCK, Clock
from ...config.mooncake_storage import MooncakeStorageOptions
from ...errors import InvalidInput
from ...frame import FrameCodec
from ...mapping import address_of
from ...units import MIB
from ..base import StoredPage, Usage
from ..driver import Answer
from ..errors import StoreError
from ..pages import PageReads, PageWrites
from . import codes
from .admin import Admin, admin_address
from .batches import MooncakeWrites, read_pages
from .session import ClientSession, Names, SessionManager, remove_unleased

_log = logging.getLogger(__name__)

# The bounce buffer of a tool at first, for one page.
_TOOL_BYTES = MIB
# How long `close` waits for the library, which needs 1 s, 4 s without a master, 30 s if a daemon hangs.
_CLOSE_S = 10.0


class MooncakeDriver:
    """Pages in a Mooncake store. See the module's docstring; `Driver` documents the functions.

    Pages in registered memory move without a copy, unless a daemon moves them. Other pages are copied through bounce
    buffers: their verb returns at its deadline or at most a quarter of a second later, and an unfinished transfer
    continues only in the bounce buffers. A transfer of registered frames cannot be abandoned: the verb returns when the
    library does, after at most three times `timeout` plus 2 s, or 5 s without a master. After such a failure, frames
    are copied until a call succeeds, so that only one verb waits that long.

    The constructor raises ConfigError if the library is missing, BackendUnavailable if the store cannot be joined,
    BackendError without memory for bounce buffers. Open it after a fork, not before.
    """

    def __init__(self, codec: FrameCodec | None, options: MooncakeStorageOptions, clock: Clock = SYSTEM_CLOCK) -> None:
        options = instance("options", options, MooncakeStorageOptions)
        if codec is None:
            # A tool moves pages itself, not through a daemon. It adds no segment, whose pages would be lost on `close`.
            options = options.model_copy(update={"daemon": None, "segment": 0, "staging": _TOOL_BYTES})
        self.options = options
        self._admin = Admin(admin_address(options))
        frame_bytes = _TOOL_BYTES if codec is None else codec.frame_bytes
        self._sessions = SessionManager(lambda: ClientSession(frame_bytes, options, clock), clock)

    def find(self, namespace: bytes, keys: Sequence[bytes], deadline: float) -> list[Answer]:
        """See Driver. One request for all keys; grants a lease on each stored page."""
        with self._sessions.use() as session:
            names = session.names.of(namespace, keys)
            found = session.ask(lambda: session.client.exist(names), deadline)
        return [code == 1 if code >= 0 else codes.kind_of(code) for code in found]

    def read(self, pages: PageReads[bool]) -> None:
        """See Driver. A page still being written is a miss."""
        with self._sessions.use() as session:
            read_pages(session, pages)
            self._renew_if_lost(pages.errors, session)

    def write(self, pages: PageWrites) -> None:
        """See Driver. If the store is full, waits up to half a second for it to evict pages."""
        with self._sessions.use() as session:
            session.paths.enlarge(pages.codec.frame_bytes, pages.deadline)
            MooncakeWrites(session, pages).run()
            self._renew_if_lost(pages.errors, session)

    def _renew_if_lost(self, errors: list[str], session: ClientSession) -> None:
        """Replace the session if the daemon rejects transfers: it restarted, without this process's memory."""
        if self.options.daemon is not None and codes.kind_of(codes.BAD_PARAMETER) in errors:
            self._sessions.renew(session)

    def remove(
        self, namespace: bytes, keys: Sequence[bytes], deadline: float, found: Sequence[bool] | None = None
    ) -> tuple[int, Sequence[str]]:
        """See Driver. Waits, for at most 30 s, until the leases of recently used pages expire. With `found`, removes
        pages despite the lease from reading them; if another process has replaced a page since, its new page is removed
        too: the store cannot tell them apart."""
        with self._sessions.use() as session:
            names = session.names.of(namespace, keys)
            if found is None:
                return remove_unleased(session, names, deadline)
            answers = session.ask(lambda: session.client.remove(names, force=True), deadline)
        kinds = [codes.kind_of(code) for code in answers if code < 0 and code not in codes.MISSES]
        return answers.count(codes.OK), kinds

    def pages(self, namespace: str, deadline: float) -> Iterator[StoredPage]:
        """See Driver. Gets all keys of the store from the master's HTTP server, about 140 bytes per page, and their
        sizes. `used_s` is None, because the master does not report it."""
        names = Names(self.options.prefix)
        ids = {name: found for name in sorted(self._admin.all_keys()) if (found := names.id_of(name))}
        ours = [name for name, (space, _) in ids.items() if space.hex().startswith(namespace)]
        for name, size in self._admin.sizes(ours):
            yield StoredPage(*ids[name], size, None)

    def read_start(self, page: StoredPage, bytes_max: int, deadline: float) -> tuple[bytes, bool] | None:
        size = min(bytes_max, page.bytes)
        if not size:
            return b"", True
        buffer = memoryview(bytearray(size))
        with self._sessions.use() as session:
            (name,) = session.names.of(page.namespace, [page.key])
            session.paths.enlarge(size, deadline)
            with session.paths.path([[buffer]], deadline) as path:
                address = path.addresses[0][0]
                (code,) = session.noted(path.run(lambda: session.client.get_start(name, address, size), deadline))
                if code in codes.MISSES or code == codes.BAD_PARAMETER:  # removed, or replaced by a shorter page
                    return None
                if code < 0:
                    raise StoreError(codes.kind_of(code))
                path.fetch(0, size)
        return bytes(buffer), True

    def measure(self) -> Usage:
        """See Driver. Sends a request to the master's HTTP server. Counts all pages and bytes in the store, since
        they share its capacity."""
        return self._admin.usage()

    def close(self) -> None:
        """See Driver. When the last user in this process closes, its segment leaves the store with all its pages.

        Returns after at most 10 s, even if a library call still hangs.
        """
        if not self._sessions.close(_CLOSE_S):
            _log.warning("mooncake store: a library call still hangs; the client is closed when it returns")

    def check(self) -> None:
        """Raise InvariantError if bounce buffers are lost. REQUIRES: no verb and no abandoned call is running."""
        self._sessions.current.paths.check()

    def register_memory(self, memory: memoryview) -> None:
        """See RegistersMemory. Does nothing if `memory` is already registered, or with a daemon: pages are copied to
        it.

        REQUIRES: `memory` stays valid until the driver is closed. Raises InvalidInput and BackendError.
        """
        if not memory.nbytes or not memory.c_contiguous or memory.readonly:
            raise InvalidInput("mooncake store: memory to register must be contiguous, writable and not empty")
        if self.options.daemon is not None:
            return
        start = address_of(memory.cast("B"))
        session = self._sessions.current
        if (start, start + memory.nbytes) not in session.paths.registered:
            session.register(start, memory.nbytes)
