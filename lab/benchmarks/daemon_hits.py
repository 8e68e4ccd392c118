"""Hit rates of an engine behind a daemon whose store is full, dead or silent, beside a daemon without a store.

    python -m lab.benchmarks.daemon_hits [--requests N] [--path DIRECTORY]

The driver looks a prompt up, reads the found pages, and stores the others, through the guard of an engine. Prompts are
drawn again and again from a set that the pool nearly holds. In the second half of the requests the prompts are new, so
that a store that died in between cannot be helped by earlier pages.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hicache.backends.base import GetOutcome
from hicache.backends.registry import BackendSpec, open_spec
from hicache.backends.storage import Storage
from hicache.config.remote_storage import RemoteStorageOptions
from hicache.errors import BackendError
from hicache_lab.devservers import ValkeyServer
from hicache_lab.devservers.ports import LOOPBACK, free_ports

from ._table import Row, print_table, reduced
from .daemon import Daemon, Pages, _soon, file_storage, folder_in

_PAGE_BYTES, _RUN_PAGES, _PROMPTS = 64 << 10, 8, 40
_POOL = "16MiB"  # 80 % of the prompts of one half
_GOAL = 0.98


class Engine:
    """Requests of an engine. `asked` and `hits` count pages. A store that cannot be opened costs all hits, and is
    opened again at the next request."""

    def __init__(self, daemon: Daemon, pages: Pages, seed: int = 1) -> None:
        self.asked = self.hits = 0
        self._spec = BackendSpec("remote", RemoteStorageOptions(socket=daemon.socket))
        self._pages = pages
        self._dice = random.Random(seed)
        self._backend: Storage | None = None

    def serve(self, requests: int, half: int) -> None:
        """Serve requests for the prompts of one half."""
        for _ in range(requests):
            prompt = min(int(self._dice.expovariate(0.08)), _PROMPTS - 1)
            keys = [hashlib.sha256(f"{half} {prompt} {page}".encode()).digest() for page in range(_RUN_PAGES)]
            self.asked += len(keys)
            with contextlib.suppress(BackendError):
                self._backend = self._backend or open_spec(self._spec, self._pages.codec)
                self._request(self._backend, keys)

    def _request(self, backend: Storage, keys: list[bytes]) -> None:
        frames = self._pages.frames
        found = backend.batch_exists(keys, deadline=_soon())
        read = backend.batch_get(keys[:found], frames[:found], deadline=_soon())
        hits = next((at for at, outcome in enumerate(read) if outcome is not GetOutcome.HIT), found)
        self.hits += hits
        if hits < len(keys):
            backend.batch_set(
                keys[hits:], frames[hits:], parent=keys[hits - 1] if hits else None, deadline=_soon()
            )

    def close(self) -> None:
        """Close the connection to the daemon."""
        if self._backend is not None:
            self._backend.close()


def hit_rate(folder: Path, storage: dict[str, Any] | None, requests: int, dies: ValkeyServer | None = None) -> float:
    """Return the hit rate of the second half of the requests; `dies` is killed before it."""
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(Daemon(folder, storage, _POOL))
        pages = stack.enter_context(Pages(_PAGE_BYTES, _RUN_PAGES))
        engine = stack.enter_context(contextlib.closing(Engine(daemon, pages)))
        engine.serve(requests // 2, 0)
        if dies is not None:
            dies.kill()
        engine.asked = engine.hits = 0
        engine.serve(requests // 2, 1)
        return engine.hits / engine.asked


@contextlib.contextmanager
def silent_server() -> Iterator[int]:
    """A server that accepts connections and never answers. Yields its port."""
    with contextlib.closing(socket.create_server((LOOPBACK, 0))) as listener:
        yield listener.getsockname()[1]


def hits(folder: Path, requests: int) -> list[Row]:
    """Return all rows."""
    full = file_storage(folder / "full")
    full["options"] |= {"free_space_floor": "512TiB"}
    small = file_storage(folder / "small")
    small["options"] |= {"capacity": "1MiB"}
    reference = hit_rate(folder / "none", None, requests)
    found = {
        "file store, floor above the volume": hit_rate(folder / "floor", full, requests),
        "file store of 1 MiB": hit_rate(folder / "capacity", small, requests),
        "Redis dead before the start": hit_rate(folder / "dead", _redis(free_ports(1)[0]), requests),
    }
    with silent_server() as port:
        found["Redis that accepts and never answers"] = hit_rate(folder / "silent", _redis(port), requests)
    with ValkeyServer() as server:
        found["Redis dead after half of the requests"] = hit_rate(
            folder / "dies", _redis(server.port), requests, server
        )
    return [
        Row(what, f"{rate:.3f}", f"{reference:.3f}", rate / reference, _GOAL) for what, rate in found.items()
    ]


def _redis(port: int) -> dict[str, Any]:
    return {"type": "redis", "options": {"url": f"redis://{LOOPBACK}:{port}"}}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=reduced(600, 40))
    parser.add_argument("--path", default="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    arguments = parser.parse_args()
    with folder_in(arguments.path) as folder:
        print_table("Hit rates of an engine (reference: a daemon without a store)", hits(folder, arguments.requests))


if __name__ == "__main__":
    main()
