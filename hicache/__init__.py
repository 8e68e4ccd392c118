"""HiCache keeps the KV cache of an LLM engine in three tiers: device memory, host memory and storage.

The names below are the public interface. Each is loaded at its first use, so `import hicache` and `hicache --version`
do not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import lazy_names

__version__ = "0.1.0"

__all__ = [
    "ChunkCache",
    "EventStream",
    "HiCacheConfig",
    "HiCacheController",
    "HiCacheError",
    "HiRadixCache",
    "HostCache",
    "KVGeometry",
    "KVLayout",
    "Namespace",
    "PageShape",
    "Piece",
    "PrefixIndex",
    "RadixKey",
    "SessionCache",
    "TorchRankGroup",
    "TreeCache",
    "__version__",
    "create_cache",
    "create_host_cache",
    "load_config",
    "model_fingerprint",
    "open_storage",
    "scales_fingerprint",
]

if TYPE_CHECKING:
    from .cache import (
        ChunkCache,
        HiRadixCache,
        HostCache,
        SessionCache,
        TreeCache,
        create_cache,
        create_host_cache,
        open_storage,
    )
    from .config import HiCacheConfig, load_config
    from .controller import HiCacheController, TorchRankGroup
    from .errors import HiCacheError
    from .events import EventStream, PrefixIndex
    from .fingerprint import model_fingerprint, scales_fingerprint
    from .geometry import KVGeometry, KVLayout, PageShape, Piece
    from .keys import Namespace, RadixKey

if not TYPE_CHECKING:  # a type checker has the names from above, and would accept any name because of `__getattr__`
    __getattr__ = lazy_names(
        __name__,
        {
            "cache": "ChunkCache HiRadixCache HostCache SessionCache TreeCache create_cache create_host_cache "
            "open_storage",
            "config": "HiCacheConfig load_config",
            "controller": "HiCacheController TorchRankGroup",
            "errors": "HiCacheError",
            "events": "EventStream PrefixIndex",
            "fingerprint": "model_fingerprint scales_fingerprint",
            "geometry": "KVGeometry KVLayout PageShape Piece",
            "keys": "Namespace RadixKey",
        },
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
