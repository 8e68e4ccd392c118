"""One page file, looked at: what its header says, and whether the page is sound.

This works from the file alone: a header carries its namespace and its lengths, so no engine configuration is needed. A
length from a header is compared with the size of the file and never allocates anything.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field

from ...errors import BackendUnavailable, InvalidInput
from ...frame import FRAME_KEY_BYTES, HEADER_BYTES, NO_PARENT, Damage, Form, FrameCodec, FrameHeader, TagKind
from ...keys import FORMAT_VERSION
from .pages import NOT_REGULAR, READ_FLAGS, Identity, System, identity, read_head

UNVERIFIABLE = "unverifiable: MAC key needed"
ENCRYPTED = "unverifiable: encryption key needed"
NO_TAG = "unverifiable: the page carries no tag"
OTHER_KEY = "sealed with another key than those given"
WEAKER_TAG = "its tag is no MAC, so the given key proves nothing"
OTHER_TAG = "sealed by another means than the given key is for"
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
    and, where keys were given, proves the page under one of them. `misfit` is `mac_key`, `encryption_key` or `tag_kind`
    for a page with which nothing else is wrong, but which an engine with the given keys would refuse for that reason.
    `note` explains in words. Keys and digests are hexadecimal; `form` names how the payload is stored, `weights_epoch`
    and `label` are what the header says of the model.
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
    form: str | None = None
    stored_bytes: int | None = None
    weights_epoch: int | None = None
    label: str | None = None
    found: Identity | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class PageKeys:
    """The keys a tool was given: of MACs and of encryption, up to two of each. Raises InvalidInput."""

    mac: tuple[bytes, ...] = ()
    encryption: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        for kind, keys in (("MAC", self.mac), ("encryption", self.encryption)):
            for key in keys:
                if len(key) != FRAME_KEY_BYTES:
                    raise InvalidInput(f"the {kind} key must be {FRAME_KEY_BYTES} bytes, got {len(key)}")


NO_KEYS = PageKeys()


@dataclass(frozen=True, slots=True)
class Finding:
    """What checking one stored page gave: `damage`, `misfit` and `note` as in PageReport."""

    damage: str | None = None
    misfit: str | None = None
    note: str | None = None


def inspect_page(path: str | os.PathLike[str], *, keys: PageKeys = NO_KEYS) -> PageReport:
    """Read one page file and check it, including that its name and its namespace directory agree with its header.

    Blocks for one read. Never follows a link. Raises BackendUnavailable if the file cannot be read.
    """
    return report_on(os.path.abspath(os.fspath(path)), keys, System())


def report_on(path: str, keys: PageKeys, system: System, *, dir_fd: int | None = None) -> PageReport:
    """As `inspect_page`; `path` may be relative to the directory `dir_fd`, and must name the directories of a page."""
    try:
        found = system.lstat(path, dir_fd=dir_fd)
        if not stat.S_ISREG(found.st_mode):
            return _not_regular(path, found)
        fd = system.open(path, READ_FLAGS, dir_fd=dir_fd)
        try:
            return _report_open(path, fd, system.fstat(fd), keys, system)
        finally:
            system.close(fd)
    except OSError as error:
        raise BackendUnavailable(f"page {path}: {error.strerror}; check the path and its permissions") from error


def _not_regular(path: str, found: os.stat_result) -> PageReport:
    kind = _FILE_KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
    return PageReport(path, found.st_size, NOT_REGULAR, False, note=f"it is {kind}", found=identity(found))


def _report_open(path: str, fd: int, found: os.stat_result, keys: PageKeys, system: System) -> PageReport:
    size = found.st_size
    head = memoryview(bytearray(HEADER_BYTES))
    header = FrameHeader.parse(head[: read_head(system, fd, head)])
    if header is None:
        return PageReport(path, size, Damage.NOT_A_FRAME.value, False, found=identity(found))
    finding = impossible(size, header)
    if finding is None:
        frame = memoryview(bytearray(size))
        whole = read_head(system, fd, frame) == size
        finding = judge(frame, header, keys) if whole else Finding(Damage.SIZE.value)
        # A tag that does not fit says more than a name that does not: the bytes themselves are not what was stored.
        if (elsewhere := _misplaced(path, header)) is not None:
            damage = finding.damage or elsewhere.damage
            finding = Finding(damage, None, "; ".join(filter(None, (elsewhere.note, finding.note))))
    return report_of(path, size, header, finding, identity(found))


def report_of(
    path: str, size: int, header: FrameHeader, finding: Finding, found: Identity | None = None
) -> PageReport:
    """What is known of a page whose header could be read, wherever it is stored."""
    return PageReport(
        path=path,
        size_bytes=size,
        damage=finding.damage,
        verified=finding == Finding(),
        misfit=finding.misfit,
        note=finding.note,
        version=header.version,
        tag_kind=tag_name(header),
        payload_bytes=header.payload_bytes,
        page_key=header.page_key.hex(),
        parent_key=None if header.parent_key == NO_PARENT else header.parent_key.hex(),
        namespace=header.namespace.hex(),
        form=form_name(header),
        stored_bytes=header.stored_bytes,
        weights_epoch=header.weights_epoch,
        label=header.label,
        found=found,
    )


def impossible(size: int, header: FrameHeader) -> Finding | None:
    """What keeps the frame from being checked at all: its version, or a length that the file does not have."""
    if header.version != FORMAT_VERSION:
        return Finding(Damage.VERSION.value, note=f"version {header.version}; this program reads {FORMAT_VERSION}")
    if not 0 < header.payload_bytes < PAGE_BYTES_MAX or not 0 < header.stored_bytes <= header.payload_bytes:
        return Finding(Damage.SIZE.value, note="the header's lengths are those of no page")
    if header.object_bytes != size:
        return Finding(Damage.SIZE.value, note=f"it has {size} bytes, its header says {header.object_bytes}")
    return None


def tag_name(header: FrameHeader) -> str:
    """The kind of a header's tag in words."""
    return TagKind(header.tag_kind).name if header.tag_kind in list(TagKind) else str(header.tag_kind)


