"""Pages out of a store: those of a namespace or an age, or as many as it takes, tails first."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...errors import InvalidInput
from ..chains import read_chains
from ..raw import RawStore, StoredPage

# Pages in one call of the store: as many as S3 deletes at once, and the most that is lost when a tool is stopped.
REMOVE_CHUNK = 1000


@dataclass(slots=True)
class RemovalProgress:
    """Pages and bytes that were removed, or would be, of those that were `seen` (and are still to be seen: `total`,
    None while that is not known). `left_bytes` is what a trimmed store holds now, in the namespaces looked at; None for
    a purge."""

    seen: int = 0
    total: int | None = None
    pages: int = 0
    bytes: int = 0
    left_bytes: int | None = None


def check_prefix(namespace: str) -> None:
    """Raise InvalidInput unless `namespace` can be the beginning of a digest; empty stands for all."""
    if len(namespace) > 64 or namespace.strip("0123456789abcdef"):
        raise InvalidInput("the namespace must be 1 to 64 lower-case hexadecimal digits")


def purge_raw(
    raw: RawStore, *, namespace: str = "", older_than_s: float | None = None, dry_run: bool = False
) -> Iterator[RemovalProgress]:
    """Remove the pages of the namespaces whose digest starts with `namespace`, or those of them that were not used for
    `older_than_s` seconds, damaged ones too; the same progress after each page. A page whose last use the store does
    not know is never old. With `dry_run` nothing is changed.

    Raises InvalidInput for a prefix that is not hexadecimal and for a negative age.
    """
    check_prefix(namespace)
    if older_than_s is not None and not older_than_s >= 0:
        raise InvalidInput(f"the age must not be negative, got {older_than_s!r} seconds")
    before_s = None if older_than_s is None else time.time() - older_than_s
    chunk: list[StoredPage] = []
    progress = RemovalProgress()
    yield progress
    for page in raw.pages(namespace):
        progress.seen += 1
        if before_s is None or (page.used_s is not None and page.used_s < before_s):
            chunk.append(page)
        if len(chunk) == REMOVE_CHUNK:
            _remove(raw, chunk, progress, dry_run)
            chunk = []
        yield progress
    _remove(raw, chunk, progress, dry_run)
    yield progress


def _remove(raw: RawStore, chunk: Sequence[StoredPage], progress: RemovalProgress, dry_run: bool) -> None:
    removed = len(chunk) if dry_run else raw.remove(chunk)
    progress.pages += removed
    progress.bytes += sum(page.bytes for page in chunk) if removed else 0


def trim_raw(
    raw: RawStore, target_bytes: int, *, namespace: str = "", dry_run: bool = False
) -> Iterator[RemovalProgress]:
    """Remove pages until `target_bytes` are left in the namespaces whose digest starts with `namespace`: always the
    least recently used of those on which none hangs, so that chains lose their tails and keep their heads.

    Pages that engines store meanwhile are not seen. Reads all headers first, and holds some 600 bytes a page. Raises
    InvalidInput for a prefix that is not hexadecimal and for a negative size.
    """
    check_prefix(namespace)
    if target_bytes < 0:
        raise InvalidInput(f"the size to trim to must not be negative, got {target_bytes}")
    progress = RemovalProgress()
    for chains in read_chains(raw, namespace):
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
            _remove(raw, chunk, progress, dry_run)
            chunk = []
            yield progress
    _remove(raw, chunk, progress, dry_run)
    yield progress
