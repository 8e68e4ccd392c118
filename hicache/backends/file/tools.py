"""What an operator does with a file store: look at one page, scrub all of them, remove some.

These work from the files alone: a header carries its namespace and its lengths, so no engine configuration is needed.
A length from a header is compared with the size of the file and never allocates anything.
"""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ...errors import BackendUnavailable, InvalidInput
from ...frame import HEADER_BYTES, NO_PARENT, Damage, FrameCodec, FrameHeader, TagKind, frame_bytes
from ...keys import FORMAT_VERSION
from .index import Index, PageRow
from .pages import NOT_REGULAR, READ_FLAGS, SIZE, Identity, System, identity, is_hex, remove_damaged, remove_page
from .pages import page_name as name_of
from .store import Store

UNVERIFIABLE = "unverifiable: MAC key needed"
OTHER_MAC_KEY = "unverifiable: sealed with another MAC key"
# A larger "page" is no page of any model; it is refused before memory is taken for it.
PAGE_BYTES_MAX = 1 << 30
_TOOL_WAIT_S = 30.0
# Pages removed in one transaction: engines wait for the store no longer than that takes.
_PURGE_CHUNK = 256


@dataclass(frozen=True, slots=True)
class PageReport:
    """What is known about one page file.

    `damage` is None for a page that is sound as far as it could be checked; `verified` is True if its tag was checked
    too. `note` says why it was not. Keys and digests are hexadecimal.
    """

    path: str
    size_bytes: int
    damage: str | None
    verified: bool
    note: str | None = None
    version: int | None = None
    tag_kind: str | None = None
    payload_bytes: int | None = None
    page_key: str | None = None
    parent_key: str | None = None
    namespace: str | None = None
    found: Identity | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ScrubProgress:
    """How far `verify_store` has come. `damaged` counts by reason; `unverifiable` pages need a MAC key."""

    pages: int
    pages_total: int
    bytes: int
    damaged: Mapping[str, int]
    unverifiable: int
    removed: int


@dataclass(frozen=True, slots=True)
class PurgeResult:
    """Pages and bytes that `purge_store` removed, or would remove."""

    pages: int
    bytes: int


def inspect_page(path: str | os.PathLike[str], *, mac_key: bytes | None = None) -> PageReport:
    """Read one page file and check it, including that its name and its namespace directory agree with its header.

    Blocks for one read. Never follows a link. Raises BackendUnavailable if the file cannot be read, InvalidInput for a
    MAC key of another length than 32 bytes.
    """
    return _inspect(os.path.abspath(os.fspath(path)), mac_key, System())


def _inspect(path: str, mac_key: bytes | None, system: System) -> PageReport:
    try:
        found = system.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            return PageReport(path, found.st_size, NOT_REGULAR, False, found=identity(found))
        fd = system.open(path, READ_FLAGS)
        try:
            found = system.fstat(fd)
            return _inspect_open(path, fd, found, mac_key, system)
        finally:
            system.close(fd)
    except OSError as error:
        raise BackendUnavailable(f"page {path}: {error.strerror}; check the path and its permissions") from error


def _inspect_open(path: str, fd: int, found: os.stat_result, mac_key: bytes | None, system: System) -> PageReport:
    size = found.st_size
    head = memoryview(bytearray(HEADER_BYTES))
    header = FrameHeader.parse(head[: system.preadv(fd, head, 0)])
    if header is None:
        return PageReport(path, size, "not_a_frame", False, found=identity(found))
    damage = _mismatch(path, size, header)
    verified, note = False, None
    if damage is None:
        frame = memoryview(bytearray(size))
        done = 0
        while done < size and (count := system.preadv(fd, frame[done:], done)):
            done += count
        if done < size:
            damage = SIZE
        else:
            damage, note = _verify(frame, header, mac_key)
            verified = damage is None and note is None
    return PageReport(
        path=path,
        size_bytes=size,
        damage=damage,
        verified=verified,
        note=note,
        version=header.version,
        tag_kind=TagKind(header.tag_kind).name if header.tag_kind in list(TagKind) else str(header.tag_kind),
        payload_bytes=header.payload_bytes,
        page_key=header.page_key.hex(),
        parent_key=None if header.parent_key == NO_PARENT else header.parent_key.hex(),
        namespace=header.namespace.hex(),
        found=identity(found),
    )


def _mismatch(path: str, size: int, header: FrameHeader) -> str | None:
    """What the header contradicts: this version, the size of the file, its name, or its directory."""
    folder, name = os.path.split(path)
    namespace = os.path.basename(os.path.dirname(folder))
    if header.version != FORMAT_VERSION:
        return "version"
    if not 0 < header.payload_bytes < PAGE_BYTES_MAX or frame_bytes(header.payload_bytes) != size:
        return SIZE
    if name != header.page_key.hex():
        return "page_key"
    if namespace != header.namespace.hex():
        return "namespace"
    return None


def _verify(frame: memoryview, header: FrameHeader, mac_key: bytes | None) -> tuple[str | None, str | None]:
    """Damage and note."""
    if header.tag_kind not in list(TagKind):
        return "tag_kind", None
    kind = TagKind(header.tag_kind)
    keyed = kind is TagKind.AES_256_GMAC
    if keyed and mac_key is None:
        return None, UNVERIFIABLE
    codec = FrameCodec(header.namespace, header.payload_bytes, tag=kind, mac_key=mac_key if keyed else None)
    damage = codec.check(header.page_key, frame)
    if damage is Damage.MAC_KEY:
        # Sealed with a key that is not at hand: nothing is known against it.
        return None, OTHER_MAC_KEY
    if damage is not None:
        return damage.value, None
    return None, "unverifiable: the page carries no tag" if kind is TagKind.NONE else None


