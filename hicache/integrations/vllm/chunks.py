"""ChunkConnector: the connector of models whose layers keep the KV of different tokens (windows, states, draft models).

vLLM's own OffloadingConnector does the work: it knows which chunks of a window or a state a request needs and which
block of a draft model is not valid, and these rules change with each version of vLLM. It keeps chunks in its host
memory, and HiCacheTier behind it stores them. Both are set up here from HiCache's configuration.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import logging
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec, iter_layer_specs

from ...config import HiCacheConfig
from ...config.schema import HostConfig
from ...errors import ConfigError
from ...fingerprint import loaded_fingerprint, process_start_ns
from ...units import Share, format_size
from ..options import engine_config
from .engine import OPTIONS, extra_of, identity_of, quantisation_of, require_supported

logger = logging.getLogger(__name__)

_SPEC = "TieringOffloadingSpec"
# The entries that have an effect with and without storage.
_USED = frozenset({"page_size", "model_label", "host", "logging"})
_USED_BY_STORAGE = frozenset({"storage", "storage_format", "integrity", "transfer", "prefetch", "metrics"})
_USED_OF_HOST = frozenset({"size", "ratio"})


class ChunkConnector(OffloadingConnector):
    """See the module's docstring. The scheduler's process writes one line with the chunk and the entries without
    effect. Raises ConfigError for unsupported settings, and BackendError if storage cannot be opened."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        require_supported(vllm_config, kv_cache_config)
        extra = extra_of(vllm_config)
        chunk = Chunk.of(extra, kv_cache_config)
        host_bytes = _host_bytes(chunk.config.host, vllm_config, kv_cache_config, chunk.blocks)
        options: dict[str, Any] = {
            "spec_name": _SPEC, "cpu_bytes_to_use": host_bytes, "blocks_per_chunk": chunk.blocks,
            "self_describing_kv_events": True,
        }
        if role == KVConnectorRole.SCHEDULER:
            options["secondary_tiers"] = _tiers(vllm_config, chunk.config)
            _log_choice(kv_cache_config, chunk, host_bytes, _without_effect(chunk.config, extra))
        super().__init__(_with_options(vllm_config, options), role, kv_cache_config)

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any) -> Any:
        return super().build_prom_metrics(_with_options(vllm_config, {"spec_name": _SPEC}), *args)


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """The unit that is copied and stored: `blocks` of each group, with the reason for the number. The page size of
    `config` is the shortest chunk; `tokens` are the lengths in all groups."""

    config: HiCacheConfig
    blocks: int
    tokens: tuple[int, ...]
    reason: str

    @classmethod
    def of(cls, extra: dict[str, Any], cache: KVCacheConfig) -> Chunk:
        """Choose the chunk for these KV caches. Reads the configuration. Raises ConfigError if no chunk can hit."""
        specs = [cache.kv_cache_groups[number].kv_cache_spec for number in get_offloading_group_ids(cache)]
        sizes = sorted({spec.block_size for spec in specs})
        states = [layer for spec in specs for layer in iter_layer_specs(spec) if not isinstance(layer, AttentionSpec)]
        if any(getattr(state, "mamba_cache_mode", None) == "none" for state in states):
            raise ConfigError(
                "HiCacheConnector: without prefix caching vLLM keeps only the last state of a request, so no prompt "
                "can hit; use --enable-prefix-caching with --mamba-cache-mode align"
            )
        if states:
            config, blocks = engine_config(OPTIONS, extra, 1), 1
            reason = "one block and not page_size: vLLM keeps single blocks of a state"
        else:
            config = engine_config(OPTIONS, extra, sizes[-1])
            blocks = config.page_size // sizes[-1]
            reason = f"page_size in blocks of {sizes[-1]}"
        tokens = tuple(blocks * size for size in sizes)
        return cls(config.model_copy(update={"page_size": tokens[0]}), blocks, tokens, reason)


