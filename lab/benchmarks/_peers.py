"""Stores of other projects on the buffers of a benchmark: SGLang's files, and LMCache's files and Redis client.

Each is used from its unpacked wheel, or from the installed package: `pip download --no-deps sglang==0.5.23
lmcache==0.5.6`, then unpack both into one directory. Both need torch, which is imported only for them.

SGLang's store is called as by its threads, one page after another, but without the copies between pool and page.
LMCache's clients move pages in threads of their own in C++. They are called through LMCache's own class for asyncio, on
a loop in a thread of its own, as LMCache does. None of them verifies the content of a page.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

SGLANG, LMCACHE = "SGLang", "LMCache"


class Peer(Protocol):
    """A store and the pages of one batch, which it writes from the frames and reads into them."""

    def write(self) -> None: ...
    def read(self) -> None: ...
    def remove(self) -> None: ...
    def close(self) -> None: ...


def find_package(name: str, folder: str | None) -> Path | None:
    """Return the folder of a package below `folder`, or else of the installed package; None if there is none."""
    if folder is not None:
        return next((path.parent for path in Path(folder).rglob(f"{name}/__init__.py")), None)
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def file_peers(wheels: str | None, folder: Path, frames: Sequence[memoryview], threads: int) -> dict[str, Peer]:
    """Return those of SGLang's and LMCache's file stores that can be used, in new directories below `folder`."""
    found: dict[str, Peer] = {}
    if (package := find_package("sglang", wheels)) is not None:
        found[SGLANG] = _SGLangFiles(package, folder / "sglang", frames)
    if (package := find_package("lmcache", wheels)) is not None:
        found[LMCACHE] = _LMCacheFiles(package, folder / "lmcache", frames, threads)
    for peer in found.values():
        _check(peer, frames)
    return found


def redis_peers(wheels: str | None, port: int, frames: Sequence[memoryview], connections: int) -> dict[str, Peer]:
    """Return LMCache's client of a server on 127.0.0.1 if it can be used; `remove` keeps its pages."""
    package = find_package("lmcache", wheels)
    if package is None:
        return {}
    module = _load("lmcache_redis", package)
    peer = _LMCache(package, module.LMCacheRedisClient("127.0.0.1", port, connections, "", ""), frames)
    _check(peer, frames)
    return {LMCACHE: peer}


def _check(peer: Peer, frames: Sequence[memoryview]) -> None:
    """Write and read all pages once. A store that did not move the bytes would only seem to be fast."""
    before = [bytes(frame) for frame in frames]
    peer.write()
    for frame in frames:
        frame[:] = bytes(len(frame))
    peer.read()
    assert [bytes(frame) for frame in frames] == before
    peer.remove()


class _SGLangFiles:
    def __init__(self, package: Path, folder: Path, frames: Sequence[memoryview]) -> None:
        torch: Any = importlib.import_module("torch")
        sglang: Any = importlib.import_module("lab.benchmarks.engines._sglang")
        self._store = sglang.open_file_store(package, str(folder))
        self._folder = folder
        self._keys = [f"{page:064x}" for page in range(len(frames))]
        self._pages = [torch.frombuffer(frame, dtype=torch.uint8) for frame in frames]

    def write(self) -> None:
        assert self._store.batch_set(self._keys, self._pages)

    def read(self) -> None:
        assert all(page is not None for page in self._store.batch_get(self._keys, self._pages))

    def remove(self) -> None:
        _remove_files(self._folder)

    def close(self) -> None:
        self._pages.clear()


class _LMCache:
    def __init__(self, package: Path, native: Any, frames: Sequence[memoryview]) -> None:
        wrapper = _load("v1/storage_backend/native_clients/connector_client_base", package)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        # Four fields, as its file store requires: model, rank, group and hash.
        self._keys = [f"bench@00000000@0@{page:064x}" for page in range(len(frames))]
        self._frames = list(frames)

        async def connect() -> Any:
            return wrapper.ConnectorClientBase(native, self._loop)

        self._client = self._call(connect())

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def write(self) -> None:
        self._call(self._client.batch_set(self._keys, self._frames))

    def read(self) -> None:
        self._call(self._client.batch_get(self._keys, self._frames))

    def remove(self) -> None:
        pass

    def close(self) -> None:
        async def close() -> None:
            self._client.close()

        self._call(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._frames.clear()


class _LMCacheFiles(_LMCache):
    def __init__(self, package: Path, folder: Path, frames: Sequence[memoryview], threads: int) -> None:
        module = _load("lmcache_fs", package)
        self._folder = folder
        super().__init__(package, module.LMCacheFSClient(str(folder), threads, "", False, 0), frames)

    def remove(self) -> None:
        _remove_files(self._folder)


def _remove_files(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def _load(name: str, package: Path) -> ModuleType:
    """Load one module of a package without the package itself, which imports CUDA's libraries."""
    importlib.import_module("torch")  # loads the libraries that LMCache's compiled modules are linked to
    path = next(package.glob(f"{name}.*"))
    spec = importlib.util.spec_from_file_location(f"lmcache.{Path(name).name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
