"""An engine without vLLM that uses a tier as vLLM's TieringOffloadingManager does.

It allocates and frees rows of host memory as vLLM does. It detects a tier that accesses a row after the end of its job,
ends a job twice, or reports chunks that were not in the job.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hicache.backends.base import GetOutcome, SetOutcome
from hicache.backends.calls import Call
from hicache.backends.memory import MemoryDriver
from hicache.backends.opening import StorageOpener
from hicache.backends.pages import PageReads
from hicache.backends.storage import Storage
from hicache.config import HiCacheConfig
from hicache.frame import FrameCodec, PageBuffer
from hicache.integrations.vllm_tier.identity import ChunkGroup, ChunkLayout, chunk_keys
from hicache.integrations.vllm_tier.tier import ChunkTier, Ended
from hicache.keys import Namespace
from hicache_lab.conformance import bare
from tests.passing import Passing
from tests.waiting import wait_for

ROWS = 64
CHUNK_BYTES = 8192
LAYOUT = ChunkLayout(
    engine="vllm/0.32.0/cuda", dtype="bfloat16", kv_layout="LBHNC", groups=(ChunkGroup(0, 16, ("layer.0", "layer.1")),),
    chunk_bytes=CHUNK_BYTES, chunk_blocks=4, hash_tokens=16,
)
NAMESPACE = LAYOUT.namespace("weights", "model")
# vLLM's hash of a block, and its group.
ROOT = hashlib.sha256(b"root").digest()


def names_of(prompt: str, count: int, group: int = 0) -> list[bytes]:
    """Return the names of a prompt's chunks in vLLM's form: a hash of 32 bytes and the group."""
    return [hashlib.sha256(f"{prompt} {i}".encode()).digest() + group.to_bytes(4, "big") for i in range(count)]


def content(name: bytes, weights: str = "") -> bytes:
    """Return the KV of a chunk."""
    return hashlib.shake_128(name + weights.encode()).digest(CHUNK_BYTES)


class Store:
    """A server with one store per namespace. Closing a store keeps its pages.

    While `reads`, `writes` or `lookups` is cleared, these calls hang, also beyond their deadline. `refuses` is raised
    when a store is opened, `raises` by each call. With `fails`, each read returns ERROR; with `lies`, the driver says
    that it has filled the buffers of each read, and has not.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.reads, self.writes, self.lookups = threading.Event(), threading.Event(), threading.Event()
        self.release()
        self.hanging = threading.Semaphore(0)  # released once per call that begins to hang
        self.refuses: Exception | None = None
        self.raises: Exception | None = None
        self.fails = self.lies = False
        self.pages_asked = 0
        self.closed: list[bytes] = []  # by namespace
        self.drivers: dict[bytes, MemoryDriver] = {}  # by namespace
        self.capacity_bytes = capacity_bytes

    def open(self, namespace: Namespace) -> Storage:
        if self.refuses is not None:
            raise self.refuses
        codec = FrameCodec(namespace.digest, namespace.shape.payload_bytes)
        driver = self.drivers.setdefault(namespace.digest, _Driver(self))
        return _Backend(self, bare(driver, codec))

    @property
    def driver(self) -> MemoryDriver:
        """The driver of the pages of NAMESPACE."""
        return self.drivers[NAMESPACE.digest]

    def damage(self, key: bytes, at: int = 1000) -> None:
        """Flip a bit of a page of NAMESPACE."""
        page = bytearray(self.driver.peek(NAMESPACE.digest, key) or b"")
        page[at] ^= 1
        self.driver.poke(NAMESPACE.digest, key, bytes(page))

    def release(self) -> None:
        for event in (self.reads, self.writes, self.lookups):
            event.set()

    def pass_or_hang(self, event: threading.Event) -> None:
        if self.raises is not None:
            raise self.raises
        if not event.is_set():
            self.hanging.release()
            assert event.wait(30)


class _Driver(MemoryDriver):
    def __init__(self, store: Store) -> None:
        super().__init__(store.capacity_bytes)
        self._store = store

    def read(self, pages: PageReads[Any]) -> None:
        if not self._store.lies:
            super().read(pages)
            return
        for position in pages:
            pages.accept(position, pages.codec.frame_bytes, None)


