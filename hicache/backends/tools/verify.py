"""Verifies stored pages: a whole store of any kind, or one file of a file store, outside its store.

A header contains its namespace and its lengths, so the engine's configuration is not needed. A length from a header is
compared with the length of the object and never used to allocate memory.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from ...clock import Clock
from ...config.files import OTHER_KINDS
from ...config.guard import GuardConfig
from ...errors import BackendUnavailable, InvalidInput, PageUnreadable
from ...frame import FRAME_KEY_BYTES, HEADER_BYTES, Damage, Encoding, FrameCodec, FrameHeader, TagKind
from ...keys import FORMAT_VERSION
from ..base import StoredPage
from ..file.pages import NOT_REGULAR, read_start
from ..file.system import System
from ..stored import StoredPages

UNREADABLE = "unreadable"
NOT_PROVED = "the answer may be from a gateway, a proxy or a mount instead of the store"
SPARED = (
    "not removed, because most pages are damaged: the reader is more likely wrong than the store; compare the keys, "
    "and look for a gateway, a proxy or a mount that answers instead of the store"
)
UNVERIFIABLE = "unverifiable: MAC key needed"
ENCRYPTED = "unverifiable: encryption key needed"
NO_TAG = "unverifiable: the page carries no tag"
OTHER_KEY = "sealed with another key than the given ones"
WEAKER_TAG = "its tag is not a MAC, so the given key cannot verify it"
OTHER_TAG = "sealed with another kind of tag than the given key is for"
OTHER_NAME = "the name of the file is not the key of the page"
OTHER_DIRECTORY = "the directory of the file is not that of the page's namespace"
# A larger object is not a page of any model; it is rejected before memory is allocated.
PAGE_BYTES_MAX = 1 << 30
# The most damaged pages that a scrub lists, about 300 bytes each. Further ones are only counted.
FINDINGS_MAX = 100_000
# So many damaged pages, if they are most of those read, mean that the reader is wrong, as for an engine.
_DAMAGE_PAGES = GuardConfig.damage_pages
# The interval of progress while a store is listed, and while pages are removed.
_LISTED_STEP = 1000
# For a larger object the header is read first, to check whether it is a page.
_LARGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class PageReport:
    """The result for one stored page. `header` is None if it is not readable.

    `damage` is None for a page without detected damage. `unsupported` is `mac_key`, `encryption_key` or `tag_kind` for
    an undamaged page that an engine with the given keys would reject for that reason. `note` explains in words.
    """

    size_bytes: int
    header: FrameHeader | None = None
    damage: str | None = None
    unsupported: str | None = None
    note: str | None = None

    @property
    def is_proved(self) -> bool:
        """True if the tag was verified, with one of the keys if any were given."""
        return self.damage is None and self.unsupported is None and self.note is None


@dataclass(frozen=True, slots=True)
class PageKeys:
    """The keys of a tool: for MACs and for encryption, up to two of each. Raises InvalidInput."""

    mac: tuple[bytes, ...] = ()
    encryption: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        for kind, keys in (("MAC", self.mac), ("encryption", self.encryption)):
            for key in keys:
                if len(key) != FRAME_KEY_BYTES:
                    raise InvalidInput(f"the {kind} key must be {FRAME_KEY_BYTES} bytes, got {len(key)}")


NO_KEYS = PageKeys()


def read_page(
    size_bytes: int, read: Callable[[int], bytes | None], name: tuple[str, str], keys: PageKeys
) -> tuple[bytes, PageReport] | None:
    """Read and verify a page of about `size_bytes`, including that its header matches `name`, the digest of its
    namespace and its key in hexadecimal. `read(n)` returns its first n bytes, or None if it is missing; then this
    returns None."""
    if size_bytes > _LARGE_BYTES and (head := read(HEADER_BYTES)) is not None:
        report = _at_first_sight(size_bytes, head)
        if report.damage is not None:
            return b"", report
    data = read(PAGE_BYTES_MAX)
    if data is None:
        return None
    report = _at_first_sight(len(data), data)
    header = report.header
    if header is None or report.damage is not None:
        return data, report
    report = _judged(report, memoryview(data), header, keys)
    # A wrong tag comes before a wrong name: it means that the bytes themselves have changed.
    if header.page_key.hex() != name[1]:
        elsewhere, note = Damage.PAGE_KEY, OTHER_NAME
    elif header.namespace.hex() != name[0]:
        elsewhere, note = Damage.NAMESPACE, OTHER_DIRECTORY
    else:
        return data, report
    notes = "; ".join(filter(None, (note, report.note)))
    return data, replace(report, damage=report.damage or elsewhere.value, unsupported=None, note=notes)


def _at_first_sight(size_bytes: int, head: bytes) -> PageReport:
    """Check only the header of an object: it is damaged if its version or a length prevents verification."""
    header = FrameHeader.parse(head)
    if header is None:
        return PageReport(size_bytes, damage=Damage.NOT_A_FRAME.value)
    report = PageReport(size_bytes, header)
    if header.version != FORMAT_VERSION:
        note = f"version {header.version}; this program reads {FORMAT_VERSION}"
        return replace(report, damage=Damage.VERSION.value, note=note)
    if not 0 < header.payload_bytes < PAGE_BYTES_MAX or not 0 < header.stored_bytes <= header.payload_bytes:
        return replace(report, damage=Damage.SIZE.value, note="the header's lengths are not those of a page")
    if header.object_bytes != size_bytes:
        note = f"it has {size_bytes} bytes instead of {header.object_bytes} as in its header"
        return replace(report, damage=Damage.SIZE.value, note=note)
    return report


def _judged(report: PageReport, stored: memoryview, header: FrameHeader, keys: PageKeys) -> PageReport:
    """Verify the bytes of a whole page. REQUIRES: `_at_first_sight` has accepted its `header`."""
    if header.tag_kind not in list(TagKind):
        return replace(report, damage=Damage.TAG_KIND.value, note=f"tag kind {header.tag_kind} does not exist")
    kind = TagKind(header.tag_kind)
    fitting = {TagKind.AES_256_GMAC: keys.mac, TagKind.AES_256_GCM: keys.encryption}.get(kind)
    if fitting == ():
        if keys != NO_KEYS:
            return replace(report, unsupported=Damage.TAG_KIND.value, note=OTHER_TAG)
        return replace(report, note=UNVERIFIABLE if kind is TagKind.AES_256_GMAC else ENCRYPTED)
    codec = FrameCodec(
        header.namespace, header.payload_bytes, tag=kind,
        mac_keys=keys.mac if kind is TagKind.AES_256_GMAC else (),
        encryption_keys=keys.encryption if kind is TagKind.AES_256_GCM else (),
    )
    damage = codec.check(header.page_key, stored)
    if damage in (Damage.MAC_KEY, Damage.ENCRYPTION_KEY):
        # Its own key may be in use elsewhere: the page is not known to be damaged.
        return replace(report, unsupported=damage.value, note=OTHER_KEY)
    if damage is not None:
        return replace(report, damage=damage.value)
    if keys != NO_KEYS and fitting is None:
        return replace(report, unsupported=Damage.TAG_KIND.value, note=WEAKER_TAG)
    return replace(report, note=NO_TAG if kind is TagKind.NONE else None)


def tag_name(header: FrameHeader) -> str:
    """Return the kind of a header's tag in words."""
    return TagKind(header.tag_kind).name if header.tag_kind in list(TagKind) else str(header.tag_kind)


