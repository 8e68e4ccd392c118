"""The file `checked` of a store: what the next opening need not check. docs/formats/file_store.md specifies it.

| its lines                                       | written by                     | so the next opening trusts  |
|-------------------------------------------------|--------------------------------|-----------------------------|
| `boot`, the boot and the inode of the index     | each opening                   | the file of the index       |
| a stamp of the index and of each page directory | the last process, at its close | all that has the same stamp |

The second form vanishes, durably, before the first change of the next process. So after a power failure no form
matches, and after a kill only the first does. A copy of a directory has other inodes and times, so it matches neither.

REQUIRES everywhere: the store's lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Mapping
from typing import NamedTuple

from .index import IndexDamaged
from .index_file import usable_index
from .owners import Owner
from .pages import file_id, is_hex, look, read_start, remove_temporary
from .reconcile import listed
from .system import OPEN_OR_CREATE_FLAGS, READ_FLAGS, System

CHECKED_FILE = "checked"
_BOOT = "boot"
_REPLACE_FLAGS = OPEN_OR_CREATE_FLAGS | os.O_TRUNC
# More than the lines of a thousand namespaces.
_BYTES_MAX = 64 << 20


class Trusted(NamedTuple):
    """What an opening need not check. `check` is SQLite's pragma that verifies the index, empty for none. `folders` are
    the page directories to compare with it, see `folders_of`; None for all."""

    check: str
    folders: Collection[tuple[bytes, bytes]] | None


NOTHING = Trusted("integrity_check", None)
# After a kill: rows may be without files, but not the other way around, so the index counts enough.
NAMES = Trusted("", None)


def take_checked(system: System, root_fd: int, *, others: bool, dead: bool) -> Trusted:
    """Return what an opening need not check, with `others` that live and `dead` owners, and end the trust of a clean
    close. Raises OSError."""
    lines = _read(system, root_fd)
    if _BOOT not in lines and look(system, root_fd, CHECKED_FILE) is not None:
        remove_temporary(system, root_fd, CHECKED_FILE)
        _sync(system, root_fd)
    try:
        index = usable_index(system, root_fd)
    except IndexDamaged:
        index = None
    if index is None:
        return NOTHING
    if (boot := _boot_line(system, root_fd, index)) is not None and lines.get(_BOOT) == boot:
        return Trusted("", ()) if others and not dead else NAMES
    if others or dead or _BOOT in lines or index not in lines:
        return NOTHING
    changed = {name for name, _ in lines.items() ^ _stamps(system, root_fd, index).items()}
    if index in changed:
        return NOTHING
    fans = sorted(name for name in changed if is_hex(name[:64], 64) and is_hex(name[65:], 2))
    return Trusted("", [(bytes.fromhex(name[:64]), bytes.fromhex(name[65:])) for name in fans])


def note_verified(system: System, root_fd: int, index: str) -> None:
    """Write that this boot has verified the file `index`. Raises OSError."""
    line = _boot_line(system, root_fd, index)
    if line is not None and _read(system, root_fd).get(_BOOT) != line:
        _write(system, root_fd, {_BOOT: line})


def note_closed(system: System, root_fd: int, index: str) -> None:
    """Write the stamps after a clean close. REQUIRES: no process uses the store. Raises OSError."""
    with system.opened(index, READ_FLAGS, dir_fd=root_fd) as fd:
        system.fsync(fd)
    _write(system, root_fd, _stamps(system, root_fd, index))


def _boot_line(system: System, root_fd: int, index: str) -> str | None:
    """Return None if the boot is not known, or the file is gone."""
    boot, found = Owner.here(system, root_fd).boot, look(system, root_fd, index)
    return None if boot == "-" or found is None else f"{boot} {file_id(found)}"


def _stamps(system: System, root_fd: int, index: str) -> dict[str, str]:
    """Return a text for the index and each directory of pages that changes with it. A directory changes with each of
    its names."""
    names = [index]
    for namespace in system.listdir(root_fd):
        if is_hex(namespace, 64):
            fans = listed(system, root_fd, namespace) or ()
            names += [f"{namespace}/{fan}" for fan in fans if is_hex(fan, 2)]
    found = ((name, look(system, root_fd, name)) for name in names)
    return {name: f"{one.st_ino} {one.st_size} {one.st_mtime_ns} {one.st_ctime_ns}" for name, one in found if one}


def _read(system: System, root_fd: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        text = read_start(system, root_fd, CHECKED_FILE, _BYTES_MAX).decode("ascii", "replace")
        return dict(line.partition(" ")[::2] for line in text.splitlines())
    return {}


def _write(system: System, root_fd: int, lines: Mapping[str, str]) -> None:
    """Write the file in place: after a kill or a failure in between, the missing lines are not trusted."""
    with system.opened(CHECKED_FILE, _REPLACE_FLAGS, dir_fd=root_fd) as fd:
        system.pwritev(fd, [memoryview("".join(f"{name} {value}\n" for name, value in lines.items()).encode())], 0)
        system.fsync(fd)


def _sync(system: System, root_fd: int) -> None:
    """Make the removal of a name durable, if the file system can. Raises OSError."""
    try:
        system.fsync(root_fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
