"""A radix tree the slow way: a plain dictionary of prefixes, one entry per cached page."""

from __future__ import annotations

from dataclasses import dataclass, field

Prefix = tuple[bytes, ...]


@dataclass
class Oracle:
    """`device[prefix]` and `host[prefix]` are the page ids that hold the last page of that prefix."""

    device: dict[tuple[bytes, Prefix], int] = field(default_factory=dict)
    host: dict[tuple[bytes, Prefix], int] = field(default_factory=dict)

    def match(self, seed: bytes, pages: Prefix) -> tuple[list[int], int]:
        """L1 pages of the longest cached prefix, and how many pages behind them are on L2 only."""
        on_device: list[int] = []
        host_hit = 0
        for end in range(1, len(pages) + 1):
            place = (seed, pages[:end])
            if place in self.device:
                on_device.append(self.device[place])
            elif place in self.host:
                host_hit += 1
            else:
                break
        return on_device, host_hit

    def insert(self, seed: bytes, pages: Prefix, ids: list[int]) -> int:
        """Add L1 pages; returns how many were there already."""
        present = 0
        for end in range(1, len(pages) + 1):
            place = (seed, pages[:end])
            if place in self.device:
                present += 1
            else:
                self.device[place] = ids[end - 1]
        return present

    def drop_device(self, ids: set[int]) -> None:
        """These pages left L1."""
        self.device = {place: page for place, page in self.device.items() if page not in ids}

    def drop_host(self, ids: set[int]) -> None:
        """These pages left L2."""
        self.host = {place: page for place, page in self.host.items() if page not in ids}