def form_name(header: FrameHeader) -> str:
    """The form of a header's payload in words."""
    if not header.form:
        return "plain"
    names = [form.name or "" for form in Form if header.form & form]
    return "+".join([*names, *([hex(unknown)] if (unknown := header.form & ~sum(Form)) else [])]).lower()


def _misplaced(path: str, header: FrameHeader) -> Finding | None:
    folder, name = os.path.split(path)
    if name != header.page_key.hex():
        return Finding(Damage.PAGE_KEY.value, note="the name of the file is not the key of the page")
    if os.path.basename(os.path.dirname(folder)) != header.namespace.hex():
        return Finding(Damage.NAMESPACE.value, note="the directory of the file is not that of the page's namespace")
    return None


def judge(stored: memoryview, header: FrameHeader, keys: PageKeys) -> Finding:
    """What the bytes of a whole stored page prove. REQUIRES: `impossible` found nothing against `header`, which is
    theirs."""
    if header.tag_kind not in list(TagKind):
        return Finding(Damage.TAG_KIND.value, note=f"there is no tag kind {header.tag_kind}")
    kind = TagKind(header.tag_kind)
    fitting = {TagKind.AES_256_GMAC: keys.mac, TagKind.AES_256_GCM: keys.encryption}.get(kind)
    if fitting == ():
        if keys != NO_KEYS:
            return Finding(misfit=Damage.TAG_KIND.value, note=OTHER_TAG)
        return Finding(note=UNVERIFIABLE if kind is TagKind.AES_256_GMAC else ENCRYPTED)
    codec = FrameCodec(
        header.namespace,
        header.payload_bytes,
        tag=kind,
        mac_keys=keys.mac if kind is TagKind.AES_256_GMAC else (),
        encryption_keys=keys.encryption if kind is TagKind.AES_256_GCM else (),
    )
    damage = codec.check(header.page_key, stored)
    if damage in (Damage.MAC_KEY, Damage.ENCRYPTION_KEY):
        # Its own key may be in use elsewhere: nothing is known against the page.
        return Finding(misfit=damage.value, note=OTHER_KEY)
    if damage is not None:
        return Finding(damage.value)
    if keys != NO_KEYS and fitting is None:
        return Finding(misfit=Damage.TAG_KIND.value, note=WEAKER_TAG)
    return Finding(note=NO_TAG if kind is TagKind.NONE else None)
