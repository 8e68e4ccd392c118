"""What two vLLM engines must agree on before one reads a chunk that the other has stored, and the key of a chunk.

A chunk is a row of vLLM's primary tier: the blocks of one KV cache group, of all workers one behind the other. A row
has the same length for each group, and what lies in it follows from the layers of the group.

vLLM names a chunk by the hash of its last block, which covers all tokens before it, the adapter, the salt and the
multimodal inputs, and by its group. The hash has 16 or 32 bytes, depending on the algorithm, and both together are
longer than a page key, so a page key is a SHA-256 over them. It also covers vLLM's root hash, which follows from the
algorithm and from its seed (`PYTHONHASHSEED`): chunks of engines that hash in another way, or begin with another
seed, have other keys. vLLM knows the root only after it has made its tiers, so it is not part of the namespace.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass

from ...geometry import PAGE_SIZE_MAX, PageShape, Piece
from ...keys import Namespace

# Changed when the key of a chunk is derived in another way.
KEY_HASH = "vllm chunk key 1: sha256(root hash, block hash, group)"
_KEY_DOMAIN = b"hicache.vllm_tier.key.1"


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """One KV cache group: its number, the tokens of one of its blocks over all workers, and its layers in order."""

    number: int
    block_tokens: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """How an engine lays out its chunks. `engine` names the engine, its version and the kind of its device, since the
    order of bytes within a block is the engine's own business; `kv_layout` is what the engine calls it."""

    engine: str
    dtype: str
    kv_layout: str
    groups: tuple[ChunkGroup, ...]
    chunk_bytes: int
    chunk_blocks: int
    hash_tokens: int
    is_canonical: bool = False
    is_replicated: bool = False
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    dcp_size: int = 1

    @property
    def chunk_tokens(self) -> int:
        """Tokens of the shortest chunk, within what a page may have: groups may have blocks of different lengths."""
        return min(PAGE_SIZE_MAX, *(group.block_tokens * self.chunk_blocks for group in self.groups))

    def namespace(self, model: str, label: str) -> Namespace:
        """Return the namespace of these chunks under the weights `model`. A page holds the chunks of all ranks, so
        there is one namespace for them. Raises InvalidInput for a layout that cannot exist."""
        groups = [[group.number, group.block_tokens, list(group.layers)] for group in self.groups]
        terms = [self.chunk_blocks, self.hash_tokens, self.is_canonical, self.is_replicated, groups]
        digest = hashlib.sha256(json.dumps(terms).encode()).hexdigest()
        return Namespace(
            model=model,
            geometry=PageShape(self.chunk_tokens, (Piece("chunk", self.chunk_bytes),)),
            tp_size=self.tp_size,
            pp_size=self.pp_size,
            cp_size=self.cp_size,
            dcp_size=self.dcp_size,
            engine_layout=f"{self.engine}/chunks/{self.kv_layout}/{self.dtype}/{digest}",
            key_hash=KEY_HASH,
            label=label,
        )


@functools.cache
def chunk_keys(root: bytes) -> Callable[[bytes], bytes]:
    """Return what derives the page key of a chunk from its name in vLLM, under vLLM's root hash."""
    start = hashlib.sha256(_KEY_DOMAIN + struct.pack("<H", len(root)) + root)

    def key_of(name: bytes) -> bytes:
        digest = start.copy()
        digest.update(name)
        return digest.digest()

    return key_of
