"""Synthetic traces of three services.

`mixed` has three kinds of users:

- **chat**: one of a few shared system prompts, a question, an answer, after a pause the next question. Each prompt
  contains the whole conversation.
- **agent**: one long shared prompt of tool descriptions, then a loop of short outputs (tool calls) and tool results,
  seconds apart. Prompts grow quickly and return often.
- **document**: a long text of one user, and two or three questions about it.

`conversation` and `agents` have the statistics of two recorded traces, mostly as tables of quantiles:

- **conversation**: Mooncake's `conversation_trace.jsonl` (Qin et al., FAST 2025), 12,031 requests in 59 minutes.
- **agents**: 46 sessions of coding agents of kv-cache-tester (callanjfox), 1,305 requests in two hours. Fresh sessions
  begin with a short prompt and have many turns. Resumed ones begin with a long prompt, and have fewer and slower turns.

docs/traces.md compares the hits of caches on them with those on the recorded traces.

Sessions begin as a Poisson process; lengths without a table are log-normal. The format is that of real traces: a
block gets its id when its 512 tokens are known, the partial last block has its own id, and the next turn's prompt
begins with the previous prompt and its output.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import TypeAlias

from hicache.errors import InvalidInput

from .request import BLOCK_TOKENS, TraceRequest
from .trace import REQUESTS_MAX

# The sigma of log-normal lengths: with 0.8, the 99th percentile is six times the median.
_SIGMA = 0.8
# A table has the values of a distribution at these shares. Between two of them it is log-uniform.
_SHARES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
Quantiles: TypeAlias = tuple[float, ...]
# The context of models with 128 Ki tokens; a session that reaches it ends.
CONTEXT_TOKENS = 120_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of session. `share` is its share of all sessions. Numbers of tokens are medians or tables, `turns` and
    `pause_s` means or tables. `pause_s` is the time from the end of an answer to the next turn.

    `pace` is the correlation of two pauses of a session: at 0 its pauses are independent, near 1 it is always fast or
    always slow. A share of `cuts` of the turns keeps only the beginning of the prompt: the shared part, or a share
    `kept` of the prompt if that is longer. The other tokens are new ones, as after a compaction or an edit.
    """

    share: float
    shared_prompts: int
    shared_tokens: int
    first_tokens: int | Quantiles
    turn_tokens: int | Quantiles
    output_tokens: int | Quantiles
    turns: float | Quantiles
    pause_s: float | Quantiles
    context_tokens: int = CONTEXT_TOKENS
    pace: float = 0.0
    cuts: float = 0.0
    kept: Quantiles = (1,) * 9


