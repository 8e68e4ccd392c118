"""Result types of the radix tree, and the protocol of its observers."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..events.types import Medium
from ..keys import PageChain
from ..types import PageIds
from .node import Node

if TYPE_CHECKING:
    from .tree import RadixTree


class Match(NamedTuple):
    """The cached prefix of a prompt. The part on L1 always comes first."""

    node: Node  # deepest matched node, a root if nothing matched
    device_node: Node  # deepest matched node on L1
    device_pages: PageIds  # int32, the L1 pages; read-only
    host_hit_pages: int  # pages after them that are on L2 only
    pages: int  # all matched pages


class Inserted(NamedTuple):
    """Result of an insert. The first `present_pages` given pages were on L1 already: they are duplicates."""

    node: Node
    present_pages: int


class Uses(NamedTuple):
    """How many requests have used the pages of a prompt, on any tier, also before their last eviction.

    The inserting request already counts for the first `known_pages` pages and is not counted there again. `steps` are
    pairs (end page, uses) with ascending ends and descending uses.
    """

    known_pages: int = 0
    steps: tuple[tuple[int, int], ...] = ()

    def of_run(self, start_page: int, end_page: int) -> tuple[int, int]:
        """Return the uses of page `start_page`, and the end of the pages with the same number of uses, at most
        `end_page`. Pages after the last step have one use.
        """
        for end, count in self.steps:
            if start_page < end:
                return count, min(end, end_page)
        return 1, end_page


# For a caller that counts no uses outside the tree: a new page has been used once.
NEW = Uses()


class Fate(enum.Enum):
    """What an eviction does with an L1 victim that has no copy on L2."""

    DROP = "drop"  # it leaves the tree
    WRITING_BACK = "writing_back"  # a copy to L2 was started; it leaves L1 when the copy has ended
    KEEP = "keep"  # it stays: it must not be lost and cannot be copied to L2 now
    LOSE = "lose"  # as KEEP, but it leaves the tree if too few other nodes can leave L1


class Evicted(NamedTuple):
    """Result of an eviction from L1. `pages` are free now; `writeback_pages` more become free when their copies to L2
    have ended. `host_pages` of L2 are free too: nodes below a victim and on L2 only are evicted with it. `lost_pages`
    counts the pages with `Fate.LOSE` among `pages`.
    """

    pages: PageIds
    writeback_pages: int
    host_pages: PageIds
    lost_pages: int


class TreeObserver(Protocol):
    """Observes nodes that appear on a medium or leave it. Called on the scheduler thread; must not change the tree.

    A split is not reported, because no page moves.
    """

    def stored(self, medium: Medium, tree: RadixTree, node: Node) -> None:
        """`node` has just appeared on `medium`. Its parent is in the tree, and on L1 if `medium` is L1."""

    def grown(self, tree: RadixTree, node: Node, pages: int, prior: bytes | PageChain) -> None:
        """The last `pages` pages of `node` have just appeared on L1, where the node already was. Their page keys are
        chained from `prior`."""

    def removed(self, medium: Medium, tree: RadixTree, node: Node) -> None:
        """`node` is about to leave `medium`, or storage has lost it. Children leave L1 before their parent."""

    def lost(self, keys: list[bytes]) -> None:
        """Storage lacks the pages `keys`. Each has left the tree or is not the last page of its run."""

    def storage_replaced(self) -> None:
        """All pages stored before are out of reach, including pages that have left the tree."""
