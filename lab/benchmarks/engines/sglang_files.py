"""Our file store beside SGLang's (`HiCacheFile`), on the pages of one host pool.

    python -m lab.benchmarks.engines.sglang_files [--peer DIR] [--path DIRECTORY]

SGLang's side works as its backup and prefetch threads: it copies each page out of the pool, 128 pages per call, with
one thread. Ours works as HiCacheStore: it stores and reads pages in place in the pool. It also verifies each page by
its tag, stores its parent, keeps an index with a capacity and checks each file. Neither side syncs.

Warm: files are removed after each round, so the next round reuses memory of the page cache that was touched before.
Cold: files stay, so each round fills memory that the host must first give to a virtual machine. There, that limits the
speed of cold writes, not the store.

Small pages are on a RAM disk if there is one, and only warm: the cost of a page shows, not that of its bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any, get_args

import torch

from hicache.config import HiCacheConfig
from hicache.integrations.sglang.identity import KEY_HASH, KV
from hicache.integrations.sglang.pages import HostPages
from hicache.integrations.sglang.storage import HostPoolStorage
from hicache.integrations.store import EngineStorage
from hicache.keys import Namespace
from lab.benchmarks._peers import find_package
from lab.benchmarks._table import Row, print_table
from lab.benchmarks.engines._sglang import HostPool, Layout, open_file_store
from lab.benchmarks.engines._sides import Side, measure_cold, measure_warm, rows_of, with_malloc
from lab.benchmarks.file_backend import ram_disk

# Tokens and layers of a page by its size in KiB. A model has as many layers as it has: small pages have fewer tokens.
_TOKENS_LAYERS = {4: (1, 1), 64: (1, 16), 256: (2, 32), 2048: (16, 32)}
_SMALL_KIB = (4, 64, 256)
_SMALL_ROUNDS = 30


def _keys(pages: int, number: int) -> list[str]:
    return [hashlib.sha256(b"%d %d" % (number, page)).hexdigest() for page in range(pages)]


def sglang_side(store: Any, folder: Path, pool: HostPool) -> Side:
    def remove(number: int) -> None:
        for key in _keys(pool.pages, number):
            next(folder.glob(f"{key}*")).unlink()

    return Side(
        lambda number: pool.save(store, _keys(pool.pages, number)),
        lambda number: pool.load(store, _keys(pool.pages, number)),
        remove,
    )


def our_side(storage: HostPoolStorage, pool: HostPool) -> Side:
    indices = pool.indices

    def write(number: int) -> None:
        assert all(storage.write(_keys(pool.pages, number), indices, []))

    def read(number: int) -> None:
        assert all(storage.read(_keys(pool.pages, number), indices))

    return Side(write, read, lambda _: storage.clear())


def open_ours(folder: Path, pool: HostPool, threads: int, direct: bool) -> HostPoolStorage:
    """Return the storage that HiCacheStore opens, without its translation of names, which would need SGLang."""
    options = {"path": str(folder), "capacity": "1TiB", "io_threads": threads, "direct_io": direct}
    config = HiCacheConfig.model_validate({
        "page_size": pool.page_size, "storage": {"type": "file", "options": options},
        "transfer": {"storage_deadline": "60s", "shutdown_deadline": "60s"},
    })
    pages = HostPages(pool)
    namespace = Namespace(model="bench", geometry=pages.shape, key_hash=KEY_HASH, engine_layout=pool.layout)
    storage = HostPoolStorage(EngineStorage(config), lambda: True)
    storage.add(KV, pages, namespace)
    return storage


def run(
    package: Path, path: str | None, *, layout: Layout = "page_first", threads: int = 1, direct: bool = False,
    pages: int = 128, rounds: tuple[int, int] = (5, 4), kib: int = 2048,
) -> list[Row]:
    """Measure pages of one size and layout, in these numbers of warm and cold rounds, in a temporary directory below
    `path` (default: the current directory)."""
    torch.set_num_threads(1)  # as SGLang does in an engine on a GPU
    tokens, layers = _TOKENS_LAYERS[kib]
    pool = HostPool(layout, pages, tokens=tokens, layers=layers, heads=8, dim=128)
    with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=path or os.getcwd()) as name:
        folder = Path(name)
        theirs = sglang_side(open_file_store(package, str(folder / "sglang")), folder / "sglang", pool)
        storage = open_ours(folder / "ours", pool, threads, direct)
        try:
            ours = our_side(storage, pool)
            sides = [ours, theirs]
            measure_warm(sides, rounds[0])
            measure_cold(sides, rounds[1])
        finally:
            storage.close()
        label = f"{kib} KiB, {layout}, {threads} threads{', direct_io' if direct else ''}"
        return rows_of(label, ours, theirs, pool.page_bytes, pages)


def main() -> None:
    parser = argparse.ArgumentParser(description="Our file store beside SGLang's")
    parser.add_argument("--peer", help="directory with SGLang's unpacked wheel (default: the installed package)")
    parser.add_argument("--path", help="directory to write in (default: a temporary one below the current directory)")
    parser.add_argument("--layouts", nargs="+", choices=get_args(Layout), default=get_args(Layout))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="io_threads of our store")
    parser.add_argument("--pages", type=int, default=128, help="pages per call; SGLang's calls have 128")
    parser.add_argument("--rounds", type=int, nargs=2, default=(5, 4), metavar=("WARM", "COLD"))
    options = parser.parse_args()
    with_malloc("lab.benchmarks.engines.sglang_files")
    package = find_package("sglang", options.peer)
    if package is None:
        parser.error("SGLang is not installed; give the directory of its unpacked wheel with --peer")
    cases = [(layout, threads, False) for layout in options.layouts for threads in options.threads]
    rows: list[Row] = []
    for layout, threads, direct in (*cases, ("page_first", options.threads[-1], True)):
        rows += run(
            package, options.path, layout=layout, threads=threads, direct=direct, pages=options.pages,
            rounds=tuple(options.rounds),
        )
    print_table(f"Our file store beside SGLang's, {options.pages} pages of 2 MiB a call", rows)
    place, kind = ram_disk(options.path)
    rows = []
    for kib, threads in itertools.product(_SMALL_KIB, options.threads):
        rounds = (_SMALL_ROUNDS if options.rounds[0] > 1 else 1, 0)
        rows += run(package, place, threads=threads, pages=options.pages, rounds=rounds, kib=kib)
    print_table(f"Our file store beside SGLang's, {options.pages} small pages a call, {kind}", rows)


if __name__ == "__main__":
    main()
