"""Finds the most-read chains of pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .statistics import HotPrefix

# The number of chains whose hits are counted, and of those that are shown.
_TABLE_MAX = 64
_HOT_MAX = 16
# After this many batches a hit counts half: a few minutes of a busy daemon.
EPOCH_BATCHES = 1 << 14


@dataclass(slots=True)
class Hits:
    """The hits of one page, with their weight in an epoch."""

    count: int = 0
    epoch: int = 0

    def at(self, epoch: int) -> int:
        """Return the weight of the hits in a later epoch."""
        return self.count >> (epoch - self.epoch)

    def add(self, epoch: int) -> None:
        self.count = self.at(epoch) + 1
        self.epoch = epoch


class HotPrefixes:
    """The chains with the most recent hits, a limited number. For one thread at a time.

    The hot part of a batch ends at the first page with less than half the hits of the first page, so requests that
    share a prefix and then differ count for the prefix.
    """

    def __init__(self) -> None:
        self._batches = 0
        self._table: dict[bytes, tuple[HotPrefix, Hits]] = {}

    @property
    def _epoch(self) -> int:
        return self._batches // EPOCH_BATCHES

    def note(self, label: str, keys: Sequence[bytes], hits: Sequence[Hits]) -> None:
        """Count one hit of each page of a batch, head first. `label` is its namespace's. REQUIRES: a page."""
        self._batches += 1
        epoch = self._epoch
        for one in hits:
            one.add(epoch)
        half = hits[0].count / 2
        length = next((number for number, one in enumerate(hits) if one.count < half), len(hits))
        key, end = keys[length - 1], hits[length - 1]
        if end.count < 2:
            return
        if key not in self._table and len(self._table) >= _TABLE_MAX:
            coldest = min(self._table, key=lambda known: self._table[known][1].at(epoch))
            if self._table[coldest][1].at(epoch) >= end.count:
                return
            del self._table[coldest]
        self._table[key] = HotPrefix(key.hex()[:8], label, length, end.count), replace(end)

    def hottest(self) -> tuple[HotPrefix, ...]:
        epoch = self._epoch
        found = [replace(prefix, hits=hits.at(epoch)) for prefix, hits in self._table.values() if hits.at(epoch)]
        return tuple(sorted(found, key=lambda prefix: -prefix.hits)[:_HOT_MAX])
