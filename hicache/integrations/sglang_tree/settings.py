"""SGLang's flags that have no effect under HiCache's tree, and those that it refuses. Does not import SGLang, so that
`hicache doctor` can read them anywhere.

A flag has the name of SGLang's field: `hicache_ratio` is `--hicache-ratio`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

USE_OWN_TREE = "use SGLang's own tree with HiCacheStore as its storage (docs/engines.md)"
_HICACHE_IS_THE_TREE = "remove it: HiCache is the tree"

# The flags without effect, with what to do instead. Entries are those of HiCache's configuration.
INEFFECTIVE: Mapping[str, str] = {
    "hicache_ratio": "set host.ratio",
    "hicache_size": "set host.size",
    "hicache_host_memory_fraction": "set host.size to a share, such as 50%",
    "hicache_write_policy": "set write_policy",
    "hicache_io_backend": "remove it: HiCache chooses how to copy",
    "hicache_mem_layout": "remove it: HiCache has one layout of host memory",
    "hicache_storage_backend": "set storage",
    "hicache_storage_prefetch_policy": "set prefetch.policy",
    "radix_eviction_policy": "set eviction_policy",
    "radix_eviction_policy_config": "set eviction_policy",
    "enable_lmcache": _HICACHE_IS_THE_TREE,
    "enable_flexkv": _HICACHE_IS_THE_TREE,
}


class Refusal(NamedTuple):
    """A flag with which the tree does not start, for the values that `applies` accepts."""

    field: str
    applies: Callable[[Any], bool]
    words: str


def _is_many(value: Any) -> bool:
    return value is not None and value > 1


REFUSED = (
    Refusal("disable_radix_cache", bool, "nothing would be reused; remove it"),
    Refusal("pp_size", _is_many, f"pipeline parallelism is not supported; {USE_OWN_TREE}"),
    Refusal("attn_cp_size", _is_many, f"context parallelism is not supported; {USE_OWN_TREE}"),
    Refusal("dcp_size", _is_many, f"context parallelism is not supported; {USE_OWN_TREE}"),
    Refusal("enable_kv_cache_sharding", bool, f"interleaved pages are not supported; {USE_OWN_TREE}"),
    Refusal("hicache_host_memory_mode", "buffer_only".__eq__, "our host memory is a cache; remove it"),
    Refusal("disaggregation_mode", "decode".__eq__, f"a decode engine is not supported; {USE_OWN_TREE}"),
    Refusal("enable_pd_role_switch", bool, f"a decode engine is not supported; {USE_OWN_TREE}"),
    Refusal("enable_pdmux", bool, f"its event loop does not poll the tree; {USE_OWN_TREE}"),
    Refusal("enable_unified_memory", bool, f"pages that move are not supported; {USE_OWN_TREE}"),
    Refusal("kv_canary_sweep_interval", bool, "it needs SGLang's own tree; remove it"),
    Refusal("disaggregation_decode_retraction_backup", "host_pool".__eq__, "it needs SGLang's own host pool; use none"),
    Refusal("enable_session_radix_cache", bool, "it needs SGLang's own tree; remove it"),
    Refusal(
        "kv_cache_dtype", frozenset({"mxfp8", "nvfp4", "fp4_mx_block16"}).__contains__,
        "KV with separate scales is not supported; use auto or fp8_e4m3",
    ),
)


def flag(field: str) -> str:
    """Return the flag of a field."""
    return f"--{field.replace('_', '-')}"


def without_effect(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the flags in `given`, values by field, that have no effect, with what to do instead."""
    return ((flag(field), words) for field, words in INEFFECTIVE.items() if field in given)


def refused(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the flags in `given` that the tree refuses, with the reason and what to do instead."""
    return ((flag(field), words) for field, applies, words in REFUSED if field in given and applies(given[field]))
