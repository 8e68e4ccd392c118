"""A real embedded cache with the loop of an engine on a thread of this process, and its admin surface."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar

from hicache.admin import serve_configured
from hicache.admin.embedded import AdminServer
from hicache.cache import HiRadixCache, create_cache
from hicache.config import HiCacheConfig
from hicache.keys import RadixKey
from tests.cache.world import GEOMETRY, NAMESPACE, prompt
from tests.daemon.daemons import Client
from tests.waiting import wait_for

T = TypeVar("T")


def ask(path: Path, method: str, target: str, body: object = None, token: str | None = None) -> tuple[int, Any]:
    """Make one request, to `/v1/admin` unless the target has its own prefix. Return the status code and the JSON
    document of the answer."""
    with contextlib.closing(Client(path)) as client:
        return client.call(method, target if target.startswith("/v1/") else f"/v1/admin{target}", body, token)


def file_config(folder: Path, **entries: Any) -> HiCacheConfig:
    """Return a configuration with small pages, a file store and an admin socket in a separate directory."""
    return HiCacheConfig.model_validate({
        "page_size": GEOMETRY.page_size, "device": {"tokens": 256}, "host": {"tokens": 512},
        "load_back_threshold_tokens": 4, "break_even": {"mode": "always"},
        "prefetch": {"threshold_tokens": 4, "policy": "wait_complete"},
        "storage": {"type": "file", "options": {"path": folder / "store", "free_space_floor": 0}},
        "admin": {"socket": folder / "sockets" / "engine.sock"},
    } | entries)


# The namespace of these engines, and a prompt of four pages with its token ids and its page keys.
DIGEST = NAMESPACE.digest.hex()
PROMPT = prompt(1, 2, 3, 4)
IDS = [page for page in (1, 2, 3, 4) for _ in range(GEOMETRY.page_size)]
KEYS = [key.hex() for key in PROMPT.page_keys(GEOMETRY.page_size, PROMPT.seed, 0, 4)]


class RunningEngine:
    """A scheduler thread that runs steps until `close`, and the admin surface of its cache."""

    def __init__(self, config: HiCacheConfig) -> None:
        cache = create_cache(config, NAMESPACE)
        assert isinstance(cache, HiRadixCache)
        self.cache = cache
        self.config = config
        self.admin: AdminServer | None = serve_configured(config, cache, NAMESPACE)
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._is_running = threading.Event()
        self._is_running.set()
        self._is_closing = False
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def _loop(self) -> None:
        while not self._is_closing:
            self._is_running.wait()
            self.cache.poll()
            while not self._calls.empty():
                work, answer = self._calls.get()
                answer.set_result(work())
                self.cache.check()
            time.sleep(0.001)  # the time between two steps of an engine
        self.cache.check()

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the scheduler thread and return its result."""
        answer: Future[T] = Future()
        self._calls.put((work, answer))
        return answer.result(30)

    def pause(self) -> None:
        """Stop the scheduler before its next step."""
        self._is_running.clear()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._is_running.set()

    def serve(self, rid: str, key: RadixKey) -> int:
        """Serve a whole request. Return the number of its cached tokens."""
        self.call(lambda: self.cache.prefetch_from_storage(rid, key))
        wait_for(lambda: self.call(lambda: self.cache.check_prefetch_progress(rid)))
        return self.call(lambda: self._run(rid, key))

    def _run(self, rid: str, key: RadixKey) -> int:
        request = self.cache.begin_request(rid, key)
        assert request is not None
        self.cache.start_loading()
        cached = request.cached_tokens
        self.cache.cache_finished_req(request, key)
        return cached

    def ask(self, method: str, target: str, body: object = None, code: int = 200) -> Any:
        """Make one request to its admin surface. Return the document. Fails if the status is not `code`."""
        status, answer = ask(self.config.admin.socket or Path(), method, target, body)
        assert status == code, answer
        return answer

    def job(self, target: str, body: object) -> Any:
        """Start a job, wait for its end, and return its description."""
        started = self.ask("POST", target, body, 202)
        found: list[Any] = []

        def has_ended() -> bool:
            found[:] = [self.ask("GET", f"/jobs/{started['id']}")]
            return bool(found[0]["state"] in ("done", "failed", "cancelled"))

        wait_for(has_ended)
        return found[0]

    def places(self, **body: Any) -> list[list[str]]:
        """Return for each page of a lookup where it is."""
        return [page["places"] for page in self.ask("POST", "/lookup", body)["pages"]]

    def settle(self) -> None:
        """Wait until no transfer is in flight."""
        wait_for(lambda: self.call(lambda: self.cache.controller.idle))

    def close(self) -> None:
        """Stop the thread and close the cache, as an engine does at its end."""
        self._is_running.set()
        if self.admin is not None:
            self.admin.close()
        self._is_closing = True
        self._thread.join(30)
        assert self.cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
