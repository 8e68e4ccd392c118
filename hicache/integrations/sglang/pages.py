"""Pages in one of SGLang's host pools: each consists of a few parts of its buffers, which storage reads and writes in
place. A page has the KV of a page of tokens, or one state.

The pool returns their addresses, which are checked against its buffers: an address outside them is an error, and is
never written to.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ...arguments import instance
from ...errors import ConfigError, InvalidInput
from ...frame import HEADER_BYTES, PageView
from ...geometry import PAGE_SIZE_MAX, PageShape, Piece

# The layouts in which a page consists of whole runs of one buffer: K and V of all layers, or of each layer.
LAYOUTS = ("page_first", "page_first_direct", "layer_first", "page_head")


class EngineHostPool(Protocol):
    """The used interface of SGLang's HostKVCache. A pool without `kv_buffer` returns its buffers from
    `get_hybrid_pool_buffer`."""

    page_size: int
    layout: str
    dtype: torch.dtype

    def get_page_buffer_meta(self, indices: torch.Tensor) -> Any:
        """Return the addresses and the lengths of the parts of the pages of the tokens `indices`."""


class HostPages:
    """The pages of `pool`. Raises ConfigError for a pool whose pages cannot be moved in place, with what to change."""

    def __init__(self, pool: EngineHostPool) -> None:
        if pool.layout not in LAYOUTS:
            raise ConfigError(
                f"--hicache-mem-layout: {pool.layout!r} is not supported by HiCache; use one of {', '.join(LAYOUTS)}"
            )
        if not 1 <= pool.page_size <= PAGE_SIZE_MAX:
            raise ConfigError(f"--page-size: {pool.page_size} is not supported by HiCache; use 1 to {PAGE_SIZE_MAX}")
        tensors = _tensors(pool)
        self._pool = pool
        self._buffers = [(tensor.data_ptr(), _bytes_of(tensor)) for tensor in tensors]
        self.dtypes = tuple(str(tensor.dtype) for tensor in tensors)
        try:
            self._sizes = [part.nbytes for part in self._parts(torch.arange(pool.page_size), 1)]
            addresses, _ = pool.get_page_buffer_meta(torch.arange(pool.page_size))
        except (NotImplementedError, TypeError, ValueError) as error:
            raise ConfigError(
                f"SGLang's host pool {type(pool).__name__} does not describe its pages in the layout {pool.layout!r} "
                f"({error}); set --hicache-mem-layout page_first, or remove --hicache-storage-backend for this model"
            ) from error
        self.shape = PageShape(pool.page_size, tuple(Piece("part", size) for size in self._sizes))
        # SGLang flattens a page in the order of its addresses, which is always the same only within one buffer.
        self._flat_order = sorted(range(len(addresses)), key=addresses.__getitem__)
        self.is_flat = len(tensors) == 1

    def views(self, indices: torch.Tensor, count: int) -> list[PageView]:
        """Return the `count` pages of the tokens `indices`, with new headers, so unsealed.

        Raises InvalidInput if the indices or the pool's addresses are wrong.
        """
        parts, of_page = self._parts(indices, count), len(self._sizes)
        if [part.nbytes for part in parts] != self._sizes * count:
            raise InvalidInput("sglang: the parts of the host pool's pages have changed; restart the engine")
        headers = memoryview(bytearray(HEADER_BYTES * count))
        return [
            PageView(
                headers[page * HEADER_BYTES : (page + 1) * HEADER_BYTES], parts[page * of_page : (page + 1) * of_page]
            )
            for page in range(count)
        ]

    def new_flat(self) -> torch.Tensor:
        """Return memory for one page outside the pool, 1-D, of the pool's type."""
        return torch.empty(self.shape.payload_bytes, dtype=torch.uint8).view(self._pool.dtype)

    def flat_view(self, page: torch.Tensor) -> PageView:
        """Return a page outside the pool, with the bytes of SGLang's `get_data_page`, and a new header, so unsealed.

        REQUIRES: `is_flat`. Raises InvalidInput unless it is a contiguous host tensor with the bytes of a page.
        """
        page, size = instance("sglang: a page", page, torch.Tensor), self.shape.payload_bytes
        if page.device.type != "cpu" or not page.is_contiguous() or page.nbytes != size:
            raise InvalidInput(
                f"sglang: a page of {page.nbytes} bytes on {page.device}; pass {size} contiguous bytes in host memory"
            )
        rest = _bytes_of(page)
        parts = [rest] * len(self._sizes)
        for part in self._flat_order:
            parts[part], rest = rest[: self._sizes[part]], rest[self._sizes[part] :]
        return PageView(memoryview(bytearray(HEADER_BYTES)), parts)

    def _parts(self, indices: torch.Tensor, count: int) -> list[memoryview]:
        page_size = self._pool.page_size
        if len(indices) != count * page_size:
            raise InvalidInput(f"sglang: {len(indices)} host indices for {count} pages of {page_size} tokens; pass all")
        if count and int(indices.min()) < 0:
            raise InvalidInput("sglang: a host index is negative; pass the indices of allocated pages")
        try:
            addresses, sizes = self._pool.get_page_buffer_meta(indices)
        except IndexError as error:
            raise InvalidInput("sglang: a host index is outside the pool; pass those of allocated pages") from error
        return [self._memory(address, size) for address, size in zip(addresses, sizes, strict=True)]

    def _memory(self, address: int, size: int) -> memoryview:
        for start, memory in self._buffers:
            if start <= address and address + size <= start + memory.nbytes:
                return memory[address - start : address - start + size]
        raise InvalidInput("sglang: the host pool returns addresses outside its KV buffers; this pool is not supported")


def _tensors(pool: EngineHostPool) -> list[torch.Tensor]:
    """Return the buffers of `pool` that have bytes. Raises ConfigError unless all are contiguous tensors."""
    found: Any = getattr(pool, "kv_buffer", None)
    if found is None:
        found = getattr(pool, "get_hybrid_pool_buffer", lambda: None)()
    tensors = list(found) if isinstance(found, (list, tuple)) else [found]
    if not all(isinstance(tensor, torch.Tensor) and tensor.is_contiguous() for tensor in tensors):
        raise ConfigError(
            f"SGLang's host pool {type(pool).__name__} does not keep its pages in tensors of its own, so HiCache "
            "cannot store them; remove --hicache-storage-backend for this model"
        )
    return [tensor for tensor in tensors if tensor.numel()]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy().data)
