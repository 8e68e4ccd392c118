"""File systems: the type of an open file's, and which types several machines can mount at once.

The type comes from the mount of the file, not from its device number: the numbers of btrfs subvolumes are not in
`/proc/self/mountinfo`. All functions only read `/proc`, except that `file_system` opens its path for lookups.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

UNKNOWN = "unknown"
_ONE_MACHINE = "a file store is for one machine and a local disk; use storage.type shared_files there"
_NOT_SHARED = (
    "it is of this machine alone: see whether the shared file system is mounted; for one machine, storage.type file "
    "is faster"
)
# Network file systems, those of clusters, and those with which a virtual machine mounts a directory of its host.
_SHARED = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fhgfs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs", "nfs4",
    "ocfs2", "orangefs", "panfs", "prl_fs", "pvfs2", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs", "wekafs",
})
# FUSE hides what is behind it, so it counts as shared, except for these: a disk (ntfs-3g), and the root of a container
# without root's rights. `overlay`, the root of other containers, is local too.
_LOCAL_FUSE = frozenset({"fuseblk", "fuse.fuse-overlayfs"})


def is_shared(kind: str) -> bool:
    """Return True if several machines, or several mounts with locks of their own, can use a file system of this type
    at once."""
    is_fuse = kind == "fuse" or kind.startswith("fuse.")
    return kind in _SHARED or (is_fuse and kind not in _LOCAL_FUSE)


def misplaced(backend: str, kind: str) -> str | None:
    """Return an advice if a store of type `backend` should not be on a file system of this type; None if it may be."""
    if backend == "file":
        return _ONE_MACHINE if is_shared(kind) else None
    return _NOT_SHARED if backend == "shared_files" and kind != UNKNOWN and not is_shared(kind) else None


def mount_id(fd: int) -> str:
    """Return the number of the mount of an open file (proc(5), `/proc/pid/fdinfo`); empty text if it is unknown."""
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:
        return next((line.split()[1] for line in lines if line.startswith("mnt_id:")), "")
    return ""


def type_of(mount: str, mountinfo: str) -> str:
    """Return the type of the file system of the mount with this number in a text of `/proc/pid/mountinfo` (proc(5))."""
    for line in mountinfo.splitlines():
        head, _, tail = line.partition(" - ")
        if tail and head.split()[0] == mount:
            return tail.split()[0]
    return UNKNOWN


def file_system_of(fd: int) -> str:
    """Return the type of the file system of an open file; `unknown` if the system does not say."""
    with contextlib.suppress(OSError):
        return type_of(mount_id(fd), Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace"))
    return UNKNOWN


def file_system(path: Path) -> str:
    """Return the type of the file system of `path`, or of its nearest parent that exists; `unknown` if it cannot be
    opened or the system does not say. Reads nothing of the file."""
    for place in (path.absolute(), *path.absolute().parents):
        try:
            fd = os.open(place, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return UNKNOWN
        try:
            return file_system_of(fd)
        finally:
            os.close(fd)
    return UNKNOWN
