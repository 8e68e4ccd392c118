"""What becomes of the pages of one batch: chunk by chunk to the network and back, codes into outcomes.

Locking design: a batch belongs to the thread of its verb. `Parts` are shared, and nothing here changes them but the
road, which is one reference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...frame import Damage, FrameCodec
from ...keys import PAGE_KEY_BYTES
from ...supervised import NoThread, SupervisedPool
from ...units import MIB
from ..base import SetOutcome
from ..errors import ErrorKind
from ..pages import PageReads, PageWrites
from . import codes
from .client import GRACE_S, Client
from .lanes import Lane, Roads

# One library call moves about so much, some 10 to 100 ms: far more work than the call itself is, and soon enough over
# for the deadline to be looked at.
_CHUNK_BYTES = 128 * MIB
# A full store evicts in the background, and has room after some 10 ms if it can evict anything.
FULL_WAIT_S = 0.02
FULL_TRIES = 25


class Names:
    """The keys of one namespace's pages in the store: `prefix`, the namespace, "/", the page key, in hexadecimal."""

    def __init__(self, prefix: str, namespace: bytes) -> None:
        self._start = f"{prefix}{namespace.hex()}/"

    def of(self, keys: Sequence[bytes]) -> list[str]:
        """The names of `keys`."""
        return [self._start + key.hex() for key in keys]

    def key_of(self, name: str) -> bytes | None:
        """The key of the page of that name, None if it is not a page of this namespace."""
        digits = name[len(self._start) :]
        is_page = name.startswith(self._start) and len(digits) == 2 * PAGE_KEY_BYTES
        return bytes.fromhex(digits) if is_page and not digits.strip("0123456789abcdef") else None


