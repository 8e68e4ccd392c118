"""What the radix tree answers, and whom it tells."""

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
    """The cached prefix of a prompt. Page counts are from the start of the prompt; the L1 part always comes first."""

    node: Node  # deepest matched node, a root if nothing matched
    device_node: Node  # deepest matched node on L1
    device_pages: PageIds  # int32, the L1 pages; not to be written to
    host_hit_pages: int  # pages behind them that are on L2 only
    pages: int  # all matched pages


class Inserted(NamedTuple):
    """What an insert did. The first `present_pages` pages that were given were on L1 already: they are duplicates."""

    node: Node
    present_pages: int


class Uses(NamedTuple):
    """How many requests have used the pages of a prompt, on whichever tier they were, or before they left all of them.

    The request that inserts them counted the first `known_pages` of them before, and counts no more for those.
    `steps` are (end page, uses), the ends ascending and the uses descending.
    """

    known_pages: int = 0
    steps: tuple[tuple[int, int], ...] = ()

    def of_run(self, start_page: int, end_page: int) -> tuple[int, int]:
        """Return how many requests have used page `start_page`, and the end of the pages that as many have used, at
        most `end_page`. One has used what is behind the last step.
        """
        for end, count in self.steps:
            if start_page < end:
                return count, min(end, end_page)
        return 1, end_page


# For whoever keeps no count beside the tree: a page that is new there has been used once.
NEW = Uses()


class Fate(enum.Enum):
    """What becomes of an L1 victim that has no copy on L2."""

    DROP = "drop"  # it leaves the tree
    WRITING_BACK = "writing_back"  # a copy to L2 was started; it leaves L1 when that has arrived
    KEEP = "keep"  # it must not be lost and cannot be copied to L2 now
    LOSE = "lose"  # as KEEP, but it leaves the tree if too few others can leave L1


class Evicted(NamedTuple):
    """`pages` are free now, `writeback_pages` more will be once their copies to L2 have arrived. `host_pages` of L2 are
    free too: what was below a victim on L2 only left with it. `lost_pages` of `pages` had `Fate.LOSE`.
    """

    pages: PageIds
    writeback_pages: int
    host_pages: PageIds
    lost_pages: int


class TreeObserver(Protocol):
    """Is told of each node that appears on a medium or leaves it, on the scheduler thread. Must not change the tree.

    Splits are not told: the same pages stay where they were.
    """

    def stored(self, medium: Medium, tree: RadixTree, node: Node) -> None:
        """`node` has just appeared on `medium`; its parent is in the tree, and on L1 if `medium` is."""

    def grown(self, tree: RadixTree, node: Node, pages: int, prior: bytes | PageChain) -> None:
        """The last `pages` pages of `node`, which was on L1 before, have just appeared there. Their page keys are
        chained from `prior`."""

    def removed(self, medium: Medium, tree: RadixTree, node: Node) -> None:
        """`node` is about to leave `medium`, or storage has lost it; on L1 its children have left before."""

    def lost(self, keys: list[bytes]) -> None:
        """Storage lacks the pages `keys`, whose runs have left the tree, or which are not the last of their run."""

    def storage_replaced(self) -> None:
        """What was stored before is out of reach, also what is not in the tree any more."""
