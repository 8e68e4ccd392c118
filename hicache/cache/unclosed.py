"""Closes caches that their engine has not closed: at the exit of the interpreter, and after they were collected.

An engine closes its cache, for example by a `with` statement. Without that, the queued copies and stores would be lost
in silence. So each cache of the factory is watched: at exit it gets `EXIT_S` for its close, and a collected cache is
closed on a thread of its own. Both log a line with the number of lost pages, and emit a ResourceWarning.

Python calls the exit handler after all threads that are not daemons have ended, on the main thread, and before it ends
the daemon threads, which are the workers of the cache. It runs before the handlers of torch, which was imported
earlier. It is not called after a signal without a handler (such as SIGTERM), or by `os._exit`. A forked child has no
workers, so only the process that has built a cache closes it.

Locking design: a cache belongs to one thread (`misuse`). If that is another one and still runs, it closes the cache
itself, in its next `poll`, through the mailbox. Changes of `_watched` and `_ending` are single, atomic operations.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from contextlib import ExitStack

from ..errors import AdminError
from .tiered import TieredCache

logger = logging.getLogger(__name__)

# The time of all caches together. Supervisors kill a process 5 to 10 s after its SIGTERM, and a person
# who waits longer for an exit believes that it hangs.
EXIT_S = 3.0
_watched: weakref.WeakSet[TieredCache] = weakref.WeakSet()
_ending: set[threading.Thread] = set()


def watch(cache: TieredCache) -> None:
    """Close `cache` at exit or when it is collected, unless it is closed by then."""
    cache.built_by, cache.on_collected = os.getpid(), _collected
    _watched.add(cache)


def _collected(cache: TieredCache) -> None:
    """Close a collected cache. Does not block: a collection may interrupt any code, even one that holds a lock of this
    cache, so another thread does it."""
    if not _is_ours(cache) or sys.is_finalizing():
        return
    cache.is_abandoned = True
    thread = threading.Thread(target=_close_collected, args=(cache,), name="hicache-end", daemon=True)
    _ending.add(thread)
    thread.start()
    _warn(cache, "was collected")  # last, because a warning may be an error


def _close_collected(cache: TieredCache) -> None:
    try:
        cache.controller.leave_ranks()
        cache.close()
    finally:
        _ending.discard(threading.current_thread())


@atexit.register
def _exit() -> None:
    deadline = time.monotonic() + EXIT_S
    with ExitStack() as stack:  # which makes all calls, last to first, even if one raises
        for thread in list(_ending):
            stack.callback(lambda thread: thread.join(max(0.0, deadline - time.monotonic())), thread)
        for cache in filter(_is_ours, list(_watched)):
            stack.callback(_warn, cache, "still existed at exit")
            stack.callback(_close_at_exit, cache, deadline)


def _close_at_exit(cache: TieredCache, deadline: float) -> None:
    cache.is_abandoned = True
    left_s = min(max(0.0, deadline - time.monotonic()), cache.config.transfer.shutdown_deadline)
    owner = cache.caller.owner
    if owner is None or owner is threading.current_thread() or not owner.is_alive():
        cache.controller.leave_ranks()  # which may never poll again
        cache.close(left_s)
        return
    try:
        cache.mailbox.ask(lambda: cache.close(left_s / 2), left_s / 2)
    except AdminError:
        logger.warning("cache was not closed: its thread %s did not close it within %.1f s of the exit; %d pages are "
                       "lost. Call close(), or use the cache in a with statement",
                       owner.name, left_s / 2, cache.count_unsaved())


def _is_ours(cache: TieredCache) -> bool:
    return cache.built_by == os.getpid() and not cache.closed


def _warn(cache: TieredCache, what: str) -> None:
    message = f"{type(cache).__name__} {what} and was not closed: call close(), or use it in a with statement"
    warnings.warn(message, ResourceWarning, stacklevel=2, source=cache)