KINDS: Mapping[str, Kind] = {
    "chat": Kind(
        share=0.6, shared_prompts=4, shared_tokens=1500, first_tokens=400, turn_tokens=120, output_tokens=300,
        turns=4, pause_s=30,
    ),
    "agent": Kind(
        share=0.2, shared_prompts=2, shared_tokens=6000, first_tokens=600, turn_tokens=900, output_tokens=120,
        turns=10, pause_s=3,
    ),
    "document": Kind(
        share=0.2, shared_prompts=1, shared_tokens=600, first_tokens=9000, turn_tokens=60, output_tokens=250,
        turns=2.5, pause_s=45,
    ),
}
# What the two kinds of agents' sessions have in common.
_CODING = Kind(
    share=1, shared_prompts=1, shared_tokens=12_288, first_tokens=1, turns=1, pause_s=1,
    turn_tokens=(1, 1, 27, 197, 700, 2200, 4000, 12_000, 40_000),
    output_tokens=(1, 99, 125, 220, 412, 848, 1688, 3919, 8270),
    pace=0.7, cuts=0.02, kept=(0.04, 0.11, 0.23, 0.34, 0.53, 0.84, 0.95, 0.98, 0.99),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The kinds of users of a service, and how often a session begins."""

    kinds: Mapping[str, Kind]
    sessions_per_s: float


SERVICES: Mapping[str, Service] = {
    "mixed": Service(kinds=KINDS, sessions_per_s=1.0),
    "conversation": Service(sessions_per_s=2.2, kinds={
        "chat": Kind(
            share=1, shared_prompts=1, shared_tokens=512, context_tokens=127_000,
            first_tokens=(380, 393, 810, 4730, 12_478, 24_977, 37_947, 89_082, 125_683),
            turn_tokens=(1, 1, 9, 26, 369, 4242, 6955, 16_705, 91_467),
            output_tokens=(1, 24, 156, 350, 472, 597, 698, 1118, 2000),
            turns=(1, 1, 1, 1.25, 2.2, 3.1, 4.6, 15, 50),
            pause_s=(8, 36, 60, 115, 300, 560, 780, 1800, 3030),
            pace=0.3, cuts=0.15, kept=(0.01, 0.07, 0.11, 0.22, 0.46, 0.89, 0.94, 0.98, 0.99),
        ),
    }),
    "agents": Service(sessions_per_s=0.008, kinds={
        "fresh": replace(
            _CODING, share=0.65, shared_prompts=40, context_tokens=200_000,
            first_tokens=(100, 300, 2000, 6500, 10_000, 30_000, 33_000, 43_000, 50_000),
            turns=(1, 4, 9, 28, 60, 98, 110, 180, 203),
            pause_s=(1, 2, 4, 7, 14, 47, 124, 596, 2899),
        ),
        "resumed": replace(
            _CODING, share=0.35, shared_prompts=20, context_tokens=520_000,
            first_tokens=(48_000, 52_000, 62_000, 115_000, 230_000, 280_000, 330_000, 360_000, 366_000),
            turns=(2, 3, 6, 8, 26, 46, 60, 68, 70),
            pause_s=(1, 3, 8, 20, 50, 200, 600, 1500, 2900),
        ),
    }),
}
# The speed of an answer, which determines when the next turn can begin.
_OUTPUT_TOKENS_PER_S = 40.0


@dataclass(slots=True)
class _Session:
    kind: Kind
    shared_prompt: tuple[str, int]
    turns: int
    tokens: int  # of the prompt of the next turn
    pace: float  # the normal score of its mean pause
    blocks: list[int] = field(default_factory=list)  # ids of its whole blocks so far


def synthetic_trace(requests: int, seed: int, service: str = "mixed") -> Iterator[TraceRequest]:
    """Yield `requests` requests to a service of `SERVICES` in the order of their timestamps. Equal arguments give equal
    traces.

    Raises InvalidInput for a number that is not 1 to `REQUESTS_MAX`, and for an unknown service.
    """
    if not 1 <= requests <= REQUESTS_MAX:
        raise InvalidInput(f"synthetic trace: the number of requests must be 1 to {REQUESTS_MAX}")
    if service not in SERVICES:
        raise InvalidInput(f"synthetic trace: unknown service {service[:40]!r}; known: {', '.join(SERVICES)}")
    return itertools.islice(_requests(random.Random(seed), SERVICES[service]), requests)


def _requests(numbers: random.Random, service: Service) -> Iterator[TraceRequest]:
    ids = itertools.count()
    shared: dict[tuple[str, int], list[int]] = {}
    arrival_s = 0.0
    order = itertools.count()  # orders sessions with equal times by their creation
    turns: list[tuple[float, int, _Session]] = []
    for index in itertools.count():
        # Start new sessions until the next event of an active session is earlier.
        while not turns or arrival_s <= turns[0][0]:
            heapq.heappush(turns, (arrival_s, next(order), _session(numbers, service)))
            arrival_s += numbers.expovariate(service.sessions_per_s)
        now_s, _, session = heapq.heappop(turns)
        kind = session.kind
        output = _length(numbers, kind.output_tokens)
        yield _turn(index, now_s, session, output, shared, ids)
        session.turns -= 1
        session.tokens += output + _length(numbers, kind.turn_tokens)
        if kind.cuts and numbers.random() < kind.cuts:
            kept = max(kind.shared_tokens, session.tokens * _quantile(numbers, kind.kept))
            del session.blocks[int(kept) // BLOCK_TOKENS :]
        if session.turns and session.tokens < kind.context_tokens:
            next_s = now_s + output / _OUTPUT_TOKENS_PER_S + _pause(numbers, session)
            heapq.heappush(turns, (next_s, next(order), session))


def _session(numbers: random.Random, service: Service) -> _Session:
    (name,) = numbers.choices(list(service.kinds), [kind.share for kind in service.kinds.values()])
    kind = service.kinds[name]
    first = min(kind.context_tokens - 1, kind.shared_tokens + _length(numbers, kind.first_tokens))
    if isinstance(kind.turns, tuple):
        turns = int(_quantile(numbers, kind.turns))
    else:
        turns = 1 + int(numbers.expovariate(1 / kind.turns))
    prompt = (name, numbers.randrange(kind.shared_prompts))
    return _Session(kind, prompt, turns, first, numbers.gauss() if kind.pace else 0.0)


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


def _length(numbers: random.Random, of: int | Quantiles) -> int:
    if isinstance(of, tuple):
        return round(_quantile(numbers, of))
    return max(1, min(CONTEXT_TOKENS // 2, round(numbers.lognormvariate(math.log(of), _SIGMA))))


def _pause(numbers: random.Random, session: _Session) -> float:
    kind = session.kind
    if not isinstance(kind.pause_s, tuple):
        return numbers.expovariate(1 / kind.pause_s)
    # A Gaussian copula: the pauses of all sessions have the distribution of the table.
    score = math.sqrt(kind.pace) * session.pace + math.sqrt(1 - kind.pace) * numbers.gauss()
    return _at(kind.pause_s, NormalDist().cdf(score))


def _quantile(numbers: random.Random, table: Quantiles) -> float:
    return _at(table, numbers.random())


def _at(table: Quantiles, share: float) -> float:
    above = min(bisect_right(_SHARES, share), len(_SHARES) - 1)
    low, high = table[above - 1], table[above]
    return low * math.pow(high / low, (share - _SHARES[above - 1]) / (_SHARES[above] - _SHARES[above - 1]))
