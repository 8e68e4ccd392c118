"""Stored pages, checked as bytes from any store."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ...errors import InvalidInput
from ...frame import Damage, FrameHeader
from ..file.report import PAGE_BYTES_MAX, Finding, PageKeys, PageReport, impossible, judge, report_of
from ..file.tools import ScrubProgress
from ..raw import RawStore, StoredPage


def pause_for(rate_bytes_per_s: float | None, started_s: float, done_bytes: int) -> None:
    """Sleep until `done_bytes` since `started_s` (monotonic) are no more than the rate allows; None is no limit."""
    if rate_bytes_per_s is not None:
        time.sleep(max(0.0, started_s + done_bytes / rate_bytes_per_s - time.monotonic()))


def check_rate(rate_bytes_per_s: float | None) -> None:
    """Raise InvalidInput for a rate that is not positive."""
    if rate_bytes_per_s is not None and not rate_bytes_per_s > 0:
        raise InvalidInput(f"the rate must be positive, got {rate_bytes_per_s!r} bytes per second")


def report_bytes(page: StoredPage, data: bytes, keys: PageKeys) -> PageReport:
    """What is known about a page from the bytes in its place."""
    place = f"{page.namespace.hex()}/{page.key.hex()}"
    header = FrameHeader.parse(data)
    if header is None:
        return PageReport(place, len(data), Damage.NOT_A_FRAME.value, False)
    finding = impossible(len(data), header) or judge(memoryview(data), header, keys)
    if finding.damage is None and header.page_key != page.key:
        finding = Finding(Damage.PAGE_KEY.value)
    if finding.damage is None and header.namespace != page.namespace:
        finding = Finding(Damage.NAMESPACE.value)
    return report_of(place, len(data), header, finding)


def verify_raw(
    raw: RawStore, *, keys: PageKeys, rate_bytes_per_s: float | None = None, remove: bool = False
) -> Iterator[ScrubProgress]:
    """Check every page of a store; one progress per page, the last one is the result.

    Changes nothing, unless `remove` says that damaged pages are to be removed: a page that was stored anew between
    reading and removing may go too. Reads at most `rate_bytes_per_s` on average, by sleeping between pages. Raises
    InvalidInput for a rate that is not positive.
    """
    check_rate(rate_bytes_per_s)
    started_s = time.monotonic()
    progress = ScrubProgress(pages_total=sum(1 for _ in raw.pages()))
    yield progress
    for page in raw.pages():
        data = raw.read(page, PAGE_BYTES_MAX)
        if data is None:
            continue  # evicted since it was listed
        report = report_bytes(page, data, keys)
        removed = report.damage is not None and remove and raw.remove([page]) > 0
        progress = progress.with_page(report, removed=removed)
        yield progress
        pause_for(rate_bytes_per_s, started_s, progress.bytes)