def encoding_name(header: FrameHeader) -> str:
    """Return the encoding of a header's payload in words."""
    if not header.encoding:
        return "plain"
    names = [form.name or "" for form in Encoding if header.encoding & form]
    return "+".join([*names, *([hex(unknown)] if (unknown := header.encoding & ~sum(Encoding)) else [])]).lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """A damaged page: its location, the kind of damage, and an optional explanation."""

    page: StoredPage
    damage: str
    note: str | None


@dataclass(slots=True)
class ScrubProgress:
    """The progress of a scrub. It lists the store first: `pages` is 0 and `pages_total` grows.

    `damaged` counts, by reason, objects that are damaged or not pages. `unsupported` counts, by reason, undamaged pages
    that an engine with the given keys would reject: `mac_key` and `encryption_key`, sealed with another key;
    `tag_kind`, with another kind of tag. `unverifiable` are the pages without a tag or without a key for it. `findings`
    are the first `FINDINGS_MAX` damaged ones, with the identity of the object that was read. `spared` damaged pages
    were to be removed and stay, because most pages are damaged.
    """

    pages: int = 0
    pages_total: int = 0
    bytes: int = 0
    damaged: Counter[str] = field(default_factory=Counter)
    unsupported: Counter[str] = field(default_factory=Counter)
    unverifiable: int = 0
    removed: int = 0
    spared: int = 0
    findings: list[Finding] = field(default_factory=list)

    def add(self, page: StoredPage, report: PageReport) -> None:
        """Count a page."""
        self.pages += 1
        self.pages_total = max(self.pages_total, self.pages)
        self.bytes += report.size_bytes
        if report.damage is not None:
            self.damaged[report.damage] += 1
            if len(self.findings) < FINDINGS_MAX:
                self.findings.append(Finding(page, report.damage, report.note))
        elif report.unsupported is not None:
            self.unsupported[report.unsupported] += 1
        else:
            self.unverifiable += not report.is_proved


