"""Reading every page of a store and proving it."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...errors import InvalidInput, PageUnreadable
from ..raw import RawStore
from .report import PageKeys, PageReport, read_page

UNREADABLE = "unreadable"


@dataclass(slots=True)
class ScrubProgress:
    """How far a scrub has come.

    `damaged` counts by reason the objects that are not sound pages. `unsupported` counts, by reason, pages with which
    nothing is wrong but that an engine with the given keys would refuse: `mac_key` and `encryption_key`, sealed with
    another key; `tag_kind`, by other means than the given keys are for. `unverifiable` are the pages that nothing could
    be proved about without a key, or at all.
    """

    pages: int = 0
    pages_total: int = 0
    bytes: int = 0
    damaged: Counter[str] = field(default_factory=Counter)
    unsupported: Counter[str] = field(default_factory=Counter)
    unverifiable: int = 0
    removed: int = 0

    def add(self, report: PageReport) -> None:
        """Count a page."""
        self.pages += 1
        self.pages_total = max(self.pages_total, self.pages)
        self.bytes += report.size_bytes
        if report.damage is not None:
            self.damaged[report.damage] += 1
        elif report.unsupported is not None:
            self.unsupported[report.unsupported] += 1
        else:
            self.unverifiable += not report.is_proved


class Pace:
    """Keeps to a rate of bytes per second from now on, None for no limit. Raises InvalidInput for one not positive."""

    def __init__(self, rate_bytes_per_s: float | None) -> None:
        if rate_bytes_per_s is not None and not rate_bytes_per_s > 0:
            raise InvalidInput(f"the rate must be positive, got {rate_bytes_per_s!r} bytes per second")
        self._rate = rate_bytes_per_s
        self._started_s = time.monotonic()

    def wait(self, done_bytes: int) -> None:
        """Sleep until `done_bytes` since the start are no more than the rate allows."""
        if self._rate is not None:
            time.sleep(max(0.0, self._started_s + done_bytes / self._rate - time.monotonic()))


def verify_raw(
    raw: RawStore, *, keys: PageKeys, rate_bytes_per_s: float | None = None, remove: bool = False
) -> Iterator[ScrubProgress]:
    """Check every object in a page's place, in every namespace; the same progress after each of them.

    Changes nothing, unless `remove` says that damaged pages are to be removed. Pages that an engine stored again
    meanwhile stay where the store can tell, and so do pages that only do not fit the keys and those that cannot be read
    now. Reads at most `rate_bytes_per_s` on average, by sleeping between pages. Raises InvalidInput for a rate that is
    not positive.
    """
    pace = Pace(rate_bytes_per_s)
    progress = ScrubProgress(pages_total=sum(1 for _ in raw.pages()))
    yield progress
    for page in raw.pages():
        report = PageReport(page.bytes, damage=page.damage)
        if page.damage is None:
            try:
                found = read_page(
                    page.bytes, functools.partial(raw.read, page), (page.namespace.hex(), page.key.hex()), keys
                )
            except PageUnreadable:
                progress.add(PageReport(0, damage=UNREADABLE))
                yield progress
                continue
            if found is None:
                continue  # evicted since it was listed
            _, report = found
        progress.add(report)
        if report.damage is not None and remove:
            progress.removed += raw.remove([page])
        yield progress
        pace.wait(progress.bytes)
