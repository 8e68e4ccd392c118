"""The library's client: loaded, set up, shared, called, and closed after its last use.

Backends with the same store, segment and network settings share one client. So when new weights reopen a store, the
segment and the registered memory stay; a second client would need both twice.

Locking design: `_lock` guards `_clients`, the number of users of each, and the memory registered with each. It is held
while a client is set up or memory is registered, which is rare. The library's client is thread-safe, but a call on a
closed client ends the process: a user must not leave with a call in flight.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ...clock import SYSTEM_CLOCK, Clock
from ...config.mooncake_storage import MooncakeStorageOptions
from ...errors import BackendError, BackendUnavailable, ConfigError, MissingPackage, install_hint
from ...supervised import LINGER_S, NoThread, SupervisedPool
from . import codes

# The time limit of one attempt to find the master: four connection attempts a second apart, or one unanswered request.
_SETUP_S = 30.0
# Concurrent library calls: as many as storage workers have in flight at usual settings, plus some that hang.
THREADS_MAX = 16
# How long a verb waits for a call after its deadline: the library's own limits end then too.
GRACE_S = 0.25
# The libraries that Mooncake is linked with, and their Debian packages.
MOONCAKE_LIBRARIES: Mapping[str, str] = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}

_lock = threading.Lock()
_clients: dict[tuple[object, ...], Client] = {}


def join_store(options: MooncakeStorageOptions, clock: Clock = SYSTEM_CLOCK) -> tuple[Client, SupervisedPool[Any]]:
    """Return this process's client for the store in `options`, set up if there is none; and threads for calls that a
    verb may abandon. The library cannot be interrupted, and waits 30 s for a hanging daemon.

    Blocks during the setup. Raises ConfigError without the library, BackendUnavailable if the store cannot be joined.
    """
    place = (
        options.master, options.daemon, options.segment, options.host, options.metadata, options.protocol,
        options.devices,
    )
    pool = SupervisedPool[Any]("mooncake", THREADS_MAX, linger_s=LINGER_S, clock=clock)
    try:
        with _lock:
            client = _clients.get(place)
            if client is None:
                client = _clients[place] = Client(options, pool, place)
            client.uses += 1
    except (BackendError, ConfigError):
        pool.close(timeout_s=1.0)
        raise
    return client, pool


def load_library(options: MooncakeStorageOptions) -> Any:
    """Load the module `mooncake.store` with the time limits of `options`. Raises MissingPackage if it, or a system
    library that it needs, is missing."""
    for name, value in _environment(options).items():
        os.environ.setdefault(name, value)
    try:
        from mooncake import store  # noqa: PLC0415  an optional dependency that reads the environment when it loads
    except ImportError as error:
        raise MissingPackage(
            f"backend mooncake: its library cannot be loaded ({error}); {install_hint('mooncake')}; on a machine "
            "without CUDA the extra is mooncake-cpu; for missing system libraries: sudo apt-get install "
            f"{' '.join(MOONCAKE_LIBRARIES.values())}"
        ) from error
    return store


def _environment(options: MooncakeStorageOptions) -> dict[str, str]:
    """Return the environment variables to set before the library is loaded. Variables that are already set win."""
    whole_s = math.ceil(options.timeout)
    timeout_ms = str(math.ceil(options.timeout * 1000))
    return {
        "MC_RPC_TIMEOUT_MS": timeout_ms,
        "MC_RPC_CONNECT_TIMEOUT_MS": timeout_ms,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(whole_s),
        "MC_TCP_STATUS_TIMEOUT_SEC": str(whole_s),
        # Longer than the two above: the connection of a slow transfer closes before the transfer is abandoned, so
        # nothing is written into a frame afterwards.
        "MC_SLICE_TIMEOUT": str(whole_s + 1),
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_LOG_LEVEL": "ERROR",
    }


class Client:
    """One client of a store, made by `join_store`. All methods block; none may be called after `leave`.

    Methods on keys return one number per key, see `codes`.
    """

    def __init__(self, options: MooncakeStorageOptions, pool: SupervisedPool[Any], place: tuple[object, ...]) -> None:
        self.uses = 0
        self._place = place
        self._registered: Counter[tuple[int, int]] = Counter()
        self._library = load_library(options)
        self._store = self._library.MooncakeDistributedStore()
        store: Any = self._store
        if options.daemon is not None:
            setup = functools.partial(store.setup_dummy, 0, 0, options.daemon)
        else:
            setup = functools.partial(
                store.setup, options.host, options.metadata, options.segment, 0, options.protocol, options.devices,
                options.master,
            )
        # If the library hangs during setup, this process loses one thread.
        try:
            done = pool.call(lambda: [int(setup())], pool.clock() + _SETUP_S)
        except NoThread as error:
            raise BackendUnavailable(f"mooncake store: {error}") from None
        if done != [codes.OK]:
            where = f"master {options.master}" if options.daemon is None else f"daemon {options.daemon}"
            what = "did not answer in time" if done is None else f"could not be joined (code {done[0]})"
            raise BackendUnavailable(
                f"mooncake store: {where} {what}; check that it runs, the address, protocol {options.protocol!r} and, "
                "for a segment, free memory"
            )

    def allocator(self) -> Any:
        """Return the library's allocator: every client, also a daemon's, can move pages from and to its memory."""
        return self._library.MooncakeHostMemAllocator()

    def register(self, address: int, size: int) -> None:
        """Register memory for transfers, until each `register` is undone by `unregister`. Raises BackendError."""
        with _lock:
            if not self._registered[address, size]:
                code = self._store.register_buffer(address, size)
                if code != codes.OK:
                    raise BackendError(
                        f"mooncake store: {size} bytes of memory could not be registered (code {code}); for RDMA check "
                        "the limit on locked memory (ulimit -l) and the devices"
                    )
            self._registered[address, size] += 1

    def unregister(self, address: int, size: int) -> None:
        """Undo one `register`."""
        with _lock:
            self._registered[address, size] -= 1
            if not self._registered[address, size]:
                self._store.unregister_buffer(address)

    def exist(self, keys: list[str]) -> list[int]:
        """Return 1 for each stored page, 0 for a missing one. Grants leases: stored pages stay for a while."""
        return codes.checked(self._store.batch_is_exist(keys), len(keys))

    def get(self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """Read whole pages, each into its pieces of memory; return their sizes in bytes. A longer page is not read."""
        store: Any = self._store
        if all(len(pieces) == 1 for pieces in addresses):
            found = store.batch_get_into(keys, [one for one, in addresses], [one for one, in sizes])
        else:
            found = store.batch_get_into_multi_buffers(keys, addresses, sizes)
        return codes.checked(found, len(keys))

    def get_start(self, key: str, address: int, size: int) -> list[int]:
        """Read the first `size` bytes of a page. The code is BAD_PARAMETER if the page is shorter."""
        found: Any = self._store.get_into_ranges([address], [[key]], [[[0]]], [[[0]]], [[[size]]])
        try:
            return codes.checked(found[0][0], 1)
        except (LookupError, TypeError):
            return [codes.UNREADABLE]

    def put(self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """Store pages, each from its pieces of memory. A page that is already stored is unchanged, and OK too."""
        store: Any = self._store
        if all(len(pieces) == 1 for pieces in addresses):
            found = store.batch_put_from(keys, [one for one, in addresses], [one for one, in sizes])
        else:
            found = store.batch_put_from_multi_buffers(keys, addresses, sizes)
        return codes.checked(found, len(keys))

    def sizes(self, keys: list[str]) -> list[int]:
        """Return the size of each page in bytes. Grants leases as `exist` does."""
        return codes.checked([self._store.get_size(key) for key in keys], len(keys))

    def remove(self, keys: list[str], *, force: bool) -> list[int]:
        """Remove pages. With `force`, also remove pages with leases."""
        return codes.checked(self._store.batch_remove(keys, force), len(keys))

    def leave(self) -> None:
        """Stop using the client. The last user to leave removes this process's segment from the store.

        REQUIRES: the caller has undone each of its `register` calls and has no call in flight.
        """
        with _lock:
            self.uses -= 1
            if self.uses:
                return
            self._give_up_place()
        self._store.close()

    def forget(self) -> None:
        """Make the next `join_store` create a new client. Users of this client must still leave it."""
        with _lock:
            self._give_up_place()

    def _give_up_place(self) -> None:
        if _clients.get(self._place) is self:
            del _clients[self._place]
