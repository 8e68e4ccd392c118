"""Synthetic traces: three kinds of users of one service.

- **chat**: one of a few shared system prompts, a question, an answer, after a pause the next question. Each prompt
  contains the whole conversation.
- **agent**: one long shared prompt of tool descriptions, then a loop of short outputs (tool calls) and tool results,
  seconds apart. Prompts grow quickly and return often.
- **document**: a long text of one user, and two or three questions about it.

Sessions begin as a Poisson process; lengths are log-normal, as in public traces. The format is that of real traces: a
block gets its id when its 512 tokens are known, the partial last block has its own id, and the next turn's prompt
begins with the previous prompt and its output.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hicache.errors import InvalidInput

from .request import BLOCK_TOKENS, TraceRequest
from .trace import REQUESTS_MAX

# The sigma of log-normal lengths: with 0.8, the 99th percentile is six times the median.
_SIGMA = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of session. Numbers of tokens are medians, `pause_s` is a mean. `share` is its share of all sessions."""

    share: float
    shared_prompts: int
    shared_tokens: int
    first_tokens: int
    turn_tokens: int
    output_tokens: int
    turns_mean: float
    pause_s: float


KINDS: Mapping[str, Kind] = {
    "chat": Kind(
        share=0.6, shared_prompts=4, shared_tokens=1500, first_tokens=400, turn_tokens=120, output_tokens=300,
        turns_mean=4, pause_s=30,
    ),
    "agent": Kind(
        share=0.2, shared_prompts=2, shared_tokens=6000, first_tokens=600, turn_tokens=900, output_tokens=120,
        turns_mean=10, pause_s=3,
    ),
    "document": Kind(
        share=0.2, shared_prompts=1, shared_tokens=600, first_tokens=9000, turn_tokens=60, output_tokens=250,
        turns_mean=2.5, pause_s=45,
    ),
}
SESSIONS_PER_S = 1.0
# The context of models with 128 Ki tokens; a session that reaches it ends.
CONTEXT_TOKENS = 120_000
# The speed of an answer, which determines when the next turn can begin.
_OUTPUT_TOKENS_PER_S = 40.0


@dataclass(slots=True)
class _Session:
    kind: Kind
    shared_prompt: tuple[str, int]
    turns: int
    tokens: int  # of the prompt of the next turn
    blocks: list[int] = field(default_factory=list)  # ids of its whole blocks so far


def synthetic_trace(requests: int, seed: int) -> Iterator[TraceRequest]:
    """Yield `requests` requests in the order of their timestamps. Equal arguments give equal traces.

    Raises InvalidInput for a number that is not 1 to `REQUESTS_MAX`.
    """
    if not 1 <= requests <= REQUESTS_MAX:
        raise InvalidInput(f"synthetic trace: the number of requests must be 1 to {REQUESTS_MAX}")
    return itertools.islice(_requests(random.Random(seed)), requests)


def _requests(numbers: random.Random) -> Iterator[TraceRequest]:
    ids = itertools.count()
    shared: dict[tuple[str, int], list[int]] = {}
    arrival_s = 0.0
    order = itertools.count()  # orders sessions with equal times by their creation
    turns: list[tuple[float, int, _Session]] = []
    for index in itertools.count():
        # Start new sessions until the next event of an active session is earlier.
        while not turns or arrival_s <= turns[0][0]:
            heapq.heappush(turns, (arrival_s, next(order), _session(numbers)))
            arrival_s += numbers.expovariate(SESSIONS_PER_S)
        now_s, _, session = heapq.heappop(turns)
        kind = session.kind
        output = _length(numbers, kind.output_tokens)
        yield _turn(index, now_s, session, output, shared, ids)
        session.turns -= 1
        session.tokens += output + _length(numbers, kind.turn_tokens)
        if session.turns and session.tokens < CONTEXT_TOKENS:
            next_s = now_s + output / _OUTPUT_TOKENS_PER_S + numbers.expovariate(1 / kind.pause_s)
            heapq.heappush(turns, (next_s, next(order), session))


def _session(numbers: random.Random) -> _Session:
    (name,) = numbers.choices(list(KINDS), [kind.share for kind in KINDS.values()])
    kind = KINDS[name]
    first = min(CONTEXT_TOKENS - 1, kind.shared_tokens + _length(numbers, kind.first_tokens))
    turns = 1 + int(numbers.expovariate(1 / kind.turns_mean))
    return _Session(kind, (name, numbers.randrange(kind.shared_prompts)), turns, first)


def _turn(
    index: int,
    now_s: float,
    session: _Session,
    output: int,
    shared: dict[tuple[str, int], list[int]],
    ids: Iterator[int],
) -> TraceRequest:
    """Return the request of the session's next turn. Assigns ids to blocks that have become whole."""
    if not session.blocks:
        whole = session.kind.shared_tokens // BLOCK_TOKENS
        known = shared.setdefault(session.shared_prompt, [])
        known.extend(itertools.islice(ids, whole - len(known)))
        session.blocks.extend(known)
    session.blocks.extend(itertools.islice(ids, session.tokens // BLOCK_TOKENS - len(session.blocks)))
    partial = [next(ids)] if session.tokens % BLOCK_TOKENS else []
    return TraceRequest(index, round(1000 * now_s), session.tokens, output, (*session.blocks, *partial))


def _length(numbers: random.Random, median: int) -> int:
    return max(1, min(CONTEXT_TOKENS // 2, round(numbers.lognormvariate(math.log(median), _SIGMA))))
