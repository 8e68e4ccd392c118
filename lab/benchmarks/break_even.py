"""Time to first token with a store slower and one faster than the break-even bandwidth: does the store pay?

    python -m lab.benchmarks.break_even

Uses the reference engine with the bundled model on the CPU. One engine stores some prompts; then engines with only that
store request each prompt once. The store is memory that returns pages at a given bandwidth, in multiples of the
break-even bandwidth: the bytes of a prompt's pages per median time of computing the prompt. Ours is the mean time to
first token from the store, if the cache decides (`break_even.mode: measure`) and if it takes every hit (`always`). The
reference is an engine that computes every prompt. ratio = ours : reference time; above 1 the store does harm.

The second table is a busy engine: all prompts arrive at once, over files on a RAM disk (`/dev/shm`) and on the disk of
`TMPDIR`, past the page cache. Runs alternate between the default, `always` and no store; each is the median of some
runs. The reference is the better of the other two.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from hicache.backends.file import FileDriver
from hicache.backends.memory import MemoryDriver
from hicache.backends.pages import PageReads
from hicache.backends.storage import Storage
from hicache.backends.store import UNGUARDED, Store
from hicache.cache import HiRadixCache
from hicache.config import BreakEvenConfig, FileStorageOptions, HiCacheConfig, PrefetchConfig
from hicache.controller import HiCacheController
from hicache.frame import FrameCodec
from hicache.geometry import KVGeometry
from hicache.keys import Namespace
from hicache.tiers import HostPool, HostWindow, MHATokenToKVPool, RequestToTokenPool, create_copy_engine
from hicache_lab.engine import Checkpoint, Engine, LlamaModel, load_checkpoint
from hicache_lab.engine.factory import BUNDLED_MODEL
from hicache_lab.engine.model import TILE

from ._table import Row, print_table, reduced

PAGE_SIZE = 16
# 32 whole pages (4 with the smallest sizes), and one token that is always computed.
PROMPT_TOKENS = reduced(513, 65)
PROMPTS = reduced(64, 4)
WARM_UP_PROMPTS = 4  # computed first, as serving engines do; from them the cache measures the speed of prefill
DRAIN_S = 60.0
BUSY_RUNS = reduced(7)
RAM_DISK = Path("/dev/shm")


class SharedDriver(MemoryDriver):
    """A driver of stores that several engines use, one after another, at `bytes_per_s` (0: without limit)."""

    bytes_per_s = 0.0

    def read(self, pages: PageReads[bytes]) -> None:
        super().read(pages)
        if self.bytes_per_s > 0:
            time.sleep(len(pages) * pages.codec.frame_bytes / self.bytes_per_s)

    def close(self) -> None:
        """Stays open for the next engine."""


class Bench:
    """Engines of one model over one store."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.engines = 0
        self.geometry: KVGeometry = checkpoint.config.geometry(PAGE_SIZE, "float32")
        digest = Namespace(checkpoint.fingerprint, self.geometry).digest
        self.codec = FrameCodec(digest, self.geometry.payload_bytes)
        self.driver = SharedDriver()
        tokens = np.random.default_rng(0).integers(
            2, checkpoint.config.vocab_size, (PROMPTS + WARM_UP_PROMPTS, PROMPT_TOKENS)
        )
        self.prompts: list[list[int]] = tokens.tolist()

    def engine(self, storage: Storage | None, *, always: bool = False) -> Engine:
        """Return an engine with empty L1 and L2 that has computed a few warm-up prompts."""
        pages = 2 * PROMPTS * (PROMPT_TOKENS // PAGE_SIZE + 1)
        pool, host = MHATokenToKVPool(self.geometry, pages), HostPool(self.geometry, pages)
        copies = create_copy_engine(pool.blocks, HostWindow(host))
        config = HiCacheConfig(
            break_even=BreakEvenConfig(mode="always" if always else "measure"),
            prefetch=PrefetchConfig(timeout_base=DRAIN_S),
        )
        controller = HiCacheController(host, copies, storage, config)
        rows = RequestToTokenPool(8, -(-self.checkpoint.config.context_tokens // TILE) * TILE)
        model = LlamaModel(self.checkpoint.config, self.checkpoint.tensors, pool, rows)
        engine = Engine(model, HiRadixCache(pool, host, controller))
        self.engines += 1
        for prompt in self.prompts[PROMPTS:]:
            ask(engine, prompt, salt=f"warm up {self.engines}")  # which no earlier engine has stored
        return engine

    def times(self, bytes_per_s: float, *, store: bool = True, always: bool = False) -> list[float]:
        """Return the seconds to the first token of each prompt, from a store of this bandwidth (0: without limit)."""
        with self.engine(Store(self.driver, self.codec, UNGUARDED) if store else None, always=always) as engine:
            self.driver.bytes_per_s = bytes_per_s
            times = [ask(engine, prompt) for prompt in self.prompts[:PROMPTS]]
            self.driver.bytes_per_s = 0.0
            engine.cache.drain(DRAIN_S)
            return times

    def busy(self, directory: Path, side: str) -> tuple[float, float]:
        """Serve all prompts, which arrive at once, over the files of `directory`. Return the seconds until the last one
        ended, and the mean seconds to the first token."""
        options = FileStorageOptions(path=directory, direct_io=directory.parent != RAM_DISK)
        storage = None if side == "off" else Store(FileDriver(self.codec, options), self.codec, UNGUARDED)
        with self.engine(storage, always=side == "always") as engine:
            began_s = time.perf_counter()
            rids = [engine.submit(prompt, 1, ignore_eos=True) for prompt in self.prompts[:PROMPTS]]
            records = engine.run_until_done()
            ended_s = time.perf_counter()
            engine.cache.drain(DRAIN_S)
        return ended_s - began_s, statistics.mean(records[rid].time_to_first_token_s or 0.0 for rid in rids)


def ask(engine: Engine, prompt: list[int], salt: str | None = None) -> float:
    """Serve a single request; return its seconds to the first token."""
    rid = engine.submit(prompt, 1, cache_salt=salt, ignore_eos=True)
    time_s = engine.run_until_done()[rid].time_to_first_token_s
    if time_s is None:
        raise RuntimeError("a request ended without a token")
    return time_s


def run() -> list[Row]:
    """Return all rows."""
    bench = Bench(load_checkpoint(BUNDLED_MODEL))
    bench.times(0)  # misses and stores all prompts
    computed = bench.times(0, store=False)
    computed_s = statistics.mean(computed)
    break_even_bytes_per_s = PROMPT_TOKENS // PAGE_SIZE * bench.codec.frame_bytes / statistics.median(computed)
    rows = []
    for factor in (0.25, 4.0):
        for mode in ("measure", "always"):
            mean_s = statistics.mean(bench.times(factor * break_even_bytes_per_s, always=mode == "always"))
            label = f"store at {factor:g} x break-even, mode {mode}"
            rows.append(Row(label, f"{mean_s * 1e3:.1f} ms", f"{computed_s * 1e3:.1f} ms", mean_s / computed_s))
    return rows


def run_busy() -> list[Row]:
    """Return the rows of a busy engine."""
    bench, rows, sides = Bench(load_checkpoint(BUNDLED_MODEL)), [], ("default", "always", "off")
    for where in (RAM_DISK, None):
        with tempfile.TemporaryDirectory(prefix="hicache-bench-", dir=where) as folder:
            bench.busy(Path(folder), "always")  # stores all prompts
            runs = [[bench.busy(Path(folder), side) for side in sides] for _ in range(BUSY_RUNS)]
        for number, what in enumerate(("all served", "mean time to first token")):
            ours, *others = (statistics.median(run[side][number] for run in runs) for side in range(len(sides)))
            rows.append(Row(
                f"{what}, files on {'a RAM disk' if where else 'disk'}", f"{ours * 1e3:.0f} ms",
                f"always {others[0] * 1e3:.0f}, off {others[1] * 1e3:.0f} ms", ours / min(others),
            ))
    return rows


def main() -> None:
    """Command line."""
    print_table("Does it pay: mean time to first token (reference: every prompt computed)", run())
    print_table("A busy engine over files (reference: the better of always and no store)", run_busy())


if __name__ == "__main__":
    main()
