"""What the workers do with storage: look prefixes up, read pages into lent frames, store pages.

A backend is not believed blindly: its answers are checked before they count, because a wrong count would show pages
that nobody has filled.

Locking design: all methods run on worker threads, several at once. They write the fields of the job they were given
(see `jobs`) and `_broken_chains`, whose entries are set and removed one by one. The scheduler's gate writes `until`,
one reference to a value that never changes; its times only ever get earlier. `in_flight` belongs to the scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from ..backends.base import GetOutcome, SetOutcome, StorageBackend
from ..backends.guard import Direction
from ..errors import BackendError
from ..tiers import HostPool
from .jobs import LookupJob, ReadJob, StoreJob
from .operations import Store

# More failed chains than operations fit into the queue of small pages need not be remembered.
_BROKEN_CHAINS_MAX = 4096

# Monotonic seconds: workers start no batch of a direction at or after its time.
Until: TypeAlias = Mapping[Direction, float]
IN_SERVICE: Final[Until] = dict.fromkeys(Direction, math.inf)
RETIRED: Final[Until] = dict.fromkeys(Direction, -math.inf)


class StorageJobs:
    """What the storage workers do with one backend. `batch_pages` is what one backend call carries, `deadline_s` what
    it may take. `clock` is monotonic, in seconds.
    """

    def __init__(
        self,
        backend: StorageBackend,
        host: HostPool,
        *,
        batch_pages: int,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.until = IN_SERVICE  # scheduler
        self.in_flight = 0  # operations that are not acknowledged yet
        self.backend = backend
        self._host = host
        self._batch_pages = batch_pages
        self._deadline_s = deadline_s
        self._clock = clock
        # Last keys of operations that did not store everything, the oldest first. With several backup workers a
        # continuation may overtake the failure; it is then stored in vain and found once its head is there.
        self._broken_chains: dict[bytes, None] = {}

    def look_up(self, job: LookupJob, beat: Callable[[], None]) -> None:
        """Prefetch worker: chain the page keys batch by batch and ask for the longest stored prefix."""
        lookup, page_size = job.operation, self._host.shape.tokens
        pages = lookup.key.pages(page_size)
        prior = lookup.prior if isinstance(lookup.prior, bytes) else lookup.prior.keys()[-1]
        for start in range(lookup.start_page, pages, self._batch_pages):
            if job.cancelled or self._clock() >= min(lookup.deadline, self.until[Direction.READ]):
                return
            beat()
            keys = lookup.key.page_keys(page_size, prior, start, min(start + self._batch_pages, pages))
            prior = keys[-1]
            job.keys += keys
            found = self.backend.batch_exists(keys, deadline=self._call_deadline(lookup.deadline))
            if type(found) is not int or not 0 <= found <= len(keys):
                raise BackendError(f"the backend says that {found!r} of {len(keys)} pages are stored")
            job.hit_pages += found
            if found < len(keys):
                return

    def read(self, job: ReadJob, beat: Callable[[], None]) -> None:
        """I/O worker: read batch by batch, stop at the first page that is not a hit."""
        read, batch = job.operation, self._batch_pages
        for start in range(0, len(read.host_pages), batch):
            if job.cancelled or self._clock() >= min(read.deadline, self.until[Direction.READ]):
                return
            beat()
            pages = read.host_pages[start : start + batch]
            keys = read.keys[start : start + len(pages)]
            frames = self._host.frames(pages)
            began = self._clock()
            outcomes = self.backend.batch_get(keys, frames, deadline=self._call_deadline(read.deadline))
            job.seconds += self._clock() - began
            _require_outcomes(outcomes, GetOutcome, len(pages))
            hits = 0
            # A page counts only if its frame says so too: a backend that filled nothing has not hit.
            while hits < len(pages) and outcomes[hits] is GetOutcome.HIT:
                if not self.backend.codec.is_sealed(keys[hits], frames[hits]):
                    raise BackendError("the backend reports a hit but has not filled the frame with that page")
                hits += 1
            job.pages = start + hits
            if hits < len(pages):
                return

    def store(self, job: StoreJob, beat: Callable[[], None]) -> None:
        """Backup worker: store batch by batch, head first; a page that could not be stored ends the operation, and with
        it the operations behind it that continue its chain: nobody could reach their pages."""
        if self._clock() >= self.until[Direction.WRITE]:
            return
        try:
            if self._head_is_stored(job.operation, beat):
                self._store_batches(job, beat)
        finally:
            outcomes = job.outcomes
            job.stored_pages = outcomes.count(SetOutcome.STORED)
            job.complete = len(outcomes) == job.operation.chain.pages and all(o.is_stored for o in outcomes)
            self._note_chain(job)

    def _head_is_stored(self, store: Store, beat: Callable[[], None]) -> bool:
        """Asks the backend only where a store of the head has failed here: somebody else may have stored it since."""
        if store.begins_prompt or not self._broken_chains:
            return True
        parent = store.chain.prior_key()
        if parent not in self._broken_chains:
            return True
        beat()
        if self.backend.batch_exists([parent], deadline=self._clock() + self._deadline_s) != 1:
            return False
        self._broken_chains.pop(parent, None)
        return True

    def _note_chain(self, job: StoreJob) -> None:
        last_key = job.operation.chain.keys()[-1]
        if job.complete:
            self._broken_chains.pop(last_key, None)
            return
        self._broken_chains[last_key] = None
        while len(self._broken_chains) > _BROKEN_CHAINS_MAX:
            self._broken_chains.pop(next(iter(self._broken_chains)), None)

    def _store_batches(self, job: StoreJob, beat: Callable[[], None]) -> None:
        store, batch, chain_keys = job.operation, self._batch_pages, job.operation.chain.keys()
        parent = None if store.begins_prompt else store.chain.prior_key()
        for start in range(0, len(store.host_pages), batch):
            keys = chain_keys[start : start + batch]
            frames = self._host.frames(store.host_pages[start : start + batch])
            beat()
            deadline = min(self.until[Direction.WRITE], self._clock() + self._deadline_s)
            if self._clock() >= deadline:
                return
            outcomes = self.backend.batch_set(keys, frames, parent=parent, deadline=deadline)
            _require_outcomes(outcomes, SetOutcome, len(keys))
            job.outcomes += outcomes
            if not all(outcome.is_stored for outcome in outcomes):
                return
            parent = keys[-1]

    def _call_deadline(self, operation_deadline: float) -> float:
        return min(operation_deadline, self._clock() + self._deadline_s)


def _require_outcomes(outcomes: object, kind: type[GetOutcome] | type[SetOutcome], count: int) -> None:
    """Raise BackendError if a backend's answer is not one outcome of `kind` per page."""
    if not isinstance(outcomes, list) or len(outcomes) != count or not all(type(o) is kind for o in outcomes):
        raise BackendError(f"the backend did not answer with {count} {kind.__name__} values")
