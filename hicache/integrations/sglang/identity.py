"""The namespace of an SGLang engine: everything that must be equal before two engines share pages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ...keys import Namespace
from .pages import EngineHostPool, HostPages

# The names of SGLang's host pools that HiCache treats specially: that of full attention, and that of states.
KV, MAMBA = "kv", "mamba"
# SGLang's page keys: SHA-256 over the key of the page before, or a seed of adapter and salt, and the tokens.
KEY_HASH = "sglang sha256 chain, seed sglang-cache-namespace-v1"


class Ranks(Protocol):
    """The used fields of SGLang's HiCacheStorageConfig. With data-parallel attention, `tp_rank` is the rank in its
    attention group; pages do not depend on the group."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    dcp_rank: int
    dcp_size: int
    is_mla_model: bool


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """The relevant configuration of SGLang.

    `weights` identifies the weights, with adapters and a draft model; `weight_version` is SGLang's own, which updates
    change. `overrides` are the model settings that flags change. `kv_cache_dtype` distinguishes types with the same
    byte representation.
    """

    version: str
    weights: str
    weight_version: str
    label: str
    kv_cache_dtype: str = "auto"
    quantization: str = ""
    kv_scales: str = ""
    overrides: Mapping[str, object] | None = None

    @property
    def model(self) -> str:
        """The identity of the weights, with the settings that change their results."""
        overrides = hashlib.sha256(json.dumps(self.overrides or {}, sort_keys=True, default=str).encode()).hexdigest()
        return f"{self.weights} {overrides} {self.weight_version}"

    def namespace(self, ranks: Ranks, pool: EngineHostPool, pages: HostPages, name: str = KV) -> Namespace:
        """Return the namespace of the pages of the pool `name` on one rank. Ranks of MLA have the same pages and share
        one, except for states and for pools with a rank's own heads."""
        layers = f"{getattr(pool, 'start_layer', '')}-{getattr(pool, 'end_layer', '')}"
        # SGLang's name of a byte format that class, layout and dtype do not tell.
        tag = getattr(pool, "storage_format_tag", None)
        return Namespace(
            model=self.model, geometry=pages.shape, kv_scales=self.kv_scales,
            tp_rank=ranks.tp_rank, tp_size=ranks.tp_size, pp_rank=ranks.pp_rank, pp_size=ranks.pp_size,
            cp_rank=ranks.attn_cp_rank, cp_size=ranks.attn_cp_size, dcp_rank=ranks.dcp_rank, dcp_size=ranks.dcp_size,
            ranks_share_pages=ranks.is_mla_model and (name == KV or (name != MAMBA and not hasattr(pool, "head_num"))),
            engine_layout=(
                f"sglang {self.version} {type(pool).__name__} {pool.layout} {pool.dtype} kv={self.kv_cache_dtype} "
                f"layers={layers}"
                + ("" if tag is None else f" format={tag}")
                + ("" if name == KV else f" pool={name} {','.join(pages.dtypes)}")
            ),
            quantisation=self.quantization, key_hash=KEY_HASH, label=self.label,
        )