class RateLimit:
    """Limits the bytes per second from now on; None means no limit. Raises InvalidInput for one that is not > 0."""

    def __init__(self, rate_bytes_per_s: float | None, clock: Clock) -> None:
        if rate_bytes_per_s is not None and not rate_bytes_per_s > 0:
            raise InvalidInput(f"the rate must be positive, got {rate_bytes_per_s!r} bytes per second")
        self._rate = rate_bytes_per_s
        self._clock = clock
        self._started_s = clock()

    def wait(self, done_bytes: int) -> None:
        """Sleep until the rate allows `done_bytes` since the start."""
        if self._rate is not None:
            self._clock.sleep(self._started_s + done_bytes / self._rate - self._clock())


def verify_stored(
    stored: StoredPages, *, keys: PageKeys, rate_bytes_per_s: float | None = None, remove: bool = False
) -> Iterator[ScrubProgress]:
    """Verify every object at a page's location, in every namespace; yield the same progress object after each of them.

    Changes nothing, unless `remove` is True: then it removes the first `FINDINGS_MAX` damaged pages after it has read
    all, but none if most pages are damaged: more likely the reader is wrong than the store. Pages that an engine has
    stored again since stay, if the store can detect that, and so do pages that only do not match the keys and those
    that cannot be read now. Reads at most `rate_bytes_per_s` on average, by sleeping between pages. Raises InvalidInput
    for a rate that is not positive.
    """
    limit = RateLimit(rate_bytes_per_s, stored.clock)
    progress = ScrubProgress()
    yield progress
    for progress.pages_total, _ in enumerate(stored.pages(), 1):
        if progress.pages_total % _LISTED_STEP == 0:
            yield progress
    yield progress
    for page in stored.pages():
        if (read := _examined(stored, page, keys)) is None:
            continue  # evicted since the listing
        progress.add(*read)
        yield progress
        limit.wait(progress.bytes)
    if remove:
        damaged = sum(progress.damaged.values())
        if damaged >= _DAMAGE_PAGES and 2 * damaged > progress.pages:
            progress.spared = damaged
            yield progress
            return
        proved = [found.page for found in progress.findings if found.damage != UNREADABLE]
        for start in range(0, len(proved), _LISTED_STEP):
            progress.removed += stored.remove(proved[start : start + _LISTED_STEP])
            yield progress


def _examined(stored: StoredPages, page: StoredPage, keys: PageKeys) -> tuple[StoredPage, PageReport] | None:
    """Read and verify a listed page. Return it with the identity of the object that was read; None if it is missing."""
    identity = page.identity

    def read(bytes_max: int) -> bytes | None:
        nonlocal identity
        data, identity = stored.find(page, bytes_max) or (None, None)
        return data

    report = PageReport(page.bytes, damage=page.damage)
    if page.damage is None:
        try:
            found = read_page(page.bytes, read, (page.namespace.hex(), page.key.hex()), keys)
        except PageUnreadable:
            return page, PageReport(0, damage=UNREADABLE)
        if found is None:
            return None
        _, report = found
    if report.damage is not None and identity is None:
        report = PageReport(report.size_bytes, damage=UNREADABLE, note=NOT_PROVED)
    return replace(page, identity=identity), report


def inspect_page(path: str | os.PathLike[str], *, keys: PageKeys = NO_KEYS) -> PageReport:
    """Read and verify one page file, including that its name and its namespace directory match its header.

    Blocks for one read. Never follows a link. Raises BackendUnavailable if the file cannot be read.
    """
    where, system = os.path.abspath(os.fspath(path)), System()
    folder, name = os.path.split(where)
    try:
        found = system.lstat(where)
        if not stat.S_ISREG(found.st_mode):
            kind = OTHER_KINDS.get(stat.S_IFMT(found.st_mode), "not a regular file")
            return PageReport(found.st_size, damage=NOT_REGULAR, note=f"it is {kind}")
        names = (os.path.basename(os.path.dirname(folder)), name)
        page = read_page(found.st_size, lambda bytes_max: read_start(system, None, where, bytes_max), names, keys)
        assert page is not None
    except OSError as error:
        raise BackendUnavailable(f"page {where}: {error.strerror}; check the path and its permissions") from error
    return page[1]
