"""What an operator does with a whole file store: scrub its pages, remove some of them.

A scrub and a dry run only look (`View`): they change nothing, take no lock for long and work on a read-only mount. What
removes pages opens the store as an engine does, but leaves damaged files for the tool to count and remove. It needs no
index: files go under the store's lock, and their rows as soon as there is room to write the index.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from ...errors import BackendError, BackendUnavailable, InvalidInput
from .pages import NOT_REGULAR, System, identity, is_hex, look, remove_damaged, remove_page
from .report import NO_KEYS, PageKeys, PageReport, inspect_page, report_on
from .store import Store
from .view import Place, View, places

__all__ = ["PageKeys", "PageReport", "PurgeResult", "ScrubProgress", "inspect_page", "purge_store", "verify_store"]

UNREADABLE = "unreadable"
_TOOL_WAIT_S = 30.0
# Pages removed in one transaction: engines wait for the store no longer than that takes.
_PURGE_CHUNK = 256


@dataclass(frozen=True, slots=True)
class ScrubProgress:
    """How far `verify_store` has come.

    `damaged` counts by reason what is no sound page. `misfits` counts, by reason, pages with which nothing is wrong but
    that an engine with the given keys would refuse: `mac_key` and `encryption_key`, sealed with another key;
    `tag_kind`, by other means than the given keys are for. `unverifiable` are the pages that nothing could be proved
    about without a key, or at all.
    """

    pages: int = 0
    pages_total: int = 0
    bytes: int = 0
    damaged: Mapping[str, int] = field(default_factory=dict)
    misfits: Mapping[str, int] = field(default_factory=dict)
    unverifiable: int = 0
    removed: int = 0

    def with_page(self, report: PageReport, *, removed: bool) -> ScrubProgress:
        """This progress and one more page."""
        return ScrubProgress(
            self.pages + 1,
            max(self.pages_total, self.pages + 1),
            self.bytes + report.size_bytes,
            _counted(self.damaged, report.damage),
            _counted(self.misfits, report.misfit),
            self.unverifiable + (report.damage is None and report.misfit is None and not report.verified),
            self.removed + removed,
        )


def _counted(counts: Mapping[str, int], reason: str | None) -> Mapping[str, int]:
    return counts if reason is None else dict(Counter(counts) + Counter([reason]))


@dataclass(frozen=True, slots=True)
class PurgeResult:
    """Pages and bytes that `purge_store` removed, or would remove."""

    pages: int
    bytes: int


def verify_store(
    root: str | os.PathLike[str],
    *,
    keys: PageKeys = NO_KEYS,
    rate_bytes_per_s: float | None = None,
    remove: bool = False,
) -> Iterator[ScrubProgress]:
    """Check whatever lies in a page's place, in every namespace; one progress per place, the last one is the result.

    Changes nothing, unless `remove` says that damaged pages are to be removed; those that were stored again meanwhile
    stay, and so do pages that only do not fit the keys. Reads at most `rate_bytes_per_s` on average, by sleeping
    between pages. Engines may use the store meanwhile. Raises as `Store` does, BackendUnavailable, and InvalidInput for
    a rate that is not positive.
    """
    if rate_bytes_per_s is not None and not rate_bytes_per_s > 0:
        raise InvalidInput(f"verify: the rate must be positive, got {rate_bytes_per_s!r} bytes per second")
    opened = Store(root, create=False, keep_damaged=True) if remove else View(root)
    try:
        yield from _scrub(opened, keys, rate_bytes_per_s)
    except BackendError:
        raise
    except (OSError, sqlite3.Error) as error:
        raise _unavailable(opened.path, error) from error
    finally:
        opened.close()


def _unavailable(path: str, error: Exception) -> BackendUnavailable:
    reason = getattr(error, "strerror", None) or str(error)
    return BackendUnavailable(f"file store {path}: {reason}; check disk and permissions")


def _scrub(opened: Store | View, keys: PageKeys, rate: float | None) -> Iterator[ScrubProgress]:
    system, root_fd = opened.system, opened.root_fd
    started = time.monotonic()
    progress = ScrubProgress(pages_total=sum(1 for _ in places(system, root_fd)))
    yield progress
    for place in places(system, root_fd):
        report = _report(system, root_fd, place, keys)
        if report is None:
            continue  # evicted since the list was made
        removed = report.damage is not None and isinstance(opened, Store) and _remove(opened, place, report)
        progress = progress.with_page(report, removed=removed)
        yield progress
        if rate is not None:
            time.sleep(max(0.0, started + progress.bytes / rate - time.monotonic()))


def _report(system: System, root_fd: int, place: Place, keys: PageKeys) -> PageReport | None:
    """What lies at a place; None if nothing does any more."""
    try:
        if place.key is None:
            found = system.lstat(place.name, dir_fd=root_fd)
            return PageReport(place.name, found.st_size, NOT_REGULAR, False, found=identity(found))
        return report_on(place.name, keys, system, dir_fd=root_fd)
    except FileNotFoundError:
        return None
    except BackendUnavailable as error:
        if isinstance(error.__cause__, (FileNotFoundError, NotADirectoryError)):
            return None
        return PageReport(place.name, 0, UNREADABLE, False)


def _remove(store: Store, place: Place, report: PageReport) -> bool:
    if report.damage == UNREADABLE:
        return False  # the disk may be able to read it later
    with store.removing(time.monotonic() + _TOOL_WAIT_S) as removal:
        removed = remove_damaged(store.system, store.root_fd, place.name, report.found)
        if place.key is not None and look(store.system, store.root_fd, place.name) is None:
            removal.pages.append((place.namespace, place.key))
    return removed


def purge_store(
    root: str | os.PathLike[str],
    *,
    namespace: str | None = None,
    older_than_s: float | None = None,
    dry_run: bool = False,
) -> PurgeResult:
    """Remove the pages of the namespaces whose digest starts with `namespace` (hexadecimal; None: all of them) that
    were not used for `older_than_s` seconds (None: whenever), and damaged files in a page's place that are as old.

    The files decide, and the index says when each was used; without a sound index that is when it was stored. Removes
    page files of this store only, and holds the lock for some hundred of them, so engines may go on; pages that are
    being written are left. Works on a full disk. With `dry_run` nothing is changed. Raises as `Store` does,
    BackendUnavailable, and InvalidInput for a prefix that is no hexadecimal or an age that is negative.
    """
    if namespace is not None and (not namespace or len(namespace) > 64 or not is_hex(namespace, len(namespace))):
        raise InvalidInput("purge: the namespace must be 1 to 64 lower-case hexadecimal digits")
    if older_than_s is not None and not older_than_s >= 0:
        raise InvalidInput(f"purge: the age must not be negative, got {older_than_s!r} seconds")
    before = None if older_than_s is None else int((time.time() - older_than_s) * 1e6)
    view = View(root)
    store = None
    try:
        chosen = _chosen(view, namespace or "", before)
        if dry_run:
            sizes = [found.st_size for _, found in chosen]
        else:
            store = Store(root, create=False, keep_damaged=True)
            sizes = _purge(store, chosen)
        return PurgeResult(len(sizes), sum(sizes))
    except BackendError:
        raise
    except (OSError, sqlite3.Error) as error:
        raise _unavailable(view.path, error) from error
    finally:
        if store is not None:
            store.close()
        view.close()


def _chosen(view: View, prefix: str, before: int | None) -> Iterator[tuple[Place, os.stat_result]]:
    """The files to remove, in the order of their places."""
    rows = {} if before is None else view.index_rows()
    for place in places(view.system, view.root_fd, prefix):
        if place.key is None:
            continue
        found = _file_at(view.system, view.root_fd, place.name)
        if found is None:
            continue
        row = rows.get((place.namespace, place.key))
        # A row that does not fit its file is stale, and the age of the file counts; so it is when a store is opened.
        used_us = row.last_use if row is not None and row.size == found.st_size else found.st_mtime_ns // 1000
        if before is None or used_us < before:
            yield place, found


def _file_at(system: System, root_fd: int, name: str) -> os.stat_result | None:
    """What lies there, unless nothing or a directory does."""
    found = look(system, root_fd, name)
    return None if found is None or stat.S_ISDIR(found.st_mode) else found


def _purge(store: Store, chosen: Iterator[tuple[Place, os.stat_result]]) -> list[int]:
    """Remove the files that are still what they were when they were chosen; their sizes."""
    sizes: list[int] = []
    while chunk := list(islice(chosen, _PURGE_CHUNK)):
        with store.removing(time.monotonic() + _TOOL_WAIT_S) as removal:
            for place, found in chunk:
                now = _file_at(store.system, store.root_fd, place.name)
                if place.key is None or now is None or identity(now) != identity(found):
                    continue
                remove_page(store.system, store.root_fd, place.name)
                removal.pages.append((place.namespace, place.key))
                sizes.append(found.st_size)
    return sizes
