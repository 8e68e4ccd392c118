"""The KV of one running request, and the checks of an engine's arguments.

Every method of a cache checks its arguments first, so a rejected call changes nothing. A cache cannot check the output
tokens of a request, because it gets them only in the call that shares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from ..arguments import WHOLE_MAX, instance, whole
from ..controller import Load
from ..errors import CapacityError, InvalidInput, InvariantError
from ..keys import RadixKey
from ..radix import Node, RadixTree
from ..tiers import KVPool
from ..types import NO_PAGES, PageIds
from .explain import PromptTokens


@dataclass(slots=True, eq=False)
class RequestKV:
    """The pages of a request on L1, and its lock on `tree`, the current tree when it began.

    `pages` are all its L1 pages in order. The first `shared_pages` belong to the tree and are locked by this request;
    the remaining ones are its own. `key` is its prompt, and later the shared tokens if these are more. `account`
    has the sources of its prompt tokens. The cache identifies the object: a copy is not a request.
    """

    rid: str
    key: RadixKey
    pages: PageIds
    shared_pages: int
    tree: RadixTree
    last_node: Node
    priority: int = 0
    load: Load | None = None  # the load of its L2 part
    gathers: bool = False  # its last shared pages wait for more of its prompt, to be copied to L2 together
    account: PromptTokens | None = None  # its sources, once it has begun
    ended: bool = False
    trailing: list[tuple[int, int]] = field(default_factory=list)  # pages whose slots it holds in each trailing pool

    def __repr__(self) -> str:
        state = ", ended" if self.ended else ""
        return (
            f"RequestKV({self.rid!r}, {self.key.prompt_tokens} tokens, {self.cached_tokens} cached, "
            f"{len(self.pages)} pages, {self.shared_pages} shared{state})"
        )

    @property
    def device_hit_tokens(self) -> int:
        """Prompt tokens from L1."""
        return 0 if self.account is None else self.account.device

    @property
    def host_hit_tokens(self) -> int:
        """Prompt tokens from L2."""
        return 0 if self.account is None else self.account.host

    @property
    def storage_hit_tokens(self) -> int:
        """Prompt tokens from storage."""
        return 0 if self.account is None else self.account.storage

    @property
    def cached_tokens(self) -> int:
        """Leading prompt tokens whose KV need not be computed."""
        return 0 if self.account is None else self.account.cached


class RunningRequests:
    """The running requests of one cache, identified as objects and not by their fields.

    Two requests that have begun have different ids; the pages that a session keeps have the id of their last turn.
    Invariant, verified by `check()`: each page outside the tree has one owner, and the shared pages of a request are
    those of its tree, locked.
    """

    def __init__(self, ended: Callable[[str], None] = lambda rid: None) -> None:
        """`ended` is called with the id of each request that ends, but not again when a session releases its pages."""
        self._ended = ended
        self._by_id: dict[int, RequestKV] = {}  # an object that is referenced here keeps its id
        self._begun: dict[str, RequestKV] = {}

    def __iter__(self) -> Iterator[RequestKV]:
        return iter(self._by_id.values())

    def __bool__(self) -> bool:
        """True if a request has begun and not ended."""
        return bool(self._begun)

    def require_new(self, rid: str) -> None:
        """Raises InvalidInput if a request with this id has begun and not ended."""
        if rid in self._begun:
            raise InvalidInput(
                f"request {rid!r} has already begun: end it with cache_finished_req first, or give each request its "
                "own id"
            )

    def add(self, request: RequestKV) -> None:
        """Add a request that has begun. REQUIRES: `require_new` has passed."""
        self._by_id[id(request)] = self._begun[request.rid] = request

    def require(self, request: RequestKV) -> None:
        """Raises InvalidInput unless `request` is running here."""
        if id(request) in self._by_id:
            return
        if instance("request", request, RequestKV).ended:
            raise InvalidInput(f"request {request.rid!r} has ended; its pages now belong to other requests")
        raise InvalidInput(
            f"request {request.rid!r} belongs to another cache or is a copy; "
            "pass the object that `begin_request` returned to the cache that returned it"
        )

    def end(self, request: RequestKV) -> None:
        """Forget a request; the caller has taken its pages."""
        del self._by_id[id(request)]
        if self._begun.get(request.rid) is request:
            del self._begun[request.rid]
            self._ended(request.rid)
        request.pages, request.shared_pages, request.ended = NO_PAGES, 0, True

    def hand_over(self, request: RequestKV, *, key: RadixKey, pages: PageIds) -> RequestKV:
        """End `request` and return its successor with the same lock: a new object, which the engine does not have."""
        successor = replace(request, key=key, pages=pages)
        self.end(request)
        self._by_id[id(successor)] = successor
        return successor

    def check(self) -> int:
        """Return how many L1 pages the requests own. Raises InvariantError if the invariant does not hold."""
        for request in self._by_id.values():
            locked, shared = request.last_node.lock_ref > 0, request.pages[: request.shared_pages]
            if len(shared) and not (locked and np.array_equal(shared, request.tree.device_pages(request.last_node))):
                raise InvariantError(f"request {request.rid!r}: its shared pages are not locked pages of its tree")
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
            "pass the total, not the tokens to add"
        )
    return _pages_of(f"request {request.rid!r}:", total_tokens, device) - len(request.pages)


def _pages_of(name: str, tokens: int, device: KVPool) -> int:
    pages = -(-tokens // device.geometry.page_size)
    if pages > device.pages:
        raise CapacityError(
            f"{name} {tokens} tokens needs {pages} pages of KV, but L1 has {device.pages}; "
            "reject the request, or raise device.size or device.tokens"
        )
    return pages


def computed_pages(request: RequestKV, key: RadixKey, page_size: int) -> int:
    """Return how many whole pages `key` has, the tokens that `request` has computed so far.

    Raises InvalidInput for a key that does not continue the prompt or the shared tokens of the request, and for one
    that needs more pages than the request has.
    """
    full = len(instance("key", key, RadixKey)) // page_size
    if full < request.shared_pages or not key.continues(request.key):
        raise InvalidInput(f"request {request.rid!r}: the key does not continue the key of the request")
    if full > len(request.pages):
        raise InvalidInput(f"request {request.rid!r}: {full} pages of tokens, but only {len(request.pages)} of KV")
    return full
