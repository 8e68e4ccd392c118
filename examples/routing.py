"""Two engines share a store, and a router picks the engine for each prompt from their KV events.

    python examples/routing.py

Each engine publishes what it adds to and removes from device, host and storage. The router follows both and keeps an
index of each. It sends a prompt to the engine that has most of it on its device or host. Pages on storage count for
both engines, because they share the store. The program prints a line for each prompt, and exits with code 1 if an
engine served fewer tokens from its cache than the index promised. It needs the package hicache-lab and the
extra `events`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hicache.config import HiCacheConfig
from hicache.events import Medium
from hicache.events.subscriber import EventFollower
from hicache.keys import RadixKey, page_keys
from hicache_lab.engine import BUNDLED_MODEL, Engine, create_engine, load_tokenizer

PAGE_SIZE = 16
PROMPT_TOKENS = 321  # of the last token the KV is computed in any case
WAIT_S = 60.0
TEXTS = Path(BUNDLED_MODEL).parent / "texts"


def engine_config(folder: Path, name: str) -> HiCacheConfig:
    """Return the configuration of an engine: it stores pages in the shared folder and publishes events at a socket."""
    return HiCacheConfig.model_validate({
        "page_size": PAGE_SIZE,
        "device": {"tokens": 1024},
        "host": {"tokens": 4096},
        "load_back_threshold_tokens": 1,
        "prefetch": {"threshold_tokens": 1, "policy": "wait_complete"},
        "break_even": {"mode": "always"},
        "storage": {"type": "file", "options": {"path": f"{folder}/pages", "free_space_floor": "64MiB"}},
        "events": {"endpoint": f"ipc://{folder}/{name}.events", "replay_endpoint": f"ipc://{folder}/{name}.replay"},
    })


class Backend:
    """An engine, and the router's index of it."""

    def __init__(self, name: str, engine: Engine, follower: EventFollower) -> None:
        self.name, self._engine, self._follower = name, engine, follower

    def cached(self, keys: Sequence[bytes], *media: Medium) -> int:
        """Return how many leading pages of a prompt are on one of `media`."""
        return self._follower.index.prefix_pages(keys, *media)

    def serve(self, prompt: Sequence[int], keys: Sequence[bytes]) -> int:
        """Serve one prompt, and wait until its pages are stored and the index knows it. Return its cached tokens."""
        rid = self._engine.submit(prompt, 4, ignore_eos=True)
        found = None
        while found is None:
            for update in self._engine.step():
                if update.rid == rid and update.record is not None:
                    if update.record.error is not None:
                        raise update.record.error
                    found = update.record.hit_tokens
            self._engine.rest()
        self._engine.cache.drain(WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while self.cached(keys, Medium.STORAGE) < len(keys):
            if time.monotonic() > deadline:
                raise SystemExit(f"engine {self.name} has not announced all pages within {WAIT_S:g} s")
            self._follower.poll(0.05)
        return found


class Router:
    """Picks the engine with the most pages of a prompt, of equal ones the one that waited longest."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = list(backends)
        self.broken_promises = 0

    def route(self, what: str, prompt: Sequence[int], busy: str = "") -> None:
        """Serve one prompt on the engine of choice, which is not `busy`, and print a line."""
        keys = page_keys(RadixKey.of(prompt[:-1]).tokens, PAGE_SIZE)
        free = [each for each in self._backends if each.name != busy]
        near = {each: each.cached(keys, Medium.DEVICE, Medium.HOST) for each in free}
        chosen = max(free, key=near.__getitem__)
        self._backends.remove(chosen)
        self._backends.append(chosen)
        promised = PAGE_SIZE * max(each.cached(keys, *Medium) for each in self._backends)
        served = chosen.serve(prompt, keys)
        self.broken_promises += served < promised
        print(f"{what:<20} -> engine {chosen.name}: {len(prompt)} tokens, {PAGE_SIZE * near[chosen]:>3} on its "
              f"device or host, {promised:>3} with the store, {served:>3} served from the cache")


def main() -> int:
    """Run all steps. Return the exit code."""
    tokenizer = load_tokenizer(BUNDLED_MODEL)
    first, second = (
        tokenizer.encode(path.read_text(encoding="utf-8")).ids[:PROMPT_TOKENS]
        for path in sorted(TEXTS.glob("*.txt"))[:2]
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hicache-routing-")))
        backends = []
        for name in ("one", "two"):
            config = engine_config(folder, name)
            engine = stack.enter_context(create_engine(config))
            ends = config.events.endpoint, config.events.replay_endpoint
            assert ends[0] is not None and ends[1] is not None
            backends.append(Backend(name, engine, stack.enter_context(EventFollower(ends[0], ends[1]))))
        router = Router(backends)
        router.route("a new prompt", first)
        router.route("another one", second)
        router.route("the first one again", first)
        router.route("the second one again", second)
        router.route("again, one is busy", first, busy="one")
    print("each engine served what the indexes promised" if not router.broken_promises else "an index was wrong")
    return min(1, router.broken_promises)


if __name__ == "__main__":
    sys.exit(main())
