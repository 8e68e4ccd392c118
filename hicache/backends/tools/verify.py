"""What the bytes of a stored page prove, in whatever store they are, and reading a whole store for that.

A header carries its namespace and its lengths, so no engine configuration is needed. A length from a header is compared
with the length of the object and never allocates anything.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from ...errors import InvalidInput, PageUnreadable
from ...frame import FRAME_KEY_BYTES, HEADER_BYTES, Damage, Encoding, FrameCodec, FrameHeader, TagKind
from ...keys import FORMAT_VERSION
from ..raw import RawStore, StoredPage

UNREADABLE = "unreadable"
UNVERIFIABLE = "unverifiable: MAC key needed"
ENCRYPTED = "unverifiable: encryption key needed"
NO_TAG = "unverifiable: the page carries no tag"
OTHER_KEY = "sealed with another key than those given"
WEAKER_TAG = "its tag is no MAC, so the given key proves nothing"
OTHER_TAG = "sealed by another means than the given key is for"
OTHER_NAME = "the name of the file is not the key of the page"
OTHER_DIRECTORY = "the directory of the file is not that of the page's namespace"
# A larger "page" is not a page of any model; it is refused before memory is taken for it.
PAGE_BYTES_MAX = 1 << 30
# Damaged pages that a scrub names; some 300 bytes each. What a broken disk has beyond that is only counted.
FINDINGS_MAX = 100_000
# While a store is listed, progress comes this often.
_LISTED_STEP = 1000
# Of a larger object the header is read first, to see whether it is worth the memory.
_LARGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class PageReport:
    """What is known about one stored page. `header` is None if it has none that can be read.

    `damage` is None for a page that is sound as far as it could be checked. `unsupported` is `mac_key`,
    `encryption_key` or `tag_kind` for a page with which nothing else is wrong, but which an engine with the given keys
    would refuse for that reason. `note` explains in words.
    """

    size_bytes: int
    header: FrameHeader | None = None
    damage: str | None = None
    unsupported: str | None = None
    note: str | None = None

    @property
    def is_proved(self) -> bool:
        """True if the tag was checked and, where keys were given, proves the page under one of them."""
        return self.damage is None and self.unsupported is None and self.note is None


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


def read_page(
    size_bytes: int, read: Callable[[int], bytes | None], name: tuple[str, str], keys: PageKeys
) -> tuple[bytes, PageReport] | None:
    """Read a page of about `size_bytes` and check it, including that its header agrees with `name`, the digest of its
    namespace and its key in hexadecimal. `read(n)` gives its first n bytes, None if it is gone, as this does."""
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
    # A tag that does not fit says more than a name that does not: the bytes themselves are not what was stored.
    if header.page_key.hex() != name[1]:
        elsewhere, note = Damage.PAGE_KEY, OTHER_NAME
    elif header.namespace.hex() != name[0]:
        elsewhere, note = Damage.NAMESPACE, OTHER_DIRECTORY
    else:
        return data, report
    notes = "; ".join(filter(None, (note, report.note)))
    return data, replace(report, damage=report.damage or elsewhere.value, unsupported=None, note=notes)


def _at_first_sight(size_bytes: int, head: bytes) -> PageReport:
    """What the header alone says of an object: it is damaged if its version or a length keeps it from being checked."""
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
        note = f"it has {size_bytes} bytes, its header says {header.object_bytes}"
        return replace(report, damage=Damage.SIZE.value, note=note)
    return report


def _judged(report: PageReport, stored: memoryview, header: FrameHeader, keys: PageKeys) -> PageReport:
    """What the bytes of a whole page prove. REQUIRES: `_at_first_sight` found nothing against its `header`."""
    if header.tag_kind not in list(TagKind):
        return replace(report, damage=Damage.TAG_KIND.value, note=f"there is no tag kind {header.tag_kind}")
    kind = TagKind(header.tag_kind)
    fitting = {TagKind.AES_256_GMAC: keys.mac, TagKind.AES_256_GCM: keys.encryption}.get(kind)
    if fitting == ():
        if keys != NO_KEYS:
            return replace(report, unsupported=Damage.TAG_KIND.value, note=OTHER_TAG)
        return replace(report, note=UNVERIFIABLE if kind is TagKind.AES_256_GMAC else ENCRYPTED)
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
        return replace(report, unsupported=damage.value, note=OTHER_KEY)
    if damage is not None:
        return replace(report, damage=damage.value)
    if keys != NO_KEYS and fitting is None:
        return replace(report, unsupported=Damage.TAG_KIND.value, note=WEAKER_TAG)
    return replace(report, note=NO_TAG if kind is TagKind.NONE else None)


def tag_name(header: FrameHeader) -> str:
    """The kind of a header's tag in words."""
    return TagKind(header.tag_kind).name if header.tag_kind in list(TagKind) else str(header.tag_kind)


