"""Surveys a store: its namespaces, the ages of their pages, and whether its chains are complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...frame import FrameHeader
from ..base import StoredPage
from ..chains import Chains, parent_in, read_header
from ..stored import StoredPages
from .verify import encoding_name, tag_name

# Pages of a namespace whose headers are read to say what it is: all have one model, but tags and encodings may change.
SAMPLES = 8
# Upper limits of the age classes, in seconds; older pages are in one further class.
AGE_BOUNDS_S = (3600.0, 86_400.0, 7 * 86_400.0, 30 * 86_400.0)


@dataclass(slots=True)
class NamespaceSurvey:
    """The survey of one namespace. `oldest_s` and `newest_s` are Unix times of last uses, None if unknown.

    `sample` is the header of a page, None if all samples were damaged; `tags` and `encodings` are those of all samples.
    """

    namespace: bytes
    pages: int = 0
    bytes: int = 0
    oldest_s: float | None = None
    newest_s: float | None = None
    sample: FrameHeader | None = None
    tags: Counter[str] = field(default_factory=Counter)
    encodings: Counter[str] = field(default_factory=Counter)

    def add(self, page: StoredPage) -> None:
        """Count a page."""
        self.pages += 1
        self.bytes += page.bytes
        if (used_s := page.used_s) is not None:
            self.oldest_s = used_s if self.oldest_s is None else min(self.oldest_s, used_s)
            self.newest_s = used_s if self.newest_s is None else max(self.newest_s, used_s)


@dataclass(slots=True)
class StoreSurvey:
    """The survey of a store so far. `ages` counts bytes by age class, the last class being unknown ages; `chains` is
    None if not requested."""

    taken_s: float
    chains: Chains | None
    namespaces: dict[bytes, NamespaceSurvey] = field(default_factory=dict)
    ages: list[int] = field(default_factory=lambda: [0] * (len(AGE_BOUNDS_S) + 2))

    @property
    def pages(self) -> int:
        """Pages of all namespaces."""
        return sum(found.pages for found in self.namespaces.values())

    @property
    def bytes(self) -> int:
        """Bytes of all namespaces."""
        return sum(found.bytes for found in self.namespaces.values())


def survey(stored: StoredPages, namespace: str = "", *, with_chains: bool = False) -> Iterator[StoreSurvey]:
    """Survey the pages of the namespaces whose digest starts with `namespace`; yield the same survey object for each
    page.

    Reads a few headers of each namespace, and with `with_chains` those of all pages, which takes one request per page
    on a server and about 600 bytes of memory. A page with a damaged header counts as an orphan.
    """
    found = StoreSurvey(stored.clock.wall_s(), Chains() if with_chains else None)
    yield found
    for page in stored.pages(namespace):
        its = found.namespaces.setdefault(page.namespace, NamespaceSurvey(page.namespace))
        its.add(page)
        age_s = None if page.used_s is None else found.taken_s - page.used_s
        found.ages[-1 if age_s is None else sum(age_s >= bound for bound in AGE_BOUNDS_S)] += page.bytes
        if found.chains is not None or its.pages <= SAMPLES:
            header = read_header(stored, page)
            if header is not None:
                its.sample = its.sample or header
                its.tags[tag_name(header)] += 1
                its.encodings[encoding_name(header)] += 1
                if found.chains is not None:
                    found.chains.add(page, parent_in(header))
        yield found
