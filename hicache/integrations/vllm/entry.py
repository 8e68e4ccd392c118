"""HiCacheConnector: the class that vLLM's flag names, for every model.

    PageConnector     full attention: pages in HiCache's own shared frames (L2), and storage
    ChunkConnector    windows, states or draft models: vLLM's own offloading, with HiCache's storage behind it

vLLM calls the class methods before it knows the groups of KV caches, so they serve both kinds.
"""

from __future__ import annotations

import functools
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_cache_interface import KVCacheConfig

from .chunks import ChunkConnector
from .connector import PageConnector
from .engine import has_pages, log_as_vllm, wants_layerwise
from .figures import CopyPromMetrics, CopyStats


class HiCacheConnector(KVConnectorBase_V1, SupportsHMA):
    """L2 and L3 of HiCache under vLLM's own prefix cache: a PageConnector or a ChunkConnector. Raises ConfigError for
    unsupported settings.

    `kv_connector_extra_config` has `config` (path of HiCache's configuration), `model` (a name of the weights, if vLLM
    has neither a folder nor a commit of them) and `load` (`async`, the default, or `layerwise`).
    """

    def __new__(
        cls, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> PageConnector | ChunkConnector:
        log_as_vllm()
        kind = PageConnector if has_pages(vllm_config, kv_cache_config) else ChunkConnector
        return kind(vllm_config, role, kv_cache_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return wants_layerwise(extra_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the layout that vLLM's offloading prefers, for models that may need it. Pages take each layout."""
        model = vllm_config.model_config
        kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
        if model.is_hybrid or len(kinds) > 1 or model.get_sliding_window() is not None:
            layout: str | None = ChunkConnector.get_required_kvcache_layout(vllm_config)
            return layout
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return OffloadingConnectorStats(data=data) if _is_of_chunks(data) else CopyStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVConnectorPromMetrics:
        return _PromMetrics(*args)


class _PromMetrics(KVConnectorPromMetrics):
    """The metrics of both kinds. Those of vLLM's offloading appear with its first figures."""

    def __init__(self, vllm_config: VllmConfig, *args: Any) -> None:
        super().__init__(vllm_config, *args)
        self._pages = CopyPromMetrics(vllm_config, *args)
        self._make_chunks = functools.partial(ChunkConnector.build_prom_metrics, vllm_config, *args)

    @functools.cached_property
    def _chunks(self) -> KVConnectorPromMetrics:
        return self._make_chunks()

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        kind = self._chunks if _is_of_chunks(transfer_stats_data) else self._pages
        kind.observe(transfer_stats_data, engine_idx)


def _is_of_chunks(data: dict[str, Any] | None) -> bool:
    return data is not None and set(OffloadingConnectorStats().data) <= set(data)


# MultiConnector finds the statistics of a child by the name of its class, and that in vLLM's registry.
for _kind in (PageConnector, ChunkConnector):
    _kind.__name__ = HiCacheConnector.__name__
KVConnectorFactory.register_connector(HiCacheConnector.__name__, __name__, HiCacheConnector.__name__)
