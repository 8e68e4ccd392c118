"""The namespace of a vLLM engine's chunks (everything that must be equal before engines share them), and their keys.

A chunk is a row of vLLM's primary tier: the blocks of one KV cache group, of all workers in order. Rows have the same
length for each group; the layers of the group determine their content.

vLLM identifies a chunk by its group and by the hash of its last block, which covers all earlier tokens, the adapter,
the salt and the multimodal inputs. The hash has 16 or 32 bytes, depending on the algorithm, and with the group it is
longer than a page key, so a page key is a SHA-256 over both. It also covers vLLM's root hash, which depends on the
algorithm and its seed (`PYTHONHASHSEED`): engines with another algorithm or seed have other keys. vLLM sets the root
hash after it has created its tiers, so it is not part of the namespace.
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

# To be changed with the derivation of a chunk's key.
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
    """The layout of an engine's chunks. `engine` contains the engine, its version and the kind of its device, which
    determine the order of bytes within a block; `kv_layout` is the engine's name of it."""

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
        """Tokens of the shortest chunk, within the limits of a page: groups may have blocks of different lengths."""
        return min(PAGE_SIZE_MAX, *(group.block_tokens * self.chunk_blocks for group in self.groups))

    def namespace(self, model: str, label: str) -> Namespace:
        """Return the namespace of these chunks for the weights `model`. A page contains the chunks of all ranks, so
        they share one namespace. Raises InvalidInput for an invalid layout."""
        groups = [[group.number, group.block_tokens, list(group.layers)] for group in self.groups]
        terms = [self.chunk_blocks, self.hash_tokens, self.is_canonical, self.is_replicated, groups]
        digest = hashlib.sha256(json.dumps(terms).encode()).hexdigest()
        return Namespace(
            model=model, geometry=PageShape(self.chunk_tokens, (Piece("chunk", self.chunk_bytes),)),
            tp_size=self.tp_size, pp_size=self.pp_size, cp_size=self.cp_size, dcp_size=self.dcp_size,
            engine_layout=f"{self.engine}/chunks/{self.kv_layout}/{self.dtype}/{digest}", key_hash=KEY_HASH,
            label=label,
        )


@functools.cache
def chunk_keys(root: bytes) -> Callable[[bytes], bytes]:
    """Return a function that derives the page key of a chunk from its name in vLLM, with vLLM's root hash."""
    start = hashlib.sha256(_KEY_DOMAIN + struct.pack("<H", len(root)) + root)

    def key_of(name: bytes) -> bytes:
        digest = start.copy()
        digest.update(name)
        return digest.digest()

    return key_of
