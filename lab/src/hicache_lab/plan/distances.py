"""Exact stack distances of an LRU cache of prefixes.

The stack distance of a page is the number of pages that were used after it. An LRU cache of S pages has exactly the
pages with a distance below S, so one pass gives the hits of all sizes (Mattson, Gecsei, Slutz, Traiger: Evaluation
techniques for storage hierarchies, IBM Systems Journal 9(2), 1970). A request uses its whole path at once, and the head
of a path is younger than its tail. So the pages of a path that an LRU cache has are a prefix of it.

Pages that were always used together are one *run*: a node of a radix tree over paths, as long as possible when it is
made, and split where a later path leaves it. All runs that a request used and that no later request used share the
request's time slot. They are a chain of the tree, because a run is never used without those before it, so the slot and
the place in the path determine the order of pages. A Fenwick tree (Fenwick, Software: Practice and Experience 24(3),
1994) over slots counts their pages. A use takes about a microsecond for each run on its path, and some for each other
request that used a part of it last.
"""

from __future__ import annotations

from array import array
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hicache.errors import InvariantError

from .pages import ITEM_BYTES, Path

# Adjacent pages of a path in the order of the path: the distance of the first one, their number, and the number of
# requests that used them. The distance grows by one from page to page.
Known: TypeAlias = tuple[int, int, int]
_ROOT = 0
_SLOTS_MIN = 1 << 16
_ID_BYTES = 8


