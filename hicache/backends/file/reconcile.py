"""Lists the directories of a store, reconciles the index with them, and removes the leftovers of dead processes.

REQUIRES, except for listing: the store's lock and a transaction. Memory is limited to the pages of one fan-out
directory.
"""

from __future__ import annotations

import contextlib
import errno
import stat
import time
from collections.abc import Iterator, MutableMapping

from ...frame import FRAME_ALIGN, HEADER_BYTES, NO_PARENT, FrameHeader
from ...keys import FORMAT_VERSION, PAGE_KEY_BYTES
from ..base import PageId, StoredPage
from .index import Index, PageRow
from .owners import OWNER_SUFFIX, living, owner_of
from .pages import (
    NOT_REGULAR,
    TMP_DIR,
    identity,
    is_hex,
    look,
    look_for_file,
    page_name,
    read_start,
    remove_damaged,
    remove_page,
    remove_temporary,
)
from .room import ROOM_WRITER
from .system import LIST_FLAGS, System

_FANS = 256
# The errors of a device for one unreadable page. The other pages are not affected.
_SICK_ERRNOS = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})


def stored_ids(system: System, root_fd: int, prefix: str = "") -> Iterator[PageId]:
    """Yield namespace and key of everything at a page's location, by namespace, for the namespaces whose digest begins
    with `prefix` in hexadecimal. If a file or link has replaced a directory of pages, the key is the byte with which
    the keys of its pages begin. Does not follow links. Raises OSError.

    Other names are skipped. Holds the names of one directory of pages at a time.
    """
    for namespace in sorted(name for name in system.listdir(root_fd) if is_hex(name, 64) and name.startswith(prefix)):
        digest = bytes.fromhex(namespace)
        for fan in sorted(name for name in listed(system, root_fd, namespace) or () if is_hex(name, 2)):
            names = listed(system, root_fd, f"{namespace}/{fan}")
            if names is None:
                yield digest, bytes.fromhex(fan)
            for name in sorted(names or ()):
                if is_hex(name, 64) and name.startswith(fan):
                    yield digest, bytes.fromhex(name)


def rows_of(index: Index, prefix: str = "") -> dict[PageId, PageRow]:
    """Return the stored pages in the index, of the namespaces whose digest begins with `prefix` in hexadecimal."""
    rows = index.all_stored()
    return {(row.namespace, row.key): row for row in rows if row.namespace.hex().startswith(prefix)}


def stored_pages(
    system: System, root_fd: int, prefix: str, rows: MutableMapping[PageId, PageRow] | None
) -> Iterator[StoredPage]:
    """Yield the pages that `stored_ids` finds, and take their rows out of `rows`. Without `rows` the last uses are
    unknown. A link in place of a directory of pages is listed under the first byte of their keys. Raises OSError."""
    for page_id in stored_ids(system, root_fd, prefix):
        space, key = page_id
        found = look(system, root_fd, page_name(space.hex(), key))
        if found is None or (len(key) < PAGE_KEY_BYTES and stat.S_ISDIR(found.st_mode)):
            continue  # removed, or a directory of pages again
        regular = stat.S_ISREG(found.st_mode) and len(key) == PAGE_KEY_BYTES
        used_us: int | None = None
        if rows is not None:
            row = rows.pop(page_id, None)
            # A row that does not match its file is stale; then the file's time counts.
            fits = row is not None and row.size == found.st_size
            used_us = row.last_use if row is not None and fits else found.st_mtime_ns // 1000
        yield StoredPage(
            space, key, found.st_size if regular else 0, None if used_us is None else used_us / 1e6, identity(found),
            None if regular else NOT_REGULAR, found.st_mtime,
        )


def listed(system: System, root_fd: int, folder: str) -> list[str] | None:
    """Return the names in a directory: empty if it does not exist, None if it is a file or a link."""
    try:
        with system.opened(folder, LIST_FLAGS, dir_fd=root_fd) as fd:
            return system.listdir(fd)
    except FileNotFoundError:
        return []
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        return None


def owners(system: System, root_fd: int, own: str) -> tuple[set[str], list[str]]:
    """Return the living owners, `own` among them, and the paths of the files of dead ones in `tmp`. Raises OSError."""
    with system.opened(TMP_DIR, LIST_FLAGS, dir_fd=root_fd) as tmp_fd:
        names = [name for name in system.listdir(tmp_fd) if owner_of(name) is not None]
        alive = living(system, root_fd, tmp_fd, names, own)
    return alive, [f"{TMP_DIR}/{name}" for name in names if owner_of(name) not in alive]


def heartbeats(system: System, root_fd: int) -> dict[str, int]:
    """Return the heartbeat of each owner. Raises OSError."""
    names = [f"{TMP_DIR}/{name}" for name in listed(system, root_fd, TMP_DIR) or () if name.endswith(OWNER_SUFFIX)]
    found = ((name, look(system, root_fd, name)) for name in names)
    return {name: one.st_mtime_ns for name, one in found if one is not None}


