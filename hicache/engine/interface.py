"""Model: what computes KV and tokens for the scheduler. The bundled Llama is one, the stand-in of a replay another.

All calls come from the scheduler's thread. Per request: begin -> (compute | place)* -> end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from ..tiers import Fence, KVPool
from .requests import Request

# Requests of one forward, and how many tokens to compute of each, from its `kv_tokens` on.
Batch: TypeAlias = Sequence[tuple[Request, int]]


class Output(Protocol):
    """What a forward gives for the requests of its batch."""

    def wait(self) -> float | None:
        """Block until all of it is computed. Return the seconds that the forward took, None if its time says nothing
        about how long a prefill takes."""

    def token(self, index: int) -> int:
        """Return the next token of the request at `index` of the batch. Raises HiCacheError if it has none.

        REQUIRES: called after `wait`, and for a request all of whose tokens are computed.
        """


class Model(Protocol):
    """See the module's docstring. Reads and writes the pages that requests hold in `pool`, the cache's L1."""

    @property
    def pool(self) -> KVPool:
        """The pool that `compute` writes KV to."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this number."""

    @property
    def context_tokens(self) -> int:
        """Positions that one request can have."""

    @property
    def eos_tokens(self) -> frozenset[int]:
        """Tokens that end a text."""

    @property
    def requests_max(self) -> int:
        """How many requests may run at once."""

    def begin(self, request: Request) -> None:
        """Take in a request that begins, or begins again after a preemption; its `kv` says what is cached."""

    def place(self, request: Request) -> None:
        """Take note that the pages of a running request are others than before, or more. Their content is the same."""

    def compute(self, batch: Batch) -> Output:
        """Compute the KV of `batch`. May return before that has ended, if `fence` says when it has.

        Waits for the pool's load in flight, layer by layer, before the layer's KV is read. Raises TransferError if it
        failed; no request of the batch has advanced then.
        """

    def fence(self) -> Fence | None:
        """Return the point behind all work that `compute` has queued; None if it computes before it returns."""

    def end(self, request: Request) -> None:
        """Forget a request that ends or is preempted, while its pages are still its own. May be called twice."""

    def check(self, running: Sequence[Request]) -> None:
        """Raises InvariantError if the model's own state does not fit the running requests. Mutates nothing."""
