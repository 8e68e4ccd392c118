"""SGLang's trees with several host pools, over HiCache's store or SGLang's own file store. For test_sglang_pools.py.

The trees, their device pools and the steps of a request come from SGLang's test kit. There is no model: the device
pools of the engine that stores are filled with random numbers, and the host pools of the engine that reads are compared
with them.
"""

from __future__ import annotations

import json
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hicache.frame import HEADER_BYTES, FrameHeader

from .process import serve

_OURS = {
    "backend_name": "hicache", "module_path": "hicache.integrations.sglang", "class_name": "HiCacheStore",
    "interface_v1": 1, "model": "random numbers",
}
_SHARED = {"hicache_storage_pass_prefix_keys": True, "prefetch_threshold": 1}


def test_kit() -> Any:
    """Return the modules of SGLang's test kit."""
    # The kit takes one name from this module, whose imports are for SGLang's benchmarks.
    unused = types.ModuleType("sglang.test.test_utils")
    unused.CustomTestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["sglang.test.test_utils"] = unused
    from sglang.test.kits.unified_radix_cache import config, fixtures, storage  # noqa: PLC0415

    return types.SimpleNamespace(config=config, fixtures=fixtures, storage=storage)


def start(options: dict[str, Any]) -> Mapping[str, Callable[..., object]]:
    import torch  # noqa: PLC0415
    from sglang.srt.environ import envs  # noqa: PLC0415
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: PLC0415
    from sglang.srt.mem_cache.hicache_storage import (  # noqa: PLC0415
        HiCacheStorageConfig,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
    )
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, LogicalHostPool  # noqa: PLC0415
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType  # noqa: PLC0415
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: PLC0415

    from hicache.errors import ConfigError  # noqa: PLC0415
    from hicache.integrations.sglang import HiCacheStore  # noqa: PLC0415

    kit = test_kit()
    full, swa, mamba = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
    layers = {"num_layers": 4, "full_attention_layer_ids": (1, 3)}
    trees = {
        "full": kit.config.CacheConfig(page_size=16, components=(full,), kv_size=512, **layers),
        "window": kit.config.CacheConfig(
            page_size=16, components=(full, swa), sliding_window_size=32, kv_size=512, **layers
        ),
        "state": kit.config.CacheConfig(
            page_size=64, components=(full, mamba), enable_mamba_extra_buffer=True, mamba_cache_size=60, kv_size=2048,
            max_context_len=2048, **layers,
        ),
    }
    pools = {full: PoolName.KV, swa: PoolName.SWA, mamba: PoolName.MAMBA}

    fixtures: Any = kit.storage.UnifiedRadixCacheStorageFixtures

    class Engine(fixtures, unittest.TestCase):  # type: ignore[misc]
        """One tree with its pools, and storage in `folder`: HiCache's, or with `is_theirs` SGLang's file store."""

        def __init__(
            self, kind: str, folder: Path, is_theirs: bool, *, in_place: bool = True, **made: Any
        ) -> None:
            super().__init__("runTest")
            self.cfg = trees[kind]
            self.cache, self.allocator, self.requests = kit.fixtures.build_fixture(self.cfg, **made)
            self._enter(get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1))
            self._enter(envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(folder)))
            if not is_theirs:
                storage = {"type": "file", "options": {"path": str(folder / "pages"), "free_space_floor": 0}}
                (folder / "hicache.yaml").write_text(json.dumps({"storage": storage}))
            ours = {} if is_theirs else {**_OURS, "config": str(folder / "hicache.yaml"), "interface_v1": in_place}
            arguments = ServerArgs(
                model_path="dummy", page_size=self.cfg.page_size, hicache_io_backend="kernel",
                hicache_mem_layout="page_first", hicache_storage_backend="file" if is_theirs else "dynamic",
                hicache_storage_backend_extra_config=json.dumps({**_SHARED, **ours}),
                hicache_storage_prefetch_policy="wait_complete",
            )
            arguments._mamba_cache_chunk_size = 64
            set_global_server_args_for_scheduler(arguments)
            self.cache.init_hicache(arguments, self.cache.cache_init_params)
            kit.fixtures.drop_hicache_atexit_pin(self.cache)
            self.cache.write_through_threshold, self.cache.load_back_threshold = 1 << 30, 0
            self.controller = self.cache.cache_controller
            # A pool of the size of the device's would not prefetch.
            self.controller.prefetch_capacity_limit = self.controller.mem_pool_host.size
            for entry in self.controller.mem_pool_host.entries:
                entry.host_pool.pin_memory = False  # SGLang's file store allocates its buffers by it

        def _enter(self, context: Any) -> None:
            context.__enter__()
            self.addCleanup(context.__exit__, None, None, None)

        def fill(self) -> None:
            """Fill the device pools with random numbers."""
            held = self.allocator.get_kvcache()
            for pool in (getattr(held, "full_kv_pool", held), getattr(held, "swa_kv_pool", None)):
                for buffer in [] if pool is None else [*pool.k_buffer, *pool.v_buffer]:
                    buffer.copy_(torch.rand(buffer.shape))
            if self.cfg.has_mamba:
                states = self.requests.mamba_pool.mamba_cache
                for buffer in (states.temporal, *states.conv):
                    buffer.copy_(torch.rand(buffer.shape))

        def store(self, prompt: list[int]) -> None:
            """Compute a prompt, and wait until its pages are stored."""
            self._insert(self.cache, self.allocator, self.requests, prompt)
            leaf = kit.fixtures.match_prefix(self.cache, prompt).last_device_node
            self._backup_node(self.cache, leaf)
            self._write_path_to_l3(self.cache, leaf)
            self._flush_l3_backups(self.cache)

        def fetch(self, prompt: list[int]) -> int:
            """Return how many tokens of a prompt are in host memory after its prefetch."""
            self._consume_prefetch(self.cache, prompt, CacheRequestHandle("request", 0))
            return int(kit.fixtures.match_prefix(self.cache, prompt).host_hit_length)

        def pages(self) -> Iterator[tuple[tuple[str, str], bytes]]:
            """Yield the pages in host memory by pool and key."""
            core = self.cache.tree_core
            for node in set(core.get_all_node_ids()) - {self.cache.root_node_handle()}:
                for component in self.cfg.components:
                    slots = core.get_component_host_value(node, component)
                    pool = self.controller.mem_pool_host.get_pool(pools[component])
                    starts = [] if slots is None else slots.tolist()[:: pool.page_size]
                    keys = core.get_hash_values(node)[len(core.get_hash_values(node)) - len(starts) :]
                    for key, start in zip(keys, starts, strict=True):
                        page = pool.get_data_page(start).contiguous().view(torch.uint8)
                        yield (pools[component].value, key), bytes(page.numpy())

        def namespace(self, pool: str) -> bytes:
            """Return the namespace of a pool in HiCache's store."""
            store = self.controller.storage_backend._open._pools[pool].store
            return bytes(store._gate.storage.backend.codec.namespace)

        def close(self) -> None:
            self.controller.detach_storage_backend()
            self.cache.release_host_resources()
            self.doCleanups()

    @contextmanager
    def engine(kind: str, folder: str, is_theirs: bool, **made: Any) -> Iterator[Engine]:
        running = Engine(kind, Path(folder), is_theirs, **made)
        try:
            yield running
        finally:
            running.close()

    def damage(running: Engine, folder: Path, is_theirs: bool, prompt: list[int], pool: str, page: int) -> None:
        """Flip a bit of a stored page of a pool, counted from the start of a prompt."""
        leaf = kit.fixtures.match_prefix(running.cache, prompt).last_device_node
        key = running._all_page_hashes(running.cache, leaf)[page]
        if is_theirs:
            (file,) = folder.glob(f"{key}{'' if pool == 'kv' else f'.{pool}'}_*.bin")
        else:
            namespace = running.namespace(pool)
            heads = [(path, FrameHeader.parse(path.read_bytes())) for path in (folder / "pages").rglob(f"{key}*")]
            (file,) = [path for path, head in heads if head is not None and head.namespace == namespace]
        data = bytearray(file.read_bytes())
        data[0 if is_theirs else HEADER_BYTES] ^= 1
        file.write_bytes(data)

    def served(
        kind: str, folder: str, is_theirs: bool, prompts: list[list[int]], asked: list[list[int]],
        damaged: Sequence[tuple[int, str, int]] = (), *, in_place: tuple[bool, bool] = (True, True),
    ) -> list[list[int]]:
        """Store `prompts` by one engine. Damage pages: (prompt, pool, page). Fetch each prompt of `asked` by an engine
        of its own. Return for each the tokens of the hit, the pages in host memory, and the wrong ones among them.
        `in_place`: whether the first engine, and the others, transfer pages in place in HiCache's store."""
        torch.manual_seed(7)
        with engine(kind, folder, is_theirs, in_place=in_place[0]) as first:
            first.fill()
            for prompt in prompts:
                first.store(prompt)
            expected = dict(first.pages())
            for number, pool, page in damaged:
                damage(first, Path(folder), is_theirs, prompts[number], pool, page)
        found = []
        for prompt in asked:
            with engine(kind, folder, is_theirs, in_place=in_place[1]) as other:
                hit = other.fetch(prompt)
                pages = dict(other.pages())
                wrong = sum(expected[name] != page for name, page in pages.items())
                found.append([hit, len(pages), wrong])
        return found

    def added_pool(folder: str) -> list[object]:
        """Register a pool after the others, as SGLang's components do in buffer mode, and transfer its pages. Return
        whether they arrived, and how many pages the pool of full attention has."""
        with engine("full", folder, False) as running:
            pool = running.controller.storage_host_pool
            backend = running.controller.storage_backend
            backend.register_mem_host_pool_v2(pool, PoolName.DRAFT)
            keys = [f"{number:064x}" for number in range(2)]
            pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape))
            slots = torch.arange(2 * pool.page_size)
            backend.batch_set_v2([PoolTransfer(PoolName.DRAFT, host_indices=slots, keys=keys)])
            start = 4 * pool.page_size
            found = backend.batch_get_v2([PoolTransfer(PoolName.DRAFT, host_indices=slots + start, keys=keys)])
            is_equal = torch.equal(pool.get_data_page(start), pool.get_data_page(0))
            return [found[PoolName.DRAFT], is_equal, backend.batch_exists(keys)]

    def without_kv(folder: str, extra: dict[str, object]) -> list[object]:
        """Use the store as a model whose anchor has no bytes: a compressed pool with three of four pages, and a pool of
        windows with the last three. Return the hit, its lengths, the pages by pool, and which pages arrived; or the
        error message."""
        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=16))
        storage = {"type": "file", "options": {"path": f"{folder}/pages", "free_space_floor": 0}}
        Path(folder, "hicache.yaml").write_text(json.dumps({"storage": storage}))
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=True,
            enable_storage_metrics=False, is_page_first_layout=True, model_name="dummy",
            extra_config={**_OURS, "config": f"{folder}/hicache.yaml", **extra},
        )
        store = HiCacheStore(config)
        try:
            store.register_mem_pool_host(LogicalHostPool(128, 16, "page_first"))
            names = PoolName.DEEPSEEK_V4_C4, PoolName.SWA
            held = {
                name: DeepSeekV4PagedHostPool(name, [torch.zeros(8, 24, dtype=torch.uint8)] * 3, 24, 8, 16, layout,
                                              pin_memory=False)
                for name, layout in zip(names, ("page_first", "layer_first"), strict=True)
            }
            for name, pool in held.items():
                store.register_mem_host_pool_v2(pool, name)
            store.on_host_pools_registered()
            keys = [f"{number:064x}" for number in range(4)]
            written = {names[0]: keys[:3], names[1]: keys[1:]}
            store.batch_set_v2([
                PoolTransfer(name, host_indices=torch.arange(48), keys=chain) for name, chain in written.items()
            ])
            asked = [
                PoolTransfer(names[0]),
                PoolTransfer(names[1], keys=["__placeholder__"] * 2, hit_policy=PoolHitPolicy.TRAILING_PAGES),
            ]
            hit = store.batch_exists_v2(keys, asked)
            read = store.batch_get_v2([PoolTransfer(names[0], host_indices=torch.arange(64), keys=keys)])
            v1 = store.batch_get_v1(keys, torch.arange(64))
            return [hit.kv_hit_pages, hit.restorable_prefix_pages, hit.extra_pool_hit_pages, read[names[0]], v1]
        except ConfigError as error:
            return [str(error)]
        finally:
            store.close()

    def refused_pool(folder: str) -> list[object]:
        """Register a pool that does not describe its pages. Return the error message, and the hit of a stored page."""
        with engine("full", folder, False) as running:
            pool, backend = running.controller.storage_host_pool, running.controller.storage_backend
            keys, slots = ["0" * 64], torch.arange(pool.page_size)
            stored = backend.batch_set_v1(keys, slots)
            found = backend.batch_exists(keys)
            undescribed = types.SimpleNamespace(
                page_size=1, layout="page_first", dtype=torch.uint8, kv_buffer=torch.zeros(4), get_page_buffer_meta=None
            )
            try:
                backend.register_mem_host_pool_v2(undescribed, PoolName.INDEXER)
            except ConfigError as error:
                return [stored, found, str(error), backend.batch_exists(keys)]
            return [stored, found, "", -1]

    steps = (served, added_pool, without_kv, refused_pool)
    return {step.__name__: step for step in steps}


if __name__ == "__main__":
    serve(start)