class _Backend(Passing):
    def __init__(self, store: Store, inner: Storage) -> None:
        super().__init__(inner)
        self._store = store

    def _has(self, call: Call, keys: Sequence[bytes]) -> list[bool]:
        self._store.pass_or_hang(self._store.lookups)
        return super()._has(call, keys)

    def _get(self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer]) -> list[GetOutcome]:
        self._store.pass_or_hang(self._store.reads)
        self._store.pages_asked += len(keys)
        if self._store.fails:
            return [GetOutcome.ERROR] * len(keys)
        return self.inner.batch_get(keys, pages, deadline=call.deadline + 100)

    def _set(
        self, call: Call, keys: Sequence[bytes], pages: Sequence[PageBuffer], parent: bytes | None
    ) -> list[SetOutcome]:
        self._store.pass_or_hang(self._store.writes)
        return self.inner.batch_set(keys, pages, parent=parent, deadline=call.deadline + 100)

    def close(self) -> None:
        """Record the close. The server keeps the pages."""
        self._store.closed.append(self.codec.namespace)


class ChunkEngine:
    """See the module's docstring. `engine_on` closes its tier."""

    def __init__(
        self, store: Store | str, *, in_place: bool = False, namespace: Namespace = NAMESPACE, root: bytes = ROOT,
        **entries: object,
    ) -> None:
        self.config = HiCacheConfig.model_validate({
            "page_size": namespace.shape.tokens,
            "storage": {"type": "memory"},
            # Long enough for a busy machine; tests do not wait for its end.
            "prefetch": {"timeout_base": "20s"}, **entries,
        })
        self._memory = bytearray(ROWS * CHUNK_BYTES)
        self.memory = memoryview(self._memory)
        self._free = list(range(ROWS))
        self._numbers = itertools.count()
        self._open: dict[int, tuple[bool, list[bytes], list[int]]] = {}
        self.ended: dict[int, Ended] = {}
        opens = store.open if isinstance(store, Store) else _file_opener(store)
        self.tier = ChunkTier(self.config, namespace, self.memory, opens, chunk_keys(root), in_place=in_place)

    def row(self, row: int) -> memoryview:
        return self.memory[row * CHUNK_BYTES : (row + 1) * CHUNK_BYTES]

    def step(self) -> None:
        """Use the tier as a step of vLLM's scheduler does."""
        for ended in self.tier.ended():
            is_load, names, rows = self._open.pop(ended.number)
            assert set(ended.moved) <= set(names) and len(set(ended.moved)) == len(ended.moved)
            if is_load:
                for name, row in zip(names, rows, strict=True):
                    assert name not in ended.moved or self.row(row) == content(name), "the tier delivered a wrong chunk"
            self._free_rows(rows)
            self.ended[ended.number] = ended
        self.tier.step()

    def find(self, names: Sequence[bytes], request: str = "r") -> list[bool]:
        """Step until the tier has answered the lookups of all chunks. Return the answers."""
        found: list[bool | None] = []

        def ask() -> bool:
            self.step()
            found[:] = [self.tier.lookup(name, request) for name in names]
            return None not in found

        wait_for(ask)
        return [bool(one) for one in found]

    def begin(self, names: Sequence[bytes], *, load: bool) -> int:
        """Submit a job and return its number. `end` waits for it."""
        rows = [self._free.pop(0) for _ in names]
        for name, row in zip(names, rows, strict=True):
            self.row(row)[:] = bytes(CHUNK_BYTES) if load else content(name)
        number = next(self._numbers)
        self._open[number] = (load, list(names), rows)
        (self.tier.load if load else self.tier.store)(number, list(names), rows)
        return number

    def end(self, number: int) -> list[bytes]:
        """Wait for the end of a job. Return the chunks that it has moved."""
        wait_for(lambda: number in self.ended, self.step)
        return list(self.ended[number].moved)

    def save(self, names: Sequence[bytes]) -> list[bytes]:
        return self.end(self.begin(names, load=False))

    def fetch(self, names: Sequence[bytes]) -> list[bytes]:
        return self.end(self.begin(names, load=True))

    def _free_rows(self, rows: list[int]) -> None:
        """Free rows and overwrite them at once, as a busy engine does."""
        for row in rows:
            self.row(row)[:] = b"\xee" * CHUNK_BYTES
        self._free = rows + self._free

    def is_clean(self) -> bool:
        """True if no free row was written to."""
        taken = {row for _, _, rows in self._open.values() for row in rows}
        return all(
            self.row(row) in (b"\xee" * CHUNK_BYTES, bytes(CHUNK_BYTES)) for row in range(ROWS) if row not in taken
        )


@contextmanager
def engine_on(store: Store | str, **options: object) -> Iterator[ChunkEngine]:
    """Open an engine, and close it at the end."""
    engine = ChunkEngine(store, **options)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        if isinstance(store, Store):
            store.release()
        engine.tier.close()


def _file_opener(folder: str) -> Callable[[Namespace], Storage]:
    opener = StorageOpener(HiCacheConfig.model_validate({"storage": {"type": "file", "options": {"path": folder}}}))
    return lambda namespace: opener.open(
        opener.codec(namespace.digest, CHUNK_BYTES, weights_epoch=namespace.weights_epoch, label="")
    )