@dataclass(frozen=True, slots=True)
class Parts:
    """What batches work with."""

    codec: FrameCodec
    names: Names
    client: Client
    roads: Roads
    pool: SupervisedPool[Any]

    @property
    def chunk_pages(self) -> int:
        """Pages of one library call."""
        return max(1, _CHUNK_BYTES // self.codec.frame_bytes)

    def ask(self, call: Callable[[], list[int]], deadline: float) -> list[int] | str:
        """What a library call that touches no frame says, or the class of error if it says nothing in time."""
        if time.monotonic() >= deadline:
            return ErrorKind.DEADLINE
        try:
            result = self.pool.call(call, deadline + GRACE_S)
        except NoThread:
            return ErrorKind.NO_THREAD
        if result is None or any(map(codes.is_slow, result)):
            self.roads.slow = True
        return ErrorKind.TIMEOUT if result is None else result

    def moved(self, result: list[int] | None) -> list[int] | str:
        """`result` of a call that moves pages, or the class of error if it has none. Frames are copied from a slow
        failure until pages have been moved again: that the master answers says nothing of the owners of pages."""
        if result is None or any(map(codes.is_slow, result)):
            self.roads.slow = True
        elif any(code >= 0 for code in result):
            self.roads.slow = False
        return ErrorKind.TIMEOUT if result is None else result


class Reads:
    """One `batch_get`."""

    def __init__(self, parts: Parts, pages: PageReads[None]) -> None:
        self._parts = parts
        self._pages = pages

    def run(self) -> None:
        """Read all pages, as far as the deadline allows."""
        pages, start = self._pages, 0
        while start < len(pages) and not pages.is_late:
            end = min(start + self._parts.chunk_pages, len(pages))
            buffers = [pages.buffers(position) for position in range(start, end)]
            with self._parts.roads.lane(buffers, pages.deadline) as lane:
                if lane is None:
                    for position in range(start, len(pages)):
                        pages.fail(position, ErrorKind.NO_BUFFER)
                    return
                self._read(range(start, start + len(lane)), lane)
                start += len(lane)

    def _read(self, positions: range, lane: Lane) -> None:
        pages = self._pages
        names = self._parts.names.of([pages.keys[position] for position in positions])
        found = self._parts.moved(
            lane.run(lambda: self._parts.client.get(names, lane.addresses, lane.sizes), pages.deadline)
        )
        if isinstance(found, str):
            for position in positions:
                pages.fail(position, found)
            return
        for index, (position, code) in enumerate(zip(positions, found, strict=True)):
            if code >= 0:
                if pages.fits(code):
                    lane.fetch(index, code)
                pages.accept(position, code, None)
            elif code in codes.MISSES:
                pages.miss(position)
            elif code == codes.CHECKSUM:
                pages.damage(position, "checksum", None)
            elif code == codes.BAD_PARAMETER and self._is_too_long(names[index]):
                pages.damage(position, Damage.SIZE, None)
            else:
                pages.fail(position, codes.kind_of(code))

    def _is_too_long(self, name: str) -> bool:
        """Whether the library has refused a page because it is longer than a frame."""
        found = self._parts.ask(lambda: self._parts.client.sizes([name]), self._pages.deadline)
        return not isinstance(found, str) and found[0] > self._parts.codec.frame_bytes


class Writes:
    """One `batch_set`. Pages are stored head first; behind one that was rejected nothing is left that was not there
    before."""

    def __init__(self, parts: Parts, pages: PageWrites) -> None:
        self._parts = parts
        self._pages = pages
        self._was_full = False  # the store had to make room, or was asked to

    def run(self) -> None:
        """Store all pages, as far as the deadline allows."""
        count, chunk = len(self._pages), self._parts.chunk_pages
        for start in range(0, count, chunk):
            self._store(range(start, min(start + chunk, count)))
        if self._was_full:
            self._settle()

    def _names(self, positions: Sequence[int]) -> list[str]:
        return self._parts.names.of([self._pages.keys[position] for position in positions])

    def _fail(self, positions: Sequence[int], reason: str) -> None:
        for position in positions:
            self._pages.fail(position, reason)

    def _exist(self, positions: Sequence[int]) -> list[int] | str:
        names = self._names(positions)
        return self._parts.ask(lambda: self._parts.client.exist(names), self._pages.deadline)

    def _store(self, positions: range) -> None:
        """Store the pages at `positions` that are not there."""
        found = self._exist(positions)
        if isinstance(found, str):
            self._fail(positions, found)
            return
        missing: list[int] = []
        for position, code in zip(positions, found, strict=True):
            if code == 1:
                self._pages.present(position)
            elif code < 0:
                self._pages.fail(position, codes.kind_of(code))
            else:
                missing.append(position)
        while missing and not self._pages.is_full and not self._pages.is_late:
            missing = missing[self._send(missing) :]
            if missing:
                self._hold_chain()

    def _send(self, positions: list[int]) -> int:
        """Store the first pages at `positions`, as many as there is memory for on the way; how many are done."""
        sealed = [self._pages.sealed(position) for position in positions]
        with self._parts.roads.lane(sealed, self._pages.deadline) as lane:
            if lane is None:
                self._fail(positions, ErrorKind.NO_BUFFER)
                return len(positions)
            lane.load()
            self._put(positions[: len(lane)], lane)
            return len(lane)

    def _put(self, positions: list[int], lane: Lane) -> None:
        """Store the pages on the lane. A full store is asked again until it has made room, or has none to make."""
        names, deadline = self._names(positions), self._pages.deadline
        left = list(range(len(positions)))
        for _ in range(FULL_TRIES):
            found = self._parts.moved(lane.run(self._call(names, lane, left), deadline))
            if isinstance(found, str):
                self._fail([positions[index] for index in left], found)
                return
            for index, code in zip(left, found, strict=True):
                self._note(positions[index], code)
            left = [index for index, code in zip(left, found, strict=True) if code == codes.NO_ROOM]
            if not left:
                return
            self._was_full = True
            if time.monotonic() + FULL_WAIT_S >= deadline:
                break
            self._hold_chain()
            time.sleep(FULL_WAIT_S)
        for index in left:
            self._pages.reject(positions[index])

    def _call(self, names: list[str], lane: Lane, indices: list[int]) -> Callable[[], list[int]]:
        some = [names[index] for index in indices]
        addresses = [lane.addresses[index] for index in indices]
        sizes = [lane.sizes[index] for index in indices]
        return lambda: self._parts.client.put(some, addresses, sizes)

    def _note(self, position: int, code: int) -> None:
        if code == codes.OK:
            self._pages.stored(position)
        elif code == codes.PRESENT:
            self._pages.present(position)
        elif code != codes.NO_ROOM:
            self._pages.fail(position, codes.kind_of(code))

    def _stored(self) -> list[int]:
        """The positions of the pages that can be read, as far as is known."""
        outcomes = enumerate(map(self._pages.outcome, range(len(self._pages))))
        return [position for position, outcome in outcomes if outcome is not None and outcome.is_stored]

    def _hold_chain(self) -> None:
        """Grant leases to the chain's pages so far, so that it is not they that are evicted for the pages behind."""
        names = self._names(self._stored())
        if self._pages.parents[0] is not None:
            names += self._parts.names.of([self._pages.parents[0]])
        if names:  # without an answer there is no lease, and `_settle` finds out what that did
            self._parts.ask(lambda: self._parts.client.exist(names), self._pages.deadline)

    def _settle(self) -> None:
        """Have nothing of ours behind the first hole: a page that was rejected, or evicted for those behind it."""
        pages, stored = self._pages, self._stored()
        found = self._exist(stored)
        if isinstance(found, str):
            pages.errors.append(found)
            return
        for position, code in zip(stored, found, strict=True):
            if code == 0:
                pages.reject(position)
        rejected = [p for p in range(len(pages)) if pages.outcome(p) is SetOutcome.REJECTED]
        hole = min(rejected, default=len(pages))
        behind = [p for p in range(hole, len(pages)) if pages.outcome(p) is SetOutcome.STORED]
        if behind:
            self._withdraw(behind)

    def _withdraw(self, positions: list[int]) -> None:
        """Remove pages that this batch has stored, though a question about them has granted leases."""
        names = self._names(positions)
        found = self._parts.ask(lambda: self._parts.client.remove(names, force=True), self._pages.deadline)
        if isinstance(found, str):
            self._pages.errors.append(found)
            return
        for position, code in zip(positions, found, strict=True):
            if code == codes.OK or code in codes.MISSES:
                self._pages.reject(position)