def encoding_name(header: FrameHeader) -> str:
    """The form of a header's payload in words."""
    if not header.encoding:
        return "plain"
    names = [form.name or "" for form in Encoding if header.encoding & form]
    return "+".join([*names, *([hex(unknown)] if (unknown := header.encoding & ~sum(Encoding)) else [])]).lower()


@dataclass(frozen=True, slots=True)
class Finding:
    """A damaged page: where it is, what is wrong with it, and in words why, where there is more to say."""

    page: StoredPage
    damage: str
    note: str | None


@dataclass(slots=True)
class ScrubProgress:
    """How far a scrub has come. It lists the store first: `pages` is 0 and `pages_total` grows.

    `damaged` counts by reason the objects that are not sound pages. `unsupported` counts, by reason, pages with which
    nothing is wrong but that an engine with the given keys would refuse: `mac_key` and `encryption_key`, sealed with
    another key; `tag_kind`, by other means than the given keys are for. `unverifiable` are the pages that nothing could
    be proved about without a key, or at all. `findings` are the damaged ones, the first `FINDINGS_MAX` of them.
    """

    pages: int = 0
    pages_total: int = 0
    bytes: int = 0
    damaged: Counter[str] = field(default_factory=Counter)
    unsupported: Counter[str] = field(default_factory=Counter)
    unverifiable: int = 0
    removed: int = 0
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
    """Keeps to a rate of bytes per second from now on, None for no limit. Raises InvalidInput for one not positive."""

    def __init__(self, rate_bytes_per_s: float | None) -> None:
        if rate_bytes_per_s is not None and not rate_bytes_per_s > 0:
            raise InvalidInput(f"the rate must be positive, got {rate_bytes_per_s!r} bytes per second")
        self._rate = rate_bytes_per_s
        self._started_s = time.monotonic()

    def wait(self, done_bytes: int) -> None:
        """Sleep until `done_bytes` since the start are no more than the rate allows."""
        if self._rate is not None:
            time.sleep(max(0.0, self._started_s + done_bytes / self._rate - time.monotonic()))


def verify_raw(
    raw: RawStore, *, keys: PageKeys, rate_bytes_per_s: float | None = None, remove: bool = False
) -> Iterator[ScrubProgress]:
    """Check every object in a page's place, in every namespace; the same progress after each of them.

    Changes nothing, unless `remove` says that damaged pages are to be removed. Pages that an engine stored again
    meanwhile stay where the store can tell, and so do pages that only do not fit the keys and those that cannot be read
    now. Reads at most `rate_bytes_per_s` on average, by sleeping between pages. Raises InvalidInput for a rate that is
    not positive.
    """
    limit = RateLimit(rate_bytes_per_s)
    progress = ScrubProgress()
    yield progress
    for progress.pages_total, _ in enumerate(raw.pages(), 1):
        if progress.pages_total % _LISTED_STEP == 0:
            yield progress
    yield progress
    for page in raw.pages():
        report = PageReport(page.bytes, damage=page.damage)
        if page.damage is None:
            try:
                found = read_page(
                    page.bytes, functools.partial(raw.read, page), (page.namespace.hex(), page.key.hex()), keys
                )
            except PageUnreadable:
                progress.add(page, PageReport(0, damage=UNREADABLE))
                yield progress
                continue
            if found is None:
                continue  # evicted since it was listed
            _, report = found
        progress.add(page, report)
        if report.damage is not None and remove:
            progress.removed += raw.remove([page])
        yield progress
        limit.wait(progress.bytes)
