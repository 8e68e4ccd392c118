"""Model: the interface that computes KV and tokens for the scheduler. The bundled Llama and the stand-in of a replay
implement it.

All calls come from the scheduler's thread. Per request: begin -> (compute | place)* -> end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from hicache.tiers import Fence, KVPool, TrailingPool

from .requests import Request

# The requests of one forward, and the number of tokens to compute of each, starting at its `kv_tokens`.
Batch: TypeAlias = Sequence[tuple[Request, int]]


class Output(Protocol):
    """The output of a forward for the requests of its batch."""

    def wait(self) -> float | None:
        """Block until the forward has ended. Return its time in seconds, or None if it is not representative of a
        prefill."""

    def token(self, index: int) -> int:
        """Return the next token of the request at `index` of the batch. Raises HiCacheError if it cannot be chosen.

        REQUIRES: called after `wait`, for a request whose tokens are all computed.
        """


class Model(Protocol):
    """See the module's docstring. Reads and writes the pages that requests hold in `pool`, the cache's L1."""

    @property
    def pool(self) -> KVPool:
        """The pool that `compute` writes KV to."""

    @property
    def trailing(self) -> Sequence[TrailingPool]:
        """The pools of layers that need only the last tokens of a prefix. With such pools, the engine calls
        `TreeCache.prepare` for each request of a batch before `compute`."""

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
        """The number of requests that may run at the same time."""

    def begin(self, request: Request) -> None:
        """Register a request that begins, or begins again after a preemption. Its `kv` has the cached prefix."""

    def place(self, request: Request) -> None:
        """Update the pages of a running request: they have been replaced or extended. Their content is unchanged."""

    def compute(self, batch: Batch) -> Output:
        """Compute the KV of `batch`. May return before the end of the computation, if `fence` returns its end.

        Waits for the pool's load in flight, layer by layer, before it reads the KV of the layer. Raises TransferError
        if the load failed; then no request of the batch has advanced.
        """

    def fence(self) -> Fence | None:
        """Return a fence after all work that `compute` has queued, or None if `compute` only returns after its work."""

    def end(self, request: Request) -> None:
        """Remove a request that ends or is preempted, before its pages are released. Idempotent."""

    def check(self, running: Sequence[Request]) -> None:
        """Raise InvariantError if the model's state does not match the running requests. Mutates nothing."""
