"""Routes the requests of a trace to the nodes of a cluster, as the routers of services do.

Every decision depends only on the requests so far, so equal traces give equal routes.
"""

from __future__ import annotations

from enum import StrEnum

from hicache.errors import InvalidInput

from .request import TraceRequest

# A node with more than this multiple of the mean load gets no further request because of its prefixes. With a smaller
# factor the load is more even, and with a larger one there are more hits.
BOUND = 1.25
_WORD = (1 << 64) - 1


class Routing(StrEnum):
    """How requests are spread over nodes. The last two keep what can be shared on one node."""

    ROTATE = "rotate"
    RANDOM = "random"
    SESSION = "session"
    PREFIX = "prefix"


class Router:
    """Chooses a node for each request of one trace. REQUIRES: it sees all of them, in the order of the trace.

    - `rotate`: one node after the other.
    - `random`: a node that depends only on the index of the request.
    - `session`: all requests of one conversation go to one node, a new conversation to the node with the fewest prompt
      tokens so far. Without `TraceRequest.session`, a request continues a conversation by the rule of `TokenSource`.
    - `prefix`: the node that was sent the longest prefix of the prompt, among the nodes with at most `BOUND` times the
      mean of prompt tokens: consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018), with
      prefixes in place of hashes. With equal prefixes, the node with the fewest prompt tokens.

    Among equal nodes, the lowest number wins. Memory grows by an entry for each distinct block (`prefix`, `session`) or
    conversation. For one thread. Raises InvalidInput for a number of nodes below 1.
    """

    def __init__(self, routing: Routing, nodes: int) -> None:
        if nodes < 1:
            raise InvalidInput(f"routing: the number of nodes must be at least 1, got {nodes}")
        self._routing = routing
        self._tokens = [0] * nodes  # prompt tokens by node
        self._total_tokens = 0
        # prefix: the nodes that were sent a block, as bits.
        self._senders: dict[int, int] = {}
        # session: the node of a conversation that the trace names.
        self._sessions: dict[int, int] = {}
        # session: known blocks, and the node and length in tokens of the partial block and output after a last whole
        # block, as in TokenSource.
        self._known: set[int] = set()
        self._tails: dict[int, tuple[int, int]] = {}

    def route(self, request: TraceRequest) -> int:
        """Return the node of the next request, from 0, and record that the request was sent there."""
        if self._routing is Routing.ROTATE:
            node = request.index % len(self._tokens)
        elif self._routing is Routing.RANDOM:
            node = _mixed(request.index) % len(self._tokens)
        elif self._routing is Routing.PREFIX:
            node = self._by_prefix(request)
        elif request.session is not None:
            node = self._by_session(request.session)
        else:
            node = self._by_conversation(request)
        self._tokens[node] += request.input_length
        self._total_tokens += request.input_length
        return node

    def _by_prefix(self, request: TraceRequest) -> int:
        senders, count = self._senders, len(self._tokens)
        # At least one node is at or below the mean.
        bound = BOUND * self._total_tokens / count
        best = sum(1 << node for node, tokens in enumerate(self._tokens) if tokens <= bound)
        for block in request.hash_ids:
            longer = best & senders.get(block, 0)
            if not longer:
                break
            best = longer
        node = min((node for node in range(count) if best >> node & 1), key=self._tokens.__getitem__)
        for block in request.hash_ids:
            senders[block] = senders.get(block, 0) | 1 << node
        return node

    def _by_session(self, session: int) -> int:
        node = self._sessions.get(session)
        if node is None:
            node = self._sessions[session] = self._emptiest()
        return node

    def _by_conversation(self, request: TraceRequest) -> int:
        ids, size, known = request.hash_ids, request.block_tokens, self._known
        new = next((i for i, block in enumerate(ids) if block not in known), len(ids))
        tail = self._tails.get(ids[new - 1]) if 0 < new < len(ids) else None
        node = tail[0] if tail is not None and request.input_length >= new * size + tail[1] else self._emptiest()
        whole = request.whole_blocks
        if whole > new:
            self._tails[ids[whole - 1]] = node, request.input_length - whole * size + request.output_length
        known.update(ids)
        return node

    def _emptiest(self) -> int:
        return self._tokens.index(min(self._tokens))


def _mixed(index: int) -> int:
    """Return the number at `index` of the generator SplitMix64 with seed 0 (Steele et al., 2014)."""
    word = (index + 1) * 0x9E3779B97F4A7C15 & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
