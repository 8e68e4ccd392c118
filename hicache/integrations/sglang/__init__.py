"""HiCache's storage as the storage backend of SGLang's hierarchical cache (`--hicache-storage-backend dynamic`).

    adapter    HiCacheStore: SGLang's class, the only module here that imports SGLang
    storage    HostPoolStorage: pages of SGLang's host pool, to and from an EngineStorage
    pages      the locations of a page's bytes in the host pool
    identity   the namespace of an engine's pages

SGLang keeps its tree and its host pool (L2); HiCache is its L3. See docs/engines.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy_names

if TYPE_CHECKING:
    from .adapter import HiCacheStore

__all__ = ["HiCacheStore"]

__getattr__ = lazy_names(__name__, {"adapter": "HiCacheStore"})
