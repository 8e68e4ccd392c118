"""HiCache's storage as a secondary tier of vLLM's own OffloadingConnector (`TieringOffloadingSpec`).

    adapter    HiCacheTier: vLLM's class, the only module here that imports vLLM
    tier       ChunkTier: promotions into vLLM's host memory and cascades from it, on threads
    jobs       one promotion or cascade, shared by its thread and the scheduler
    lookups    lookups of chunks in storage, by a thread for the scheduler
    identity   the namespace of an engine's chunks, and their keys

vLLM keeps its primary tier, chunks of KV in shared host memory, and decides which chunks are promoted into it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...lazy import lazy_names

if TYPE_CHECKING:
    from .adapter import HiCacheTier

__all__ = ["HiCacheTier"]

__getattr__ = lazy_names(__name__, {"adapter": "HiCacheTier"})
