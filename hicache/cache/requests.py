"""The KV of one running request."""

from __future__ import annotations

from dataclasses import dataclass

from ..controller import CopyOperation
from ..errors import InvalidInput
from ..keys import RadixKey
from ..radix import Node, RadixTree
from ..types import PageIds


@dataclass(slots=True, eq=False)
class RequestKV:
    """What a request holds of L1, and of `tree`, the tree that was in use when it began.

    `pages` are all its L1 pages in order. The first `shared_pages` belong to the tree and are locked by this request;
    the others are its own. `key` is its prompt, and later what it has shared if that is more. The hit counts say where
    the prefix of its prompt came from, in tokens.
    """

    rid: str
    key: RadixKey
    pages: PageIds
    shared_pages: int
    tree: RadixTree
    last_node: Node
    priority: int = 0
    load: CopyOperation | None = None  # what brings its L2 part to L1
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    ended: bool = False

    def require_running(self) -> None:
        """Raises InvalidInput once it has ended."""
        if self.ended:
            raise InvalidInput(f"request {self.rid!r} has ended; its pages belong to others now")

    @property
    def cached_tokens(self) -> int:
        """Leading prompt tokens whose KV need not be computed."""
        return self.device_hit_tokens + self.host_hit_tokens + self.storage_hit_tokens
