"""Moves the pages of one batch in chunks, and turns return codes into outcomes.

Locking design: a batch belongs to the thread of its verb. This module changes only `slow` of the session, which is a
single reference.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

from ...frame import Damage
from ..base import SetOutcome
from ..errors import StoreError
from ..pages import PageReads, PageWrites
from . import codes
from .buffers import BufferPath
from .session import ClientSession

# A full store evicts in the background. If it can evict anything, it has room after about 10 ms.
FULL_WAIT_S = 0.02
FULL_TRIES = 25


def read_pages(session: ClientSession, pages: PageReads[bool]) -> None:
    """Read pages until the deadline. Raises StoreError if no bounce buffer is free in time. What is found is always
    True: the library reads only where the master says that the page is, and has no value that identifies it."""
    start, chunk = 0, session.chunk_pages(pages.codec.frame_bytes)
    while start < len(pages) and not pages.is_late:
        end = min(start + chunk, len(pages))
        buffers = [pages.buffers(position) for position in range(start, end)]
        with session.paths.path(buffers, pages.deadline) as path:
            positions = range(start, start + len(path))
            try:
                _read_chunk(session, pages, positions, path)
            except StoreError as error:
                for position in positions:
                    pages.fail(position, error.kind)
            start += len(path)


def _read_chunk(session: ClientSession, pages: PageReads[bool], positions: range, path: BufferPath) -> None:
    names = session.names.of(pages.codec.namespace, [pages.keys[position] for position in positions])
    found = session.noted(path.run(lambda: session.client.get(names, path.addresses, path.sizes), pages.deadline))
    for index, (position, code) in enumerate(zip(positions, found, strict=True)):
        if code >= 0:
            if pages.fits(code):
                path.fetch(index, code)
            pages.accept(position, code, True)
        elif code in codes.MISSES:
            pages.miss(position)
        elif code == codes.CHECKSUM:
            pages.damage(position, "checksum", True)
        elif code == codes.BAD_PARAMETER and _is_too_long(session, names[index], pages):
            pages.damage(position, Damage.SIZE, True)
        else:
            pages.fail(position, codes.kind_of(code))


def _is_too_long(session: ClientSession, name: str, pages: PageReads[bool]) -> bool:
    """True if the library rejected a page because it is longer than a frame."""
    try:
        return session.ask(lambda: session.client.sizes([name]), pages.deadline)[0] > pages.codec.frame_bytes
    except StoreError:
        return False


class MooncakeWrites:
    """One `batch_set`. Stores pages head first. After a rejected page, no page that this call stored remains."""

    def __init__(self, session: ClientSession, pages: PageWrites) -> None:
        self._session = session
        self._pages = pages
        self._was_full = False  # True once the store rejected a page for lack of room

    def run(self) -> None:
        """Store pages until the deadline."""
        count, chunk = len(self._pages), self._session.chunk_pages(self._pages.codec.frame_bytes)
        for start in range(0, count, chunk):
            positions = range(start, min(start + chunk, count))
            try:
                self._store(positions)
            except StoreError as error:
                for position in positions:
                    if self._pages.outcome(position) is None:
                        self._pages.fail(position, error.kind)
        if self._was_full:
            try:
                self._settle()
            except StoreError as error:
                self._pages.errors.append(error.kind)

    def _names(self, positions: Sequence[int]) -> list[str]:
        return self._session.names.of(self._pages.codec.namespace, [self._pages.keys[at] for at in positions])

    def _exist(self, names: list[str]) -> list[int]:
        """Look the pages up; this grants leases on the stored ones."""
        return self._session.ask(lambda: self._session.client.exist(names), self._pages.deadline)

    def _store(self, positions: range) -> None:
        """Store the missing pages at `positions`. Raises StoreError."""
        missing: list[int] = []
        for position, code in zip(positions, self._exist(self._names(positions)), strict=True):
            if code == 1:
                self._pages.present(position)
            elif code < 0:
                self._pages.fail(position, codes.kind_of(code))
            else:
                missing.append(position)
        while missing and not self._pages.is_full and not self._pages.is_late:
            # The path takes the first pages, as many as there are free bounce buffers.
            sealed = [self._pages.sealed(position) for position in missing]
            with self._session.paths.path(sealed, self._pages.deadline) as path:
                path.load()
                self._put(missing[: len(path)], path)
                missing = missing[len(path) :]
            if missing:
                self._hold_chain()

    def _put(self, positions: list[int], path: BufferPath) -> None:
        """Store the pages on the path. While a full store evicts, retry, up to FULL_TRIES times; then reject them."""
        names, deadline = self._names(positions), self._pages.deadline
        left = list(range(len(positions)))
        for _ in range(FULL_TRIES):
            put = functools.partial(
                self._session.client.put, [names[index] for index in left], [path.addresses[index] for index in left],
                [path.sizes[index] for index in left],
            )
            found = self._session.noted(path.run(put, deadline))
            for index, code in zip(left, found, strict=True):
                if code == codes.OK:
                    self._pages.stored(positions[index])
                elif code == codes.PRESENT:
                    self._pages.present(positions[index])
                elif code != codes.NO_ROOM:
                    self._pages.fail(positions[index], codes.kind_of(code))
            left = [index for index, code in zip(left, found, strict=True) if code == codes.NO_ROOM]
            if not left:
                return
            self._was_full = True
            if self._session.clock() + FULL_WAIT_S >= deadline:
                break
            self._hold_chain()
            self._session.clock.sleep(FULL_WAIT_S)
        for index in left:
            self._pages.reject(positions[index])

    def _stored(self) -> list[int]:
        """Return the positions of the pages known to be stored."""
        outcomes = enumerate(map(self._pages.outcome, range(len(self._pages))))
        return [position for position, outcome in outcomes if outcome is not None and outcome.is_stored]

    def _hold_chain(self) -> None:
        """Renew the leases of the chain's pages so far, so that later pages do not evict them."""
        names = self._names(self._stored())
        if self._pages.parents[0] is not None:
            names += self._session.names.of(self._pages.codec.namespace, [self._pages.parents[0]])
        if names:
            with contextlib.suppress(StoreError):  # without leases pages may be evicted; `_settle` finds them
                self._exist(names)

    def _settle(self) -> None:
        """Remove the pages stored after the first hole: a page that was rejected, or evicted for later pages. Raises
        StoreError."""
        pages, stored = self._pages, self._stored()
        for position, code in zip(stored, self._exist(self._names(stored)), strict=True):
            if code == 0:
                pages.reject(position)
        rejected = [p for p in range(len(pages)) if pages.outcome(p) is SetOutcome.REJECTED]
        hole = min(rejected, default=len(pages))
        behind = [p for p in range(hole, len(pages)) if pages.outcome(p) is SetOutcome.STORED]
        if not behind:
            return
        names = self._names(behind)  # forced, because the lookup above has granted leases
        found = self._session.ask(lambda: self._session.client.remove(names, force=True), pages.deadline)
        for position, code in zip(behind, found, strict=True):
            if code == codes.OK or code in codes.MISSES:
                pages.reject(position)
