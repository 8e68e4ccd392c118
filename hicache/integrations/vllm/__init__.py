"""HiCache as a KV connector of vLLM: `--kv-transfer-config '{"kv_connector": "HiCacheConnector",
"kv_connector_module_path": "hicache.integrations.vllm", ...}'`. See docs/engines.md.

Importing this package needs vLLM only at the first access to `HiCacheConnector`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy_names

__all__ = ["HiCacheConnector"]

if TYPE_CHECKING:
    from .entry import HiCacheConnector

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, {"entry": "HiCacheConnector"})
