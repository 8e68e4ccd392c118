"""What the parts of a composition say, made into one answer.

A page of a read is served by the first part, in a given order, that has it whole; each part is asked for what those
before it did not serve. A page of a store is stored if it can be read back from any part.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...frame import PageBuffer
from ..base import GetOutcome, SetOutcome, StorageBackend

# Calls of one merged lookup. Pages of a prefix are mostly on one part, or its head on one and its tail on another: 3
# calls of two parts. Pages that alternate more often are reported as far as these calls have come.
LOOKUPS_MAX = 16

# What is said of a page that no part served. A part that failed may have it, so that comes first.
_UNSERVED = (GetOutcome.ERROR, GetOutcome.CORRUPT, GetOutcome.MISS)
# What is said of a page that no part stored.
_UNSTORED = (SetOutcome.ERROR, SetOutcome.REJECTED)


def merged_exists(parts: Sequence[StorageBackend], keys: Sequence[bytes], deadline: float) -> int:
    """Length of the longest prefix of which each page is on some part. Blocks; asks in turns from where the last part
    has stopped, until all of them in a row have nothing more."""
    found = without = calls = 0
    while found < len(keys) and without < len(parts) and calls < LOOKUPS_MAX:
        more = parts[calls % len(parts)].batch_exists(keys[found:] if found else keys, deadline=deadline)
        calls += 1
        found += more
        # A part that has found something has said as well that it does not have the next page.
        without = 1 if more else without + 1
    return found


@dataclass(slots=True)
class MergedRead:
    """A read through parts. `outcomes` are final; `served` gives the part of each hit, by its number in the order that
    was read; `lacking` gives, for each part that was asked, the positions it had missing or damaged."""

    outcomes: list[GetOutcome]
    served: list[int]
    lacking: list[list[int]] = field(default_factory=list)

    def found_below(self, part: int) -> list[int]:
        """Positions that part number `part` lacks and one after it has served."""
        if part >= len(self.lacking):
            return []
        return [position for position in self.lacking[part] if self.outcomes[position] is GetOutcome.HIT]


class Reader(Protocol):
    """What pages are read from: a backend, or something in front of one."""

    def batch_get(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], *, deadline: float
    ) -> list[GetOutcome]:
        """See StorageBackend."""


def merged_get(
    parts: Sequence[Reader], keys: Sequence[bytes], pages: Sequence[PageBuffer], deadline: float
) -> MergedRead:
    """Read each page from the first of `parts` that has it whole. Blocks as they do, one after the other."""
    merged = MergedRead([GetOutcome.MISS] * len(keys), [0] * len(keys))
    pending: Sequence[int] = range(len(keys))
    for number, part in enumerate(parts):
        if number:
            keys_left, pages_left = [keys[p] for p in pending], [pages[p] for p in pending]
            answers = part.batch_get(keys_left, pages_left, deadline=deadline)
        else:
            answers = merged.outcomes = part.batch_get(keys, pages, deadline=deadline)
            if all(answer is GetOutcome.HIT for answer in answers):
                return merged
            merged.outcomes = list(answers)
        lacking = []
        for position, answer in zip(pending, answers, strict=True):
            if answer is GetOutcome.HIT:
                merged.served[position] = number
            elif answer is not GetOutcome.ERROR:
                lacking.append(position)
            merged.outcomes[position] = _either(merged.outcomes[position], answer)
        merged.lacking.append(lacking)
        pending = [position for position in pending if merged.outcomes[position] is not GetOutcome.HIT]
        if not pending:
            break
    return merged


def _either(one: GetOutcome, other: GetOutcome) -> GetOutcome:
    if GetOutcome.HIT in (one, other):
        return GetOutcome.HIT
    return next(outcome for outcome in _UNSERVED if outcome in (one, other))


def merge_sets(answers: Sequence[SetOutcome], quorum: int = 1) -> SetOutcome:
    """One outcome of a page from those of the parts it was given to. PRESENT if one of them had it already."""
    if sum(answer.is_stored for answer in answers) >= quorum:
        return SetOutcome.PRESENT if SetOutcome.PRESENT in answers else SetOutcome.STORED
    return next(outcome for outcome in _UNSTORED if outcome in answers)


def merged_has(parts: Sequence[StorageBackend], keys: Sequence[bytes], deadline: float) -> list[bool]:
    """Whether each page is on some part. Blocks; each part is asked for what those before it do not have."""
    found = [False] * len(keys)
    pending: Sequence[int] = range(len(keys))
    for part in parts:
        if pending:
            answers = part.batch_has([keys[p] for p in pending], deadline=deadline)
            for position, there in zip(pending, answers, strict=True):
                found[position] = there
            pending = [position for position in pending if not found[position]]
    return found


def chain_runs(positions: Sequence[int]) -> Iterator[slice]:
    """Cut ascending positions of a batch into runs without a gap: pages of one call follow each other in their chain.
    """
    for _, run in itertools.groupby(enumerate(positions), key=lambda pair: pair[1] - pair[0]):
        found = [position for _, position in run]
        yield slice(found[0], found[-1] + 1)
