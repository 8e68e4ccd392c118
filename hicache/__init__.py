"""HiCache keeps the KV cache of an LLM engine in three tiers: device memory, host memory and storage.

The names below are the public face. They are loaded when they are first used, so that `import hicache` and
`hicache --version` cost no import of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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
    from .fingerprint import model_fingerprint
    from .geometry import KVGeometry, KVLayout, PageShape, Piece
    from .keys import Namespace, RadixKey

_NAMES = {
    "cache": "ChunkCache HiRadixCache HostCache SessionCache TreeCache create_cache create_host_cache open_storage",
    "config": "HiCacheConfig load_config",
    "controller": "HiCacheController TorchRankGroup",
    "errors": "HiCacheError",
    "events": "EventStream PrefixIndex",
    "fingerprint": "model_fingerprint",
    "geometry": "KVGeometry KVLayout PageShape Piece",
    "keys": "Namespace RadixKey",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """Load a public name from its module (PEP 562). Raises AttributeError for every other name."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # the next use finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
