"""Sessions: the client, bounce buffers and threads by which a backend uses a store; and their replacement.

After a restart, a daemon no longer knows its clients' memory, and the library may not notice. Then the daemon rejects
every transfer, until the backend uses a new client with new memory.

Locking design: `SessionManager._state` guards the current session and the number of verbs that use each session; it is
held for a few instructions. The constructor makes the first session; threads of a SupervisedPool make later ones, and
leave all of them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence

from ...clock import SYSTEM_CLOCK, Clock
from ...config.mooncake_storage import MooncakeStorageOptions
from ...errors import BackendError, ConfigError
from ...supervised import NoThread, SupervisedPool
from ...units import MIB
from ..base import PageId
from ..errors import ErrorKind, StoreError
from . import codes
from .buffers import PathSelector
from .client import GRACE_S, join_store

_log = logging.getLogger(__name__)

# The shortest time between replacements: a new session may not help either, and costs threads, memory and a second.
RENEW_EVERY_S = 5.0
# Sessions that may hang at the same time while they are made or left.
_HANGING_MAX = 4
# The bytes of one library call, which takes 10 to 100 ms: long enough to outweigh the cost of the call, short enough
# that the deadline is checked often.
_CHUNK_BYTES = 128 * MIB
# A deletion polls until the lease expires (10 s by default), up to a limit, because readers may renew it.
_LEASE_WAIT_S = 0.05
_LEASE_WAIT_S_MAX = 30.0


class Names:
    """The names of pages in the store: `prefix`, the namespace in hexadecimal, "/", and the page key in hexadecimal."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._name = re.compile(re.escape(prefix) + "([0-9a-f]{64})/([0-9a-f]{64})")

    def of(self, namespace: bytes, keys: Sequence[bytes]) -> list[str]:
        """Return the names of `keys`."""
        start = f"{self._prefix}{namespace.hex()}/"
        return [start + key.hex() for key in keys]

    def id_of(self, name: str) -> PageId | None:
        """Return namespace and key of the page with this name; None if it is not the name of a page."""
        found = self._name.fullmatch(name)
        return None if found is None else (bytes.fromhex(found[1]), bytes.fromhex(found[2]))


