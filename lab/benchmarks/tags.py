"""The cost of verifying and encoding pages: tags, encryption, compression.

    python -m lab.benchmarks.tags [--path DIRECTORY]

The first table checks a frame, warm in the processor's cache and cold. The file backend checks frames warm, right after
the read. The reference is a copy of the page in memory, the least work of any backend.
ratio = time of the check : time of the copy.

The second table seals and accepts pages in each encoding: KV of the bundled model over the bundled texts, in bfloat16,
and noise that cannot be compressed. The reference is the file backend without a tag, with one thread, from and to the
page cache of DIRECTORY: the fastest store. ratio = time of the codec : time of that store for the page.

The third table is the file backend with each tag or encoding against the one without, in turns, with noise as pages.
ratio = time : time; the default tag may cost a tenth.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from hicache.backends.file import FileDriver
from hicache.backends.store import UNGUARDED, Store
from hicache.config import FileStorageOptions
from hicache.frame import HEADER_BYTES, Compression, FrameCodec, TagKind, unseal
from hicache.mapping import populate
from hicache.tiers import MHATokenToKVPool, RequestToTokenPool
from hicache_lab.engine import BUNDLED_MODEL, LlamaModel, Span, load_checkpoint, load_tokenizer
from lab.benchmarks._table import Row, alternate, print_table, reduced

KEY = bytes(32)
NAMESPACE = bytes(32)
SECRET = bytes(range(32))
COLD_BYTES = reduced(256, 8) << 20  # more than the last-level cache holds
PAGE_BYTES = 2 << 20
STORE_PAGES = reduced(64, 8)
GOAL = 1.1  # for the default tag, relative to the fastest store without a tag
ROUNDS = reduced(9)


def best(runs: int, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Return the seconds of the best run; `before` runs uncounted before each."""
    times = []
    for _ in range(runs):
        before()
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def tag_rows() -> list[Row]:
    """Return one row per page size, tag and cache state (warm or cold)."""
    rows = []
    for payload in (2 << 20, 8 << 20):
        for name, codec in (
            ("XXH3-128", FrameCodec(NAMESPACE, payload, tag=TagKind.XXH3_128)),
            ("AES-256-GMAC", FrameCodec(NAMESPACE, payload, mac_keys=[SECRET])),
        ):
            count = COLD_BYTES // payload
            memory = np.ones((count, codec.frame_bytes), dtype=np.uint8)
            target = np.zeros_like(memory)
            frames = [memoryview(row.data) for row in memory]
            for frame in frames:
                codec.seal(KEY, frame)
            warm = best(50, lambda c=codec, f=frames[0]: c.check(KEY, f))  # type: ignore[misc]
            cold = best(5, lambda c=codec, fs=frames: [c.check(KEY, f) for f in fs]) / count  # type: ignore[misc]
            copy = best(5, lambda t=target, m=memory: np.copyto(t, m)) / count  # type: ignore[misc]
            for label, seconds in (("warm", warm), ("cold", cold)):
                what = f"{name}, {payload >> 20} MiB page, {label}"
                rows.append(Row(what, speed(payload, seconds), speed(payload, copy), seconds / copy))
    return rows


def model_kv() -> bytes:
    """Return one page of real KV: the bundled model over a bundled text, bfloat16, layer by layer, K before V."""
    checkpoint = load_checkpoint(BUNDLED_MODEL)
    tokens_per_page = PAGE_BYTES // checkpoint.config.geometry(1, "bfloat16").payload_bytes
    text = "".join(path.read_text() for path in sorted((BUNDLED_MODEL.parent / "texts").glob("*.txt")))
    tokens = load_tokenizer(BUNDLED_MODEL).encode(text).ids[:tokens_per_page]
    pool = MHATokenToKVPool(checkpoint.config.geometry(tokens_per_page, "bfloat16"), 2)
    rows = RequestToTokenPool(1, 2 * tokens_per_page)
    taken, pages = rows.alloc(1), pool.allocator.alloc(1)
    assert taken is not None and pages is not None and len(tokens) == tokens_per_page
    (row,) = taken
    rows.write(row, pages, tokens_per_page)
    LlamaModel(checkpoint.config, checkpoint.tensors, pool, rows).forward([Span(row, 0, tokens)])
    return b"".join(region[pages[0]].numpy().tobytes() for layer in pool.blocks.layers for region in layer)


def forms() -> dict[str, FrameCodec]:
    """Return a codec for each encoding."""
    planes, whole = Compression(), Compression(byte_planes=False)
    return {
        "XXH3-128 (default)": FrameCodec(NAMESPACE, PAGE_BYTES),
        "AES-256-GMAC": FrameCodec(NAMESPACE, PAGE_BYTES, mac_keys=[SECRET]),
        "AES-256-GCM": FrameCodec(NAMESPACE, PAGE_BYTES, encryption_keys=[SECRET]),
        "zstd, no planes": FrameCodec(NAMESPACE, PAGE_BYTES, compression=whole),
        "zstd": FrameCodec(NAMESPACE, PAGE_BYTES, compression=planes),
        "zstd + GCM": FrameCodec(NAMESPACE, PAGE_BYTES, encryption_keys=[SECRET], compression=planes),
    }


