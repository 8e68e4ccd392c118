"""Names from the configurations of SGLang, LMCache and vLLM, and what they are called here.

A person who comes from there writes them first; most are too unlike ours to be found as typos. The names are those of
SGLang's server arguments (docs.sglang.io, HiCache best practices), LMCache's `lmcache/v1/config.py`, and vLLM's engine
arguments, as of 2026.
"""

from __future__ import annotations

# To the entry here, and what to mind beside the name.
ENTRIES: dict[str, tuple[str, str]] = {
    # SGLang
    "disable_radix_cache": ("prefix_cache", "with the opposite value"),
    "hicache_ratio": ("host.ratio", ""),
    "hicache_size": ("host.size", "with a unit: 64 of SGLang is 64GB"),
    "hicache_storage_backend": ("storage.type", ""),
    "hicache_storage_backend_extra_config": ("storage.options", "as entries, not as JSON"),
    "hicache_storage_prefetch_policy": ("prefetch.policy", ""),
    "hicache_write_policy": ("write_policy", ""),
    "max_total_tokens": ("device.tokens", ""),
    "mem_fraction_static": ("device.memory_fraction", "which is of what the weights leave"),
    "prefetch_threshold": ("prefetch.threshold_tokens", ""),
    "prefetch_timeout_base": ("prefetch.timeout_base", "with a unit, such as 1s"),
    "prefetch_timeout_per_ki_token": ("prefetch.timeout_per_1024_tokens", "with a unit, such as 250ms"),
    "radix_eviction_policy": ("eviction_policy", ""),
    "schedule_policy": ("schedule.policy", ""),
    # LMCache
    "blocking_timeout_secs": ("transfer.storage_deadline", "with a unit, such as 10s"),
    "cache_policy": ("eviction_policy", "in lower case"),
    "chunk_size": ("page_size", ""),
    "local_disk": ("storage.options.path", "of storage.type: file, and without file://"),
    "lookup_timeout_ms": ("transfer.storage_deadline", "with a unit, such as 3s"),
    "max_local_cpu_size": ("host.size", "with a unit: 5 of LMCache is 5GiB"),
    "max_local_disk_size": ("storage.options.capacity", "with a unit: 5 of LMCache is 5GiB"),
    "min_retrieve_tokens": ("prefetch.threshold_tokens", ""),
    "remote_serde": ("storage_format.compression", ""),
    "remote_url": ("storage.options.url", "of storage.type: redis; other stores have a type of their own"),
    # vLLM
    "block_size": ("page_size", ""),
    "gpu_memory_utilization": ("device.memory_fraction", "which is of what the weights leave"),
    "kv_offloading_size": ("host.size", "with a unit"),
}
# What needs no entry here.
_NEEDLESS = {
    "enable_hierarchical_cache": "host memory is always used; `host` sizes it, and `storage` adds the third tier",
    "hicache_io_backend": "the kind of the device decides how pages are copied",
    "hicache_mem_layout": "a page is contiguous in host memory and in storage",
    "local_cpu": "host memory is always used; `host` sizes it",
    "save_decode_cache": "what was computed while decoding is always kept",
    "save_unfull_chunk": "pages are always whole; a session keeps the rest",
}
_PREFIX = "hicache_"


def foreign_name(name: str) -> str | None:
    """Return what to write in place of an entry `name` of another project, in words; None for other names.

    A flag's dashes are those of a name, and `HICACHE_RATIO` may come as `ratio`.
    """
    own = name.lower().lstrip("-").replace("-", "_")
    for known in (own, _PREFIX + own):
        if known in ENTRIES:
            entry, mind = ENTRIES[known]
            return f"{known} is {entry} here" + (f", {mind}" if mind else "")
        if known in _NEEDLESS:
            return f"{known} has no counterpart: {_NEEDLESS[known]}"
    return None
