"""Maps names from the configurations of SGLang, LMCache and vLLM to entries here, for error messages.

Their users try these names first, and most are too different from ours to be found as typos. The names are those of
SGLang's server arguments (docs.sglang.io, HiCache best practices), LMCache's `lmcache/v1/config.py`, and vLLM's engine
arguments, as of 2026.
"""

from __future__ import annotations

# The entry here, and a hint about its value.
ENTRIES: dict[str, tuple[str, str]] = {
    # SGLang
    "disable_radix_cache": ("prefix_cache", "with the opposite value"),
    "hicache_ratio": ("host.ratio", ""),
    "hicache_size": ("host.size", "with a unit: SGLang's 64 is 64GB"),
    "hicache_storage_backend": ("storage.type", ""),
    "hicache_storage_backend_extra_config": ("storage.options", "as entries, not as JSON"),
    "hicache_storage_prefetch_policy": ("prefetch.policy", ""),
    "hicache_write_policy": ("write_policy", ""),
    "max_total_tokens": ("device.tokens", ""),
    "mem_fraction_static": ("device.memory_fraction", "a fraction of the memory without the weights"),
    "prefetch_threshold": ("prefetch.threshold_tokens", ""),
    "prefetch_timeout_base": ("prefetch.timeout_base", "with a unit, such as 1s"),
    "prefetch_timeout_per_ki_token": ("prefetch.timeout_per_1024_tokens", "with a unit, such as 250ms"),
    "radix_eviction_policy": ("eviction_policy", ""),
    # LMCache
    "blocking_timeout_secs": ("transfer.storage_deadline", "with a unit, such as 10s"),
    "cache_policy": ("eviction_policy", "in lower case"),
    "chunk_size": ("page_size", ""),
    "local_disk": ("storage.options.path", "of storage.type: file, and without file://"),
    "lookup_timeout_ms": ("transfer.storage_deadline", "with a unit, such as 3s"),
    "max_local_cpu_size": ("host.size", "with a unit: LMCache's 5 is 5GiB"),
    "max_local_disk_size": ("storage.options.capacity", "with a unit: LMCache's 5 is 5GiB"),
    "min_retrieve_tokens": ("prefetch.threshold_tokens", ""),
    "remote_serde": ("storage_format.compression", ""),
    "remote_url": ("storage.options.url", "of storage.type: redis; other stores have their own type"),
    # vLLM
    "block_size": ("page_size", ""),
    "gpu_memory_utilization": ("device.memory_fraction", "a fraction of the memory without the weights"),
    "kv_offloading_size": ("host.size", "with a unit"),
}
# Names without an entry here, and why.
_NEEDLESS = {
    "client": "there is one client for S3; for a proxy with a password set `proxy_env`",
    "enable_hierarchical_cache": "host memory is always used; `host` sizes it, and `storage` adds the third tier",
    "hicache_io_backend": "the kind of device determines how pages are copied",
    "hicache_mem_layout": "a page is contiguous in host memory and in storage",
    "local_cpu": "host memory is always used; `host` sizes it",
    "save_decode_cache": "KV computed while decoding is always kept",
    "save_unfull_chunk": "pages are always whole; a session keeps the partial page",
    "schedule_policy": "the engine schedules",
}
_PREFIX = "hicache_"


def foreign_name(name: str) -> str | None:
    """Return a hint for an entry `name` of another project; None for other names.

    Accepts flags with dashes, and `ratio` for `HICACHE_RATIO`.
    """
    own = name.lower().lstrip("-").replace("-", "_")
    for known in (own, _PREFIX + own):
        if known in ENTRIES:
            entry, mind = ENTRIES[known]
            return f"{known} is {entry} here" + (f", {mind}" if mind else "")
        if known in _NEEDLESS:
            return f"{known} has no counterpart: {_NEEDLESS[known]}"
    return None
