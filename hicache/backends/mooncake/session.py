"""What a backend holds of a store: a client, bounce buffers, threads; and how it gets new ones.

A daemon that was restarted does not know its clients' memory any more, and the library does not notice if a call was
made before. Then every transfer is refused, and only a new client with new memory helps.

Locking design: `SessionManager._state` guards the current session and how many verbs use each session; it is held for a
few instructions. Sessions are made and left on the threads of a SupervisedPool.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from ...config.mooncake_storage import MooncakeStorageOptions
from ...errors import BackendError, ConfigError
from ...frame import FrameCodec
from ...keys import PAGE_KEY_BYTES
from ...supervised import NoThread, SupervisedPool
from ...units import MIB
from ..errors import ErrorKind, StoreError
from . import codes
from .buffers import PathSelector
from .client import GRACE_S, join_store

_log = logging.getLogger(__name__)

# A new session that does not help is not replaced at once: each costs threads, memory and a second to leave.
RENEW_EVERY_S = 5.0
# Sessions that may hang at once while they are made or left.
_HANGING_MAX = 4
# One library call moves about so much, some 10 to 100 ms: far more work than the call itself is, and soon enough over
# for the deadline to be looked at.
_CHUNK_BYTES = 128 * MIB
# A lease ends by itself; a deletion waits for that, within a limit, since readers may renew it. The server's default is
# a lease of 10 s.
_LEASE_WAIT_S = 0.05
_LEASE_WAIT_S_MAX = 30.0


class Names:
    """The keys of one namespace's pages in the store: `prefix`, the namespace, "/", the page key, in hexadecimal."""

    def __init__(self, prefix: str, namespace: bytes) -> None:
        self._start = f"{prefix}{namespace.hex()}/"

    def of(self, keys: Sequence[bytes]) -> list[str]:
        """Return the names of `keys`."""
        return [self._start + key.hex() for key in keys]

    def key_of(self, name: str) -> bytes | None:
        """Return the key of the page of that name, None if it is not a page of this namespace."""
        digits = name[len(self._start) :]
        is_page = name.startswith(self._start) and len(digits) == 2 * PAGE_KEY_BYTES
        return bytes.fromhex(digits) if is_page and not digits.strip("0123456789abcdef") else None