def _tiers(vllm: VllmConfig, config: HiCacheConfig) -> list[dict[str, Any]]:
    """Return the entry of HiCache's tier; none without storage. Blocks while weights are fingerprinted."""
    if config.storage is None:
        return []
    model = vllm.model_config
    if vllm.lora_config is not None and "model" not in extra_of(vllm):
        raise ConfigError(
            f"{OPTIONS}: vLLM names the chunks of a LoRA adapter by its name only; set the option 'model' to a name "
            "that changes with the weights of the model and of its adapters, or remove storage"
        )
    terms = [
        quantisation_of(vllm), f"dtype={model.dtype}", f"length={model.max_model_len}", f"draft={_draft(vllm)}",
        f"weights={'dummy' if vllm.load_config.load_format == 'dummy' else 'loaded'}",
    ]
    identity = f"{identity_of(vllm)} {hashlib.sha256(repr(terms).encode()).hexdigest()}"
    module = "hicache.integrations.vllm_tier"
    return [{"type": "HiCacheTier", "module_path": module, "config": config, "model": identity}]


def _draft(vllm: VllmConfig) -> str:
    """Return the draft model whose KV the chunks contain. KV of other weights would lower its acceptance."""
    speculative = vllm.speculative_config
    if speculative is None or not speculative.uses_draft_kv_cache():
        return ""
    name = speculative.draft_model_config.model
    return f"{speculative.method} {loaded_fingerprint(name, process_start_ns()) if os.path.isdir(name) else name}"


def _host_bytes(host: HostConfig, vllm: VllmConfig, cache: KVCacheConfig, blocks: int) -> int:
    """Return the bytes of vLLM's host memory for all workers. Raises ConfigError if no chunk fits."""
    if host.tokens is not None:
        raise ConfigError(
            "host.tokens: layers of this model keep the KV of different tokens, so tokens have no fixed size; use "
            "host.size"
        )
    if isinstance(host.size, Share):
        raise ConfigError(
            "host.size: vLLM's own offloading, which serves this model, needs the same size in all its processes; "
            f"write a size, such as 64GiB, instead of {host.size}"
        )
    device_bytes = cache.kv_cache_tensors[0].size * vllm.parallel_config.world_size  # each size is that of all tensors
    found = host.size if host.size is not None else int(device_bytes * (host.ratio or 0))
    chunk_bytes = device_bytes // cache.num_blocks * blocks
    if found < chunk_bytes:
        raise ConfigError(f"host: {format_size(found)} is less than one chunk of {format_size(chunk_bytes)}; raise it")
    return found


def _without_effect(config: HiCacheConfig, extra: dict[str, Any]) -> Sequence[str]:
    used = _USED if config.storage is None else _USED | _USED_BY_STORAGE
    found = config.model_fields_set - used
    found |= {f"host.{name}" for name in config.host.model_fields_set - _USED_OF_HOST}
    found |= {f"the option {name}" for name in extra.keys() & {"load"}}
    return sorted(found)


def _log_choice(cache: KVCacheConfig, chunk: Chunk, host_bytes: int, unused: Sequence[str]) -> None:
    groups = Counter(_kind(group.kv_cache_spec) for group in cache.kv_cache_groups)
    logger.info(
        "vLLM's own offloading serves this model (%s): %s of host memory, chunks of %s tokens (%s), %s; entries "
        "without effect: %s",
        ", ".join(f"{number} x {kind}" for kind, number in groups.items()), format_size(host_bytes),
        " or ".join(map(str, chunk.tokens)), chunk.reason,
        "no storage" if chunk.config.storage is None else f"storage {chunk.config.storage.type}",
        ", ".join(unused) or "none",
    )


def _kind(spec: KVCacheSpec) -> str:
    return " and ".join(sorted({type(layer).__name__.removesuffix("Spec") for layer in iter_layer_specs(spec)}))


def _with_options(vllm: VllmConfig, options: dict[str, Any]) -> VllmConfig:
    """Return a copy of the configuration in which the connector has these options, and an id of its own: vLLM names its
    host memory by it, and an OffloadingConnector beside this one has the engine's."""
    changed, transfer = copy.copy(vllm), vllm.kv_transfer_config
    changed.kv_transfer_config = dataclasses.replace(
        transfer, kv_connector_extra_config=options, engine_id=f"{transfer.engine_id}-hicache"
    )
    return changed
