"""The plug-in of SGLang: entry point `hicache` of the group `sglang.srt.plugins`.

Each process of SGLang calls `register` before it parses its flags, also without HiCache's flag. So this module imports
no part of HiCache and of PyTorch before the tree is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

NAME = "hicache"
# SGLang's scheduler looks up storage only with a `--hicache-storage-backend`, which our tree does not use.
_SCHEDULER_INIT = "sglang.srt.managers.scheduler.Scheduler.__init__"
# Called only with `--enable-mixed-chunk`, after `ready_to_load_host_cache`.
_MIX = "sglang.srt.managers.schedule_batch.ScheduleBatch.mix_with_running"


def register() -> None:
    """Register the tree as `--radix-cache-backend hicache`."""
    from sglang.srt.mem_cache.registry import (  # noqa: PLC0415
        register_radix_cache_backend,
        registered_radix_cache_backends,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    if NAME not in registered_radix_cache_backends():
        register_radix_cache_backend(NAME, _build)
        HookRegistry.register(_SCHEDULER_INIT, _ask_for_prefetches, HookType.AFTER)
        HookRegistry.register(_MIX, _leave_out_mixed, HookType.AFTER)


def _build(context: TreeCacheBuildContext) -> BasePrefixCache:
    from .start import build_tree  # noqa: PLC0415

    return build_tree(context)


def _ask_for_prefetches(_: object, scheduler: Scheduler, *__: object, **___: object) -> None:
    """Let the scheduler call the tree's methods for storage, as with a `--hicache-storage-backend`, if requests may
    have to wait for pages. Otherwise the calls would only cost its time."""
    from .tree import HiCacheTree  # noqa: PLC0415

    if isinstance(tree := scheduler.tree_cache, HiCacheTree):
        scheduler.enable_hicache_storage = tree.may_wait


def _leave_out_mixed(_: object, batch: ScheduleBatch, *__: object, **___: object) -> None:
    """Do not measure a prefill batch to which requests that decode were added."""
    from .tree import HiCacheTree  # noqa: PLC0415

    if isinstance(tree := batch.tree_cache, HiCacheTree):
        tree.prefill.leave_out()
