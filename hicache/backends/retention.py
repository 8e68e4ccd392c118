"""The maximum age of the pages of a store, for operators who promise to delete prompts after a time.

The age counts from the time when a page was first stored, which is in its header (docs/formats/frame.md), and not from
its last use. A page of an earlier version has no such time, and counts as expired. An expired page is never served: a
read reports a miss and removes it (see `pages`). So is a page whose time is later than now by more than CLOCK_SKEW_S: a
wrong clock stored it, and its age is not known. A sweep removes the pages that are not read. It covers all namespaces,
also those that engines do not use any more. Redis removes pages itself, so it has no sweep.

The sweep knows the time of a page from the listing (the time of the object or file), or reads the header once. Where a
driver `SharesSweeps`, only the engine that lists and sweeps for all removes expired pages.

Locking design: `_state` guards the counts, and is held for a few instructions. `_closed` is one reference. The sweep is
a BackgroundTask that `start` wakes and `close` ends; everything else belongs to it.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable

from ..background import BackgroundTask
from ..backoff import Backoff
from ..clock import SYSTEM_CLOCK, Clock
from ..errors import BackendError
from .base import EvictionListener, StoredPage
from .chains import read_header
from .driver import Incidents, SharesSweeps
from .stored import StoredPages

_log = logging.getLogger(__name__)

# A page stays for at most this share of its maximum age after it has expired: see `interval_s`.
_INTERVAL_SHARE = 1 / 50
# A listing costs requests, so sweeps of a short age are not more frequent. A long age does not need fewer.
INTERVAL_S_MIN = 60.0
INTERVAL_S_MAX = 3600.0
# Clocks of machines may differ by this. A page that was stored by a clock ahead of the others stays longer by as much.
CLOCK_SKEW_S = 3600.0
# How often an engine that does not sweep looks whether it has become the one that does. Costs nothing.
LOOK_S = 60.0
_REMOVE_CHUNK = 1000
# Pages whose time in the header is known, at about 110 bytes each. The headers of further pages are read in each sweep.
_KNOWN_MAX = 1 << 19
_CLOSE_S = 5.0


class Retention:
    """The maximum age `max_age_s` of the pages of one store. See the module's docstring. `namespace` is that of the
    pages whose removal is reported to `on_evicted`. The sweeps work on `stored`, which belongs to the store; None for a
    store without sweeps. `on_removed` is called after a sweep that removed pages.

    Of its errors, `retention` counts failed sweeps and removals.
    """

    def __init__(
        self, namespace: bytes, stored: StoredPages | None, *, max_age_s: float, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.on_evicted: EvictionListener = lambda keys: None
        self.on_removed: Callable[[], object] = lambda: None
        self.interval_s = min(max(_INTERVAL_SHARE * max_age_s, INTERVAL_S_MIN), INTERVAL_S_MAX)
        self._namespace = namespace
        self._stored = stored
        self._max_age_s = max_age_s
        self._clock = clock
        self._state = threading.Lock()
        self._errors: Counter[str] = Counter()
        self._expired_pages = 0
        self._closed = False
        self._known: dict[int, int] = {}  # the times in the headers of listed pages, by the hash of the page's id
        self._backoff = Backoff(INTERVAL_S_MIN, self.interval_s)
        self._sweeps = BackgroundTask(
            "retention", self._sweep_once, backoff=self._backoff, on_error=lambda: self._count("internal"), clock=clock
        )

    @property
    def valid_s(self) -> tuple[float, float]:
        """The Unix times between which a page was stored that has not expired now."""
        now_s = self._clock.wall_s()
        return now_s - self._max_age_s, now_s + CLOCK_SKEW_S

    def start(self) -> None:
        """Begin the first sweep, for a store with sweeps."""
        if self._stored is not None:
            self._sweeps.wake()

    def incidents(self) -> Incidents:
        """Return the errors and the removed pages so far."""
        with self._state:
            return Incidents(dict(self._errors), expired_pages=self._expired_pages)

    def note_removed(self, pages: int) -> None:
        """Count expired pages that were removed."""
        with self._state:
            self._expired_pages += pages

    def _count(self, kind: str) -> None:
        with self._state:
            self._errors[kind] += 1

    def stop(self) -> None:
        """End a sweep in progress after its current step. Does not block."""
        self._closed = True

    def close(self) -> None:
        """End the sweeps. Waits at most a few seconds for a sweep that hangs. REQUIRES: `stop` was called."""
        self._sweeps.close(_CLOSE_S)

    # On the thread of the task

    def _sweep_once(self) -> float:
        """Remove the expired pages; return the time of the next sweep."""
        assert self._stored is not None
        shared = self._stored.driver
        if isinstance(shared, SharesSweeps) and not shared.sweeps:
            return self._clock() + LOOK_S
        try:
            self._sweep(self._stored)
        except BackendError as error:
            self._count("retention")
            _log.warning("retention: expired pages could not be removed: %s; the sweep is tried again", error)
            return self._clock() + self._backoff.next_s()
        self._backoff.reset()
        # Random, so that engines that started together do not list together.
        return self._clock() + self.interval_s * random.uniform(0.75, 1.25)

    def _sweep(self, stored: StoredPages) -> None:
        """List the store and remove its expired pages. A page that cannot be removed does not protect others: the
        error is raised at the end."""
        valid_s, chunk, removed = self.valid_s, list[StoredPage](), 0
        failures, known = list[BackendError](), dict[int, int]()

        def remove() -> int:
            try:
                count = stored.remove(chunk)
            except BackendError as error:
                failures.append(error)
                count = 0
            self.note_removed(count)
            self.on_evicted([page.key for page in chunk if page.namespace == self._namespace])
            chunk.clear()
            return count

        for page in stored.pages():
            if self._closed:
                return
            if chunk and (len(chunk) == _REMOVE_CHUNK or page.namespace != chunk[0].namespace):
                removed += remove()
            if self._is_expired(stored, page, valid_s, known):
                chunk.append(page)
        if chunk:
            removed += remove()
        self._known = known
        if removed:
            self.on_removed()
        if failures:
            raise failures[-1]

    def _is_expired(
        self, stored: StoredPages, page: StoredPage, valid_s: tuple[float, float], known: dict[int, int]
    ) -> bool:
        """Return True if a listed page was stored outside `valid_s`; note the time of a header in `known`. Damaged
        objects are not expired."""

        def is_valid(stored_s: float) -> bool:
            return valid_s[0] <= stored_s <= valid_s[1]

        if page.damage is not None:
            return False
        if page.stored_s is not None:
            return not is_valid(page.stored_s)
        if page.used_s is not None and page.used_s < valid_s[0]:
            return True  # a use is never before the time of storing
        where = hash(page.id)
        stored_s = self._known.get(where)
        if stored_s is None or not is_valid(stored_s):  # it may be that of a page that this one has replaced
            header = read_header(stored, page)
            if header is None:
                return False
            stored_s = header.stored_s
        if is_valid(stored_s) and len(known) < _KNOWN_MAX:
            known[where] = stored_s
        return not is_valid(stored_s)

