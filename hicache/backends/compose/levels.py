"""Levels: a fast store in front of a larger one, and so on downwards.

A page moves between levels in three ways:

    fall      a page that a level rejects or fails to store is written to the next level, within the call
    cascade   a stored page is copied to the levels below
    promotion a page read from a lower level is copied to the levels above that had no sound copy

Cascades and promotions are background copies (see `copier`), limited in bytes and dropped beyond the limit. A dropped
cascade may cost a later hit; a dropped promotion costs another slow read. A cascade reads its pages back from the level
that stored them, so a store does not wait for lower levels. A page that its level evicts before that is on no level:
the listener of evictions is told, so that a later use stores the page again. A failing level is skipped: the other
levels are read and written. The next call tries it again; while it is down, its guard answers at once. A page may be on
several levels.

Locking design: the copiers lock themselves; everything else is set by the constructor.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

from ...clock import SYSTEM_CLOCK, Clock
from ...errors import InvalidInput
from ...frame import FrameCodec, FrameHeader, PageBuffer, header_of
from ...units import MIB
from ..base import EvictionListener, GetOutcome, SetOutcome, Usage
from ..calls import Call, parent_outside, parents_of, runs
from ..chains import parent_in
from ..storage import Storage
from .composed import Composed, Part
from .copier import Copier, CopyStatistics

# `close` writes waiting copies for at most this long. An engine has 5 s for its whole shutdown, and a call of a hanging
# level may take 3 s.
CLOSE_COPIES_S = 1.5
# The limit of lookups for a prefix. Usually one level has the whole prefix, or one its head and another its tail: 3
# lookups with two levels. If pages alternate more often between levels, the answer is the pages found so far.
LOOKUPS_MAX = 16

# Two levels' outcomes of one page are combined into the one that is earlier in this order. ERROR precedes CORRUPT and
# MISS because a failed level may have the page.
_READ_ORDER = (GetOutcome.HIT, GetOutcome.ERROR, GetOutcome.CORRUPT, GetOutcome.MISS)
_STORE_ORDER = (SetOutcome.PRESENT, SetOutcome.STORED, SetOutcome.ERROR, SetOutcome.REJECTED)


class Levels(Composed):
    """Several levels that are read in order; the first one is written. See the module's docstring, and Composed.

    `promote` turns promotion on; at most `cascade_bytes_max` bytes of copies may wait for each level, and with None
    nothing is copied. Thread-safe. Owns `levels`. Raises InvalidInput for fewer than two levels or a
    `cascade_bytes_max` below one page.
    """

    def __init__(
        self, codec: FrameCodec, levels: Sequence[Part], *, promote: bool = True,
        cascade_bytes_max: int | None = 256 * MIB, clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if len(levels) < 2:
            raise InvalidInput(f"levels: {len(levels)} levels are too few; list two or more")
        if cascade_bytes_max is not None and cascade_bytes_max < codec.frame_bytes:
            raise InvalidInput(
                f"levels: cascade_bytes_max: {cascade_bytes_max} bytes is less than one page; use at least "
                f"{codec.frame_bytes} bytes"
            )
        super().__init__(codec, levels)
        self._clock = clock
        self._promotes = promote and cascade_bytes_max is not None
        self._listener: EvictionListener = lambda keys: None
        self._copiers: list[Copier] = []
        if cascade_bytes_max is not None:
            self._copiers = [
                Copier(level.storage, level.name, cascade_bytes_max, clock, on_lost=self._lost) for level in levels
            ]

    def copies(self) -> dict[str, CopyStatistics]:
        """Return, by level name, the statistics of background copies to that level."""
        return {name: copier.statistics() for name, copier in zip(self._names, self._copiers, strict=False)}

    def _exists(self, call: Call, keys: Sequence[bytes]) -> int:
        """See Verbs. A page counts if any level has it."""

        def look_in(level: Storage) -> Callable[[int], int]:
            return lambda found: level.batch_exists(
                keys[found:] if found else keys, deadline=call.deadline, errors=call.report
            )

        return interleaved_prefix(len(keys), [look_in(level) for level in self._parts])

    def _has(self, call: Call, keys: Sequence[bytes]) -> list[bool]:
        """See Verbs. A page counts if any level has it."""
        return _any_has(self._parts, keys, call)

    def _touch(self, call: Call, keys: list[bytes]) -> list[bytes]:
        """See Verbs. Touches the pages on all levels. A page is missing only if no level may have it."""
        missing = [set(level.batch_touch(keys, deadline=call.deadline, errors=call.report)) for level in self._parts]
        return list(set.intersection(*missing))

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        """See Verbs. Reads from each level the pages that the levels above did not serve. Without a sound copy, the
        outcome is ERROR if a failed level may have the page, or else CORRUPT if a copy was damaged."""
        outcomes = self._parts[0].batch_get(keys, pages, deadline=call.deadline, errors=call.report)
        missing = [p for p, outcome in enumerate(outcomes) if outcome is not GetOutcome.HIT]
        if not missing:
            return outcomes
        lacking = [[p for p in missing if outcomes[p] is not GetOutcome.ERROR]]  # by level that was read
        for level in self._parts[1:]:
            its, its_pages = [keys[p] for p in missing], [pages[p] for p in missing]
            answers = level.batch_get(its, its_pages, deadline=call.deadline, errors=call.report)
            lacking.append([])
            for position, answer in zip(missing, answers, strict=True):
                if answer in (GetOutcome.MISS, GetOutcome.CORRUPT):
                    lacking[-1].append(position)
                outcomes[position] = min(outcomes[position], answer, key=_READ_ORDER.index)
            missing = [p for p in missing if outcomes[p] is not GetOutcome.HIT]
            if not missing:
                break
        if self._promotes:
            # The batch is in chain order, so only the parent of the first page comes from its header. A header that
            # names a page of the batch is ignored as false: any process that can write the store could have written it.
            header = FrameHeader.parse(header_of(pages[0])) if outcomes[0] is GetOutcome.HIT else None
            parents = parents_of(keys, None if header is None else parent_outside(keys, parent_in(header)))
            for copier, positions in zip(self._copiers, lacking, strict=False):
                copier.submit([p for p in positions if outcomes[p] is GetOutcome.HIT], keys, pages, parents)
        return outcomes

    def _set(
        self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None
    ) -> list[SetOutcome]:
        """See Verbs. The outcome is STORED if a level has stored the page, and none reported it PRESENT."""
        outcomes = self._parts[0].batch_set(keys, pages, parent=parent, deadline=call.deadline, errors=call.report)
        parents = parents_of(keys, parent)
        stored_on = [0] * len(keys)
        for number, level in enumerate(self._parts[1:], 1):
            for run in runs([p for p, outcome in enumerate(outcomes) if not outcome.is_stored]):
                before = parent_outside(keys[run], parents[run.start])
                answers = level.batch_set(
                    keys[run], pages[run], parent=before, deadline=call.deadline, errors=call.report
                )
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
        """See StoreGroup. The last level notifies; another level only of pages without a copy below it."""
        self._listener = listener
        *upper, last = self._parts
        last.watch_evictions(listener)
        for level in upper:
            level.watch_evictions(functools.partial(self._lost, level))

    def _lost(self, level: Storage, keys: Sequence[bytes]) -> None:
        """Notify of the pages, lost by a level, whose copies to the levels below it have not been made."""
        below = self._copiers[self._parts.index(level) + 1 :]
        lost = [key for key in keys if all(copier.lacks(key) for copier in below)]
        if lost:
            self._listener(lost)

    def _delete(self, call: Call, keys: list[bytes]) -> int:
        """See Verbs. Removes the pages from all levels; a page on several levels counts once.

        Looks the pages up first, because the levels' counts alone do not show how many different pages they include.
        """
        *others, last = self._parts
        with self._without_copies(keys, call.deadline):
            held = _any_has(others, keys, call)
            for level in others:
                level.delete(keys, deadline=call.deadline, errors=call.report)
            last.delete(list(itertools.compress(keys, held)), deadline=call.deadline, errors=call.report)
            alone = [key for key, there in zip(keys, held, strict=True) if not there]
            return sum(held) + last.delete(alone, deadline=call.deadline, errors=call.report)

    def _clear(self, call: Call) -> int:
        """See Verbs. Clears all levels; the pages of the fullest one are counted, as by `usage`."""
        with self._without_copies(None, call.deadline):
            return max([level.clear(deadline=call.deadline, errors=call.report) for level in self._parts])

    def _without_copies(self, keys: Sequence[bytes] | None, deadline: float) -> contextlib.ExitStack:
        with contextlib.ExitStack() as entered:
            for copier in self._copiers:
                entered.enter_context(copier.excluding(keys, deadline))
            return entered.pop_all()

    def _measure(self) -> Usage:
        """See Verbs. Returns the usage of the level with the most pages, a lower bound of the different pages."""
        return max((level.usage() for level in self._parts), key=lambda usage: usage.pages)

    def check(self) -> None:
        """Raise InvariantError if a copier's invariants do not hold. REQUIRES: no verb is in flight."""
        for copier in self._copiers:
            copier.check()

    def _before_parts_close(self) -> None:
        stop_at = self._clock() + CLOSE_COPIES_S
        for copier in self._copiers:
            copier.stop(stop_at)
        for copier in self._copiers:
            copier.close()


