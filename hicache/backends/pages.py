"""The pages of one call, between a `Store` and the driver that moves their bytes. Only this module verifies pages.

A driver gets the buffers of a page (`PageReads.buffers`, `PageWrites.sealed`), moves the bytes, and reports the outcome
of each page by its position: `accept`, `miss`, `damage` or `fail` of a read, `stored`, `present`, `reject` or `fail` of
a write. A driver that cannot scatter and gather uses `frame` or `sealed_frame` instead: one buffer, which is the page's
own frame, or a scratch frame for a page in parts.

Locking design: an object of these classes belongs to one call. Its driver may use it in several threads at once, each
position in one of them: each writes its own slots of lists and appends to lists, both atomic in CPython.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from ..clock import SYSTEM_CLOCK, Clock
from ..frame import (
    HEADER_BYTES,
    Damage,
    FrameCodec,
    PageBuffer,
    PageView,
    TagStream,
    fill,
    first_bytes,
    header_of,
    join,
    stored_time,
    unseal,
)
from .base import GetOutcome, SetOutcome
from .calls import parents_of
from .errors import ErrorKind

# The times of storing of pages in a store without a maximum age.
FOREVER = (0.0, math.inf)
# The time for removing damaged and incomplete pages, even after the deadline.
SETTLE_S = 0.25

Found = TypeVar("Found")
Outcome = TypeVar("Outcome", GetOutcome, SetOutcome)


@dataclass(frozen=True, slots=True)
class Damaged(Generic[Found]):
    """A stored object to be removed: it failed verification as the page `key`, for this `reason`, or has expired.
    `found` is the store's value that distinguishes it from every other object."""

    key: bytes
    found: Found
    reason: str


class _Pages(Generic[Outcome]):
    """The common base of reads and writes: an outcome per key, or None until it is known. `deadline` is a time of
    `clock`. Pages that were stored outside the Unix times `valid_s` are expired."""

    valid_s = FOREVER
    _error: Outcome

    def __init__(
        self, codec: FrameCodec, keys: Sequence[bytes], pages: Sequence[PageBuffer], deadline: float, clock: Clock
    ) -> None:
        self.codec = codec
        self.keys = keys
        self.deadline = deadline
        self._clock = clock
        self.errors: list[str] = []
        self.pages = pages
        self._outcomes: list[Outcome | None] = [None] * len(keys)

    def __len__(self) -> int:
        return len(self.keys)

    def has_expired(self, page: PageBuffer) -> bool:
        """Return True if a sealed page is too old to be served."""
        return not self.valid_s[0] <= stored_time(header_of(page)) <= self.valid_s[1]

    @property
    def is_late(self) -> bool:
        """True after the deadline: further pages are not started."""
        return self._clock() >= self.deadline

    def outcome(self, position: int) -> Outcome | None:
        """Return the reported outcome of a page, or None."""
        return self._outcomes[position]

    def fail(self, position: int, kind: str) -> None:
        """Report that a page could not be read or written; no part of it is visible then. Reverts `stored`."""
        self._outcomes[position] = self._error
        self.errors.append(kind)

    def finish(self, kind: str = "") -> list[Outcome]:
        """Fail the pages without an outcome, for `kind` or the deadline, and return all outcomes."""
        unsettled = self._outcomes.count(None)
        if unsettled:
            why = kind or (ErrorKind.DEADLINE if self.is_late else ErrorKind.INTERNAL)
            self.errors += [why] * unsettled
            self._outcomes = [self._error if outcome is None else outcome for outcome in self._outcomes]
        elif kind and not self.errors:
            self.errors.append(kind)
        return cast(list[Outcome], self._outcomes)


