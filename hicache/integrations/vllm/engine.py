"""Reads vLLM's configuration: whether HiCache supports this engine, the layout of a page, and its namespace."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import __version__
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
)

from ...clock import SYSTEM_CLOCK
from ...config import EventsConfig, HiCacheConfig
from ...errors import ConfigError, HiCacheError
from ...fingerprint import folder_state, loaded_fingerprint
from ...keys import Namespace
from ...supervised import Beat, SupervisedPool
from ...tiers import SharedHostPool
from ...tiers.memory import host_is_pinned, host_pages
from ...units import Share
from ..options import engine_config, known_options, model_identity
from .announced import WorkerLayout
from .layout import BlockLayout

logger = logging.getLogger(__name__)

OPTIONS = "kv_connector_extra_config"
# How long the other processes of an engine wait while the kernel zeroes the frames: 1 TiB takes minutes.
_OPEN_S = 600.0
# Adapters that are remembered; a forgotten one is identified again.
_ADAPTERS_MAX = 1024
# Entries of a model's configuration that only describe its source and its reader.
_NOT_THE_MODEL = ("_name_or_path", "_commit_hash", "transformers_version")


@dataclass(frozen=True, slots=True)
class VllmEngine:
    """One vLLM engine, equal in all its processes. `layer_names` are in the order of the page, `specs` is a digest of
    their attention settings in vLLM. vLLM gives layers of different sizes to its workers only: see `as_announced`.

    A forward does not wait for the first `early_layers` of a page, such as the cache of an indexer, so layer-wise loads
    of them end before it begins.
    """

    config: HiCacheConfig
    layout: BlockLayout
    layer_names: tuple[str, ...]
    blocks: int
    layerwise: bool
    specs: str
    vllm: VllmConfig
    early_layers: int = 0

    @classmethod
    def of(cls, vllm: VllmConfig, cache: KVCacheConfig) -> VllmEngine:
        """Read vLLM's configuration. Raises ConfigError for unsupported settings, with what to change."""
        extra = extra_of(vllm)
        require_supported(vllm, cache)
        group = cache.kv_cache_groups[0]
        spec = group.kv_cache_spec
        config = engine_config(OPTIONS, extra, spec.block_size)
        # Rejects invalid settings. ROCm also has devices of type cuda, but not the driver.
        host_is_pinned(config.host, "cuda" if current_platform.is_cuda() else current_platform.device_name)
        if config.host.shared.owner == "daemon":
            raise ConfigError(
                "host.shared.owner: the processes of vLLM create the memory that they share; use 'engine'"
            )
        if (engines := vllm.parallel_config.data_parallel_size) > 1 and isinstance(config.host.size, Share):
            raise ConfigError(
                f"host.size: a share needs one pool per machine; with {engines} data-parallel ranks write a size: 64GiB"
            )
        if engines > 1 and config.events.data_parallel_rank is None:
            rank = {"data_parallel_rank": vllm.parallel_config.data_parallel_index}
            config = config.model_copy(update={"events": EventsConfig(**config.events.model_dump() | rank)})
        layers = spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
        if config.host.shared.keep:
            raise ConfigError(
                "host.shared.keep: workers of a vLLM that has died may still write to its memory; remove the entry"
            )
        early = _unawaited(vllm, group.layer_names)
        names = sorted(group.layer_names, key=lambda name: name not in early)
        sizes = tuple(layers.get(name, spec).unpadded_page_size_bytes for name in names)
        layout = BlockLayout(
            spec.block_size, config.page_size, sizes, vllm.parallel_config.tensor_parallel_size, cache.kv_tp_replicas
        )
        return cls(
            config=config, layout=layout, layer_names=tuple(names), blocks=cache.num_blocks,
            layerwise=wants_layerwise(extra),
            specs=hashlib.sha256(repr([layers.get(name, spec) for name in names]).encode()).hexdigest(), vllm=vllm,
            early_layers=len(early),
        )

    @property
    def name(self) -> str:
        """The name of its shared memory."""
        shared, rank = self.config.host.shared.name, self.vllm.parallel_config.data_parallel_index
        if shared and rank:  # each data-parallel rank is a separate engine with the same configuration
            shared += f"-dp{rank}"
        return shared or f"vllm.{self.vllm.kv_transfer_config.engine_id}".replace("_", "-")

    def as_announced(self, found: WorkerLayout) -> VllmEngine:
        """Return this engine with the layers of its workers."""
        layout = dataclasses.replace(self.layout, layer_bytes=found.layer_bytes)
        return dataclasses.replace(self, layout=layout, specs=found.specs)

    def open_pool(self, *, worker: bool) -> SharedHostPool:
        """Open the frames that all processes of the engine share; the first process creates them. Blocks until then.

        Raises CapacityError if they do not fit into memory, and SharedMemoryError, also if they are another engine's.
        """
        pin = None
        if worker and current_platform.is_cuda():
            pin = torch.device("cuda", torch.cuda.current_device())
        processes = None if self.config.host.shared.name else self.layout.ranks + 1
        shape = self.layout.shape
        pages = host_pages(self.config.host, shape, self.blocks // self.layout.blocks_per_page, shared=True)
        pool = SharedHostPool(self.name, shape, pages, processes=processes, pin=pin, timeout_s=_OPEN_S)
        if not worker:
            pool.claim()
        return pool

    def namespace(self, form: str) -> Namespace:
        """Return the namespace of the pages. `form` is that of the workers' blocks. Blocks while weights are
        fingerprinted."""
        model, vllm = self.vllm.model_config, self.vllm
        algorithm = vllm.cache_config.prefix_caching_hash_algo
        seed = resolve_none_hash_seed(get_hash_fn_by_name(algorithm))  # vLLM sets it after the workers' reports
        terms = [
            f"vllm {__version__}", form, f"dtype={model.dtype}", f"kv={vllm.cache_config.cache_dtype}",
            f"tp={self.layout.ranks}", self.specs,
            f"length={model.max_model_len}",  # some models scale their rotary embedding by it
            f"weights={'dummy' if vllm.load_config.load_format == 'dummy' else 'loaded'}",
        ]
        return Namespace(
            model=identity_of(vllm), geometry=self.layout.shape, tp_size=self.layout.ranks, ranks_share_pages=True,
            engine_layout=" ".join(terms), quantisation=quantisation_of(vllm),
            key_hash=f"vllm {algorithm} of {self.layout.block_tokens} tokens, seed {seed}", label=str(model.model),
        )

    def worker_layout(self, caches: Mapping[str, torch.Tensor], pool: SharedHostPool) -> WorkerLayout:
        """Return what the worker with these tensors announces to the scheduler's process."""
        backends = get_layers_from_vllm_config(self.vllm, AttentionLayerBase, list(self.layer_names))
        names = sorted({layer.get_attn_backend().get_name() for layer in backends.values()})
        platform = current_platform.device_type
        if platform == "cpu":  # its kernels pack K for the instruction set
            platform += f":{torch.backends.cpu.get_cpu_capability()}"
        forms = dict.fromkeys(_form(caches[name]) for name in self.layer_names)
        form = f"{'+'.join(names)} {' + '.join(forms)} on {platform}"
        return WorkerLayout(form, self.layout.layer_bytes, self.specs, pool.identity)

    def layers(self, caches: Mapping[str, torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the regions of each layer, whose dimension 0 counts the blocks of vLLM's block tables."""
        missing = [name for name in self.layer_names if name not in caches]
        if missing:
            raise ConfigError(f"vLLM registered no KV cache for {', '.join(missing)}; remove the connector")
        return [[group_kernel_blocks(caches[name], self.blocks)] for name in self.layer_names]


@dataclass(slots=True, eq=False)
class _Adapter:
    """An adapter that vLLM has loaded once, and the state of its files at its first request, None after a change. `key`
    gets its result when the weights have been read."""

    name: str
    path: str
    files: dict[str, list[int]] | None
    key: Future[str] = field(default_factory=Future)


class AdapterKeys:
    """The identities of LoRA adapters, because block hashes only contain their names, whose weights can change.

    vLLM does not tell when it loads an adapter. So only files that have not changed since this object was made, before
    vLLM loads any adapter, are those that it has loaded. The pages of other adapters, such as one on a hub, are found
    only by this process. If the files change after the first request, vLLM may use the old or the new ones; from then
    on the requests of the adapter share no pages.

    Locking design: the scheduler's thread calls `of` and owns all fields. The thread of the pool reads the weights of
    an adapter once, and sets the result of its `key`.
    """

    def __init__(self) -> None:
        self._since_ns = int(1e9 * SYSTEM_CLOCK.wall_s())
        self._adapters: dict[tuple[object, ...], _Adapter] = {}
        self._pool: SupervisedPool[_Adapter] = SupervisedPool(
            "adapters", 1, handle=self._identify, fail=_set_unique_key, linger_s=0
        )

    def of(self, adapter: LoRARequest | None) -> Future[str] | None:
        """Return the future key of a request's adapter; None without one. Reads the state of files, but no file."""
        if adapter is None:
            return None
        path = os.path.expanduser(adapter.lora_path)
        try:
            files = folder_state(path).entries
        except HiCacheError:
            files = {}
        # vLLM loads an adapter again under another number, or in place.
        loaded = (adapter.lora_name, path, adapter.lora_int_id, adapter.load_inplace)
        known = self._adapters.get(loaded)
        if known is None:
            if len(self._adapters) >= _ADAPTERS_MAX:
                del self._adapters[next(iter(self._adapters))]
            known = self._adapters[loaded] = _Adapter(adapter.lora_name, path, files)
            self._pool.submit(known)
        elif known.files not in (files, None):
            known.files = None
            logger.warning(
                "adapter %r: its files have changed, so its pages are not reused; restart the engine", known.name
            )
        if known.files is None:
            known.key = Future()
            _set_unique_key(known)
        return known.key

    def _identify(self, adapter: _Adapter, beat: Beat) -> None:
        try:
            adapter.key.set_result(f"{adapter.name} {loaded_fingerprint(adapter.path, self._since_ns)}")
        except HiCacheError as error:
            logger.warning(
                "adapter %r: its pages are not shared with other engines; serve it from a local folder: %s",
                adapter.name, error,
            )
            _set_unique_key(adapter)


def _set_unique_key(adapter: _Adapter) -> None:
    adapter.key.set_result(f"{adapter.name} {uuid.uuid4().hex}")


def identity_of(vllm: VllmConfig) -> str:
    """Return the identity of the model: its weights, and the settings that the command line may change, such as the
    scaling of its rotary embedding. Blocks while weights are fingerprinted."""
    model = vllm.model_config
    weights = model_identity(OPTIONS, extra_of(vllm), model.model, getattr(model.hf_config, "_commit_hash", None))
    entries = {name: value for name, value in model.hf_config.to_dict().items() if name not in _NOT_THE_MODEL}
    changed = json.dumps(entries, sort_keys=True, default=str)
    return f"{weights} {hashlib.sha256(changed.encode()).hexdigest()}"


def quantisation_of(vllm: VllmConfig) -> str:
    """Return the quantization of the weights, empty without one."""
    model = vllm.model_config
    return f"{model.quantization or ''} {model.quantization_config or ''}".strip()


def _form(cache: torch.Tensor) -> str:
    order = sorted(range(1, cache.ndim), key=cache.stride().__getitem__, reverse=True)
    return f"{cache.dtype} {list(cache.shape[1:])} order={order}"


def extra_of(vllm: VllmConfig) -> dict[str, Any]:
    return dict(vllm.kv_transfer_config.kv_connector_extra_config or {})


def wants_layerwise(extra: Mapping[str, object]) -> bool:
    """Return True if the forward waits for loads layer by layer. Raises ConfigError for an unknown value."""
    load = extra.get("load", "async")
    if load not in ("async", "layerwise"):
        raise ConfigError(f"{OPTIONS}: load: {load!r} is not valid; use 'async' or 'layerwise'")
    return load == "layerwise"


def warn_of_settings(vllm: VllmConfig, cache: KVCacheConfig) -> None:
    """Log which supported settings cost more than necessary. For one process of an engine."""
    policy, length = vllm.kv_transfer_config.kv_load_failure_policy, vllm.model_config.max_model_len
    if policy != "recompute":
        logger.warning(
            "kv_load_failure_policy is %r: a request fails if a copy to the device fails; set it to 'recompute'", policy
        )
    # vLLM keeps the window of the layers that it changes to full attention without its hybrid allocator.
    layers = layer_specs(cache)
    windows = [one.sliding_window for one in layers if isinstance(one, FullAttentionSpec) and one.sliding_window]
    if windows and min(windows) < length:
        logger.warning(
            "layers of this model attend only to the last %d tokens, but without its hybrid allocator vLLM keeps the "
            "KV of all tokens, and HiCache copies and stores it; remove "
            "--disable-hybrid-kv-cache-manager, or the connector that turns it off", min(windows),
        )


def has_pages(vllm: VllmConfig, cache: KVCacheConfig) -> bool:
    """True if all layers have full attention in one group, so that a page is the same blocks of all of them, and none
    is a draft model's, whose last block vLLM may drop."""
    speculative = vllm.speculative_config
    if len(cache.kv_cache_groups) != 1 or (speculative is not None and speculative.uses_draft_kv_cache()):
        return False
    return all(isinstance(layer, FullAttentionSpec) for layer in layer_specs(cache))


def _unawaited(vllm: VllmConfig, names: list[str]) -> frozenset[str]:
    """Return the layers whose loads a forward does not wait for: vLLM calls `wait_for_layer_load` in the layers of
    attention only. Empty in the scheduler's process, which has no layers."""
    layers = get_layers_from_vllm_config(vllm, AttentionLayerBase, names)
    return frozenset(name for name, layer in layers.items() if not isinstance(layer, Attention | MLAAttention))


def layer_specs(cache: KVCacheConfig) -> list[KVCacheSpec]:
    """Return the spec of each layer, or of each group whose layers have the same one."""
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    return [one for spec in specs for one in getattr(spec, "kv_cache_specs", {"": spec}).values()]


def require_supported(vllm: VllmConfig, cache: KVCacheConfig) -> None:
    """Raise ConfigError, with what to change, for options and settings that HiCache does not support."""
    known_options(OPTIONS, extra_of(vllm), frozenset({"config", "model", "load"}))
    parallel = vllm.parallel_config
    algorithm, multimodal = vllm.cache_config.prefix_caching_hash_algo, vllm.model_config.multimodal_config
    layers, role = layer_specs(cache), vllm.kv_transfer_config.kv_role
    problems = {
        f"kv_role {role!r} is not supported, every engine loads and saves; use 'kv_both'": role != "kv_both",
        "pipeline parallelism is not supported yet; use tensor parallelism": parallel.pipeline_parallel_size > 1,
        "several nodes are not supported: the workers share host memory; run one engine per node and let them "
        "share storage": parallel.nnodes > 1,
        "context parallelism is not supported yet; turn it off":
            parallel.prefill_context_parallel_size > 1 or parallel.decode_context_parallel_size > 1,
        "the KV of this model does not depend only on earlier tokens (a prefix or a canvas is attended to as a "
        "whole, or pooling needs all tokens); remove the connector":
            any(layer.non_causal for layer in layers if isinstance(layer, FullAttentionSpec))
            or vllm.model_config.is_diffusion or not vllm.model_config.is_prefix_caching_supported,
        "--mm-processor-cache-gb 0 without prefix caching: vLLM then names images by a counter, so two images can have "
        "the same pages; turn one of them on":
            multimodal is not None and multimodal.mm_processor_cache_gb == 0
            and not vllm.cache_config.enable_prefix_caching,
        f"--prefix-caching-hash-algo {algorithm}: a prompt can be made that collides with another's pages; use "
        "sha256": not algorithm.startswith("sha256"),
    }
    found = [problem for problem, is_there in problems.items() if is_there]
    if found:
        raise ConfigError("HiCacheConnector: " + "; ".join(found))


def log_as_vllm() -> None:
    """Write HiCache's log to vLLM's handlers, if it has any, unless the program has set up HiCache's logger, or the
    root logger at vLLM's level. (`logging.debug` in a library adds a root handler, for warnings.)"""
    ours, theirs, root = logging.getLogger("hicache"), logging.getLogger("vllm"), logging.getLogger()
    is_set_up = ours.handlers or (root.handlers and root.level <= theirs.getEffectiveLevel())
    if theirs.handlers and not is_set_up:
        ours.handlers, ours.propagate = list(theirs.handlers), False
        ours.setLevel(ours.level or theirs.level)
