"""Levels: a fast store in front of a large one, and so on downwards.

Three ways of a page between levels:

    fall      a page that a level rejects or fails to store is written to the next one, within the call
    cascade   a page that was stored is copied to the levels below
    promotion a page that was read from below is copied to the levels above that did not have it whole

Falling is part of the call; cascades and promotions are copies in the background (see `copier`), bounded in bytes and
dropped beyond that: a dropped cascade costs a hit some day, a dropped promotion the same way once more. A cascade reads
its pages back from the level that stored them, so a store pays nothing for the levels below. A level that
fails is stepped over: pages are read from and written to the others, and it is asked again with the next call, which
its guard answers at once as long as it is down. A page is on any number of levels.

Locking design: as `envelope`; the copiers lock themselves.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Mapping, Sequence

from ...errors import InvalidInput
from ...frame import FrameCodec, FrameHeader, PageBuffer, header_of
from ...units import MIB
from ..base import Composite, EvictionListener, GetOutcome, SetOutcome, StorageBackend, Usage, watch_evictions
from ..calls import parent_outside, parents_of, runs
from ..chains import parent_in
from .composed import ComposedBackend, Part
from .copier import Copier, CopyStatistics

# Calls of one lookup. Pages of a prefix are mostly on one level, or its head on one and its tail on another: 3 calls of
# two levels. Pages that alternate more often are reported as far as these calls have come.
LOOKUPS_MAX = 16
# Closing writes the copies that wait for this long at most. An engine has 5 s for its whole shutdown, and a call of a
# level that hangs may take 3 of them.
CLOSE_COPIES_S = 1.5

# The outcomes of one page on two levels make one: the first of them that is in the list. A level that failed may have a
# page, so ERROR goes before CORRUPT and MISS.
_READ_ORDER = (GetOutcome.HIT, GetOutcome.ERROR, GetOutcome.CORRUPT, GetOutcome.MISS)
_STORE_ORDER = (SetOutcome.PRESENT, SetOutcome.STORED, SetOutcome.ERROR, SetOutcome.REJECTED)


class LevelsBackend(ComposedBackend):
    """Several backends read in order, written to the first. See the module's docstring, and ComposedBackend.

    `promote` turns promotion on, and `cascade_bytes_max` bytes of copies may wait for each level. Thread-safe. Owns
    `levels`, of which there are at least two. Raises InvalidInput for less, and for a bound below one page.
    """

    def __init__(
        self, codec: FrameCodec, levels: Sequence[Part], *, promote: bool = True, cascade_bytes_max: int = 256 * MIB
    ) -> None:
        if len(levels) < 2:
            raise InvalidInput(f"levels: two or more are needed, got {len(levels)}")
        if cascade_bytes_max < codec.frame_bytes:
            raise InvalidInput(
                f"levels: cascade_bytes_max of {cascade_bytes_max} bytes holds no page of {codec.frame_bytes} bytes; "
                "raise it"
            )
        super().__init__(codec, levels)
        self._promotes = promote
        self._copiers = [Copier(level.backend, level.name, cascade_bytes_max) for level in levels]

    def copies(self) -> dict[str, CopyStatistics]:
        """By level: the pages that were copied to it in the background, and those that were not."""
        return {name: copier.statistics() for name, copier in zip(self._names, self._copiers, strict=True)}

    def prefix(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Envelope. A page counts if any level has it. Asks the levels in turns, each from where the one before it
        has stopped, until all of them in a row have nothing more."""
        found = without = calls = 0
        while found < len(keys) and without < len(self._parts) and calls < LOOKUPS_MAX:
            level = self._parts[calls % len(self._parts)]
            more = level.batch_exists(keys[found:] if found else keys, deadline=deadline)
            calls += 1
            found += more
            # A level that has found something has said as well that it does not have the next page.
            without = 1 if more else without + 1
        return found

    def has(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See Envelope. A page counts if any level has it."""
        return _any_has(self._parts, keys, deadline)

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffer], deadline: float) -> list[GetOutcome]:
        """See Envelope. Each level is asked for the pages that those above it did not serve. CORRUPT if no level has
        the page whole, ERROR if a level that failed may have it."""
        outcomes = self._parts[0].batch_get(keys, pages, deadline=deadline)
        missing = [p for p, outcome in enumerate(outcomes) if outcome is not GetOutcome.HIT]
        if not missing:
            return outcomes
        outcomes = list(outcomes)
        lacking = [[p for p in missing if outcomes[p] is not GetOutcome.ERROR]]  # by level that was asked
        for level in self._parts[1:]:
            answers = level.batch_get([keys[p] for p in missing], [pages[p] for p in missing], deadline=deadline)
            lacking.append([])
            for position, answer in zip(missing, answers, strict=True):
                if answer in (GetOutcome.MISS, GetOutcome.CORRUPT):
                    lacking[-1].append(position)
                outcomes[position] = min(outcomes[position], answer, key=_READ_ORDER.index)
            missing = [p for p in missing if outcomes[p] is not GetOutcome.HIT]
            if not missing:
                break
        if self._promotes:
            parents = _parents_read(keys, pages, outcomes)
            for copier, positions in zip(self._copiers, lacking, strict=False):
                copier.submit([p for p in positions if outcomes[p] is GetOutcome.HIT], keys, pages, parents)
        return outcomes

    def put(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See Envelope. STORED if a page that the first level did not have is on any level now."""
        parents = parents_of(keys, parent)
        outcomes = list(self._parts[0].batch_set(keys, pages, parent=parent, deadline=deadline))
        stored_on = [0] * len(keys)
        for number, level in enumerate(self._parts[1:], 1):
            for run in runs([p for p, outcome in enumerate(outcomes) if not outcome.is_stored]):
                before = parent_outside(keys[run], parents[run.start])
                answers = level.batch_set(keys[run], pages[run], parent=before, deadline=deadline)
                for position, answer in enumerate(answers, run.start):
                    outcomes[position] = min(outcomes[position], answer, key=_STORE_ORDER.index)
                    stored_on[position] = number
        new = [p for p, outcome in enumerate(outcomes) if outcome is SetOutcome.STORED]
        for number, source in enumerate(self._parts[:-1]):
            on_source = [p for p in new if stored_on[p] == number]
            for copier in self._copiers[number + 1 :]:
                copier.submit(on_source, keys, pages, parents, source)
        return outcomes

    def watch_evictions(self, listener: EvictionListener) -> None:
        """See EvictionNotices. Only the last level tells: what leaves another one was copied to the levels below it."""
        watch_evictions(self._parts[-1], listener)

    def remove(self, keys: Sequence[bytes], deadline: float) -> int:
        """See Envelope. Removes the pages from all levels; a page on several of them counts once.

        Looks first which pages are on which level: the counts of levels alone do not tell how many different pages
        they speak of.
        """
        *others, last = self._parts
        with self._without_copies(keys, deadline):
            held = _any_has(others, keys, deadline)
            for level in others:
                level.delete(keys, deadline=deadline)
            last.delete(list(itertools.compress(keys, held)), deadline=deadline)
            alone = [key for key, there in zip(keys, held, strict=True) if not there]
            return sum(held) + last.delete(alone, deadline=deadline)

    def remove_all(self, deadline: float) -> int:
        """See Envelope. Clears all levels; the pages of the fullest one are counted, as by `usage`."""
        with self._without_copies(None, deadline):
            return max([level.clear(deadline=deadline) for level in self._parts])

    def _without_copies(self, keys: Sequence[bytes] | None, deadline: float) -> contextlib.ExitStack:
        with contextlib.ExitStack() as entered:
            for copier in self._copiers:
                entered.enter_context(copier.excluding(keys, deadline))
            return entered.pop_all()

    def measure(self) -> Usage:
        """See Envelope. That of the fullest level, so at least so many different pages: those on several levels count
        once."""
        return max((level.usage() for level in self._parts), key=lambda usage: usage.pages)

    def check(self) -> None:
        """Raise InvariantError if a copier contradicts itself. REQUIRES: no verb is in flight."""
        for copier in self._copiers:
            copier.check()

    def _before_parts_close(self) -> None:
        stop_at = time.monotonic() + CLOSE_COPIES_S
        for copier in self._copiers:
            copier.stop(stop_at)
        for copier in self._copiers:
            copier.close()


def _any_has(levels: Sequence[StorageBackend], keys: Sequence[bytes], deadline: float) -> list[bool]:
    """Ask each of `levels` for the keys that those before it do not have."""
    found = [False] * len(keys)
    for level in levels:
        missing = [position for position, there in enumerate(found) if not there]
        if missing:
            answers = level.batch_has([keys[p] for p in missing], deadline=deadline)
            for position, there in zip(missing, answers, strict=True):
                found[position] = there
    return found


def _parents_read(
    keys: Sequence[bytes], pages: Sequence[PageBuffer], outcomes: Sequence[GetOutcome]
) -> list[bytes | None]:
    """Return the page before each page of a batch that was just read. The batch is in the order of its chain; only the
    page before the first one is not in it, so the header of the first one is asked. A header that names a page of the
    batch is not believed: it is the word of any process that can write the store."""
    header = FrameHeader.parse(header_of(pages[0])) if outcomes[0] is GetOutcome.HIT else None
    return parents_of(keys, None if header is None else parent_outside(keys, parent_in(header)))


def copies_of(backend: StorageBackend, prefix: str = "") -> Mapping[str, CopyStatistics]:
    """The copies that all compositions in `backend` make in the background, by the part that they go to; a part inside
    a part is called `outer/inner`, and all names begin with `prefix`. Does not block."""
    found: dict[str, CopyStatistics] = {}
    if isinstance(backend, LevelsBackend):
        found.update({prefix + name: copies for name, copies in backend.copies().items()})
    if isinstance(backend, ComposedBackend):
        for name, part in zip(backend.names, backend.parts, strict=True):
            found.update(copies_of(part, f"{prefix}{name}/"))
    elif isinstance(backend, Composite):
        for part in backend.parts:
            found.update(copies_of(part, prefix))
    return found