class ClientSession:
    """One membership in a store. Raises ConfigError if the library is missing, BackendUnavailable if the store cannot
    be joined, BackendError without memory for bounce buffers."""

    def __init__(self, codec: FrameCodec, options: MooncakeStorageOptions) -> None:
        self.users = 0
        self.retired = False
        self.codec = codec
        self.names = Names(options.prefix, codec.namespace)
        self.chunk_pages = max(1, _CHUNK_BYTES // codec.frame_bytes)  # of one library call
        self.client, self._pool = join_store(options, "mooncake")
        try:
            self.paths = PathSelector(self.client, self._pool, codec.frame_bytes, options.staging)
        except BackendError:
            self.client.leave()
            self._pool.close()
            raise

    def ask(self, call: Callable[[], list[int]], deadline: float) -> list[int]:
        """Return what a library call that touches no frame says. Raises StoreError if it says nothing in time."""
        if time.monotonic() >= deadline:
            raise StoreError(ErrorKind.DEADLINE)
        try:
            result = self._pool.call(call, deadline + GRACE_S)
        except NoThread:
            raise StoreError(ErrorKind.NO_THREAD) from None
        if result is None or any(map(codes.is_slow, result)):
            self.paths.slow = True
        if result is None:
            raise StoreError(ErrorKind.TIMEOUT)
        return result

    def moved(self, result: list[int] | None) -> list[int]:
        """Return `result` of a call that moves pages. Raises StoreError if it has none.

        Frames are copied from a slow failure until pages have been moved again: that the master answers says nothing of
        the owners of pages.
        """
        if result is None or any(map(codes.is_slow, result)):
            self.paths.slow = True
        elif any(code >= 0 for code in result):
            self.paths.slow = False
        if result is None:
            raise StoreError(ErrorKind.TIMEOUT)
        return result

    def register(self, address: int, size: int) -> None:
        """Let frames in this memory go as they are. Raises BackendError."""
        self.client.register(address, size)
        self.paths.add(address, address + size)

    def leave(self) -> None:
        """Give everything back, when the last library call has ended. REQUIRES: no verb uses it."""
        self._pool.close()
        self.paths.free()
        for start, end in self.paths.registered:
            self.client.unregister(start, end - start)
        self.client.leave()


class SessionManager:
    """Has the session that verbs use now. `make` makes another."""

    def __init__(self, make: Callable[[], ClientSession]) -> None:
        self._make = make
        self._state = threading.Lock()
        self._current = make()
        self._renew_from = -math.inf  # monotonic
        self._closed = False
        self._workers = SupervisedPool[Callable[[], None]](
            "mooncake-session", _HANGING_MAX, handle=lambda job, beat: job(), linger_s=0.0
        )

    @property
    def current(self) -> ClientSession:
        """The session that the next verb uses."""
        return self._current

    @contextlib.contextmanager
    def use(self) -> Iterator[ClientSession]:
        """Lend the current session, which stays until the block ends."""
        with self._state:
            session = self._current
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
        """Replace `session`, unless that is done or was tried in the last `RENEW_EVERY_S`. Does not block; verbs use
        the old one until then."""
        with self._state:
            now = time.monotonic()
            if session is not self._current or now < self._renew_from or self._closed:
                return
            self._renew_from = now + RENEW_EVERY_S
        self._workers.submit(functools.partial(self._replace, session))

    def _replace(self, old: ClientSession) -> None:
        with self._state:
            is_wanted = self._current is old and not self._closed
        if not is_wanted:
            return
        old.client.forget()
        try:
            new = self._make()
        except (BackendError, ConfigError) as error:
            _log.warning("mooncake store: the daemon could not be joined anew (%s); trying again", type(error).__name__)
            return
        _log.warning("mooncake store: joined the daemon anew; it had lost this process's memory")
        with self._state:
            unwanted = old
            if self._closed or self._current is not old:
                unwanted = new
            else:
                self._current = new
            unwanted.retired = True
            unused = not unwanted.users
        if unused:
            unwanted.leave()

    def close(self, timeout_s: float) -> bool:
        """Leave the store. False if a library call still hangs after `timeout_s`; the rest is done when it returns.

        REQUIRES: no verb is in flight, and none follows.
        """
        with self._state:
            self._closed = True
        self._workers.submit(self._current.leave)
        return self._workers.close(timeout_s)


def remove_unleased(
    names: Sequence[str], deadline: float, remove: Callable[[list[str]], list[int]]
) -> tuple[int, list[str]]:
    """Remove pages, again and again those that have a lease; return how many were there, and the kinds of errors.

    `remove` makes one attempt for some names; a StoreError of it is an error of each of them. Blocks until `deadline`,
    or `_LEASE_WAIT_S_MAX` if that is sooner, as long as there are leases.
    """
    left = list(names)
    removed, errors = 0, list[str]()
    give_up = min(deadline, time.monotonic() + _LEASE_WAIT_S_MAX)
    while True:
        try:
            found = remove(left)
        except StoreError as error:
            return removed, errors + [error.kind] * len(left)
        removed += found.count(codes.OK)
        errors += [codes.kind_of(code) for code in found if code < 0 and code not in codes.MISSES | codes.BUSY]
        left = [name for name, code in zip(left, found, strict=True) if code in codes.BUSY]
        if not left:
            return removed, errors
        time.sleep(max(0.0, min(_LEASE_WAIT_S, give_up - time.monotonic())))
        if time.monotonic() >= give_up:
            return removed, errors + [ErrorKind.LEASED] * len(left)