class StackDistances:
    """See the module's docstring. Runs are numbered; a split gives the head a new number. For one thread.

    Invariant, verified by `check`: the parent of a run is used whenever the run is, so its slot is at least as high;
    a run begins at the page where its parent ends; the Fenwick tree has the pages of each slot.
    """

    def __init__(self, uses_max: int = 1) -> None:
        """Counts the uses of a page up to `uses_max`."""
        self.pages = 0
        self._uses_max = uses_max
        # Runs by their parent's number (upper bits) and the id of their first item (lower 64 bits).
        self._children: dict[int, int] = {}
        # Columns of runs. The root has no pages.
        self._items: list[Path] = [b""]
        self._parents, self._ends, self._pages = array("i", [0]), array("q", [0]), array("q", [0])
        self._slots, self._uses = array("i", [0]), array("i", [0])
        # The largest distance at a use, of the first page of the run.
        self._farthest = array("q", [0])
        # A Fenwick tree: slots are 1 to `_capacity`.
        self._capacity = _SLOTS_MIN
        self._sums = [0] * (self._capacity + 1)
        self._next_slot = 1

    def use(self, path: Path) -> list[Known]:
        """Return the known prefix of a path as it is before this use, then move the whole path to the top."""
        if self._next_slot > self._capacity:
            self._compact()
        new_slot, parent, at, length = self._next_slot, _ROOT, 0, len(path)
        children, items, slots, pages_of = self._children, self._items, self._slots, self._pages
        uses, farthest = self._uses, self._farthest
        known: list[Known] = []
        # The slot that the last run had, the pages that leave it, and the distance after the last run.
        slot = leaving = distance = 0
        # The last entry of `known`, still open.
        first = pages = count = 0
        while at < length:
            run = children.get(parent << 64 | int.from_bytes(path[at : at + _ID_BYTES], "little"))
            if run is None:
                break
            end = at + len(items[run])
            if path[at:end] == items[run]:
                at = end
            else:
                run, at = self._match(run, path, at)
            if slots[run] != slot:
                if leaving:
                    self._add(slot, -leaving)
                slot, leaving = slots[run], 0
                distance = self.pages - self._sum(slot)
            if distance != first + pages or uses[run] != count:
                if pages:
                    known.append((first, pages, count))
                first, pages, count = distance, 0, uses[run]
            run_pages = pages_of[run]
            pages += run_pages
            leaving += run_pages
            farthest[run] = max(farthest[run], distance)
            if count < self._uses_max:
                uses[run] = count + 1
            distance += run_pages
            slots[run] = new_slot
            parent = run
        if pages:
            known.append((first, pages, count))
        if leaving:
            self._add(slot, -leaving)
        if at < length:
            parent = self._new_run(parent, path[at:], new_slot)
        self._next_slot += 1
        self._add(new_slot, self._ends[parent])
        return known

    def never_deeper(self, depth: int) -> int:
        """Return the number of pages that were always among the `depth` most recently used ones since their first
        use."""
        depths = np.maximum(self._depths(), np.array(self._farthest))
        return int(np.clip(depth - depths, 0, np.array(self._pages)).sum())

    def check(self) -> None:
        """Raises InvariantError if the invariant does not hold."""
        slots, parents, pages = np.array(self._slots), np.array(self._parents), np.array(self._pages)
        ends = np.array(self._ends)
        if ((slots[parents] < slots) & (parents != _ROOT)).any():
            raise InvariantError("stack distances: a run is younger than its parent")
        if (ends[parents[1:]] + pages[1:] != ends[1:]).any() or (pages[1:] <= 0).any():
            raise InvariantError("stack distances: a run does not begin where its parent ends")
        sums = np.bincount(slots[1:], pages[1:], self._capacity + 1).astype(np.int64).cumsum()
        if [self._sum(slot) for slot in range(self._next_slot)] != sums[: self._next_slot].tolist():
            raise InvariantError("stack distances: a slot has other pages than its runs")
        if self.pages != pages.sum():
            raise InvariantError(f"stack distances: {self.pages} pages counted, runs have {pages.sum()}")
        for key, run in self._children.items():
            id_ = key & (1 << 64) - 1
            if (key >> 64) != parents[run] or int.from_bytes(self._items[run][:_ID_BYTES], "little") != id_:
                raise InvariantError(f"stack distances: run {run} has a wrong key")
        if len(self._children) != len(pages) - 1:
            raise InvariantError("stack distances: a run is not in the tree")

    def _match(self, run: int, path: Path, at: int) -> tuple[int, int]:
        """Return the run of the pages that `path` from `at` on has in common with a run, and the place of the first
        item of the path with other pages. Splits the run after them.

        REQUIRES: the run has the first page there and is not equal to the items there.
        """
        items = self._items[run]
        ours = path[at : at + len(items)]
        differ = int.from_bytes(ours, "little") ^ int.from_bytes(items[: len(ours)], "little")
        # Places are those of items, in bytes. Without a difference, the path ends in the run.
        same = len(ours) if differ == 0 else ((differ & -differ).bit_length() - 1) // (8 * ITEM_BYTES) * ITEM_BYTES
        if differ == 0 or ours[same : same + _ID_BYTES] != items[same : same + _ID_BYTES]:
            return self._split(run, same, _end(items, same)), at + same
        # The same id with different ends: the shorter of both is common.
        end, own_end = _end(ours, same + ITEM_BYTES), _end(items, same + ITEM_BYTES)
        if end < own_end:
            return self._split(run, same, end), at + same + ITEM_BYTES
        if same + ITEM_BYTES == len(items):
            return run, at + same
        return self._split(run, same + ITEM_BYTES, own_end), at + same

    def _split(self, run: int, place: int, end: int) -> int:
        """Split a run after page `end` of its path, which is the end of the item before `place` or in the item at it.
        Return the head; the tail keeps the number."""
        items, parent = self._items[run], self._parents[run]
        tail = items[place:]
        is_whole = place > 0 and _end(items, place) == end
        part = b"" if is_whole else tail[:_ID_BYTES] + end.to_bytes(_ID_BYTES, "little")
        head = self._new_run(parent, items[:place] + part, self._slots[run])
        pages = self._pages[head]
        self.pages -= pages
        self._uses[head], self._farthest[head] = self._uses[run], self._farthest[run]
        self._farthest[run] += pages
        self._items[run], self._parents[run] = tail, head
        self._pages[run] -= pages
        self._children[head << 64 | int.from_bytes(tail[:_ID_BYTES], "little")] = run
        return head

    def _new_run(self, parent: int, items: Path, slot: int) -> int:
        """Add a run of pages after the run `parent`, used once. Return its number."""
        run, end = len(self._items), _end(items, len(items))
        self._children[parent << 64 | int.from_bytes(items[:_ID_BYTES], "little")] = run
        self._items.append(items)
        self._parents.append(parent)
        self._ends.append(end)
        self._pages.append(end - self._ends[parent])
        self._slots.append(slot)
        self._uses.append(1)
        self._farthest.append(0)
        self.pages += self._pages[run]
        return run

    def _sum(self, slot: int) -> int:
        """Return the pages of all slots up to this one."""
        sums, total = self._sums, 0
        while slot:
            total += sums[slot]
            slot &= slot - 1
        return total

    def _add(self, slot: int, pages: int) -> None:
        sums, capacity = self._sums, self._capacity
        while slot <= capacity:
            sums[slot] += pages
            slot += slot & -slot

    def _compact(self) -> None:
        """Number the slots that have pages from 1 on, and make room for at least as many new ones."""
        slots = np.array(self._slots[1:])
        live, dense = np.unique(slots, return_inverse=True)
        self._slots = array("i", [0, *(dense + 1).tolist()])
        self._capacity = max(_SLOTS_MIN, 2 * len(live))
        self._next_slot = len(live) + 1
        pages = np.bincount(dense + 1, np.array(self._pages[1:]), self._capacity + 1).astype(np.int64)
        ends = np.arange(self._capacity + 1)
        upto = pages.cumsum()
        self._sums = (upto - upto[ends - (ends & -ends)]).tolist()

    def _depths(self) -> npt.NDArray[np.int64]:
        """Return the distance of the first page of each run. That of the root is meaningless."""
        pages, starts = np.array(self._pages), np.array(self._ends) - np.array(self._pages)
        order = np.lexsort((starts, -np.array(self._slots)))
        # The root has no pages, so its place does not matter.
        depths = np.empty(len(pages), np.int64)
        depths[order] = pages[order].cumsum() - pages[order]
        return depths


def _end(items: Path, place: int) -> int:
    """Return the end of the item before a place."""
    return int.from_bytes(items[place - _ID_BYTES : place], "little")
