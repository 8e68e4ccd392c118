"""Copies pages from one store to another: the same bytes, verified, parents before children."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import PageUnreadable
from ..base import StoredPage
from ..chains import read_chains
from ..stored import StoredPages
from .removal import check_prefix
from .verify import PageKeys, RateLimit, read_page


@dataclass(slots=True)
class CopyProgress:
    """The progress of a copy: `seen` of `total` pages (None while the source is being listed).

    Each page is counted once: `copied`, already `present` in the target, `damaged` in the source, `refused` by the
    target (full, or another process has just stored it), `behind` a page that is missing in the target, or `gone` from
    the source since the listing. `unproved` of the copied ones have a tag that the given keys cannot verify.
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
        """True if the target has all pages that the source still has."""
        return not (self.damaged or self.refused or self.behind)


def copy_stored(
    source: StoredPages, target: StoredPages | None, *, namespace: str = "", keys: PageKeys,
    rate_bytes_per_s: float | None = None, dry_run: bool = False,
) -> Iterator[CopyProgress]:
    """Copy the pages of `source`, of the namespaces whose digest starts with `namespace`, to `target`; yield the same
    progress object after each page.

    Parents come before children, the most recently used chains first: at any point `target` has whole prefixes, and the
    next run continues there. A page that is damaged or does not fit is skipped with all its descendants. With `dry_run`
    only headers are read and nothing is written; then `target` None means an empty one. Holds about 700 bytes per page.
    Raises InvalidInput for a wrong prefix or rate.
    """
    check_prefix(namespace)
    limit = RateLimit(rate_bytes_per_s, source.clock)
    progress = CopyProgress()
    for chains in read_chains(source, namespace):
        progress.seen = len(chains)
        yield progress
    found = [] if target is None else target.pages(namespace)
    there = {(page.namespace, page.key) for page in found if page.damage is None}
    progress.seen, progress.total = 0, len(chains)
    yield progress
    for page, parent in chains.heads_first():
        progress.seen += 1
        where = (page.namespace, page.key)
        # An orphan's parent is in neither store: engines may store it again, which makes the orphan useful.
        above = None if parent is None else (page.namespace, parent)
        if where in there:
            progress.present += 1
        elif above is not None and above in chains and above not in there:
            progress.behind += 1
        elif dry_run or target is None:
            there.add(where)
            progress.copied += 1
            progress.bytes += page.bytes
        elif _copy(progress, source, target, page, parent, keys):
            there.add(where)
        yield progress
        if not dry_run:
            limit.wait(progress.bytes)


def _copy(
    progress: CopyProgress, source: StoredPages, target: StoredPages, page: StoredPage, parent: bytes | None,
    keys: PageKeys,
) -> bool:
    """Copy one page and count its outcome; return True if it was copied."""
    name = (page.namespace.hex(), page.key.hex())
    try:
        found = read_page(page.bytes, functools.partial(source.read, page), name, keys)
    except PageUnreadable:
        progress.damaged += 1
        return False
    if found is None:
        progress.gone += 1
        return False
    data, report = found
    if report.damage is not None:
        progress.damaged += 1
        return False
    if not target.write(page, data, parent):
        progress.refused += 1
        return False
    progress.copied += 1
    progress.bytes += len(data)
    progress.unproved += not report.is_proved
    return True