def reap(index: Index, system: System, root_fd: int, own: str, *, compares: bool = False) -> None:
    """Remove the temporary files and reservations of dead processes. Their renamed pages are whole, and stay; so do
    their owner files, which tell an opening that rows may be without files, and unless that `compares` all files now,
    their rooms, which count files without rows."""
    alive, dead = owners(system, root_fd, own)
    for name in dead:
        if not name.endswith(OWNER_SUFFIX):
            remove_temporary(system, root_fd, name)
    writers = [writer for writer in index.writers() if writer.partition(".")[0] not in alive]
    if not compares:
        writers = [writer for writer in writers if not writer.endswith(ROOM_WRITER)]
    for writer in writers:
        for namespace, key in index.reserved_keys(writer):
            found = look_for_file(system, root_fd, page_name(namespace.hex(), key))
            if found is None:
                index.release(namespace, [key], writer)
            else:
                index.resize(namespace, {key: found.st_size}, writer)
        index.publish(writer)


def folders_of(index: Index, system: System, root_fd: int) -> list[tuple[bytes, bytes]]:
    """Return namespace and first byte of the keys of each directory that may have pages or rows. Raises OSError."""
    on_disk = {bytes.fromhex(name) for name in system.listdir(root_fd) if is_hex(name, 64)}
    return [(space, bytes([fan])) for space in sorted(on_disk | {*index.namespaces()}) for fan in range(_FANS)]


def reconcile(
    index: Index, system: System, root_fd: int, directory: tuple[bytes, bytes], *, by_names: bool, keep_damaged: bool
) -> None:
    """Compare the files of a directory of `folders_of` with their rows: forget rows without files, adopt whole files
    without rows, remove damaged files. `by_names` skips a directory whose names are those of its rows.

    With `keep_damaged` damaged files only lose their rows: a tool that counts damage removes them itself, one by one.
    Directories and files with other names are ignored. Raises OSError.
    """
    namespace, fan = directory
    span = fan.ljust(PAGE_KEY_BYTES, b"\x00"), fan.ljust(PAGE_KEY_BYTES, b"\xff")
    folder = page_name(namespace.hex(), fan)
    names = listed(system, root_fd, folder)
    if by_names and names is not None and set(names) == {key.hex() for key in index.keys(namespace, *span)}:
        return
    rows = index.stored(namespace, *span)
    if names is None and not keep_damaged:
        remove_page(system, root_fd, folder)
    for name in names or ():
        if not is_hex(name, 64) or not name.startswith(folder[-2:]):
            continue
        key = bytes.fromhex(name)
        try:
            _reconcile_page(index, system, root_fd, namespace, key, rows.get(key), keep_damaged=keep_damaged)
        except FileNotFoundError:
            continue  # just removed by a user; its row is removed below
        except OSError as error:
            if error.errno not in _SICK_ERRNOS:
                raise
            # The device cannot read this page: the file stays, without a row.
        rows.pop(key, None)
    for key in rows:
        index.drop(namespace, key)


def _reconcile_page(
    index: Index, system: System, root_fd: int, namespace: bytes, key: bytes, row_bytes: int | None, *,
    keep_damaged: bool,
) -> None:
    name = page_name(namespace.hex(), key)
    found = system.lstat_listed(name, dir_fd=root_fd)
    regular = stat.S_ISREG(found.st_mode)
    if row_bytes is not None:
        if regular and found.st_size == row_bytes:
            return
        index.drop(namespace, key)
    header = FrameHeader.parse(read_start(system, root_fd, name, HEADER_BYTES)) if regular else None
    if (
        header is None
        or header.page_key != key
        or header.namespace != namespace
        # For another version only the alignment is known.
        or (found.st_size != header.object_bytes if header.version == FORMAT_VERSION else found.st_size % FRAME_ALIGN)
    ):
        if not keep_damaged:
            remove_damaged(system, root_fd, name, identity(found))
        return
    parent = None if header.parent_key == NO_PARENT else header.parent_key
    # A time of use in the future would protect the page from eviction.
    index.add(namespace, key, parent, found.st_size, min(found.st_mtime_ns, time.time_ns()) // 1000)


def remove_empty(system: System, root_fd: int, namespace_hex: str) -> None:
    """Remove the directories of a namespace without pages, such as that of an old epoch."""
    with contextlib.suppress(OSError):
        for name in listed(system, root_fd, namespace_hex) or ():
            if is_hex(name, 2):
                with contextlib.suppress(OSError):
                    system.rmdir(f"{namespace_hex}/{name}", dir_fd=root_fd)
        system.rmdir(namespace_hex, dir_fd=root_fd)