class ClientSession:
    """One membership in a store, for pages of up to `frame_bytes`.

    The constructor raises ConfigError if the library is missing, BackendUnavailable if the store cannot be joined,
    BackendError without memory for bounce buffers.
    """

    def __init__(self, frame_bytes: int, options: MooncakeStorageOptions, clock: Clock = SYSTEM_CLOCK) -> None:
        self.clock = clock
        self.users = 0
        self.retired = False
        self.names = Names(options.prefix)
        self.client, self._pool = join_store(options, clock)
        try:
            self.paths = PathSelector(self.client, self._pool, frame_bytes, options.staging, clock)
        except BackendError:
            self.client.leave()
            self._pool.close()
            raise

    @staticmethod
    def chunk_pages(frame_bytes: int) -> int:
        """Return how many pages of that size one library call moves."""
        return max(1, _CHUNK_BYTES // frame_bytes)

    def ask(self, call: Callable[[], list[int]], deadline: float) -> list[int]:
        """Return the result of a library call that uses no frames. Raises StoreError if it does not return in time."""
        if self.clock() >= deadline:
            raise StoreError(ErrorKind.DEADLINE)
        try:
            result = self._pool.call(call, deadline + GRACE_S)
        except NoThread:
            raise StoreError(ErrorKind.NO_THREAD) from None
        return self.noted(result, moves=False)

    def noted(self, result: list[int] | None, *, moves: bool = True) -> list[int]:
        """Return the `result` of a call, and set `paths.slow` from it. Raises StoreError if it is None.

        After a slow failure, frames are copied until a call `moves` pages again. An answer of the master alone does not
        prove that the owners of pages work.
        """
        if result is None or any(map(codes.is_slow, result)):
            self.paths.slow = True
        elif moves and any(code >= 0 for code in result):
            self.paths.slow = False
        if result is None:
            raise StoreError(ErrorKind.TIMEOUT)
        return result

    def register(self, address: int, size: int) -> None:
        """Register memory, so that frames in it move without a copy. Raises BackendError."""
        self.client.register(address, size)
        self.paths.registered += ((address, address + size),)

    def leave(self) -> None:
        """Release everything, after the last library call has ended. REQUIRES: no verb uses the session."""
        self._pool.close()
        self.paths.free()
        for start, end in self.paths.registered:
            self.client.unregister(start, end - start)
        self.client.leave()


class SessionManager:
    """Holds the session that verbs use now. `make` makes a new one."""

    def __init__(self, make: Callable[[], ClientSession], clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._make = make
        self._state = threading.Lock()
        self.current = make()  # the session that the next verb uses
        self._renew_from = -math.inf
        self._closed = False
        self._workers = SupervisedPool[Callable[[], None]](
            "mooncake-session", _HANGING_MAX, handle=lambda job, beat: job(), linger_s=0.0, clock=clock
        )

    @contextlib.contextmanager
    def use(self) -> Iterator[ClientSession]:
        """Use the current session; it stays open until the block ends."""
        with self._state:
            session = self.current
            session.users += 1
        try:
            yield session
        finally:
            with self._state:
                session.users -= 1
                unused = session.retired and not session.users
            if unused:
                self._workers.submit(session.leave)

    def renew(self, session: ClientSession) -> None:
        """Replace `session` in the background, unless it was replaced, or that was tried within `RENEW_EVERY_S`. Does
        not block; verbs use the old session until then."""
        with self._state:
            now = self._clock()
            if session is not self.current or now < self._renew_from or self._closed:
                return
            self._renew_from = now + RENEW_EVERY_S
        self._workers.submit(functools.partial(self._replace, session))

    def _replace(self, old: ClientSession) -> None:
        with self._state:
            is_wanted = self.current is old and not self._closed
        if not is_wanted:
            return
        old.client.forget()
        try:
            new = self._make()
        except (BackendError, ConfigError) as error:
            _log.warning("mooncake store: reconnecting to the daemon failed (%s); trying again", type(error).__name__)
            return
        _log.warning("mooncake store: reconnected to the daemon; it had lost this process's memory")
        with self._state:
            unwanted = old
            if self._closed or self.current is not old:
                unwanted = new
            else:
                self.current = new
            unwanted.retired = True
            unused = not unwanted.users
        if unused:
            unwanted.leave()

    def close(self, timeout_s: float) -> bool:
        """Leave the store. Return False if a library call still hangs after `timeout_s`; the store is left when that
        call returns.

        REQUIRES: no verb is in flight, and none follows.
        """
        with self._state:
            self._closed = True
        self._workers.submit(self.current.leave)
        return self._workers.close(timeout_s)


def remove_unleased(session: ClientSession, names: Sequence[str], deadline: float) -> tuple[int, list[str]]:
    """Remove pages, and retry those with a lease. Return how many were removed, and the error kinds.

    A StoreError counts as an error of each remaining page. Blocks while leases remain, at most until `deadline` and for
    at most `_LEASE_WAIT_S_MAX`.
    """
    clock = session.clock
    left = list(names)
    removed, errors = 0, list[str]()
    give_up = min(deadline, clock() + _LEASE_WAIT_S_MAX)
    while True:
        try:
            found = session.ask(functools.partial(session.client.remove, left, force=False), deadline)
        except StoreError as error:
            return removed, errors + [error.kind] * len(left)
        removed += found.count(codes.OK)
        errors += [codes.kind_of(code) for code in found if code < 0 and code not in codes.MISSES | codes.BUSY]
        left = [name for name, code in zip(left, found, strict=True) if code in codes.BUSY]
        if not left:
            return removed, errors
        clock.sleep(min(_LEASE_WAIT_S, give_up - clock()))
        if clock() >= give_up:
            return removed, errors + [ErrorKind.LEASED] * len(left)
