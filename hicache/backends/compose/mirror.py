"""Mirror: every page on every part, so that one of them may fail, and reads from the part that is fastest now.

A store goes to all parts at once. A read goes to one, and page by page to the others for what that one lacks; a page
that was damaged or missing on a part and whole on another is copied back in the background (see `copier`). Which part
is read first follows the time it took lately; now and then another one is read first, to notice when it has become
the fastest.

A part writes what the codec makes of a page, and sealing changes the page's header unless it encrypts. So the pages
are sealed before the parts see them: each then finds the header it wants and changes nothing under the others.

Locking design: `_pace` guards itself; otherwise as `composed`. During a store the threads of a SupervisedPool and the
caller read the same pages, which nobody writes, and each fills in the answers of its own part.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import InvalidInput
from ...frame import FrameCodec, PageBuffer, TagKind
from ...supervised import SupervisedPool
from ..base import GetOutcome, SetOutcome, StorageBackend
from ..calls import parents_of
from .composed import INTERNAL, CopyingBackend, Part
from .merge import merge_sets, merged_get

# Every so many reads a part other than the fastest is read first. Rare enough to cost little where it stays slower.
EXPLORE_EVERY = 32
# Weight of the newest measurement: the last five or so reads decide.
_NEWEST = 0.2


class MirrorBackend(CopyingBackend):
    """Several backends with the same pages. See the module's docstring, ComposedBackend and CopyingBackend.

    A page is stored once `write_quorum` parts have it; one that fewer have is reported as ERROR or REJECTED and may be
    found nevertheless. `clock` is in seconds and for tests. Thread-safe; owns `parts`, of which there are at least two.
    Raises InvalidInput for less, and for a quorum that cannot be reached.
    """

    def __init__(
        self,
        codec: FrameCodec,
        parts: Sequence[Part],
        *,
        write_quorum: int,
        copy_bytes_max: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if len(parts) < 2:
            raise InvalidInput(f"mirror: two or more parts are needed, got {len(parts)}")
        if type(write_quorum) is not int or not 1 <= write_quorum <= len(parts):
            raise InvalidInput(f"mirror: write_quorum must be 1 .. {len(parts)}, the parts; got {write_quorum!r}")
        super().__init__(codec, parts, copy_bytes_max)
        self.write_quorum = write_quorum
        self._clock = clock
        self._pace = Pace(len(parts))
        # Two stores at once find a thread each for every part but the one that they serve themselves.
        self._pool = SupervisedPool[Any](
            "mirror", 2 * (len(parts) - 1), on_error=lambda: self._calls.count(errors=[INTERNAL])
        )

    def _in_order(self) -> Sequence[StorageBackend]:
        """See CopyingBackend."""
        return [self._parts[part] for part in self._pace.order()]

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffer], deadline: float) -> list[GetOutcome]:
        """See Envelope. CORRUPT if no part has the page whole, ERROR if one that failed may have it."""
        epochs = [copier.epoch for copier in self._copiers]
        order = self._pace.order(explore=True)
        timed = [_Timed(self._parts[part], part, self._pace, self._clock) for part in order]
        read = merged_get(timed, keys, pages, deadline)
        for number, part in enumerate(order):
            self._copy_read(part, read.found_below(number), keys, pages, epochs[part])
        return read.outcomes

    def put(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See Envelope. All parts at once; returns when the slowest has ended or reached the deadline. PRESENT if one
        of them had the page before."""
        if self.codec.tag_kind is not TagKind.AES_256_GCM:
            for key, page, before in zip(keys, pages, parents_of(keys, parent), strict=True):
                self.codec.seal_buffers(key, page, parent=before)
        answers = [[SetOutcome.ERROR] * len(keys) for _ in self._parts]

        def store(part: int) -> None:
            answers[part] = self._parts[part].batch_set(keys, pages, parent=parent, deadline=deadline)

        self._pool.run(len(self._parts), store)
        return [merge_sets(page, self.write_quorum) for page in zip(*answers, strict=True)]

    def _before_parts_close(self) -> None:
        super()._before_parts_close()
        self._pool.close()


class Pace:
    """How fast each part has answered lately, in seconds per page. One that was not measured yet counts as fastest.

    Locking design: one lock for all fields, held for a few instructions.
    """

    def __init__(self, parts: int) -> None:
        self._lock = threading.Lock()
        self._page_s = [0.0] * parts
        self._failing = [False] * parts
        self._reads = 0

    def order(self, *, explore: bool = False) -> list[int]:
        """The parts to ask, fastest first, those that failed last time at the end. With `explore` every so many calls
        have another one in front, each in its turn."""
        with self._lock:
            found = sorted(range(len(self._page_s)), key=lambda part: (self._failing[part], self._page_s[part]))
            if explore:
                self._reads += 1
                turn, rest = divmod(self._reads, EXPLORE_EVERY)
                if not rest:
                    found.insert(0, found.pop(1 + turn % (len(found) - 1)))
        return found

    def note(self, part: int, seconds: float, outcomes: Sequence[GetOutcome]) -> None:
        """Take a read into account. Only pages that were hit tell how fast a part is."""
        hits = outcomes.count(GetOutcome.HIT)
        with self._lock:
            self._failing[part] = GetOutcome.ERROR in outcomes
            if hits:
                page_s, before = seconds / hits, self._page_s[part]
                self._page_s[part] = before + _NEWEST * (page_s - before) if before else page_s


class _Timed:
    """One part for one read, whose time and success are noted."""

    def __init__(self, backend: StorageBackend, part: int, pace: Pace, clock: Callable[[], float]) -> None:
        self._backend = backend
        self._part = part
        self._pace = pace
        self._clock = clock

    def batch_get(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, deadline: float
    ) -> list[GetOutcome]:
        """As the backend's."""
        began_s = self._clock()
        outcomes = self._backend.batch_get(keys, pages, deadline=deadline)
        self._pace.note(self._part, self._clock() - began_s, outcomes)
        return outcomes
