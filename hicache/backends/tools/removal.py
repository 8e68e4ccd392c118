"""Removes pages from a store: by namespace or age, or tails first down to a size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...errors import InvalidInput
from ..base import StoredPage
from ..chains import read_chains
from ..stored import StoredPages

# Pages in one call of the store: the most that S3 deletes at once, and the most that a tool removes after a stop.
REMOVE_CHUNK = 1000


@dataclass(slots=True)
class RemovalProgress:
    """Pages and bytes that were removed, or would be, of the `seen` pages of `total` (None while unknown). `left_bytes`
    is the size of a trimmed store, in the chosen namespaces; None for a purge."""

    seen: int = 0
    total: int | None = None
    pages: int = 0
    bytes: int = 0
    left_bytes: int | None = None


def check_prefix(namespace: str) -> None:
    """Raise InvalidInput unless `namespace` is a valid prefix of a digest; empty means all."""
    if len(namespace) > 64 or namespace.strip("0123456789abcdef"):
        raise InvalidInput("the namespace must be 1 to 64 lower-case hexadecimal digits")


def purge_stored(
    stored: StoredPages, *, namespace: str = "", older_than_s: float | None = None, dry_run: bool = False
) -> Iterator[RemovalProgress]:
    """Remove the pages, including damaged ones, of the namespaces whose digest starts with `namespace`, or those of
    them that were not used for `older_than_s` seconds; yield the same progress object after each page. A page with an
    unknown last use is not old. With `dry_run` nothing is changed.

    Raises InvalidInput for a prefix that is not hexadecimal and for a negative age.
    """
    check_prefix(namespace)
    if older_than_s is not None and not older_than_s >= 0:
        raise InvalidInput(f"the age must not be negative, got {older_than_s!r} seconds")
    before_s = None if older_than_s is None else stored.clock.wall_s() - older_than_s
    chunk: list[StoredPage] = []
    progress = RemovalProgress()
    yield progress
    for page in stored.pages(namespace):
        progress.seen += 1
        if before_s is None or (page.used_s is not None and page.used_s < before_s):
            chunk.append(page)
        if len(chunk) == REMOVE_CHUNK:
            _remove(stored, chunk, progress, dry_run)
            chunk = []
        yield progress
    _remove(stored, chunk, progress, dry_run)
    yield progress


def _remove(stored: StoredPages, chunk: Sequence[StoredPage], progress: RemovalProgress, dry_run: bool) -> None:
    removed = len(chunk) if dry_run else stored.remove(chunk)
    progress.pages += removed
    progress.bytes += sum(page.bytes for page in chunk) if removed else 0


def trim_stored(
    stored: StoredPages, target_bytes: int, *, namespace: str = "", dry_run: bool = False
) -> Iterator[RemovalProgress]:
    """Remove pages until `target_bytes` remain in the namespaces whose digest starts with `namespace`: always the least
    recently used page without children, so that chains lose their tails and keep their heads.

    Pages that engines store at the same time are ignored. Reads all headers first, and holds about 600 bytes per page.
    Raises InvalidInput for a prefix that is not hexadecimal and for a negative size.
    """
    check_prefix(namespace)
    if target_bytes < 0:
        raise InvalidInput(f"the size to trim to must not be negative, got {target_bytes}")
    progress = RemovalProgress()
    for chains in read_chains(stored, namespace):
        progress.seen, progress.left_bytes = len(chains), chains.bytes
        yield progress
    progress.total = progress.seen
    chunk: list[StoredPage] = []
    left_bytes = chains.bytes
    for page in chains.tails_first():
        if left_bytes <= target_bytes:
            break
        progress.left_bytes = left_bytes = left_bytes - page.bytes
        chunk.append(page)
        if len(chunk) == REMOVE_CHUNK:
            _remove(stored, chunk, progress, dry_run)
            chunk = []
            yield progress
    _remove(stored, chunk, progress, dry_run)
    yield progress