def interleaved_prefix(count: int, looks: Sequence[Callable[[int], int]]) -> int:
    """Return how many of `count` pages any level has up to the first hole. `looks[n](found)` returns how many pages
    level n has from the page `found` on.

    Looks in one level after the other, each time from the first page not found so far, until no level finds more.
    """
    found = without = calls = 0
    while found < count and without < len(looks) and calls < LOOKUPS_MAX:
        more = looks[calls % len(looks)](found)
        calls += 1
        found += more
        # A level that found pages stopped at one that it does not have.
        without = 1 if more else without + 1
    return found


def _any_has(levels: Sequence[Storage], keys: Sequence[bytes], call: Call) -> list[bool]:
    """Return for each key whether any of `levels` has it. Looks in each level only for keys that no earlier one has."""
    found = [False] * len(keys)
    for level in levels:
        missing = [position for position, there in enumerate(found) if not there]
        if missing:
            answers = level.batch_has([keys[p] for p in missing], deadline=call.deadline, errors=call.report)
            for position, there in zip(missing, answers, strict=True):
                found[position] = there
    return found


def copies_of(storage: Storage, prefix: str = "") -> Mapping[str, CopyStatistics]:
    """Return the statistics of background copies of all compositions in `storage`, by the name of the target part. A
    part inside a part is called `outer/inner`; all names begin with `prefix`. Does not block."""
    found: dict[str, CopyStatistics] = {}
    if isinstance(storage, Levels):
        found.update({prefix + name: copies for name, copies in storage.copies().items()})
    if isinstance(storage, Composed):
        for name, part in storage.named_parts:
            found.update(copies_of(part, f"{prefix}{name}/"))
    return found
