"""Facts about SGLang's code, read without an engine. For test_sglang_interface.py.

Runs in its own process: SGLang on a CPU needs stubs for packages, which other engines must not import.
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .process import serve

_LAYERS, _HEADS, _HEAD_DIM, _LATENT, _PAGE_TOKENS, _PAGES = 3, 2, 4, 6, 8, 6


def start(options: dict[str, Any]) -> Mapping[str, Callable[..., object]]:
    import torch  # noqa: PLC0415
    from sglang.srt.arg_groups.fields import exec_, lora, model, serving, spec  # noqa: PLC0415
    from sglang.srt.managers.cache_controller import HiCacheController  # noqa: PLC0415
    from sglang.srt.mem_cache.device_pool_info import (  # noqa: PLC0415
        KVBufferLayout,
        KVBuffers,
        MHABufferInfo,
        MLABufferInfo,
    )
    from sglang.srt.mem_cache.hicache_storage import (  # noqa: PLC0415
        HiCacheStorage,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
    )
    from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool  # noqa: PLC0415
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: PLC0415
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: PLC0415
    from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: PLC0415
    from sglang.srt.observability.metrics_collector import StorageMetrics  # noqa: PLC0415
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler  # noqa: PLC0415

    from hicache.errors import ConfigError  # noqa: PLC0415
    from hicache.integrations.sglang import HiCacheStore  # noqa: PLC0415
    from hicache.integrations.sglang.pages import HostPages  # noqa: PLC0415
    from hicache.integrations.sglang_tree.start import _given_flags  # noqa: PLC0415

    def parameters(function: Callable[..., object]) -> list[str]:
        return list(inspect.signature(function).parameters)

    def methods() -> dict[str, list[list[str]]]:
        """Return the parameters of each method of SGLang's interface, in SGLang and in HiCacheStore."""
        named = inspect.getmembers(HiCacheStorage, inspect.isfunction)
        return {name: [parameters(function), parameters(getattr(HiCacheStore, name))] for name, function in named}

    def own() -> list[str]:
        """The methods of SGLang's interface that HiCacheStore implements."""
        return sorted(name for name in vars(HiCacheStore) if name in vars(HiCacheStorage) and not name.startswith("_"))

    def names() -> dict[str, list[str]]:
        """Return the fields of the SGLang classes that HiCacheStore uses."""
        found: dict[str, Any] = {
            "config": HiCacheStorageConfig, "extra": HiCacheStorageExtraInfo, "metrics": StorageMetrics,
            "transfer": PoolTransfer, "result": PoolTransferResult,
        }
        fields = {name: sorted(kind.__dataclass_fields__) for name, kind in found.items()}
        return {**fields, "policies": sorted(PoolHitPolicy), "pools": sorted(PoolName)}

    def flags() -> dict[str, list[str]]:
        """Return the fields of SGLang's configuration by namespace."""
        kinds = (lora.Lora, model.Model, serving.Serving, spec.Spec, exec_.ExecFeatures, exec_.ExecOffload)
        return {kind._NS_PATH: sorted(kind.__annotations__) for kind in kinds}

    def given(**arguments: Any) -> dict[str, Any]:
        """Return the flags that the tree takes for given ones, after SGLang's own decisions."""
        made = ServerArgs(model_path="dummy", device="cpu", **arguments)
        made.resolve_once()
        return _given_flags(made)

    def fields() -> list[str]:
        """Return all fields of SGLang's arguments."""
        return sorted(ServerArgs.__annotations__)

    def pool(layout: str, is_mla: bool, is_packed: bool = False) -> Any:
        """Return a host pool of SGLang, over an unused device pool; a packed one has rows of bytes, as of DeepSeek V4.
        """
        if is_packed:
            rows = [torch.zeros(_PAGES, 24, dtype=torch.uint8)] * _LAYERS
            return DeepSeekV4PagedHostPool("packed", rows, 24, _PAGES, _PAGE_TOKENS, layout, pin_memory=False)
        heads, dim = (1, _LATENT) if is_mla else (_HEADS, _HEAD_DIM)
        device = tuple(torch.zeros(_PAGE_TOKENS, heads, dim, dtype=torch.bfloat16) for _ in range(_LAYERS))
        addresses = torch.tensor([tensor.data_ptr() for tensor in device], dtype=torch.uint64)
        common = {"page_size": _PAGE_TOKENS, "dtype": torch.bfloat16, "device": torch.device("cpu")}
        info: Any
        if is_mla:
            info = MLABufferInfo(
                buffers=device, data_ptrs=addresses, layer_indices=tuple(range(_LAYERS)), device_layer_num=_LAYERS,
                kv_lora_rank=_LATENT - 2, qk_rope_head_dim=2, kv_cache_dim=_LATENT, **common,
            )
        else:
            buffers = KVBuffers(
                k=device, v=device, k_data_ptrs=addresses, v_data_ptrs=addresses, layout=KVBufferLayout.NHD
            )
            info = MHABufferInfo(buffers=buffers, head_num=heads, head_dim=dim, v_head_dim=dim, **common)
        kind, more = (MLATokenToKVPoolHost, {"target_layer_num": _LAYERS}) if is_mla else (MHATokenToKVPoolHost, {})
        return kind(
            info, 0.0, 0, _PAGE_TOKENS, layout, pin_memory=False, device_capacity_tokens=_PAGE_TOKENS, start_layer=0,
            end_layer=_LAYERS, host_token_capacity=_PAGES * _PAGE_TOKENS, **more,
        )

    def moved(layout: str, is_mla: bool, is_packed: bool = False) -> list[bool]:
        """Copy two pages from one pool to another by the addresses of HostPages. Return for each page of the target
        whether SGLang reads the expected KV from it."""
        source, target = (pool(layout, is_mla, is_packed) for _ in range(2))
        for buffer in source.kv_buffer if isinstance(source.kv_buffer, list) else [source.kv_buffer]:
            buffer.copy_(255 * torch.rand(buffer.shape))
        for buffer in target.kv_buffer if isinstance(target.kv_buffer, list) else [target.kv_buffer]:
            buffer.zero_()
        indices = {page: torch.arange(page * _PAGE_TOKENS, (page + 1) * _PAGE_TOKENS) for page in range(_PAGES)}
        pairs = {1: 4, 3: 0}  # of the target and of the source
        theirs = HostPages(source).views(torch.cat([indices[page] for page in pairs.values()]), len(pairs))
        ours = HostPages(target).views(torch.cat([indices[page] for page in pairs]), len(pairs))
        for one, other in zip(ours, theirs, strict=True):
            for part, bytes_ in zip(one.parts, other.parts, strict=True):
                part[:] = bytes_
        nothing = torch.zeros_like(target.get_data_page(0))
        wanted = {page: source.get_data_page(from_ * _PAGE_TOKENS) for page, from_ in pairs.items()}
        return [
            torch.equal(target.get_data_page(page * _PAGE_TOKENS), wanted.get(page, nothing)) for page in range(_PAGES)
        ]

    def copied(folder: str, layout: str, is_mla: bool, is_packed: bool) -> dict[str, object]:
        """Transfer pages by SGLang's functions that copy them, and by interface v1. Return what was stored, and which
        pages of another pool are those of the source; or the error message."""
        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=_PAGE_TOKENS))
        storage = {"type": "file", "options": {"path": f"{folder}/pages", "free_space_floor": 0}}
        Path(folder, "hicache.yaml").write_text(json.dumps({"storage": storage}))
        source, target = (pool(layout, is_mla, is_packed) for _ in range(2))
        for buffer in source.kv_buffer if isinstance(source.kv_buffer, list) else [source.kv_buffer]:
            buffer.copy_(255 * torch.rand(buffer.shape))
        extra = {"config": f"{folder}/hicache.yaml", "model": "random numbers", "fixed_weights": True}
        store = HiCacheStore(settings(extra))
        try:
            store.register_mem_pool_host(source)
            controller: Any = types.SimpleNamespace(
                storage_host_pool=source, storage_backend=store, page_size=_PAGE_TOKENS
            )
            keys = [f"{number:064x}" for number in range(4)]
            stored = HiCacheController._generic_page_set(controller, keys[:3], indices(4, 0, 2))
            store.batch_set_v1(keys[3:], indices(5))
            in_place = store.batch_get_v1(keys[:3], indices(1, 3, 0))  # in the source: pages 1, 3 and 0 are overwritten
            same = [torch.equal(page(source, one), page(source, other)) for one, other in ((1, 4), (0, 2))]
            controller.storage_host_pool = target
            operation: Any = types.SimpleNamespace(request_id="request", is_terminated=lambda: False)
            ask = [keys[0], keys[2], f"{9:064x}"]
            count = HiCacheController._generic_page_get(controller, operation, ask, indices(3, 1, 0))
            of_v1 = HiCacheController._generic_page_get(controller, operation, keys[3:], indices(5))
            of_copies = [torch.equal(page(target, one), page(source, other)) for one, other in ((3, 4), (1, 2))]
            return {
                "stored": stored,
                "in place": [all(in_place), *same],
                "copied": [count, *of_copies],
                "copied, of v1": [of_v1, torch.equal(page(target, 5), page(source, 5))],
            }
        except ConfigError as error:
            return {"error": str(error)}
        finally:
            store.close()

    def indices(*pages: int) -> torch.Tensor:
        return torch.cat([torch.arange(page * _PAGE_TOKENS, (page + 1) * _PAGE_TOKENS) for page in pages])

    def page(held: Any, number: int) -> torch.Tensor:
        found: torch.Tensor = held.get_data_page(number * _PAGE_TOKENS)
        return found

    def settings(extra: dict[str, object], split_heads: bool = False) -> HiCacheStorageConfig:
        return HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
            enable_storage_metrics=False, is_page_first_layout=True, model_name="small", should_split_heads=split_heads,
            extra_config={
                "backend_name": "hicache", "module_path": "hicache.integrations.sglang", "class_name": "HiCacheStore",
                **extra,
            },
        )

    def create(extra: dict[str, object], split_heads: bool = False) -> str:
        """Create the store as SGLang does. Return the error message, if any."""
        config = settings(extra, split_heads)
        try:
            made = StorageBackendFactory.create_backend("dynamic", config, pool("page_first", False))
            for call in ("get", "batch_get", "set", "batch_set", "batch_exists_v2", "batch_get_v2", "batch_set_v2"):
                try:
                    getattr(made, call)([])
                except ConfigError:
                    continue
                return f"{call} did not raise ConfigError"
        except ConfigError as error:
            return str(error)
        return ""

    def new_table() -> list[bool]:
        """Return whether `alloc` and `free` keep the table of used slots, and whether `clear` replaces it."""
        made = pool("page_first", False)
        table = made.slot_used
        made.free(made.alloc(_PAGE_TOKENS))
        kept = made.slot_used is table
        made.clear()
        return [kept, made.slot_used is not table]

    steps = (methods, own, names, flags, fields, given, moved, copied, create, new_table)
    return {step.__name__: step for step in steps}


if __name__ == "__main__":
    serve(start)
