"""Small models, pools and engines for the tests of the reference engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from hicache.backends.storage import Storage
from hicache.cache import HiRadixCache
from hicache.config import BreakEvenConfig, HiCacheConfig, PrefetchConfig
from hicache.controller import HiCacheController
from hicache.frame import FrameCodec
from hicache.keys import Namespace
from hicache.tiers import (
    CopyEngine,
    EngineBlocks,
    HostPool,
    HostWindow,
    MHATokenToKVPool,
    RequestToTokenPool,
    create_copy_engine,
)
from hicache.types import PageIds
from hicache_lab.engine import (
    TILE,
    Checkpoint,
    Engine,
    EngineOptions,
    LayerKind,
    LlamaConfig,
    LlamaModel,
    RequestRecord,
    Span,
    TrailingLayers,
)

WAIT_S = 60.0
ROWS = 8

TINY = LlamaConfig(
    vocab_size=97, hidden_size=48, intermediate_size=80, layers=2, heads=6, kv_heads=2, head_dim=16, context_tokens=512
)


def mixed(kinds: str, window: int | None = None) -> LlamaConfig:
    """Return `TINY` with other layers: `f` has full attention, `w` a window and `s` a state."""
    names = {"f": LayerKind.FULL, "w": LayerKind.WINDOW, "s": LayerKind.LINEAR}
    return replace(
        TINY, layers=len(kinds), layer_types=tuple(names[kind] for kind in kinds), sliding_window=window
    )


def random_tensors(config: LlamaConfig, seed: int = 0, std: float = 0.15) -> dict[str, torch.Tensor]:
    """Return random weights, large enough that attention influences the result."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * std + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in config.tensor_shapes().items()
    }


def random_checkpoint(config: LlamaConfig = TINY, seed: int = 0) -> Checkpoint:
    return Checkpoint(config, random_tensors(config, seed), f"random-{seed}")


def random_tokens(count: int, seed: int, config: LlamaConfig = TINY) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(2, config.vocab_size, (count,), generator=generator).tolist()
    return tokens


