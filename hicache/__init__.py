"""HiCache keeps the KV cache of an LLM engine in three tiers: device memory, host memory and storage.

The names below are the public face. They are loaded when they are first used, so that `import hicache` and
`hicache --version` cost no import of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [
    "HiCacheConfig",
    "HiCacheController",
    "HiCacheError",
    "HiRadixCache",
    "KVGeometry",
    "KVLayout",
    "Namespace",
    "RadixKey",
    "__version__",
]

if TYPE_CHECKING:
    from .cache import HiRadixCache
    from .config import HiCacheConfig
    from .controller import HiCacheController
    from .errors import HiCacheError
    from .geometry import KVGeometry, KVLayout
    from .keys import Namespace, RadixKey

_HOME = {
    "HiCacheConfig": "config",
    "HiCacheController": "controller",
    "HiCacheError": "errors",
    "HiRadixCache": "cache",
    "KVGeometry": "geometry",
    "KVLayout": "geometry",
    "Namespace": "keys",
    "RadixKey": "keys",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module (PEP 562). Raises AttributeError for every other name."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # the next use finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
