"""Traces that no single eviction policy serves well: one changes its users, one alternates between two policies.

A policy that adapts must follow the change, and must not lose much while it does.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from hicache.errors import InvalidInput

from .request import BLOCK_TOKENS, TraceRequest
from .synthetic import synthetic_trace

# A prompt of an agent has seven times as many tokens as one of a conversation, so both parts have equally many.
_CONVERSATIONS_PER_AGENT = 7
# Of the alternating trace: the requests of a phase, and the prompts that fill the cache. The prompts of a phase would
# fill 17 caches, enough for S3-FIFO to learn which prompts are popular.
PHASE_REQUESTS = 400
_PROMPTS_PER_CACHE = 24
# The popular prompts fill half of the cache. Each third request uses one, so they return after 1.5 times its size.
_POPULAR_PROMPTS = _PROMPTS_PER_CACHE // 2
_POPULAR_SHARE = 1 / 3


def changing_trace(requests: int, seed: int) -> Iterator[TraceRequest]:
    """Yield requests of the service `conversation`, then about as many tokens of `agents`. The two parts have no block
    in common.

    Raises InvalidInput as `synthetic_trace` does, and for fewer than 8 requests, when the first one is taken.
    """
    agents = requests // (1 + _CONVERSATIONS_PER_AGENT)
    second = synthetic_trace(agents, seed, "agents")
    end_ms, ids = 0.0, 0
    for request in synthetic_trace(requests - agents, seed, "conversation"):
        end_ms, ids = request.timestamp_ms, max(ids, 1 + max(request.hash_ids))
        yield request
    for request in second:
        yield replace(
            request, index=request.index + requests - agents, timestamp_ms=request.timestamp_ms + end_ms,
            hash_ids=tuple(ids + one for one in request.hash_ids),
        )


def alternating_trace(requests: int, seed: int, cache_tokens: int) -> Iterator[TraceRequest]:
    """Return requests, one per second, that are bad for S3-FIFO and for LRU in turn, in a cache of `cache_tokens`.

    A phase has `PHASE_REQUESTS` requests. In the even ones, each prompt returns once, after half of the cache's size:
    LRU hits, while S3-FIFO has evicted the prompt from its small queue. In the odd ones, one-off prompts surround a
    popular set that returns after 1.5 times the cache's size: S3-FIFO keeps it, LRU does not. The set is the same in
    all phases.

    Raises InvalidInput for a cache of less than one block per prompt.
    """
    blocks = cache_tokens // (_PROMPTS_PER_CACHE * BLOCK_TOKENS)
    if not blocks:
        raise InvalidInput(f"alternating trace: the cache must have {_PROMPTS_PER_CACHE * BLOCK_TOKENS} tokens or more")
    tokens = blocks * BLOCK_TOKENS
    prompts = itertools.islice(_alternating(random.Random(seed)), requests)
    return (
        TraceRequest(index, 1000 * index, tokens, 1, tuple(range(prompt * blocks, (prompt + 1) * blocks)))
        for index, prompt in enumerate(prompts)
    )


def _alternating(numbers: random.Random) -> Iterator[int]:
    new = itertools.count(_POPULAR_PROMPTS)
    popular = list[int]()  # those not yet used in this round
    for phase in itertools.count():
        waiting = deque[int]()
        for request in range(PHASE_REQUESTS):
            if phase % 2 == 1 and numbers.random() < _POPULAR_SHARE:
                popular = popular or numbers.sample(range(_POPULAR_PROMPTS), _POPULAR_PROMPTS)
                yield popular.pop()
            elif phase % 2 == 0 and request % 2 and len(waiting) >= _PROMPTS_PER_CACHE // 4:
                yield waiting.popleft()
            else:
                waiting.append(next(new))
                yield waiting[-1]