class PageReads(_Pages[GetOutcome], Generic[Found]):
    """The pages of a `batch_get`. `keys` may repeat. See the module's docstring.

    Iterating gives the positions, head first, until the deadline: then the remaining pages fail. Invariant: a page is a
    HIT only after its codec has verified the bytes in its buffers. An expired page is a MISS.

    **A removal needs proof.** `found` tells the object that was read from every other one, so that `remove` spares what
    was not read. It is None if the answer may not be a stored object: a gateway, a proxy or a mount may have answered
    instead of the store. Without it a damaged page fails and stays.
    """

    _error = GetOutcome.ERROR

    def __init__(
        self, codec: FrameCodec, keys: Sequence[bytes], pages: Sequence[PageBuffer], deadline: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(codec, keys, pages, deadline, clock)
        self.damaged: list[Damaged[Found]] = []
        self.expired: list[Damaged[Found]] = []
        self._frames: dict[int, memoryview] = {}

    def __iter__(self) -> Iterator[int]:
        deadline, clock = self.deadline, self._clock
        for position in range(len(self.keys)):
            if clock() >= deadline:
                return
            yield position

    def fits(self, stored_bytes: int) -> bool:
        """Return True if an object of that size may be a page. Other objects are damaged and not read."""
        return self.codec.fits(stored_bytes)

    def buffers(self, position: int, stored_bytes: int | None = None) -> list[memoryview]:
        """Return the buffers for the first `stored_bytes` bytes of a stored page, in order; for None, for all of a
        frame."""
        buffers = self.codec.buffers(self.pages[position])
        return buffers if stored_bytes is None else first_bytes(buffers, stored_bytes)

    def frame(self, position: int) -> memoryview:
        """Return one buffer of `codec.frame_bytes` for the stored bytes of a page."""
        page = self.pages[position]
        if not isinstance(page, PageView):
            return page
        return self._frames.setdefault(position, self.codec.scratch_frame())

    def stream(self) -> TagStream | None:
        """Return a stream that hashes the bytes of one page in order as they arrive, for `accept`; None if not
        useful."""
        return self.codec.stream()

    def take(self, position: int, stored: bytes | memoryview, found: Found | None) -> bool:
        """Copy the stored bytes of a page to its buffers and `accept` them, for a store that has them in one piece."""
        if self.codec.fits(len(stored)):
            fill(self.codec.buffers(self.pages[position]), stored)
        return self.accept(position, len(stored), found)

    def accept(self, position: int, stored_bytes: int, found: Found | None, arrived: TagStream | None = None) -> bool:
        """Verify the page whose `stored_bytes` bytes are in its buffers (or were not read because they do not fit).
        Return True for a hit. A damaged or expired page is removed after the store has read all pages."""
        key, page, frame = self.keys[position], self.pages[position], self._frames.pop(position, None)
        damage = self.codec.accept(key, page if frame is None else frame, stored_bytes, arrived)
        if damage is None:
            if frame is not None and isinstance(page, PageView):
                page.scatter(frame)
            if self.valid_s is not FOREVER:
                return self._is_served(position, found)
            self._outcomes[position] = GetOutcome.HIT
            return True
        if damage.is_unsupported:
            self._outcomes[position] = GetOutcome.MISS  # not damaged: the page stays for other readers
            self.errors.append(damage.value)
        else:
            self.damage(position, damage, found)
        return False

    def _is_served(self, position: int, found: Found | None) -> bool:
        """Report a verified page. Return False if it has expired."""
        page = self.pages[position]
        if not self.has_expired(page):
            self._outcomes[position] = GetOutcome.HIT
            return True
        unseal(header_of(page))  # the buffer does not count as this page later
        self.miss(position)
        if found is not None:
            self.expired.append(Damaged(self.keys[position], found, "expired"))
        return False

    def accept_proven(self, position: int) -> bool:
        """Report a page that the native helper has verified in its buffers. Return False for an expired one, which is
        not settled."""
        if self.valid_s is not FOREVER and self.has_expired(self.pages[position]):
            return False
        self._outcomes[position] = GetOutcome.HIT
        return True

    def accept_verified(self, position: int, found: Found) -> None:
        """Report a page that a trusted server has verified and put into its buffers as plain bytes: only its header is
        compared. Another header is an answer to another request, and proves nothing about the page."""
        if self.codec.is_sealed(self.keys[position], self.pages[position]):
            self._is_served(position, found)
        else:
            self.damage(position, Damage.HEADER, None)

    def damage(self, position: int, reason: str, found: Found | None) -> None:
        """Report that the answer is not the page."""
        if found is None:
            self.fail(position, ErrorKind.PROTOCOL)
            return
        self._outcomes[position] = GetOutcome.CORRUPT
        self.damaged.append(Damaged(self.keys[position], found, str(reason)))

    def miss(self, position: int) -> None:
        """Report that a page is not stored."""
        self._outcomes[position] = GetOutcome.MISS


class PageWrites(_Pages[SetOutcome]):
    """The pages of a `batch_set`, each key once: `keys` and `parents`, head first. See the module's docstring.

    Iterating gives the positions until the deadline, or until a page was rejected: readers cannot reach the pages after
    a missing page, so the remaining ones count as rejected too.
    """

    _error = SetOutcome.ERROR
    seals = True

    def __init__(
        self, codec: FrameCodec, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None,
        deadline: float, clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        first_of: dict[bytes, int] = {}
        for place, key in enumerate(keys):
            first_of.setdefault(key, place)
        parents = parents_of(keys, parent)
        super().__init__(codec, list(first_of), [pages[place] for place in first_of.values()], deadline, clock)
        self.parents = [parents[place] for place in first_of.values()]
        self.used_s: float | None = None  # the Unix time of the last use of pages from another store
        self._all_keys = keys
        self.rejected_from = len(self.keys)  # the first rejected position

    def __iter__(self) -> Iterator[int]:
        for position in range(len(self.keys)):
            if self.is_late or self.is_full:
                return
            yield position

    @property
    def breaks(self) -> list[int]:
        """The positions of pages whose parent is not the page before them."""
        return [at for at in range(1, len(self.keys)) if self.parents[at] != self.keys[at - 1]]

    @property
    def is_full(self) -> bool:
        """True after a page was rejected: further pages are not started."""
        return self.rejected_from < len(self.keys)

    def is_copy(self, position: int) -> bool:
        """Return True for the copy of a stored page, see PageView."""
        page = self.pages[position]
        return isinstance(page, PageView) and page.is_copy

    def sealed(self, position: int) -> list[memoryview]:
        """Return the encoded page as the buffers to write, in order; together a multiple of 4096 bytes. They stay valid
        while they are referenced. An expired page, such as an old one in host memory, is stored as a new one, unless it
        `is_copy`."""
        key, page = self.keys[position], self.pages[position]
        if not self.is_copy(position) and self.has_expired(page) and self.codec.is_sealed(key, page):
            # Not unsealed: other threads may read the page.
            payload = page.parts if isinstance(page, PageView) else [page[HEADER_BYTES:][: self.codec.payload_bytes]]
            page = PageView(memoryview(bytearray(HEADER_BYTES)), payload)
        return self.codec.seal_buffers(key, page, parent=self.parents[position])

    def sealed_natively(
        self, positions: Sequence[int]
    ) -> tuple[list[list[memoryview]], list[bytes], list[bytes | None], Any]:
        """Return the buffers of the pages to write, and the keys, parents and `fields` with which the native helper
        must seal them first; the last is None if they are sealed."""
        codec, keys = self.codec, [self.keys[p] for p in positions]
        fields = codec.fields() if self.seals and not codec.transforms and self.valid_s is FOREVER else None
        if fields is None:
            return [self.sealed(p) for p in positions], keys, [None] * len(keys), None
        parents = [codec.parent_of(self.keys[p], self.pages[p], self.parents[p]) for p in positions]
        return [codec.unsealed_buffers(self.pages[p]) for p in positions], keys, parents, fields

    def sealed_frame(self, position: int) -> memoryview:
        """Return the encoded page as one buffer."""
        buffers = self.sealed(position)
        if len(buffers) == 1:
            return buffers[0]
        frame = self.codec.scratch_frame()
        join(buffers, frame)
        return frame

    def stored(self, position: int) -> None:
        """Report that a page was written and can be read back."""
        self._outcomes[position] = SetOutcome.STORED

    def present(self, position: int) -> None:
        """Report that a page was already stored."""
        self._outcomes[position] = SetOutcome.PRESENT

    def reject(self, position: int, kind: str = "") -> None:
        """Report that a page does not fit; a `kind` is counted as an error. Reverts `stored`."""
        self._outcomes[position] = SetOutcome.REJECTED
        self.rejected_from = min(self.rejected_from, position)
        if kind:
            self.errors.append(kind)

    def finish(self, kind: str = "") -> list[SetOutcome]:
        """Settle the remaining pages and return the outcomes of all keys of the call, including repeated ones."""
        for position in range(self.rejected_from, len(self.keys)):
            self._outcomes[position] = self._outcomes[position] or SetOutcome.REJECTED
        known = dict(zip(self.keys, super().finish(kind), strict=True))
        outcomes: list[SetOutcome] = []
        for key in self._all_keys:
            outcomes.append(known[key])
            if known[key].is_stored:
                known[key] = SetOutcome.PRESENT  # for the next occurrence of the key
        return outcomes
