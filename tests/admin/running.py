"""A real embedded cache with the loop of an engine around it, on a thread of this process, and its admin surface."""

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
    """One request to `/v1/admin`; the status code and the JSON document of the answer."""
    with contextlib.closing(Client(path)) as client:
        return client.call(method, f"/v1/admin{target}", body, token)


def file_config(folder: Path, **entries: Any) -> HiCacheConfig:
    """Small pages in a file store, and an admin socket in a directory of its own."""
    return HiCacheConfig.model_validate({
        "page_size": GEOMETRY.page_size, "device": {"tokens": 256}, "host": {"tokens": 512},
        "load_back_threshold_tokens": 4, "prefetch": {"threshold_tokens": 4}, "break_even": {"mode": "always"},
        "storage": {"type": "file", "options": {"path": folder / "store", "free_space_floor": 0}},
        "admin": {"socket": folder / "sockets" / "engine.sock"},
    } | entries)  # fmt: skip


# The namespace of what these engines compute, and a prompt of four pages, its token ids and its page keys.
DIGEST = NAMESPACE.digest.hex()
PROMPT = prompt(1, 2, 3, 4)
IDS = [page for page in (1, 2, 3, 4) for _ in range(GEOMETRY.page_size)]
KEYS = [key.hex() for key in PROMPT.page_keys(GEOMETRY.page_size, PROMPT.seed, 0, 4)]


class RunningEngine:
    """Steps of a scheduler until `close`; `call` does something in one of them. `admin` serves its cache."""

    def __init__(self, config: HiCacheConfig) -> None:
        cache = create_cache(config, NAMESPACE)
        assert isinstance(cache, HiRadixCache)
        self.cache = cache
        self.config = config
        self.admin: AdminServer | None = serve_configured(config, cache, NAMESPACE)
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._ends = False
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def _loop(self) -> None:
        while not self._ends:
            self._goes_on.wait()
            self.cache.poll()
            while not self._calls.empty():
                work, answer = self._calls.get()
                answer.set_result(work())
                self.cache.check()
            time.sleep(0.001)  # as an engine between steps
        self.cache.check()

    def call(self, work: Callable[[], T]) -> T:
        """Have the scheduler thread do something."""
        answer: Future[T] = Future()
        self._calls.put((work, answer))
        return answer.result(30)

    def pause(self) -> None:
        """Let no step begin any more."""
        self._goes_on.clear()

    def resume(self) -> None:
        """Go on."""
        self._goes_on.set()

    def serve(self, rid: str, key: RadixKey) -> int:
        """A whole request; how many tokens of it were cached."""
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
        """One request to its admin surface, which is answered with `code`; the document."""
        status, answer = ask(self.config.admin.socket or Path(), method, target, body)
        assert status == code, answer
        return answer

    def job(self, target: str, body: object) -> Any:
        """A job, to its end."""
        started = self.ask("POST", target, body, 202)
        found: list[Any] = []

        def has_ended() -> bool:
            found[:] = [self.ask("GET", f"/jobs/{started['id']}")]
            return bool(found[0]["state"] in ("done", "failed", "cancelled"))

        wait_for(has_ended)
        return found[0]

    def places(self, **body: Any) -> list[list[str]]:
        """Where the pages of a lookup are."""
        return [page["places"] for page in self.ask("POST", "/lookup", body)["pages"]]

    def settle(self) -> None:
        """Until nothing is in flight."""
        wait_for(lambda: self.call(lambda: self.cache.controller.idle))

    def close(self) -> None:
        """End it as an engine does."""
        self._goes_on.set()
        if self.admin is not None:
            self.admin.close()
        self._ends = True
        self._thread.join(30)
        assert self.cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
