"""Who wants to know what happens in the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..events.types import Medium
from .node import Node

if TYPE_CHECKING:
    from .residency import Residency


class TreeObserver(Protocol):
    """Is told of each node that appears on a medium or leaves it, on the scheduler thread. Must not change the tree.

    Splits are not told: the same pages stay where they were.
    """

    def stored(self, medium: Medium, tree: Residency, node: Node) -> None:
        """`node` has just appeared on `medium`; its parent is there already."""

    def removed(self, medium: Medium, tree: Residency, node: Node) -> None:
        """`node` is about to leave `medium`; its children have left before."""