def form_rows(folder: Path) -> list[Row]:
    """Return rows of sealing and accepting in each encoding, relative to the time of a store without tags."""
    store_s, load_s = store_times(folder)
    rows = []
    noise = np.random.default_rng(1).bytes(PAGE_BYTES)
    for data, payload in (("model KV", model_kv()), ("noise", noise)):
        for name, codec in forms().items():
            frame = memoryview(np.zeros(codec.frame_bytes, dtype=np.uint8).data)
            frame[HEADER_BYTES : HEADER_BYTES + PAGE_BYTES] = payload
            seal = best(9, lambda c=codec, f=frame: c.seal(KEY, f), lambda f=frame: unseal(f))  # type: ignore[misc]
            stored = bytes(codec.seal(KEY, frame))

            def arrive(frame: memoryview = frame, stored: bytes = stored) -> None:
                frame[: len(stored)] = stored

            size = len(stored)
            accept = best(9, lambda c=codec, f=frame, n=size: c.accept(KEY, f, n), arrive)  # type: ignore[misc]
            what = f"{name}, {data}, {size / codec.frame_bytes:.2f} of the bytes"
            rows.append(Row(f"seal: {what}", speed(PAGE_BYTES, seal), speed(PAGE_BYTES, store_s), seal / store_s))
            rows.append(Row(f"accept: {what}", speed(PAGE_BYTES, accept), speed(PAGE_BYTES, load_s), accept / load_s))
    return rows


class FileStore:
    """A file backend of one codec and one thread, and its pages."""

    def __init__(self, folder: Path, codec: FrameCodec) -> None:
        driver = FileDriver(codec, FileStorageOptions(path=folder, io_threads=1))
        self.backend = Store(driver, codec, UNGUARDED)
        # In huge pages and aligned, as in a host pool: loads take two thirds of the time of loads into other memory.
        mapping = mmap.mmap(-1, STORE_PAGES * codec.frame_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        populate(mapping)
        memory = np.frombuffer(mapping, dtype=np.uint8).reshape(STORE_PAGES, codec.frame_bytes)
        memory[:] = np.random.default_rng(2).integers(0, 256, memory.shape, dtype=np.uint8)
        self.frames = [memoryview(row.data) for row in memory]
        self.keys = [number.to_bytes(32, "big") for number in range(STORE_PAGES)]

    def renew(self) -> None:
        """Remove the pages."""
        self.backend.delete(self.keys, deadline=float("inf"))
        for frame in self.frames:
            unseal(frame)

    def store(self) -> None:
        """Store all pages."""
        outcomes = self.backend.batch_set(self.keys, self.frames, parent=None, deadline=float("inf"))
        assert set(outcomes) == {"stored"}

    def load(self) -> None:
        """Read all pages."""
        assert set(self.backend.batch_get(self.keys, self.frames, deadline=float("inf"))) == {"hit"}


def plain_codec() -> FrameCodec:
    """Return a codec without a tag."""
    return FrameCodec(NAMESPACE, PAGE_BYTES, tag=TagKind.NONE)


def store_times(folder: Path) -> tuple[float, float]:
    """Return the seconds per page of a store and of a load, with the file backend without tags."""
    store = FileStore(folder / "alone", plain_codec())
    found = best(5, store.store, store.renew) / STORE_PAGES, best(5, store.load) / STORE_PAGES
    store.backend.close()
    return found


def backend_rows(folder: Path) -> list[Row]:
    """Return rows of the whole file backend with a tag or an encoding against the one without."""
    rows = []
    for number, (name, codec) in enumerate(forms().items()):
        sides = [FileStore(folder / f"{number} {side}", codec) for side, codec in enumerate((codec, plain_codec()))]

        def renew(sides: list[FileStore] = sides) -> None:
            for side in sides:
                side.renew()

        stores = alternate(ROUNDS, [side.store for side in sides], renew)
        loads = alternate(ROUNDS, [side.load for side in sides])
        for verb, (ours, reference) in (("store", stores), ("load", loads)):
            size, goal = STORE_PAGES * PAGE_BYTES, GOAL if name.startswith("XXH3") else None
            ratio = min(ours) / min(reference)
            rows.append(Row(f"{verb}: {name}", speed(size, min(ours)), speed(size, min(reference)), ratio, goal))
        for side in sides:
            side.renew()
            side.backend.close()
    return rows


def speed(size: int, seconds: float) -> str:
    """Return the speed as text."""
    return f"{size / seconds / 1e9:.2f} GB/s"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--path", type=Path, help="directory of the reference store; default: a temporary directory")
    options = parser.parse_args()
    print_table(
        "Tags (reference: one copy of the page in memory; ratio = time of the check : time of the copy)", tag_rows()
    )
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        print_table(
            "Stored forms, 2 MiB pages (reference: file backend without tags; ratio = time of the codec : its time)",
            form_rows(Path(folder)),
        )
        print_table(
            "File backend, 2 MiB pages of noise (reference: the same without tags; ratio = time : time)",
            backend_rows(Path(folder)),
        )


if __name__ == "__main__":
    main()
