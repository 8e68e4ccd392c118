"""A complete test engine: shared frames, worker processes, and a `HostCache` over a file store."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hicache.cache import HostCache, create_host_cache
from hicache.config import HiCacheConfig
from hicache.keys import Namespace
from hicache.tiers import SharedHostPool
from tests.workers.blocks import BlockPool
from tests.workers.engine import Engine, Request
from tests.workers.model import ModelShape, reference_tokens
from tests.workers.worker import DropBlocks, Ready, Task, page_of
from tests.workers.workers import Workers

SHAPE = ModelShape()
BLOCKS = 96
HOST_PAGES = 40
OUTPUT_TOKENS = 3
# The common prefix of the prompts of one seed.
SHARED_PAGES = 2
_WAIT_S = 60.0
_numbers = itertools.count()


def make_prompts(seed: int, count: int = 3) -> list[list[int]]:
    """Return prompts of different lengths with a common prefix."""
    chance = random.Random(seed)
    common = [chance.randrange(1000) for _ in range(SHARED_PAGES * SHAPE.page_tokens)]
    return [common + [chance.randrange(1000) for _ in range(13 + 6 * i)] for i in range(count)]


def whole_pages(prompt: list[int]) -> int:
    """Return how many pages of a prompt can be reused; its last token is always computed."""
    return (len(prompt) - 1) // SHAPE.page_tokens


def expected_tokens(prompt: list[int]) -> list[int]:
    """Return the correct output for a prompt."""
    return reference_tokens(SHAPE, prompt, OUTPUT_TOKENS)


@dataclass(slots=True, eq=False)
class World:
    """One engine. `replace_workers` starts new workers over the same frames."""

    host: SharedHostPool
    cache: HostCache
    engine: Engine
    tasks: list[Task]
    ready: list[Ready]
    _number: Iterator[int] = field(default_factory=itertools.count)

    def submit(self, prompt: list[int]) -> Request:
        """Submit a new request for a prompt."""
        return self.engine.submit(f"request-{next(self._number)}", prompt, OUTPUT_TOKENS)

    def serve(self, *prompts: list[int]) -> list[Request]:
        """Serve prompts together, from beginning to end."""
        requests = [self.submit(prompt) for prompt in prompts]
        self.engine.run(*requests)
        return requests

    def pages_on_host(self, prompt: list[int]) -> int:
        """Return how many pages of a prompt a request would load now."""
        found = self.cache.lookup("looking", self.engine.key(prompt))
        self.cache.abort("looking")
        return found.pages

    def drop_blocks(self) -> None:
        """Overwrite the blocks of all workers."""
        self.engine.workers.send(DropBlocks())
        self.engine.blocks.forget()

    def kill_workers(self) -> None:
        """Kill the remaining processes."""
        self.engine.workers.kill()

    def replace_workers(self) -> None:
        """Start new workers over the same frames. REQUIRES: `keep_pool`."""
        workers = Workers(self.tasks)
        self.engine.replace_workers(workers)
        assert all(ready.identity == self.host.identity for ready in workers.wait_ready())


@contextmanager
def started(
    folder: Path,
    ranks: int,
    *,
    host_pages: int = HOST_PAGES,
    keep_pool: bool = False,
    hashed_keys: bool = True,
    keeps_pages: bool = False,
    blocks: int = BLOCKS,
) -> Iterator[World]:
    """Start an engine over the store in `folder`, which may have pages. Everything ends with the block.

    The name of the pool is removed once all processes have opened it, except with `keep_pool`, for new workers.
    """
    name, page = f"test-{os.getpid()}-{next(_numbers)}", page_of(SHAPE, ranks)
    processes = None if keep_pool else ranks + 1
    tasks = [Task(rank, ranks, SHAPE, blocks, name, host_pages, processes) for rank in range(ranks)]
    workers = Workers(tasks)
    with ExitStack() as undo:
        undo.callback(workers.kill)
        host = SharedHostPool(name, page, host_pages, processes=processes, timeout_s=_WAIT_S)
        undo.callback(host.unlink)
        ready = workers.wait_ready()
        assert all(each.identity == host.identity for each in ready)
        assert host.path.exists() == keep_pool
        namespace = _namespace(ranks, hashed_keys)
        cache = undo.enter_context(create_host_cache(_config(folder), namespace, host=host, environ={}))
        pool = BlockPool(SHAPE, blocks, keeps_pages=keeps_pages)
        engine = Engine(cache, workers, SHAPE, pool, hashed_keys=hashed_keys)
        world = World(host, cache, engine, tasks, ready)
        undo.callback(world.kill_workers)
        yield world
        assert not engine.busy
        assert cache.drain(_WAIT_S)
        cache.check()
        engine.workers.close()
    assert not [file for file in os.listdir("/dev/shm") if name in file]
    assert not multiprocessing.active_children()


def _config(folder: Path) -> HiCacheConfig:
    return HiCacheConfig.model_validate({
        "page_size": SHAPE.page_tokens,
        "load_back_threshold_tokens": 1,
        "prefetch": {"threshold_tokens": 1, "policy": "wait_complete"},
        "break_even": {"mode": "always"},
        "storage": {"type": "file", "options": {"path": str(folder / "pages"), "capacity": "64MiB"}},
    })


def _namespace(ranks: int, hashed_keys: bool) -> Namespace:
    """Return the namespace of pages that contain all ranks."""
    layout = f"toy/[2,blocks,{SHAPE.block},heads,dim]/int32/{ranks} ranks"
    return Namespace(
        model="toy", geometry=page_of(SHAPE, ranks), engine_layout=layout, ranks_share_pages=True,
        key_hash="sha256 of blocks" if hashed_keys else "",
    )