class Device:
    """A model with its pool and request table. Tests allocate the pages of rows themselves. In trailing pools, all
    pages of a row have slots."""

    def __init__(
        self,
        config: LlamaConfig = TINY,
        *,
        page_size: int = 16,
        pages: int = 96,
        dtype: str = "float32",
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.pool = MHATokenToKVPool(config.geometry(page_size, dtype), pages)
        columns = -(-config.context_tokens // TILE) * TILE
        self.rows = RequestToTokenPool(ROWS, columns)
        self.trailing = TrailingLayers(config, page_size, pages, ROWS, columns, dtype=dtype)
        for pool in self.trailing.pools:
            pool.attach(page_size, pages + 1, 0)
        self.pages: dict[int, PageIds] = {}  # by row
        self.model = LlamaModel(config, tensors or random_tensors(config), self.pool, self.rows, self.trailing)

    def poison(self) -> None:
        """Fill the whole pool with NaN, including the padding page."""
        for buffer in self.pool.kv_buffer:
            buffer.fill_(float("nan"))

    def row(self, tokens: int, *, shuffle: int | None = None) -> int:
        """Allocate a row with pages for `tokens` tokens. `shuffle` is the seed of a random page order."""
        size = self.pool.geometry.page_size
        rows, pages = self.rows.alloc(1), self.pool.allocator.alloc(-(-tokens // size))
        assert rows is not None and pages is not None
        if shuffle is not None:
            np.random.default_rng(shuffle).shuffle(pages)
        (row,) = rows
        self.rows.write(row, pages, size)
        self.pages[row] = pages
        assert all(pool.hold(pages) for pool in self.trailing.pools)
        return row

    def forward(self, row: int, tokens: Sequence[int], start: int = 0) -> torch.Tensor:
        """Compute `tokens` from position `start` on. Return the logits of the last one, `[vocab_size]`."""
        self.trailing.place(row, self.pages[row], start, start + len(tokens))
        return self.model.forward([Span(row, start, tokens)])[0]

    def kv(self, row: int, tokens: int) -> torch.Tensor:
        """Return the KV bytes of the first tokens of a row, `[layers * 2, tokens, bytes]` uint8."""
        place = self.place(row, slice(tokens))
        parts = [part for layer in range(self.pool.geometry.layers) for part in self.pool.get_kv_buffer(layer)]
        return torch.stack([part[place].reshape(tokens, -1).view(torch.uint8) for part in parts])

    def place(self, row: int, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pages and offsets of tokens of a row, as an index into K and V of a layer."""
        slots, page_size = self.rows.table[row, tokens], self.pool.geometry.page_size
        return slots // page_size, slots % page_size


def make_engine(  # noqa: PLR0913 - the parts that tests replace
    checkpoint: Checkpoint,
    *,
    page_size: int = 8,
    device_pages: int = 64,
    host_pages: int = 128,
    backend: Callable[[FrameCodec], Storage] | None = None,
    copies: Callable[[EngineBlocks, HostWindow], CopyEngine] = create_copy_engine,
    model: type[LlamaModel] = LlamaModel,
    options: EngineOptions | None = None,
    break_even: BreakEvenConfig | None = None,
    eviction_policy: str = "lru",
    kind: type[HiRadixCache] = HiRadixCache,
) -> Engine:
    """Return an engine whose cache uses every hit, even if it does not pay. `kind` is the class of the cache."""
    options = options or EngineOptions()
    geometry = checkpoint.config.geometry(page_size)
    pool, host = MHATokenToKVPool(geometry, device_pages), HostPool(geometry, host_pages)
    codec = FrameCodec(Namespace(checkpoint.fingerprint, geometry).digest, geometry.payload_bytes)
    storage = None if backend is None else backend(codec)
    config = HiCacheConfig(
        load_back_threshold_tokens=1,
        break_even=break_even or BreakEvenConfig(mode="always"),
        eviction_policy=eviction_policy,
        prefetch=PrefetchConfig(threshold_tokens=1, timeout_base=WAIT_S, host_share=1),
    )
    controller = HiCacheController(host, copies(pool.blocks, HostWindow(host)), storage, config)
    rows = RequestToTokenPool(options.running_max, -(-checkpoint.config.context_tokens // TILE) * TILE)
    computing = model(checkpoint.config, checkpoint.tensors, pool, rows)
    return Engine(computing, kind(pool, host, controller), options)


def plain_greedy(prompt: Sequence[int], new_tokens: int) -> tuple[int, ...]:
    """Return greedy tokens of the model of `random_checkpoint()` without cache and scheduler. Each step computes the
    whole sequence."""
    tokens, device = list(prompt), Device()
    row = device.row(len(prompt) + new_tokens)
    for _ in range(new_tokens):
        tokens.append(int(device.forward(row, tokens).argmax()))
    return tuple(tokens[len(prompt) :])


def drive(engine: Engine, until: Callable[[], bool] | None = None) -> dict[str, RequestRecord]:
    """Step and check all invariants until no request is left or `until` is true. Return the records."""
    deadline = time.monotonic() + WAIT_S
    records: dict[str, RequestRecord] = {}
    while True:
        updates = engine.step()
        engine.check()
        records |= {update.rid: update.record for update in updates if update.record is not None}
        if until() if until is not None else engine.waiting + engine.running == 0:
            return records
        assert time.monotonic() < deadline, "the engine has not finished in time"


def tiers(engine: Engine) -> HiRadixCache:
    """Return the engine's cache, for tests that inspect its tiers."""
    cache = engine.cache
    assert isinstance(cache, HiRadixCache)
    return cache


def settle(engine: Engine) -> None:
    """Wait until every copy and every store has ended."""
    drive(engine, until=lambda: tiers(engine).controller.idle)


def generate(
    engine: Engine, prompt: Sequence[int], new_tokens: int = 8, *, cache_salt: str | None = None
) -> RequestRecord:
    """Run one request to its end."""
    rid = engine.submit(prompt, new_tokens, cache_salt=cache_salt, ignore_eos=True)
    return drive(engine)[rid]


def assert_nothing_leaked(engine: Engine) -> None:
    """Check that all of L1 is free or in the tree, and that all rows are free. REQUIRES: no request is left."""
    settle(engine)
    tree, allocator = tiers(engine).tree, engine.cache.device.allocator
    assert tree.device_protected_pages == 0
    assert allocator.used_pages == tree.device_evictable_pages
    assert free_rows(engine) == engine.options.running_max


def free_rows(engine: Engine) -> int:
    """Return the number of free rows of the model's request table."""
    return engine.model.requests_max
