"""Result types of the radix tree."""

from __future__ import annotations

import enum
from typing import NamedTuple

from ..types import PageIds, concat
from .node import Node


class Match(NamedTuple):
    """The cached prefix of a prompt. The part on L1 always comes first."""

    node: Node  # deepest matched node, a root if nothing matched
    device_node: Node  # deepest matched node on L1
    device_runs: list[PageIds]  # int32, the L1 pages of each node; read-only
    device_count: int  # pages on L1
    host_hit_pages: int  # pages after them that are on L2 only
    pages: int  # all matched pages

    @property
    def device_pages(self) -> PageIds:
        """The L1 pages as one read-only array. Each use joins the runs."""
        return concat(self.device_runs)


class Peek(NamedTuple):
    """The pages that a match would find: on L1, and after them on L2 only."""

    device_pages: int
    host_pages: int


class Inserted(NamedTuple):
    """Result of an insert. The first `present_pages` pages were on L1 already: they are duplicates."""

    node: Node
    present_pages: int


class EvictionChoice(enum.Enum):
    """The choice of an eviction for an L1 victim that has no copy on L2."""

    DROP = "drop"  # it leaves the tree
    WRITING_BACK = "writing_back"  # a copy to L2 was started; it leaves L1 when the copy has ended
    KEEP = "keep"  # it stays: it must not be lost and cannot be copied to L2 now
    LOSE = "lose"  # as KEEP, but it leaves the tree if too few other nodes can leave L1


class Evicted(NamedTuple):
    """Result of an eviction from L1. `pages` are free now; `writeback_pages` more become free when their copies to L2
    have ended. `host_pages` of L2 are free too: nodes below a victim and on L2 only are evicted with it. `lost_pages`
    counts the pages with `EvictionChoice.LOSE` among `pages`.
    """

    pages: PageIds
    writeback_pages: int
    host_pages: PageIds
    lost_pages: int
