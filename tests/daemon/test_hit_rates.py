"""The hit rates of an engine are those of a daemon without a store, whatever happens to the store."""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.base import GetOutcome
from hicache.backends.registry import BackendSpec, open_spec
from hicache.backends.storage import Storage
from hicache.config.remote_storage import RemoteStorageOptions
from hicache_lab.devservers import ValkeyServer
from hicache_lab.devservers.ports import LOOPBACK, free_ports
from tests.backends.remote.daemon import Frames
from tests.daemon.daemons import CODEC, Daemon
from tests.waiting import WAIT_S

RUN_PAGES, PROMPTS, REQUESTS = 6, 24, 200
POOL = "2MiB"  # 128 pages, and the prompts have 144


@pytest.fixture
def frames() -> Iterator[Frames]:
    made = Frames(RUN_PAGES, CODEC.frame_bytes)
    yield made
    made.close()


def serve(backend: Storage, frames: Frames, half: int) -> int:
    """Serve requests for the prompts of one half: look up, read, store the rest. Return the number of hits."""
    dice, hits = random.Random(half), 0
    for _ in range(REQUESTS):
        prompt = min(int(dice.expovariate(0.15)), PROMPTS - 1)
        keys = [hashlib.sha256(f"{half} {prompt} {page}".encode()).digest() for page in range(RUN_PAGES)]
        pages, deadline = [frames.frame(number) for number in range(RUN_PAGES)], time.monotonic() + WAIT_S
        found = backend.batch_exists(keys, deadline=deadline)
        read = backend.batch_get(keys[:found], pages[:found], deadline=deadline)
        good = next((at for at, one in enumerate(read) if one is not GetOutcome.HIT), found)
        hits += good
        if good < RUN_PAGES:
            parent = keys[good - 1] if good else None
            backend.batch_set(keys[good:], pages[good:], parent=parent, deadline=deadline)
    return hits


def hits_of(start: Callable[..., Daemon], frames: Frames, storage: Any, between: Callable[[], object]) -> list[int]:
    daemon = start({"pool": POOL}, storage=storage)
    spec = BackendSpec("remote", RemoteStorageOptions(socket=daemon.socket))
    with contextlib.closing(open_spec(spec, CODEC)) as backend:
        first = serve(backend, frames, 0)
        between()
        found = [first, serve(backend, frames, 1)]
        assert backend.statistics().errors == {}, "the guard of the engine has seen errors of the store"
    daemon.kill()
    return found


def file_store(path: Path, **limits: str) -> dict[str, Any]:
    return {"type": "file", "options": {"path": str(path), "capacity": None, "free_space_floor": "0B", **limits}}


def redis(port: int) -> dict[str, Any]:
    return {"type": "redis", "options": {"url": f"redis://{LOOPBACK}:{port}"}}


@pytest.mark.servers
@pytest.mark.long
def test_a_store_that_is_full_dead_or_dies_costs_no_hits(
    start: Callable[..., Daemon], frames: Frames, scratch: Path
) -> None:
    reference = hits_of(start, frames, None, lambda: None)
    assert reference[0] > REQUESTS * RUN_PAGES / 2
    found = {
        "no room": hits_of(start, frames, file_store(scratch / "no-room", free_space_floor="512TiB"), lambda: None),
        "small": hits_of(start, frames, file_store(scratch / "small", capacity="1MiB"), lambda: None),
        "dead at the start": hits_of(start, frames, redis(free_ports(1)[0]), lambda: None),
    }
    with ValkeyServer() as server:
        found["dies"] = hits_of(start, frames, redis(server.port), server.kill)
    for name, hits in found.items():
        assert all(ours >= 0.98 * plain for ours, plain in zip(hits, reference, strict=True)), (name, hits, reference)
