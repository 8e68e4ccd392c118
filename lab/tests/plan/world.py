"""Small traces and paths for the tests of plans."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hicache.cli.model_shapes import ModelShape
from hicache_lab.plan import Plan, PlanInputs, make_plan
from hicache_lab.plan.pages import Path
from hicache_lab.traces.request import TraceRequest

PAGE_SIZE = 64
# A model with one byte per token, so that tokens are bytes.
MODEL = ModelShape("one-byte", 1)


def items(path: Path) -> list[tuple[int, int]]:
    """Return the items of a path as (id, end)."""
    return [(id_, end) for id_, end in np.frombuffer(path, "<i8").reshape(-1, 2).tolist()]


def path(ids: tuple[int, ...]) -> Path:
    """Return the path with one id for each page."""
    packed, end = b"", 0
    for id_, equal in itertools.groupby(ids):
        end += len(list(equal))
        packed += struct.pack("<2q", id_, end)
    return packed


def conversations(seed: int, block_tokens: int = 512, requests: int = 150) -> list[TraceRequest]:
    """Return conversations with short turns, which branch and stop. Outputs end everywhere in blocks and pages."""
    numbers = random.Random(seed)
    chats: list[tuple[list[int], int]] = [([], 0)]  # whole blocks and tokens, before the next question
    trace, ids = [], iter(range(10**9))
    for index in range(requests):
        blocks, tokens = numbers.choice(chats[-6:])
        tokens += numbers.choice([0, 1, block_tokens, numbers.randrange(1, 3 * block_tokens)])
        tokens = max(1, tokens)
        blocks = [*blocks, *(next(ids) for _ in range(tokens // block_tokens - len(blocks)))]
        partial = [next(ids)] if tokens % block_tokens else []
        output = numbers.choice([0, 1, block_tokens, numbers.randrange(3 * block_tokens)])
        trace.append(TraceRequest(index, index, tokens, output, (*blocks, *partial), block_tokens))
        if numbers.random() < 0.1:  # a client repeats its request
            trace.append(TraceRequest(index + 1000, index, tokens, output, (*blocks, *partial), block_tokens))
        chats.append((blocks, tokens + output))
    return trace


def fits(one: TraceRequest, device: int) -> bool:
    """Return True if a request fits into an L1 of so many pages; 0 is a system without L1."""
    return not device or one.kv_tokens <= device * PAGE_SIZE


def short_conversations(seed: int, device: int) -> list[TraceRequest]:
    """Return the requests of conversations that fit into an L1 of so many pages, and all of them once more."""
    once = [one for one in conversations(seed, 128) if fits(one, device)]
    return [*once, *(replace(one, index=one.index + 5000, timestamp_ms=one.timestamp_ms + 200) for one in once)]


def plan_of(trace: Sequence[TraceRequest], device: int, host: int, storage: int | None, **inputs: Any) -> Plan:
    """Return the plan of a trace with tiers of so many pages."""
    return make_plan(lambda: iter(trace), plan_inputs(device, host, storage, **inputs))


def plan_inputs(device: int, host: int, storage: int | None, **inputs: Any) -> PlanInputs:
    """Return the inputs of a plan with tiers of so many pages of `PAGE_SIZE` bytes."""
    entries: dict[str, Any] = {
        "trace": "test",
        "model": MODEL,
        "page_size": PAGE_SIZE,
        "device_bytes": device * PAGE_SIZE,
        "host_bytes": host * PAGE_SIZE,
        "storage_bytes": None if storage is None else storage * PAGE_SIZE,
    }
    return PlanInputs(**entries | inputs)
