"""A slow radix tree with one entry per page and nothing else, so that splits and counts cannot be wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Pages = tuple[bytes, ...]


class Page:
    """One page below its prefix, with the full state that the tree keeps about it. It exists while it is on a tier."""

    __slots__ = ("children", "copying", "device", "hits", "holds", "host", "locks", "parent", "pins", "priority",
                 "stored")

    def __init__(self, parent: Page | None, hits: int = 1, priority: int = 0) -> None:
        self.parent = parent
        self.children: dict[bytes, Page] = {}
        self.device: int | None = None
        self.host: int | None = None
        self.hits = hits
        self.priority = priority
        self.locks = self.holds = self.pins = 0
        self.copying = self.stored = False

    def state(self) -> tuple[object, ...]:
        """Return the state except for the location, in the order of `test_tree_oracle`."""
        return (self.hits, self.priority, self.copying, self.stored)

    def counts(self) -> tuple[int, ...]:
        """Return the counts of locks, holds and pins that a node ending here must have: those that end at this page,
        plus the number of next pages that have any."""
        below = list(self.children.values())
        behind = [[getattr(page, name) for page in below] for name in ("locks", "holds", "pins")]
        here = (self.locks, self.holds, self.pins)
        return tuple(count - sum(counts) + sum(map(bool, counts)) for count, counts in zip(here, behind, strict=True))


class Oracle:
    """The cached pages under each seed."""

    def __init__(self) -> None:
        self.roots: dict[bytes, Page] = {}

    def path(self, seed: bytes, pages: Pages) -> list[Page]:
        """Return the leading pages that are cached."""
        found: list[Page] = []
        page = self.roots.get(seed)
        for content in pages:
            page = None if page is None else page.children.get(content)
            if page is None:
                break
            found.append(page)
        return found

    def all(self) -> Iterator[Page]:
        """Iterate over all pages."""
        stack = [child for root in self.roots.values() for child in root.children.values()]
        while stack:
            page = stack.pop()
            stack.extend(page.children.values())
            yield page

    def insert(self, seed: bytes, pages: Pages, ids: list[int], priority: int, start: int) -> int:
        """Add L1 pages after the first `start`; return how many were on L1 already."""
        present = 0
        known = self.path(seed, pages)
        for page, number in zip(known[start:], ids, strict=False):
            page.hits += 1
            page.priority = max(page.priority, priority)
            if page.device is None:
                page.device = number
            else:
                present += 1
        page = known[-1] if known else self.roots.setdefault(seed, Page(None))
        for position in range(len(known), len(pages)):
            page.children[pages[position]] = page = Page(page, 1, priority)
            page.device = ids[position - start]
        return present

    def insert_host(self, seed: bytes, pages: Pages, start: int, ids: list[int]) -> list[int]:
        """Add pages from storage after the first `start`; return the ids of pages that are on L2 or in flight to it."""
        unused: list[int] = []
        known = self.path(seed, pages)
        before = self.roots.setdefault(seed, Page(None)) if start == 0 else known[start - 1]
        for number in range(start, len(pages)):
            if number < len(known):
                page = known[number]
            else:
                page = before.children[pages[number]] = Page(before, 0)
            if page.host is None and not page.copying:
                page.host, page.stored = ids[number - start], True
            else:
                unused.append(ids[number - start])
            before = page
        return unused

    def accept(self, pages: Sequence[Page], ids: list[int]) -> list[int]:
        """End a copy of adjacent pages to L2; return the ids of pages that are on L2 already."""
        unused: list[int] = []
        for page, number in zip(pages, ids, strict=True):
            page.copying = False
            if page.host is None:
                page.host = number
            else:
                unused.append(number)
        return unused

    def leave_device(self, ids: set[int]) -> list[Page]:
        """Remove these page ids from L1; return their pages."""
        left = [page for page in self.all() if page.device in ids]
        for page in left:
            page.device = None
        self._forget()
        return left

    def leave_host(self, ids: set[int]) -> list[Page]:
        """Remove these page ids from L2; return their pages."""
        left = [page for page in self.all() if page.host in ids]
        for page in left:
            page.host = None
        self._forget()
        return left

    def _forget(self) -> None:
        """Remove pages that are on no tier. Children were listed after their parents, so they are removed first."""
        for page in reversed(list(self.all())):
            if page.device is None and page.host is None:
                assert not page.children, "a page left although one behind it stays"
                assert not (page.locks or page.holds or page.pins), "a page left although it is in use"
                assert page.parent is not None
                siblings = page.parent.children
                del siblings[next(content for content, other in siblings.items() if other is page)]
