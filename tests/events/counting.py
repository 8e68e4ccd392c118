"""A subscriber that counts: it keeps how often each page was stored on each medium, as routers with counters do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hicache.events import Cleared, Event, Medium, Stored


class CountingSubscriber:
    """`counts` has the pages by medium and key; `wrong` the events that store a page twice or remove an absent one."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[Medium, bytes]] = Counter()
        self.wrong: list[str] = []
        self.seen: Counter[str] = Counter()

    def apply(self, events: Iterable[Event]) -> None:
        """Count the pages of `events`."""
        for event in events:
            if isinstance(event, Cleared):
                self.counts.clear()
                continue
            is_stored = isinstance(event, Stored)
            for key in event.keys:
                if self.counts[event.medium, key] == is_stored:
                    what = "stored twice" if is_stored else "removed but absent"
                    self.wrong.append(f"{what} on {event.medium.value}: {key.hex()[:8]}")
                self.counts[event.medium, key] += 1 if is_stored else -1
                self.seen[f"{'stored' if is_stored else 'removed'} {event.medium.value}"] += 1

    def pages(self, medium: Medium) -> set[bytes]:
        """Return the keys of the pages that are on `medium` by the counts."""
        return {key for (on, key), count in self.counts.items() if count and on is medium}
