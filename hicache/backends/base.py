"""The storage contract: what every L3 backend does, on batches of frames.

A batch is a run of consecutive pages of one chain, head first. Keys are 32 raw bytes, frames are writable memoryviews
of exactly `codec.frame_bytes` bytes of host memory; no tensor crosses this line. A backend lives in one namespace: it
sees no page of another one. Backends seal what they store and check what they read, page by page through their codec
while the bytes are warm, and remove what fails the check.

Deadlines are points on `time.monotonic()`. A verb starts no new page after its deadline and reports what it did not do
as ERROR (a lookup: as not stored). Storage trouble is an outcome, never an exception; what may be raised is
InvalidInput for arguments that break this contract and BackendError from a constructor or from `close`.

Locking design: all verbs may be called from any threads at once and may block up to the deadline; none is called on an
engine's scheduler thread. `close` waits for the calls that are under way; verbs after it report ERROR.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..frame import FrameCodec


class GetOutcome(enum.StrEnum):
    """What became of one page of a `batch_get`. Only after HIT do the frame's bytes mean anything."""

    HIT = "hit"
    MISS = "miss"
    CORRUPT = "corrupt"  # stored, but not provably the page asked for; it was removed
    ERROR = "error"  # could not be read in time


class SetOutcome(enum.StrEnum):
    """What became of one page of a `batch_set`."""

    STORED = "stored"
    PRESENT = "present"  # was there already, nothing written
    REJECTED = "rejected"  # no room, and none could be made
    ERROR = "error"  # could not be written in time; nothing of it is visible

    @property
    def is_stored(self) -> bool:
        """Whether the page can be read back."""
        return self in (SetOutcome.STORED, SetOutcome.PRESENT)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a backend holds in its namespace's store. `capacity_bytes` None means that the server sets the limit."""

    pages: int
    bytes: int
    capacity_bytes: int | None


@dataclass(frozen=True, slots=True)
class BackendStatistics:
    """Totals since the backend was opened. `corrupt` counts by reason, `errors` by class of error."""

    gets: Mapping[GetOutcome, int]
    sets: Mapping[SetOutcome, int]
    corrupt: Mapping[str, int]
    errors: Mapping[str, int]
    evicted_pages: int
    read_bytes: int
    written_bytes: int


class Tally:
    """Counts behind `BackendStatistics`. Not locked: each backend adds under its own lock, once per batch."""

    def __init__(self) -> None:
        self.gets: Counter[GetOutcome] = Counter()
        self.sets: Counter[SetOutcome] = Counter()
        self.corrupt: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.evicted_pages = 0

    def statistics(self, frame_bytes: int) -> BackendStatistics:
        """A snapshot; bytes moved are whole frames."""
        return BackendStatistics(
            gets=dict(self.gets),
            sets=dict(self.sets),
            corrupt=dict(self.corrupt),
            errors=dict(self.errors),
            evicted_pages=self.evicted_pages,
            read_bytes=self.gets[GetOutcome.HIT] * frame_bytes,
            written_bytes=self.sets[SetOutcome.STORED] * frame_bytes,
        )


class StorageBackend(ABC):
    """One L3 store, seen from one namespace. See the module's docstring for what holds for every verb."""

    def __init__(self, codec: FrameCodec) -> None:
        self.codec = codec

    @abstractmethod
    def batch_exists(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """Length of the longest prefix of `keys` that is stored, stopping at the first hole.

        A hint: a page may be evicted before it is read, `batch_get` tells the truth. Does not refresh recency.
        """

    @abstractmethod
    def batch_get(
        self, keys: Sequence[bytes], frames: Sequence[memoryview], *, deadline: float
    ) -> list[GetOutcome]:
        """Read pages straight into `frames`, one outcome per key. Refreshes the recency of what it hits.

        REQUIRES: `len(keys) == len(frames)`; the frames stay untouched by others until the call returns.
        """

    @abstractmethod
    def batch_set(
        self, keys: Sequence[bytes], frames: Sequence[memoryview], *, parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """Store pages, one outcome per key. Idempotent; each page appears whole or not at all.

        `parent` is the key of the page before `keys[0]`, None at the start of a chain: with it a backend that evicts
        can drop tails before heads. Seals the frames.
        REQUIRES: as `batch_get`, and complete payloads.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes], *, deadline: float) -> int:
        """Remove pages; how many were there. Missing ones are no error."""

    @abstractmethod
    def usage(self) -> Usage:
        """What is stored now, by all processes that share the store."""

    @abstractmethod
    def statistics(self) -> BackendStatistics:
        """Totals since this backend was opened. Cheap and non-blocking."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the calls under way, then release files, sockets and threads. May be called twice."""
