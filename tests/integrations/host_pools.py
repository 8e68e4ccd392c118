"""Host pools of torch tensors with the shapes and the address arithmetic of SGLang's pools."""

from __future__ import annotations

import itertools
from typing import Any

import torch

LAYERS, HEADS, HEAD_DIM, PAGE_SIZE = 3, 2, 4, 8
LATENT = 6


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
