"""Whom the tree tells what appeared on a tier and what leaves it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..events import Medium
from .node import Node

if TYPE_CHECKING:
    from .residency import Residency


class TreeObserver(Protocol):
    """Called on the scheduler thread, in the middle of a change of the tree: must change nothing and never raise.

    Splits are not reported: pages stay where they are.
    """

    def stored(self, medium: Medium, tree: Residency, node: Node) -> None:
        """All pages of `node` have appeared on `medium`."""

    def removed(self, medium: Medium, tree: Residency, node: Node) -> None:
        """All pages of `node` are about to leave `medium`."""