def verify_store(
    root: str | os.PathLike[str],
    *,
    mac_key: bytes | None = None,
    rate_bytes_per_s: float | None = None,
    remove: bool = False,
) -> Iterator[ScrubProgress]:
    """Check every page of every namespace; one progress per page, the last one is the result.

    With `remove`, damaged pages are removed unless they were stored again meanwhile. Reads at most `rate_bytes_per_s`
    on average, by sleeping between pages. Engines may use the store meanwhile. Raises as `Store` does, and InvalidInput
    for a rate that is not positive.
    """
    if rate_bytes_per_s is not None and not rate_bytes_per_s > 0:
        raise InvalidInput(f"verify: the rate must be positive, got {rate_bytes_per_s!r} bytes per second")
    store = Store(root, create=False)
    try:
        yield from _scrub(store, mac_key, rate_bytes_per_s, remove)
    finally:
        store.close()


def _scrub(store: Store, mac_key: bytes | None, rate: float | None, remove: bool) -> Iterator[ScrubProgress]:
    started = time.monotonic()
    damaged: Counter[str] = Counter()
    pages = size = unverifiable = removed = 0
    with store.transaction(time.monotonic() + _TOOL_WAIT_S) as index:
        total = index.totals().pages
    yield ScrubProgress(0, total, 0, {}, 0, 0)
    for namespace, key in _pages(store):
        try:
            report = _inspect(os.path.join(store.path, name_of(namespace.hex(), key)), mac_key, store.system)
        except BackendUnavailable as error:
            if isinstance(error.__cause__, FileNotFoundError):
                continue  # evicted since the list was made
            damaged["unreadable"] += 1
            pages += 1
            yield ScrubProgress(pages, max(total, pages), size, dict(damaged), unverifiable, removed)
            continue
        pages += 1
        size += report.size_bytes
        unverifiable += report.damage is None and not report.verified
        if report.damage is not None:
            damaged[report.damage] += 1
            removed += remove and _remove(store, namespace, key, report.found)
        yield ScrubProgress(pages, max(total, pages), size, dict(damaged), unverifiable, removed)
        if rate is not None:
            time.sleep(max(0.0, started + size / rate - time.monotonic()))


def _pages(store: Store) -> Iterator[tuple[bytes, bytes]]:
    """Namespace and key of every page file, one fan-out directory after the other."""
    for namespace in sorted(name for name in os.listdir(store.path) if is_hex(name, 64)):
        for fan in range(256):
            try:
                names = os.listdir(os.path.join(store.path, namespace, f"{fan:02x}"))
            except (FileNotFoundError, NotADirectoryError):
                continue
            for name in sorted(names):
                if is_hex(name, 64):
                    yield bytes.fromhex(namespace), bytes.fromhex(name)


def _remove(store: Store, namespace: bytes, key: bytes, found: Identity | None) -> bool:
    name = name_of(namespace.hex(), key)
    with store.transaction(time.monotonic() + _TOOL_WAIT_S) as index:
        removed = remove_damaged(store.system, store.root_fd, name, found)
        if not os.path.lexists(os.path.join(store.path, name)):
            index.drop(namespace, key)
    return removed


def purge_store(
    root: str | os.PathLike[str],
    *,
    namespace: str | None = None,
    older_than_s: float | None = None,
    dry_run: bool = False,
) -> PurgeResult:
    """Remove the pages of the namespaces whose digest starts with `namespace` (hexadecimal; None: all of them) that
    were not used for `older_than_s` seconds (None: whenever).

    Removes page files of this store only, in short transactions, so engines may go on meanwhile; pages that are being
    written now are left. With `dry_run` nothing is removed. Raises as `Store` does, and InvalidInput for a prefix that
    is no hexadecimal or an age that is negative.
    """
    if namespace is not None and (not namespace or len(namespace) > 64 or not is_hex(namespace, len(namespace))):
        raise InvalidInput("purge: the namespace must be 1 to 64 lower-case hexadecimal digits")
    if older_than_s is not None and not older_than_s >= 0:
        raise InvalidInput(f"purge: the age must not be negative, got {older_than_s!r} seconds")
    before = int((time.time() - (older_than_s or 0.0)) * 1e6) + (1 if older_than_s is None else 0)
    store = Store(root, create=False)
    try:
        return _purge(store, namespace or "", before, dry_run)
    finally:
        store.close()


def _purge(store: Store, prefix: str, before: int, dry_run: bool) -> PurgeResult:
    pages = size = 0
    while True:
        with store.transaction(time.monotonic() + _TOOL_WAIT_S) as index:
            chosen = [digest for digest in index.namespaces() if digest.hex().startswith(prefix)]
            limit = -1 if dry_run else _PURGE_CHUNK
            rows = index.older_than(chosen, before, limit)
            if not dry_run:
                _purge_rows(store, index, rows)
        pages += len(rows)
        size += sum(row.size for row in rows)
        if dry_run or len(rows) < _PURGE_CHUNK:
            return PurgeResult(pages, size)


def _purge_rows(store: Store, index: Index, rows: list[PageRow]) -> None:
    for row in rows:
        remove_page(store.system, store.root_fd, name_of(row.namespace.hex(), row.key))
        index.drop_row(row.row)
