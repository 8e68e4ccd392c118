"""Pages from one store into another: the same bytes, checked on the way, parents before children."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..chains import Chains, PageId, parent_in, read_header
from ..file.report import PAGE_BYTES_MAX, PageKeys
from ..raw import RawStore, StoredPage
from .removal import check_prefix
from .scrub import check_rate, pause_for, report_bytes


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """How far a copy has come: `seen` of `total` pages (None while the source is being listed).

    Each page is counted once: `copied`, `present` in the target already, `damaged` in the source, `refused` by the
    target (no room, or somebody else stored it just now), `behind` a page that is missing in the target, `gone` from
    the source meanwhile. `unproved` of the copied ones have a tag that no given key checks.
    """

    seen: int = 0
    total: int | None = None
    copied: int = 0
    bytes: int = 0
    present: int = 0
    damaged: int = 0
    refused: int = 0
    behind: int = 0
    gone: int = 0
    unproved: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether all that the source still has is in the target."""
        return not (self.damaged or self.refused or self.behind)


def copy_raw(
    source: RawStore,
    target: RawStore | None,
    *,
    namespace: str = "",
    keys: PageKeys,
    rate_bytes_per_s: float | None = None,
    dry_run: bool = False,
) -> Iterator[CopyProgress]:
    """Store the pages of `source`, of the namespaces whose digest starts with `namespace`, in `target` too.

    A page comes after the page before it, the chains used last at first: whenever this stops, `target` has whole
    prefixes, and the next run goes on from there. A page that is damaged, or finds no room, is left out with all that
    hangs on it. With `dry_run` nothing but headers is read and nothing is written; then `target` None is an empty one.
    Holds some 700 bytes a page. Raises InvalidInput for a wrong prefix or rate.
    """
    check_prefix(namespace)
    check_rate(rate_bytes_per_s)
    assert target is not None or dry_run
    chains = Chains()
    for page in source.pages(namespace):
        header = read_header(source, page)
        chains.add(page, None if header is None else parent_in(header))
        yield CopyProgress(seen=len(chains))
    there = set() if target is None else {(page.namespace, page.key) for page in target.pages(namespace)}
    copy = _Copy(source, target, keys, dry_run, chains, there)
    started_s = time.monotonic()
    progress = CopyProgress(total=len(chains))
    yield progress
    for page, parent in chains.heads_first():
        progress = copy.take(replace(progress, seen=progress.seen + 1), page, parent)
        yield progress
        if not dry_run:
            pause_for(rate_bytes_per_s, started_s, progress.bytes)


@dataclass(slots=True)
class _Copy:
    """One copy under way. `there` are the pages of the target."""

    source: RawStore
    target: RawStore | None
    keys: PageKeys
    dry_run: bool
    chains: Chains
    there: set[PageId]

    def take(self, progress: CopyProgress, page: StoredPage, parent: bytes | None) -> CopyProgress:
        """The next page, counted."""
        where = (page.namespace, page.key)
        if where in self.there:
            return replace(progress, present=progress.present + 1)
        # An orphan's parent is in neither store: engines may store it again, and then the orphan is of use.
        above = None if parent is None else (page.namespace, parent)
        if above is not None and above in self.chains and above not in self.there:
            return replace(progress, behind=progress.behind + 1)
        if self.dry_run or self.target is None:
            self.there.add(where)
            return replace(progress, copied=progress.copied + 1, bytes=progress.bytes + page.bytes)
        data = self.source.read(page, PAGE_BYTES_MAX)
        if data is None:
            return replace(progress, gone=progress.gone + 1)
        report = report_bytes(page, data, self.keys)
        if report.damage is not None:
            return replace(progress, damaged=progress.damaged + 1)
        if not self.target.write(page, data, parent):
            return replace(progress, refused=progress.refused + 1)
        self.there.add(where)
        return replace(
            progress,
            copied=progress.copied + 1,
            bytes=progress.bytes + len(data),
            unproved=progress.unproved + (not report.verified),
        )
