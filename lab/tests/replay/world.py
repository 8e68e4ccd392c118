"""Small traces, and replays of them that a test drives step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hicache.cache import HiRadixCache
from hicache.config import HiCacheConfig, load_config
from hicache_lab.replay.job import ReplayJob
from hicache_lab.replay.runner import Replay, start
from hicache_lab.traces.request import BLOCK_TOKENS, TraceRequest
from hicache_lab.traces.trace import write_trace

WAIT_S = 20.0


def request(index: int, hash_ids: Sequence[int], *, tail: int = 0, output: int = 20, at_ms: int = 0) -> TraceRequest:
    """Return a request whose last block has `tail` tokens (0: all 512)."""
    missing = BLOCK_TOKENS - tail if tail else 0
    return TraceRequest(index, at_ms, len(hash_ids) * BLOCK_TOKENS - missing, output, tuple(hash_ids))


def rounds(prompts: int, times: int, *, blocks: int = 2, output: int = 20) -> list[TraceRequest]:
    """Return `times` rounds of `prompts` different prompts."""
    ids = [tuple(range(number * blocks, (number + 1) * blocks)) for number in range(prompts)]
    return [request(i, ids[i % prompts], output=output, at_ms=i) for i in range(prompts * times)]


def small_config(
    *, storage: str | None = "memory", device: int = 4096, host: int = 8192, **entries: str
) -> HiCacheConfig:
    """Return a configuration with tiers of so many tokens. `entries` are dotted names with `__` for a dot."""
    overrides = {"break_even.mode": "always", "page_size": "64", "device.tokens": str(device), "host.tokens": str(host)}
    overrides["prefetch.timeout_base"] = f"{WAIT_S:g}s"  # otherwise a busy machine turns a hit into a miss
    overrides |= {} if storage is None else {"storage.type": storage}
    overrides |= {name.replace("__", "."): value for name, value in entries.items()}
    return load_config(None, environ={}, overrides=overrides)


def job(directory: Path, trace: Iterable[TraceRequest], config: HiCacheConfig, **options: Any) -> ReplayJob:
    """Write a trace to `directory`, and return a job on it."""
    path = directory / "trace.jsonl"
    write_trace(path, trace)
    return ReplayJob(config=config, trace=path, **options)


@contextmanager
def started(one: ReplayJob) -> Iterator[Replay]:
    """Start a replay; close and check it at the end."""
    replay = start(one)
    try:
        yield replay
    finally:
        replay.close()
        replay.cache.check()


def tiers(replay: Replay) -> HiRadixCache:
    """Return the cache of a replay, which must have tiers."""
    assert isinstance(replay.cache, HiRadixCache)
    return replay.cache


def go(replay: Replay) -> Replay:
    """Replay the whole trace. Check the invariants and wait for copies and stores at each step."""
    while not replay.finished:
        replay.step()
        replay.engine.check()
        assert replay.cache.drain(WAIT_S)
    replay.sample()
    return replay
