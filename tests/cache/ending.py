"""A program whose engine ends in one of several ways, mostly without closing its cache:

    python -m tests.cache.ending WAY FOLDER

It serves PROMPTS with write_back, so at the end all their pages are only on L1. Its store is in FOLDER.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from pathlib import Path

from hicache.cache import HiRadixCache
from hicache.config import HiCacheConfig
from tests.cache.keeping import RadixEngine, options
from tests.cache.world import GatedBackend, prompt

PROMPTS = [prompt(*range(first, first + 5)) for first in (10, 20, 30)]
PAGES = 15  # of all prompts
KEPT: list[RadixEngine] = []  # until the exit, as a global variable of a program


def engine_on(folder: Path) -> RadixEngine:
    """Return an engine over the store in `folder`."""
    config = {**options("", write_policy="write_back"), "host": {"tokens": 128}}
    config["storage"] = {"type": "file", "options": {"path": str(folder)}}
    return RadixEngine(HiCacheConfig.model_validate(config))


def served(folder: Path) -> RadixEngine:
    engine = engine_on(folder)
    for key in PROMPTS:
        engine.serve(key)
    return engine


def hang(cache: HiRadixCache) -> None:
    """Replace the store by one whose writes hang."""
    backend = GatedBackend()
    backend.writes.clear()
    cache.storage.attach(lambda epoch: backend)
    while cache.controller.backend is not backend:
        cache.poll()


def serve_on_thread(folder: Path, *, polls: bool) -> None:
    """Serve on a daemon thread, which polls until the end of the process, or stops polling."""
    ready = threading.Event()

    def run() -> None:
        engine = served(folder)
        ready.set()
        while polls:
            engine.cache.poll()
            time.sleep(0.001)
        threading.Event().wait()

    threading.Thread(target=run, name="engine", daemon=True).start()
    assert ready.wait(60)


def main(way: str, folder: Path) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if way.startswith("thread"):
        serve_on_thread(folder, polls=way == "thread polls")
        return
    engine = served(folder)
    if way != "collected":
        KEPT.append(engine)
    if way == "raises":
        raise RuntimeError("the engine failed")
    if way == "with":
        with engine.cache:
            raise RuntimeError("the engine failed")
    if way == "hangs":
        hang(engine.cache)
    elif way == "forks":
        if child := os.fork():
            os.waitpid(child, 0)
            engine.cache.close()
    elif way == "collected":
        del engine
        gc.collect()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
