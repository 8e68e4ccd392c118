"""L1: the owners of its pages, their copies to L2, and the loads from L2.

Backup, from L1 to L2. A node that is being copied is locked.

    write_through            a run is copied to L2 as soon as it is computed
    write_through_selective  as soon as `selective_hits` requests have used it, on any tier (`uses`)
    write_back               when L1 evicts it, in two phases: the copy starts, and after its end the run is evicted
                             from L1. Ancestors that storage needs before it are also copied.

Under each policy a pinned run is copied at once, and pages on L2 are then stored (`host_tier`). L2 may evict the copy
of a run that is still on L1. The run is copied again only if storage lacks it and would accept it. If the policy wants
a run on L2 and storage lacks it, it is written back when L1 evicts it. So is a run with descendants that are only on
L2.

Load back, from L2 to L1, is for a request that begins. Pages that fit and pay are loaded, all loads of a step in one
copy. The pages count as on L1 once the load is submitted, so that requests of the same step share them; a forward that
uses them waits for the copy, layer by layer. A request that ends before the copy starts cancels its load.

Called by the scheduler thread alone; no lock.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .. import tracing
from ..arguments import whole
from ..controller import Backup, HiCacheController, Load
from ..errors import InvariantError
from ..ghosts import Kind, Reason
from ..radix import CUT_PAGES_MIN, EvictionChoice, Match, Node, RadixTree, may_leave_device
from ..tiers import EnginePages, PagePool
from ..types import NO_PAGES, PageIds
from .break_even import BreakEven, Route
from .host_tier import HostTier
from .statistics import CacheCounters
from .trailing import TrailingTier
from .trees import Trees, require_conservation

# A prompt that is computed in chunks is copied to L2 in runs of this many tokens: seconds of computing, milliseconds of
# copying.
GATHER_TOKENS = 32_768
# The largest share of L2 for one such run.
GATHER_SHARE = 1 / 16
# Pages that are assigned in an array at once: for larger assignments numpy releases the interpreter's lock, and the
# scheduler then waits for a worker.
_WRITTEN_PAGES = 256


@dataclass(frozen=True, slots=True)
class Eviction:
    """The result of an eviction from L1: pages that are free now, pages that become free once they are copied to L2,
    and requested pages that cannot be freed now.
    """

    freed_pages: int
    writeback_pages: int
    short_pages: int


class _Run(NamedTuple):
    """The run of a backup: it ends at `node`, and may have been split into several nodes since."""

    tree: RadixTree
    node: Node
    evicts: bool  # evict the run from L1 after the copy


@dataclass(eq=False, repr=False)
class DeviceTier:
    """See the module's docstring. A `PageSource` for token allocators: it evicts to make room.

    Invariant: used pages of the pool = pages held by nodes + `request_pages`. `_backups` and `_loads` have the copies
    that are not acknowledged, a load with the last node of its run and its span. `writeback_pages` are in flight to L2
    for their eviction.
    """

    allocator: PagePool
    _trees: Trees
    _host: HostTier
    _controller: HiCacheController
    _counters: CacheCounters
    _break_even: BreakEven
    _trailing: TrailingTier
    _release_arrived: Callable[[], bool]

    def __post_init__(self) -> None:
        self.request_pages = self.writeback_pages = 0
        self._config = self._controller.config
        self._backups: dict[Backup, _Run] = {}
        self._loads: dict[Load, tuple[RadixTree, Node, tracing.Span | None]] = {}
        self._halted = False
        self.unloaded: Kind = Reason.NO_ROOM, ""  # why the last `load_back` has left pages on L2, if it has
        self._is_owned = isinstance(self.allocator, EnginePages)
        # By page: the number of the latest fence when its last reader ended, or when it was computed.
        self._read_until = np.zeros(self.first + self.capacity, dtype=np.int64)

    def pages_in_backups(self) -> list[PageIds]:
        """Return the L1 pages of each copy to L2 in flight."""
        return [backup.device_pages for backup in self._backups]

    @property
    def copies_in_flight(self) -> tuple[int, int]:
        """The copies to L2 and to L1 in flight; their nodes are locked."""
        return len(self._backups), len(self._loads)

    # Pages

    def make_room(self, pages: int) -> bool:
        """Evict until `pages` pages are free. Return False if they are not: nothing was evicted because it would not
        have been enough, or the evicted pages are in flight to L2, or pinned pages did not fit there.

        Pages that have arrived for requests that have not begun hold their prefixes. If these do not fit on L2, they
        keep the room on L1 that the requests themselves may need, so the holds end.

        Inside a free group nothing is evicted: pages freed there become free too late for this call.
        """
        if self._has_room(pages):
            return True
        is_stuck = self.may_have_room(pages) and not (self.writeback_pages or self.allocator.group_open)
        if is_stuck and self._release_arrived() and self._has_room(pages):
            return True
        self._counters.skipped["no_device_room"] += 1
        return False

    def _has_room(self, pages: int) -> bool:
        free, coming = self.allocator.free_pages, self.writeback_pages
        if pages <= free:
            return True
        evictable = 0 if self.allocator.group_open else self._trees.current.device_evictable_pages
        if free + coming < pages <= free + coming + evictable:
            self.evict(pages - free - coming)
        return self.allocator.free_pages >= pages

    def may_have_room(self, pages: int) -> bool:
        """Return True if `make_room` could succeed now or after the write-backs in flight. Changes nothing."""
        return pages <= self.free_pages + self.writeback_pages

    def evict(self, pages: int) -> Eviction:
        """Evict `pages` pages from L1, or as many as possible."""
        evicted = self._trees.current.evict_device(pages, self.write_back)
        if evicted.writeback_pages:
            self._controller.launch_backups()  # at once, so that there is room soon
        self._free_evicted([evicted.pages])
        self._host.free_evicted(evicted.host_pages)
        self._counters.skipped["write_back_dropped"] += evicted.lost_pages
        freed = len(evicted.pages)
        return Eviction(freed, evicted.writeback_pages, max(0, pages - freed - evicted.writeback_pages))

    def alloc(self, count: int) -> PageIds | None:
        """Return `count` pages for a request, evicting as needed; None if there is no room now."""
        count = whole("count", count)
        pages = self.allocator.alloc(count) if self.make_room(count) else None
        if pages is not None:
            self.request_pages += count
        return pages

    def free(self, pages: PageIds) -> None:
        """Take pages of a request back."""
        self.allocator.free(pages)
        self.read(pages)
        self.request_pages -= len(pages)

    def read(self, pages: PageIds) -> None:
        """Record that forwards up to the latest fence may read or write `pages`; a load into them waits for it."""
        if latest := self._controller.fences.latest:
            for first in range(0, len(pages), _WRITTEN_PAGES):
                self._read_until[pages[first : first + _WRITTEN_PAGES].astype(np.intp)] = latest

    def free_group(self) -> AbstractContextManager[None]:
        """Delay frees until the end of the block."""
        return self.allocator.free_group()

    @property
    def first(self) -> int:
        """The smallest page id."""
        return self.allocator.first

    @property
    def capacity(self) -> int:
        """Pages of L1."""
        return self.allocator.capacity

    @property
    def free_pages(self) -> int:
        """Pages that are free or may be evicted now."""
        return self.allocator.free_pages + self._trees.current.device_evictable_pages

    def check(self) -> None:
        """Raises InvariantError if the invariant does not hold."""
        nodes = sum(tree.device_pages_total for tree in self._trees.all())
        require_conservation("L1", self.allocator, nodes, self.request_pages)

    def _free_evicted(self, runs: list[PageIds]) -> None:
        for pages in runs:
            self.allocator.free(pages)
            self._counters.evicted_pages["device"] += len(pages)

    # From L1 to L2

    def gathers(self, node: Node) -> bool:
        """Return True if the pages of a request up to `node` should wait for more of its prompt, so that `used` starts
        one copy for both: a short copy costs the scheduler as much as a long one.
        """
        if self._trailing.pools:
            return False  # the copy needs the slots of its pages, which the request holds no longer than necessary
        tree = self._trees.current
        missing = min(GATHER_TOKENS // tree.page_size, tree.run_pages_max, int(GATHER_SHARE * self._host.host.pages))
        while missing > 0 and node.parent is not None:
            if node.host is not None or node.backup_pending or node.copied:
                break
            missing -= tree.pages(node)
            node = node.parent
        return missing > 0

    def used(self, node: Node) -> None:
        """Start the copies to L2 and the stores that the policy wants after a request has used the path to `node`."""
        if self._halted:
            return
        self._host.store_path(node)
        backups: list[Node] = []
        while node.parent is not None:
            if node.host is None and not node.backup_pending and self._wants(node):
                again = node.copied and not node.pin_ref
                if not again or self._host.may_store(node):
                    backups.append(node)
            node = node.parent
        while backups and self._back_up([part := backups.pop()]):
            pass
        _not_copied(backups, part.loss if backups else "")  # storage cannot accept them without it

    def write_back(self, victim: Node) -> EvictionChoice:
        """Return the choice for a victim that is not on L2: it is copied there first if it would be lost otherwise."""
        held = victim.host_ref > 0  # by a pin, or an operation below it
        lost = not victim.stored and self._wants(victim)
        if not self._halted and (held or lost or victim.children or self._config.write_policy == "write_back"):
            path = [victim, *self._lacking_above(victim)]
            if self._back_up(path[::-1], evicts=True) or (path[1:] and self._back_up([victim], evicts=True)):
                return EvictionChoice.WRITING_BACK
            return EvictionChoice.KEEP if held else EvictionChoice.LOSE
        return EvictionChoice.KEEP if held else EvictionChoice.DROP

    def demote(self, nodes: list[Node]) -> tuple[int, int]:
        """Let nodes of a path, deepest first, leave L1 as far as nothing uses them. Return the pages that left, and
        those that leave once they are copied to L2."""
        tree, freed = self._trees.current, list[PageIds]()
        coming = 0
        for node in nodes:
            if not may_leave_device(node):
                break
            if node.host is None:
                coming = tree.pages(node) * (self.write_back(node) is EvictionChoice.WRITING_BACK)
                break
            freed.append(tree.leave_device(node))
        self._free_evicted(freed)
        return sum(map(len, freed)), coming

    def _lacking_above(self, node: Node) -> list[Node]:
        """Return the ancestors of `node` that are not on L2 and that storage needs before it; deepest first."""
        lacking: list[Node] = []
        while (node := node.parent or node).parent is not None:
            if node.host is None and not node.backup_pending and self._host.may_store(node):
                lacking.append(node)
        return lacking

    def save(self, node: Node) -> bool:
        """Start a copy of a run that is only on L1 to L2, from where it is stored. Return False if there is no room for
        it now, or storage cannot have its parent. For `close`, when no prefetch is in flight."""
        pages, parent = self._trees.current.pages(node), node.parent
        has_room = self._controller.has_store_room(pages) and self._host.takes_save(pages)
        if node.device is None or parent is None or not has_room:
            return False
        follows = parent.parent is None or parent.stored or parent.store_pending or parent.backup_pending
        fits = self._host.reserved_pages + pages <= self._config.write_pages_max
        return follows and fits and self._back_up([node])

    def halt(self) -> None:
        """Stop all backups and stores: the content of L1 cannot be trusted."""
        self._halted = True

    def written(self, backup: Backup) -> None:
        """Handle the end of a copy to L2: add it to the tree, submit it to storage, and free a victim's L1 pages."""
        self._free_evicted(self._show(backup))

    def _show(self, backup: Backup) -> list[PageIds]:
        if self._halted:
            self.failed(backup)
            return []
        tree, node, evicts = self._backups.pop(backup)
        self._trailing.copied(backup.device_pages)
        pages = len(backup.host_pages)
        self._host.commit(pages, tree.accept_backup(node, backup.host_pages))
        parts = list(tree.span(node, pages))
        for part in reversed(parts if tree is self._trees.current else []):
            self._host.store(part)
        tree.unlock(node)
        if not evicts:
            return []
        self.writeback_pages -= pages
        # A request may have locked the run since; then it stays on L1.
        return [tree.leave_device(part) for part in parts if may_leave_device(part) and part.host is not None]

    def failed(self, backup: Backup) -> None:
        """Handle a failed copy to L2. Its host pages stay reserved: parts of the copy may still be in flight."""
        tree, node, evicts = self._backups.pop(backup)
        self._trailing.copied(backup.device_pages, on_host=False)
        for part in tree.span(node, len(backup.host_pages)):
            part.backup_pending = False
        tree.unlock(node)
        if evicts:
            self.writeback_pages -= len(backup.host_pages)

    def _wants(self, node: Node) -> bool:
        policy = self._config.write_policy
        if policy == "write_through" or node.pin_ref:
            return True
        return policy == "write_through_selective" and node.hit_count >= self._config.selective_hits

    def _back_up(self, path: list[Node], *, evicts: bool = False) -> bool:
        """Start copies of adjacent nodes, root first, all or none. `evicts` applies to the last of them."""
        tree = self._trees.current
        pages = sum(map(tree.pages, path))
        if not all(self._trailing.may_copy(node.device) for node in path if node.device is not None):
            self._counters.skipped["backup_without_slots"] += 1
            return False
        if not self._controller.takes_backup(pages):
            return _not_copied(path, "queue")
        host_pages = self._host.reserve(pages)
        if host_pages is None:
            self._counters.skipped["backup_no_host_room"] += 1
            return _not_copied(path, "no_room")
        done = 0
        for node in path:
            if node.device is None:
                raise InvariantError(f"backup of a node that is not on L1: {node!r}")
            count = len(node.device)
            run = _Run(tree, node, evicts and node is path[-1])
            node.backup_pending = True
            self._trailing.copying(node.device)
            tree.lock(node)
            self._backups[self._controller.submit_backup(node.device, host_pages[done : done + count])] = run
            done += count
            if run.evicts:
                self.writeback_pages += count
        return True

    # From L2 to L1

    def load_back(
        self, tree: RadixTree, match: Match, context: tracing.Context | None = None
    ) -> tuple[Node, PageIds, Load | None]:
        """Load the L2 part of `match`, or as much as fits. Return the last node that is on L1 now, the new L1 pages in
        order, and the load (None without pages). `context` is the parent of its span.

        REQUIRES: the caller has locked `match.node` and made room for all of it.
        """
        none = match.device_node, NO_PAGES, None
        self.unloaded = Reason.NO_ROOM, ""
        if match.host_hit_pages == 0:
            return none
        threshold_tokens = self._config.load_back_threshold_tokens
        if match.host_hit_pages * tree.page_size < threshold_tokens:
            self._counters.skipped["load_too_short"] += 1
            self.unloaded = Reason.NOT_WORTH, ""
            return none
        nodes, cut, rest = self._fitting(tree, match)
        count = sum(map(tree.pages, nodes)) + rest
        if count == 0 or count * tree.page_size < threshold_tokens:
            return none
        if not self._break_even.decide(Route.LOAD, count * tree.page_size, count).go:
            self._counters.skipped["load_does_not_pay"] += 1
            self.unloaded = Reason.NOT_WORTH, ""
            return none
        if cut is not None:
            nodes.append(tree.split(cut, rest))
        load = self._load(tree, nodes, context)
        return nodes[-1], load.device_pages, load

    def promote(self, tree: RadixTree, node: Node, context: tracing.Context | None = None) -> Load | None:
        """Load those pages of the path to `node` that are only on L2, for a request that still waits; at most as many
        as the load queue accepts. Starts at once. Return None if there is no room now. REQUIRES: `node` is held.
        """
        path: list[Node] = []
        above = node
        while above.device is None and above.parent is not None:
            path.append(above)
            above = above.parent
        nodes: list[Node] = []
        room = self._controller.load_room
        while path and tree.pages(path[-1]) <= room:
            room -= tree.pages(path[-1])
            nodes.append(path.pop())
        if self._halted or not nodes:
            return None
        tree.lock(above)  # otherwise it could be evicted to make room for the pages below it
        load = self._load(tree, nodes, context) if self._has_room(sum(map(tree.pages, nodes))) else None
        tree.unlock(above)
        if load is not None:
            self._controller.launch_loads()
        return load

    def load_path(self, tree: RadixTree, node: Node, context: tracing.Context | None = None) -> Load | None:
        """Load all pages of the path to `node` that are only on L2; None if the load queue or L1 has no room for all.

        REQUIRES: `node` is held, and the nodes on L1 above it are locked.
        """
        nodes: list[Node] = []
        while node.device is None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        pages = sum(map(tree.pages, nodes))
        if not nodes or pages > min(self._controller.load_room, self.allocator.free_pages):
            return None
        return self._load(tree, nodes[::-1], context)

    def _load(self, tree: RadixTree, nodes: list[Node], context: tracing.Context | None) -> Load:
        """Load adjacent nodes, root first. REQUIRES: there is room on L1, and they stay on L2 until this returns."""
        host_pages = np.concatenate([node.host for node in nodes if node.host is not None])
        pages = self.allocator.alloc(len(host_pages))
        if pages is None:
            raise InvariantError("L1: no pages are free for a load after room was made for it")
        tree.hold_host(nodes[-1])
        done = 0
        for node in nodes:
            run = tree.pages(node)
            tree.set_device(node, pages[done : done + run].copy())
            node.load_pending = True
            done += run
        tree.lock(nodes[-1])
        if self._is_owned:
            self.read(pages)  # the engine's forwards may have used them until now
        after = int(self._read_until[pages.astype(np.intp)].max())
        load = self._controller.submit_load(host_pages, pages, after)
        self._loads[load] = tree, nodes[-1], tracing.begin("load", context, pages=len(pages))
        return load

    def loaded(self, load: Load, outcome: str) -> None:
        """Handle the end of a load, successful or not; `outcome` is for its span."""
        tree, node, span = self._loads.pop(load)
        tracing.end(span, outcome=outcome)
        for part in tree.span(node, len(load.host_pages)):
            part.load_pending = False
        tree.release_host(node)
        tree.unlock(node)

    def cancel_load(self, load: Load) -> None:
        """Cancel a load if it has not started and other requests do not use it; free its pages on L1.

        REQUIRES: the caller's own lock is released.
        """
        if load not in self._loads:
            return
        tree, node, _ = self._loads[load]
        parts = list(tree.span(node, len(load.host_pages)))
        alone = all(part.lock_ref == 1 and part.device_children == (part is not parts[0]) for part in parts)
        if not (alone and self._controller.cancel_load(load)):
            return
        self.loaded(load, "cancelled")
        for part in parts:
            self.allocator.free(tree.leave_device(part))

    def _fitting(self, tree: RadixTree, match: Match) -> tuple[list[Node], Node | None, int]:
        """Return the leading nodes on L2 that fit, and the next node if a part of it fits, with the part's size."""
        room = min(self._controller.load_room, self.allocator.free_pages)
        if room < match.host_hit_pages:
            self._controller.refused["load"] += 1
        nodes: list[Node] = []
        for node in reversed(list(tree.span(match.node, match.host_hit_pages))):
            if not self._trailing.may_load(node):
                self._counters.skipped["load_not_verified"] += 1
                self.unloaded = Reason.LATE, "verification"
                break
            if tree.pages(node) > room:
                return (nodes, node, room) if room >= CUT_PAGES_MIN else (nodes, None, 0)
            nodes.append(node)
            room -= tree.pages(node)
        return nodes, None, 0


def _not_copied(path: list[Node], loss: str) -> bool:
    """Note why nodes are not copied to L2, and return False."""
    for node in path:
        node.loss = loss
    return False
