"""Host pools of torch tensors with the shapes and the address arithmetic of SGLang's pools, and storage for them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hicache.clock import SYSTEM_CLOCK, Clock
from hicache.config import HiCacheConfig
from hicache.integrations.sglang.identity import EngineIdentity
from hicache.integrations.sglang.pages import HostPages
from hicache.integrations.sglang.storage import HostPoolStorage
from hicache.integrations.store import EngineStorage

LAYERS, HEADS, HEAD_DIM, PAGE_SIZE = 3, 2, 4, 8
LATENT = 6
ENGINE = EngineIdentity(version="0.5.23", weights="weights", weight_version="default", label="llama")


@dataclass
class Ranks:
    """The fields of SGLang's HiCacheStorageConfig that identify a rank."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    is_mla_model: bool = False


def keys(count: int, chain: str = "a") -> list[str]:
    """Return page hashes in SGLang's form."""
    return [hashlib.sha256(f"{chain}{number}".encode()).hexdigest() for number in range(count)]


def files(folder: Path, *, capacity: int | None = None) -> dict[str, Any]:
    """Return the configuration of a file store in `folder`."""
    options = {"path": str(folder / "pages"), "free_space_floor": 0, "capacity": capacity}
    return {"type": "file", "options": options}


def open_storage(
    pools: Mapping[str, Any], storage: dict[str, Any], *, ranks: Ranks | None = None, engine: EngineIdentity = ENGINE,
    is_current: Callable[[], bool] = lambda: True, clock: Clock = SYSTEM_CLOCK, **sections: Any,
) -> HostPoolStorage:
    """Open the storage of an engine with these pools by name, as HiCacheStore does."""
    config = HiCacheConfig.model_validate({"storage": storage, **sections})
    made = HostPoolStorage(EngineStorage(config, clock=clock), is_current)
    for name, pool in pools.items():
        pages = HostPages(pool)
        made.add(name, pages, engine.namespace(ranks or Ranks(), pool, pages, name))
    return made


class HostPool:
    """A pool of `pages` pages. With `is_mla`, each token and layer has one latent vector, and there is no V."""

    def __init__(
        self, layout: str, *, pages: int = 16, is_mla: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        self.layout, self.dtype, self.is_mla = layout, dtype, is_mla
        self.page_size, self.size = PAGE_SIZE, pages * PAGE_SIZE
        self.start_layer, self.end_layer = 0, LAYERS
        self.slot_used = torch.zeros(self.size, dtype=torch.bool)
        heads, dim = (1, LATENT) if is_mla else (HEADS, HEAD_DIM)
        self._vector = heads * dim  # elements of one token and layer
        shape = {
            "layer_first": (LAYERS, self.size, heads, dim),
            "page_first": (self.size, LAYERS, heads, dim),
            "page_first_direct": (pages, LAYERS, PAGE_SIZE, heads, dim),
            "page_head": (pages, heads, PAGE_SIZE, LAYERS, dim),
        }[layout]
        self.kv_buffer: Any = torch.zeros(shape if is_mla else (2, *shape), dtype=dtype)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        item, base = self.dtype.itemsize, self.kv_buffer.data_ptr()
        kinds = [base] if self.is_mla else [base, base + LAYERS * self.size * self._vector * item]
        starts = indices.tolist()[:: self.page_size]
        if self.layout == "layer_first":
            size = self.page_size * self._vector * item
            parts = [
                kind + (layer * self.size + start) * self._vector * item
                for start in starts
                for layer, kind in itertools.product(range(LAYERS), kinds)
            ]
        else:
            size = LAYERS * self.page_size * self._vector * item
            parts = [kind + start * LAYERS * self._vector * item for start in starts for kind in kinds]
        return parts, [size] * len(parts)

    def indices(self, *pages: int) -> torch.Tensor:
        """Return the token indices of pages. Like SGLang's allocator, the pages can be in any order."""
        return torch.cat([torch.arange(page * PAGE_SIZE, (page + 1) * PAGE_SIZE) for page in pages])

    def page(self, number: int) -> torch.Tensor:
        """Return a copy of the KV of a page, as SGLang's `get_data_page` does."""
        tokens = slice(number * PAGE_SIZE, (number + 1) * PAGE_SIZE)
        head: tuple[Any, ...] = () if self.is_mla else (slice(None),)
        where = {"layer_first": (slice(None), tokens), "page_first": (tokens,)}.get(self.layout, (number,))
        page: torch.Tensor = self.kv_buffer[(*head, *where)]
        return page.clone()

    def fill(self, seed: int = 0) -> None:
        """Fill the pool with random values."""
        generator = torch.Generator().manual_seed(seed)
        self.kv_buffer.copy_(torch.rand(self.kv_buffer.shape, generator=generator))


class StatePool:
    """A pool of states, as of Mamba: a page is one slot, with a temporal and a convolutional state of all layers."""

    def __init__(self, *, slots: int = 16, dtype: torch.dtype = torch.float32) -> None:
        self.layout, self.dtype, self.page_size, self.size = "page_first", torch.bfloat16, 1, slots
        self.temporal = torch.zeros(slots, LAYERS, 1, 5, dtype=dtype)
        self.convolution = torch.zeros(slots, LAYERS, 1, 3, dtype=torch.bfloat16)
        self.empty = torch.zeros(slots, LAYERS, 1, 0)  # a model without this state

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        return [self.temporal, self.convolution, self.empty]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """As some of SGLang's pools, take rows of the tensors, of which -1 is the last one."""
        parts = [tensor[slot] for slot in indices.tolist() for tensor in (self.temporal, self.convolution)]
        return [part.data_ptr() for part in parts], [part.nbytes for part in parts]

    def indices(self, *slots: int) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int64)

    def page(self, number: int) -> torch.Tensor:
        """Return a copy of the state of a slot."""
        return torch.cat([self.temporal[number].float().flatten(), self.convolution[number].float().flatten()])

    def fill(self, seed: int = 0) -> None:
        """Fill the pool with random values."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in (self.temporal, self.convolution):
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
