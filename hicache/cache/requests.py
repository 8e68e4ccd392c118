"""The KV of one running request, and the checks of what an engine passes with it.

Every verb of a cache checks its arguments in its first lines, so that a call that is refused has changed nothing. What
a cache cannot check: the output tokens of a request, which it sees for the first time when it is told to share them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..arguments import WHOLE_MAX, instance, whole
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
    the prefix of its prompt came from, in tokens. `owner` is the cache that the request belongs to.
    """

    rid: str
    key: RadixKey
    pages: PageIds
    shared_pages: int
    tree: RadixTree
    last_node: Node
    owner: object = field(repr=False)
    priority: int = 0
    load: CopyOperation | None = None  # what brings its L2 part to L1
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    ended: bool = False

    @property
    def cached_tokens(self) -> int:
        """Leading prompt tokens whose KV need not be computed."""
        return self.device_hit_tokens + self.host_hit_tokens + self.storage_hit_tokens


def require_running(request: RequestKV, owner: object) -> None:
    """Raises InvalidInput unless `request` was begun by the cache `owner` and has not ended."""
    if instance("request", request, RequestKV).owner is not owner:
        raise InvalidInput(f"request {request.rid!r} belongs to another cache; pass it to the cache that began it")
    if request.ended:
        raise InvalidInput(f"request {request.rid!r} has ended; its pages belong to others now")


def require_beginning(rid: str, key: RadixKey, priority: int, load_pages_max: int | None) -> int:
    """Check the arguments of `begin_request` and return `priority` as an int. Raises InvalidInput."""
    instance("rid", rid, str)
    if instance("key", key, RadixKey).prompt_tokens < 1:
        raise InvalidInput("key: the prompt is empty; a request needs at least one token")
    if load_pages_max is not None:
        whole("load_pages_max", load_pages_max)
    return whole("priority", priority, -WHOLE_MAX)


def computed_pages(request: RequestKV, key: RadixKey, page_size: int) -> int:
    """Return how many whole pages `key` has, the tokens that `request` has computed so far.

    Raises InvalidInput for a key that does not continue what the request began with or has shared, and for one that
    needs more pages than the request has.
    """
    full = len(instance("key", key, RadixKey)) // page_size
    if full < request.shared_pages or not key.continues(request.key):
        raise InvalidInput(f"request {request.rid!r}: the key is not that of the request, or does not continue it")
    if full > len(request.pages):
        raise InvalidInput(f"request {request.rid!r}: {full} pages of tokens, but only {len(request.pages)} of KV")
    return full


def require_pages(pages: PageIds) -> PageIds:
    """Return `pages`. Raises InvalidInput unless they are page ids as `alloc_pages` hands them out."""
    if instance("pages", pages, np.ndarray).dtype != np.int32 or pages.ndim != 1:
        raise InvalidInput(f"pages: expected int32 of one dimension, got {pages.dtype} of {pages.ndim}")
    return pages
