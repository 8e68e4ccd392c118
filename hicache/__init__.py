"""HiCache keeps the KV cache of an LLM engine in three tiers: device memory, host memory and storage.

The names below are the public interface. Each is loaded at its first use, so `import hicache` and `hicache --version`
do not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import lazy_names

__version__ = "0.1.0"

_MODULES = {
    "cache": "ChunkCache HiRadixCache HostCache SessionCache TreeCache create_cache create_host_cache open_storage",
    "config": "HiCacheConfig load_config",
    "controller": "HiCacheController TorchRankGroup",
    "errors": "HiCacheError",
    "events": "EventStream PrefixIndex",
    "fingerprint": "model_fingerprint scales_fingerprint",
    "geometry": "KVGeometry KVLayout PageShape Piece",
    "keys": "Namespace RadixKey",
}
__all__ = ["__version__", *" ".join(_MODULES.values()).split()]  # noqa: PLE0604

if TYPE_CHECKING:
    from .cache import ChunkCache as ChunkCache
    from .cache import HiRadixCache as HiRadixCache
    from .cache import HostCache as HostCache
    from .cache import SessionCache as SessionCache
    from .cache import TreeCache as TreeCache
    from .cache import create_cache as create_cache
    from .cache import create_host_cache as create_host_cache
    from .cache import open_storage as open_storage
    from .config import HiCacheConfig as HiCacheConfig
    from .config import load_config as load_config
    from .controller import HiCacheController as HiCacheController
    from .controller import TorchRankGroup as TorchRankGroup
    from .errors import HiCacheError as HiCacheError
    from .events import EventStream as EventStream
    from .events import PrefixIndex as PrefixIndex
    from .fingerprint import model_fingerprint as model_fingerprint
    from .fingerprint import scales_fingerprint as scales_fingerprint
    from .geometry import KVGeometry as KVGeometry
    from .geometry import KVLayout as KVLayout
    from .geometry import PageShape as PageShape
    from .geometry import Piece as Piece
    from .keys import Namespace as Namespace
    from .keys import RadixKey as RadixKey
else:  # a type checker has the names from above, and would accept any name because of `__getattr__`
    __getattr__ = lazy_names(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
