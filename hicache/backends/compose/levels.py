"""Levels: a fast store in front of a large one, and so on downwards.

Three ways of a page between levels:

    fall      a page that a level turns away or fails to store is written to the next one, within the call
    cascade   stored above -> copied below: at once (`through`), when the level above evicts it (`on_eviction`), or when
              it has been read `selective_hits` times (`selective`)
    promotion read from below -> copied to the levels above that did not have it whole

Falling is part of the call; cascades and promotions are copies in the background (see `copier`), bounded in bytes and
dropped beyond that: a dropped cascade costs a hit some day, a dropped promotion the same way once more. A level that
fails is stepped over: pages are read from and written to the others, and it is asked again with the next call, which
its guard answers at once as long as it is down. A page is on any number of levels.

Locking design: `_uses` guards itself. Otherwise as `composed`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from ...config.composed_storage import CopyOptions
from ...errors import InvalidInput
from ...frame import FrameCodec, PageBuffer
from ..base import Composite, EvictionSource, GetOutcome, SetOutcome, StorageBackend
from ..calls import parent_outside, parents_of
from .composed import CopyingBackend, Part
from .merge import chain_runs, merge_sets, merged_get

# Keys whose reads are counted for `selective`. At some 150 bytes each they take 10 MiB.
USES_KEYS_MAX = 65_536


class LevelsBackend(CopyingBackend):
    """Several backends read in order, written to the first. See the module's docstring, and ComposedBackend.

    Thread-safe. Owns `levels`, of which there are at least two. Raises InvalidInput for less, and for a cascade on
    eviction from a first level that does not tell what it evicts.
    """

    def __init__(self, codec: FrameCodec, levels: Sequence[Part], options: CopyOptions) -> None:
        if len(levels) < 2:
            raise InvalidInput(f"levels: two or more are needed, got {len(levels)}")
        super().__init__(codec, levels, options.cascade_bytes_max)
        self.options = options
        self._uses = Uses(options.selective_hits)
        if options.write == "on_eviction":
            self._listen(levels[0].name)

    def _listen(self, first_name: str) -> None:
        sources = [
            [leaf for leaf in _evicting(part) if isinstance(leaf, EvictionSource)] for part in self._parts[:-1]
        ]
        if not sources[0]:
            self._stop_copying()
            raise InvalidInput(
                f"levels: {first_name} does not tell what it evicts; choose through or selective, not on_eviction"
            )
        for level, found in enumerate(sources):
            for source in found:
                source.on_eviction(self._copiers[level + 1].take_evicted)

    def get(self, keys: Sequence[bytes], pages: Sequence[PageBuffer], deadline: float) -> list[GetOutcome]:
        """See Envelope. Each level is asked for what those above it did not serve. CORRUPT if no level has the page
        whole, ERROR if one that failed may have it."""
        epochs = [copier.epoch for copier in self._copiers]
        read = merged_get(self._parts, keys, pages, deadline)
        if self.options.promote:
            for level in range(len(self._parts)):
                self._copy_read(level, read.found_below(level), keys, pages, epochs[level])
        if self.options.write == "selective":
            hits = [p for p, outcome in enumerate(read.outcomes) if outcome is GetOutcome.HIT]
            due = self._uses.count((keys[p], p) for p in hits)
            for level in range(1, len(self._parts)):
                below = [p for p in due if read.served[p] < level]
                self._copy_read(level, below, keys, pages, epochs[level])
        return read.outcomes

    def put(
        self, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None, deadline: float
    ) -> list[SetOutcome]:
        """See Envelope. STORED if a page that the first level did not have is on any level now."""
        epochs = [copier.epoch for copier in self._copiers]
        parents = parents_of(keys, parent)
        outcomes = self._parts[0].batch_set(keys, pages, parent=parent, deadline=deadline)
        stored_on = [0] * len(keys)
        for level in range(1, len(self._parts)):
            fallen = [p for p, outcome in enumerate(outcomes) if not outcome.is_stored]
            for run in chain_runs(fallen):
                before = parent_outside(keys[run], parents[run.start])
                answers = self._parts[level].batch_set(keys[run], pages[run], parent=before, deadline=deadline)
                for position, answer in enumerate(answers, run.start):
                    outcomes[position] = merge_sets((outcomes[position], answer))
                    stored_on[position] = level
        if self.options.write == "through":
            new = [p for p, outcome in enumerate(outcomes) if outcome is SetOutcome.STORED]
            for level in range(1, len(self._parts)):
                below = [p for p in new if stored_on[p] < level]
                self._copiers[level].submit(
                    [keys[p] for p in below], [pages[p] for p in below], [parents[p] for p in below], epochs[level]
                )
        return outcomes


def _evicting(part: StorageBackend) -> Iterator[StorageBackend]:
    """The leaves of a level that are not heard yet: levels that cascade on eviction hear all of theirs but the last."""
    if isinstance(part, LevelsBackend) and part.options.write == "on_eviction":
        yield from _evicting(part.parts[-1])
    elif isinstance(part, Composite):
        for inner in part.parts:
            yield from _evicting(inner)
    else:
        yield part


class Uses:
    """How often pages were read lately; beyond `keys_max` the least recently read are forgotten.

    Locking design: one lock, held for one batch's keys.
    """

    def __init__(self, due: int, keys_max: int = USES_KEYS_MAX) -> None:
        self._due = due
        self._keys_max = keys_max
        self._lock = threading.Lock()
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def count(self, read: Iterable[tuple[bytes, int]]) -> list[int]:
        """Count a read of each key; the values that came with those which have reached the number due right now."""
        reached = []
        with self._lock:
            for key, value in read:
                uses = self._counts.get(key, 0) + 1
                self._counts[key] = uses
                self._counts.move_to_end(key)
                if uses == self._due:
                    reached.append(value)
            while len(self._counts) > self._keys_max:
                self._counts.popitem(last=False)
        return reached
