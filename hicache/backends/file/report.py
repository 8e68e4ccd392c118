"""One page file, looked at: what its header says, and whether the page is sound.

This works from the file alone: a header carries its namespace and its lengths, so no engine configuration is needed. A
length from a header is compared with the size of the file and never allocates anything.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field

from ...errors import BackendUnavailable, InvalidInput
from ...frame import HEADER_BYTES, MAC_KEY_BYTES, NO_PARENT, Damage, FrameCodec, FrameHeader, TagKind, frame_bytes
from ...keys import FORMAT_VERSION
from .pages import NOT_REGULAR, READ_FLAGS, SIZE, Identity, System, identity

UNVERIFIABLE = "unverifiable: MAC key needed"
NO_TAG = "unverifiable: the page carries no tag"
OTHER_MAC_KEY = "sealed with another MAC key than the one given"
WEAKER_TAG = "its tag is no MAC, so the given MAC key proves nothing"
# A larger "page" is no page of any model; it is refused before memory is taken for it.
PAGE_BYTES_MAX = 1 << 30
_FILE_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True, slots=True)
class PageReport:
    """What is known about one page file.

    `damage` is None for a page that is sound as far as it could be checked; `verified` is True if its tag was checked
    and, where a MAC key was given, proves the page under that key. `misfit` is `mac_key` or `tag_kind` for a page with
    which nothing else is wrong, but which an engine with the given MAC key would refuse for that reason. `note`
    explains in words. Keys and digests are hexadecimal.
    """

    path: str
    size_bytes: int
    damage: str | None
    verified: bool
    misfit: str | None = None
    note: str | None = None
    version: int | None = None
    tag_kind: str | None = None
    payload_bytes: int | None = None
    page_key: str | None = None
    parent_key: str | None = None
    namespace: str | None = None
    found: Identity | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class _Finding:
    """What checking one frame gave."""

    damage: str | None = None
    misfit: str | None = None
    note: str | None = None


def inspect_page(path: str | os.PathLike[str], *, mac_key: bytes | None = None) -> PageReport:
    """Read one page file and check it, including that its name and its namespace directory agree with its header.

    Blocks for one read. Never follows a link. Raises BackendUnavailable if the file cannot be read, InvalidInput for a
    MAC key of another length than 32 bytes.
    """
    return report_on(os.path.abspath(os.fspath(path)), mac_key, System())


def report_on(path: str, mac_key: bytes | None, system: System, *, dir_fd: int | None = None) -> PageReport:
    """As `inspect_page`; `path` may be relative to the directory `dir_fd`, and must name the directories of a page."""
    if mac_key is not None and len(mac_key) != MAC_KEY_BYTES:
        raise InvalidInput(f"inspect: the MAC key must be {MAC_KEY_BYTES} bytes, got {len(mac_key)}")
    try:
        found = system.lstat(path, dir_fd=dir_fd)
        if not stat.S_ISREG(found.st_mode):
            return _not_regular(path, found)
        fd = system.open(path, READ_FLAGS, dir_fd=dir_fd)
        try:
            return _report_open(path, fd, system.fstat(fd), mac_key, system)
        finally:
            system.close(fd)
    except OSError as error:
        raise BackendUnavailable(f"page {path}: {error.strerror}; check the path and its permissions") from error


def _not_regular(path: str, found: os.stat_result) -> PageReport:
    kind = _FILE_KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
    return PageReport(path, found.st_size, NOT_REGULAR, False, note=f"it is {kind}", found=identity(found))


def _report_open(path: str, fd: int, found: os.stat_result, mac_key: bytes | None, system: System) -> PageReport:
    size = found.st_size
    head = memoryview(bytearray(HEADER_BYTES))
    header = FrameHeader.parse(head[: system.preadv(fd, head, 0)])
    if header is None:
        return PageReport(path, size, Damage.NOT_A_FRAME.value, False, found=identity(found))
    finding = _impossible(size, header)
    if finding is None:
        frame = memoryview(bytearray(size))
        done = 0
        while done < size and (count := system.preadv(fd, frame[done:], done)):
            done += count
        finding = _verify(frame, header, mac_key) if done == size else _Finding(SIZE)
        # A tag that does not fit says more than a name that does not: the bytes themselves are not what was stored.
        if (elsewhere := _misplaced(path, header)) is not None:
            damage = finding.damage or elsewhere.damage
            finding = _Finding(damage, None, "; ".join(filter(None, (elsewhere.note, finding.note))))
    return PageReport(
        path=path,
        size_bytes=size,
        damage=finding.damage,
        verified=finding == _Finding(),
        misfit=finding.misfit,
        note=finding.note,
        version=header.version,
        tag_kind=TagKind(header.tag_kind).name if header.tag_kind in list(TagKind) else str(header.tag_kind),
        payload_bytes=header.payload_bytes,
        page_key=header.page_key.hex(),
        parent_key=None if header.parent_key == NO_PARENT else header.parent_key.hex(),
        namespace=header.namespace.hex(),
        found=identity(found),
    )


def _impossible(size: int, header: FrameHeader) -> _Finding | None:
    """What keeps the frame from being checked at all: its version, or a length that the file does not have."""
    if header.version != FORMAT_VERSION:
        return _Finding(Damage.VERSION.value, note=f"version {header.version}; this program reads {FORMAT_VERSION}")
    if not 0 < header.payload_bytes < PAGE_BYTES_MAX:
        return _Finding(SIZE, note="the header's payload length is that of no page")
    expected = frame_bytes(header.payload_bytes)
    if expected != size:
        return _Finding(SIZE, note=f"the file has {size} bytes, its header says {expected}")
    return None


def _misplaced(path: str, header: FrameHeader) -> _Finding | None:
    folder, name = os.path.split(path)
    if name != header.page_key.hex():
        return _Finding(Damage.PAGE_KEY.value, note="the name of the file is not the key of the page")
    if os.path.basename(os.path.dirname(folder)) != header.namespace.hex():
        return _Finding(Damage.NAMESPACE.value, note="the directory of the file is not that of the page's namespace")
    return None


def _verify(frame: memoryview, header: FrameHeader, mac_key: bytes | None) -> _Finding:
    if header.tag_kind not in list(TagKind):
        return _Finding(Damage.TAG_KIND.value, note=f"there is no tag kind {header.tag_kind}")
    kind = TagKind(header.tag_kind)
    keyed = kind is TagKind.AES_256_GMAC
    if keyed and mac_key is None:
        return _Finding(note=UNVERIFIABLE)
    codec = FrameCodec(header.namespace, header.payload_bytes, tag=kind, mac_key=mac_key if keyed else None)
    damage = codec.check(header.page_key, frame)
    if keyed and damage is Damage.MAC_KEY:
        # Its own key may be in use elsewhere: nothing is known against the page.
        return _Finding(misfit=Damage.MAC_KEY.value, note=OTHER_MAC_KEY)
    if damage is not None:
        return _Finding(damage.value)
    if mac_key is not None and not keyed:
        return _Finding(misfit=Damage.TAG_KIND.value, note=WEAKER_TAG)
    return _Finding(note=NO_TAG if kind is TagKind.NONE else None)
