"""The KV of one running request, and the checks of what an engine passes with it.

Every verb of a cache checks its arguments in its first lines, so that a call that is refused has changed nothing. What
a cache cannot check: the output tokens of a request, which it sees for the first time when it is told to share them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..arguments import WHOLE_MAX, instance, whole
from ..controller import Load
from ..errors import CapacityError, InvalidInput, InvariantError
from ..keys import RadixKey
from ..radix import Node, RadixTree
from ..tiers import KVPool
from ..types import NO_PAGES, PageIds


@dataclass(slots=True, eq=False)
class RequestKV:
    """What a request holds of L1, and of `tree`, the tree that was in use when it began.

    `pages` are all its L1 pages in order. The first `shared_pages` belong to the tree and are locked by this request;
    the others are its own. `key` is its prompt, and later what it has shared if that is more. The hit counts say where
    the prefix of its prompt came from, in tokens. The cache that began it knows this object: a copy is not a request.
    """

    rid: str
    key: RadixKey
    pages: PageIds
    shared_pages: int
    tree: RadixTree
    last_node: Node
    priority: int = 0
    load: Load | None = None  # what brings its L2 part to L1
    gathers: bool = False  # what it has shared last waits for more of its prompt, to be copied to L2 with that
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    storage_hit_tokens: int = 0
    ended: bool = False

    def __repr__(self) -> str:
        state = ", ended" if self.ended else ""
        return (
            f"RequestKV({self.rid!r}, {self.key.prompt_tokens} tokens, {self.cached_tokens} cached, "
            f"{len(self.pages)} pages, {self.shared_pages} shared{state})"
        )

    @property
    def cached_tokens(self) -> int:
        """Leading prompt tokens whose KV need not be computed."""
        return self.device_hit_tokens + self.host_hit_tokens + self.storage_hit_tokens


class RunningRequests:
    """The running requests of one cache. It knows them by identity, whatever their fields say.

    Invariant, verified by `check()`: each page that is a request's own has one owner, and the shared pages of a request
    are those of its tree, locked.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, RequestKV] = {}  # an object that is held here keeps its id

    def add(self, request: RequestKV) -> None:
        """Take in a request that has begun."""
        self._by_id[id(request)] = request

    def require(self, request: RequestKV) -> None:
        """Raises InvalidInput unless `request` is running here."""
        if id(request) in self._by_id:
            return
        if instance("request", request, RequestKV).ended:
            raise InvalidInput(f"request {request.rid!r} has ended; its pages belong to others now")
        raise InvalidInput(
            f"request {request.rid!r} belongs to another cache or is a copy; "
            "pass the object that `begin_request` returned to the cache that returned it"
        )

    def end(self, request: RequestKV) -> None:
        """Forget a request, whose pages the caller has taken."""
        del self._by_id[id(request)]
        request.pages, request.shared_pages, request.ended = NO_PAGES, 0, True

    def hand_over(self, request: RequestKV, *, key: RadixKey, pages: PageIds) -> RequestKV:
        """End `request` and return its successor: an object that the engine does not have, with the same lock."""
        successor = replace(request, key=key, pages=pages)
        self.end(request)
        self.add(successor)
        return successor

    def check(self) -> int:
        """Return how many L1 pages the requests own. Raises InvariantError if the invariant does not hold."""
        for request in self._by_id.values():
            locked, shared = request.last_node.lock_ref > 0, request.pages[: request.shared_pages]
            if len(shared) and not (locked and np.array_equal(shared, request.tree.device_pages(request.last_node))):
                raise InvariantError(f"request {request.rid!r}: its shared pages are not those of its tree, locked")
        own = np.concatenate([NO_PAGES, *(request.pages[request.shared_pages :] for request in self._by_id.values())])
        if len(np.unique(own)) != len(own):
            raise InvariantError("L1: two requests own the same page")
        return len(own)


def require_beginning(rid: str, key: RadixKey, priority: int, device: KVPool) -> tuple[int, int]:
    """Check the arguments of `begin_request`; return the pages of the prompt, and `priority` as an int.

    Raises InvalidInput, and CapacityError for a prompt that is larger than L1.
    """
    instance("rid", rid, str)
    if instance("key", key, RadixKey).prompt_tokens < 1:
        raise InvalidInput("key: the prompt is empty; a request needs at least one token")
    priority = whole("priority", priority, -WHOLE_MAX)
    return _pages_of(f"request {rid!r}: the prompt of", key.prompt_tokens, device), priority


def missing_pages(request: RequestKV, total_tokens: int, device: KVPool) -> int:
    """Return how many pages `request` lacks for KV of `total_tokens` tokens; 0 or less if it lacks none.

    Raises InvalidInput for fewer tokens than the request began with or has shared since, whose KV it holds;
    CapacityError for more than L1 holds.
    """
    total_tokens, held = whole("total_tokens", total_tokens), request.key.prompt_tokens
    if total_tokens < held:
        raise InvalidInput(
            f"total_tokens: {total_tokens} is less than the {held} tokens that request {request.rid!r} holds KV of; "
            "pass the tokens in all, not those to add"
        )
    return _pages_of(f"request {request.rid!r}:", total_tokens, device) - len(request.pages)


def _pages_of(name: str, tokens: int, device: KVPool) -> int:
    pages = -(-tokens // device.geometry.page_size)
    if pages > device.pages:
        raise CapacityError(
            f"{name} {tokens} tokens needs {pages} pages of KV, L1 has {device.pages}; "
            "refuse the request, or raise device.size or device.tokens"
        )
    return pages


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
