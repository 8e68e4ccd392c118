"""L1: the KV cache of the device, in pages, and the table that maps a request's tokens to slots.

Page 0 of every pool is padding: it is never allocated, and kernels write the results of padding tokens there. Slot `s`
is entry `s % page_size` of page `s // page_size`. Owned by the scheduler thread; fences order copies of the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..arguments import instance, number, whole
from ..errors import CapacityError, InvalidInput
from ..geometry import KVGeometry, KVLayout
from ..lazy import native
from ..types import PageIds
from .allocator import EnginePages, PageAllocator, PagePool, require_pages
from .blocks import EngineBlocks
from .copy import Transfer
from .upload import upload

# The optional native helper computes slots in one pass. numpy takes five times as long for pages of 16 tokens.
fill_slots: Callable[..., None] | None = native("fill_slots")

# A number, or a tensor of one element on the pool's device.
Scale: TypeAlias = float | torch.Tensor | None


class BlockPool:
    """Device memory as blocks, one block per page, and the allocator of the pages.

    `loading` is the load that reads wait for, layer by layer. A cache sets it in `start_loading`, to None when no load
    is in flight. An engine that has already waited may set it to None. If a cache has several pools, `main` is its L1,
    whose `loading` is the load of all, and `first_layer` is the number of this pool's layer 0 in it.

    The memory belongs to an engine, whose tensors `blocks` views, or to a subclass that allocates it. `pages` is the
    number of allocatable pages, from page `blocks.first` on and without page 0; by default all. With `owned`, the
    engine also owns the free list, and `pages` is its capacity. Raises InvalidInput if there are too few blocks.
    """

    def __init__(self, blocks: EngineBlocks, pages: int | None = None, *, owned: EnginePages | None = None) -> None:
        instance("device pool: blocks", blocks, EngineBlocks)
        first = max(1, blocks.first) if owned is None else owned.first
        if owned is not None:
            pages = owned.capacity
        pages = blocks.count - first if pages is None else whole("device pool: pages", pages)
        if not 1 <= pages <= blocks.count - first:
            raise InvalidInput(f"device pool: {pages} pages; use 1 to {blocks.count - first}, blocks from {first} on")
        self.blocks = blocks
        self.device = blocks.device
        self.loading: Transfer | None = None
        self.main: BlockPool | None = None
        self.first_layer = 0
        self.allocator: PagePool = PageAllocator(pages, first=first) if owned is None else owned

    @property
    def pages(self) -> int:
        """The number of allocatable pages, without the padding page."""
        return self.allocator.capacity

    def wait_layer(self, layer: int) -> None:
        """Order the caller's next work on `layer` after the load in flight, if any.

        On CUDA this queues a wait on the device's current stream; on the CPU it blocks (see `Transfer.wait_layer`).
        Raises TransferError at each call if the load failed: the pages that it should fill must be recomputed.
        """
        loading = self.loading if self.main is None else self.main.loading
        if loading is not None:
            stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
            loading.wait_layer(self.first_layer + layer, stream)


class KVPool(BlockPool):
    """L1: the blocks of a model with equal layers.

    Raises InvalidInput as `BlockPool`, and if a block does not have the bytes of a page.
    """

    def __init__(
        self, geometry: KVGeometry, blocks: EngineBlocks, pages: int | None = None, *, owned: EnginePages | None = None
    ) -> None:
        instance("device pool: geometry", geometry, KVGeometry)
        instance("device pool: blocks", blocks, EngineBlocks)
        if blocks.layer_bytes != (geometry.layer_bytes,) * geometry.layers:
            raise InvalidInput(
                f"device pool: a page has {geometry.layers} layers of {geometry.layer_bytes} bytes, a block has "
                f"{len(blocks.layers)} layers of {sorted(set(blocks.layer_bytes))} bytes; a page must be one block"
            )
        self.geometry = geometry
        super().__init__(blocks, pages, owned=owned)


class MHATokenToKVPool(KVPool):
    """K and V of one layer in one tensor, `[pages + 1, 2, page_size, heads, head_dim]`, as in FlashInfer.

    So a (page, layer) is one piece of memory. If `v_head_dim` differs, the tensor is `[pages + 1, page_size * heads *
    (head_dim + v_head_dim)]`, with the K block of a page before its V block. Raises InvalidInput for a geometry of
    another layout or fewer than one page, and CapacityError, with the numbers, if the device has too little memory.
    """

    def __init__(self, geometry: KVGeometry, pages: int, device: torch.device | str = "cpu") -> None:
        size, heads, k_dim, v_dim = geometry.page_size, geometry.heads, geometry.head_dim, geometry.value_dim
        shape = (2, size, heads, k_dim) if v_dim == k_dim else (size * heads * (k_dim + v_dim),)
        self.kv_buffer = _allocate(geometry, KVLayout.MHA, pages, shape, device)
        self.dtype = self.kv_buffer[0].dtype
        k_block = size * heads * k_dim
        self._parts = [
            (kv[:, :k_block].view(-1, size, heads, k_dim), kv[:, k_block:].view(-1, size, heads, v_dim))
            for kv in (layer.flatten(1) for layer in self.kv_buffer)
        ]
        super().__init__(geometry, EngineBlocks([[kv] for kv in self.kv_buffer], first=1), pages)

    def get_kv_buffer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of one layer, each `[pages + 1, page_size, heads, head_dim]` (V: `v_head_dim`), for an
        attention kernel to read.

        Waits for the layer's load and raises as `wait_layer` does.
        """
        self.wait_layer(layer)
        return self._parts[layer]

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        """Return the K of `get_kv_buffer`."""
        return self.get_kv_buffer(layer)[0]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        """Return the V of `get_kv_buffer`."""
        return self.get_kv_buffer(layer)[1]

    def set_kv_buffer(
        self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        k_scale: Scale = None, v_scale: Scale = None,
    ) -> None:
        """Write K and V `[tokens, heads, head_dim]` of one layer at `slots` `[tokens]` (int64, on the device).

        Stores K / `k_scale` and V / `v_scale` in the pool's dtype, also if they have that dtype: a reader multiplies by
        the scales. The quotient is computed in float32 and rounded once. What exceeds the range of float8, infinity
        included, becomes its largest number. `k` and `v` stay as they are.

        Does not wait for a load, because a load fills shared pages and a request writes only to its own pages. Does not
        wait for the value of a scale on the device, so it is not checked. Raises InvalidInput, with the pool unchanged,
        for a number that is not positive, a tensor of several elements, and integers that are to be converted.
        """
        page_size = self.geometry.page_size
        place = (slots // page_size, slots % page_size)
        values = pool_values(k, k_scale, self.dtype), pool_values(v, v_scale, self.dtype)
        for part, rows in zip(self._parts[layer], values, strict=True):
            part[place] = rows


class MLATokenToKVPool(KVPool):
    """One latent tensor per layer, `[pages + 1, page_size, 1, latent_dim]`. Raises as `MHATokenToKVPool` does."""

    def __init__(self, geometry: KVGeometry, pages: int, device: torch.device | str = "cpu") -> None:
        shape = (geometry.page_size, geometry.heads, geometry.head_dim)
        self.kv_buffer = _allocate(geometry, KVLayout.MLA, pages, shape, device)
        self.dtype = self.kv_buffer[0].dtype
        super().__init__(geometry, EngineBlocks([[kv] for kv in self.kv_buffer], first=1), pages)

    def get_kv_buffer(self, layer: int) -> torch.Tensor:
        """Return the latents of one layer, `[pages + 1, page_size, 1, latent_dim]`. Waits like `wait_layer`."""
        self.wait_layer(layer)
        return self.kv_buffer[layer]

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        """Return the latents, as `get_kv_buffer`. V is their first columns; the pool does not know how many."""
        return self.get_kv_buffer(layer)

    def set_kv_buffer(self, layer: int, slots: torch.Tensor, latent: torch.Tensor, scale: Scale = None) -> None:
        """Write latents `[tokens, 1, latent_dim]` of one layer at `slots` `[tokens]` (int64, on the device).

        Converts, raises and does not wait as `MHATokenToKVPool.set_kv_buffer`.
        """
        self.kv_buffer[layer].flatten(0, 1)[slots] = pool_values(latent, scale, self.dtype)


def pool_values(values: torch.Tensor, scale: Scale, dtype: torch.dtype) -> torch.Tensor:
    """Return what `set_kv_buffer` of a pool of `dtype` writes for `values`. Raises as it does."""
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1:
            raise InvalidInput(f"device pool: a scale of shape {list(scale.shape)}; pass one element")
        scale = scale.reshape(())
    elif scale is not None:
        scale = number("device pool: scale", scale, positive=True)
    elif values.dtype is dtype:
        return values
    if not (dtype.is_floating_point and values.dtype.is_floating_point):
        raise InvalidInput(f"device pool: {values.dtype} to {dtype}; store integers in the pool's dtype, without scale")
    wide = values.float() if scale is None else values.float() / scale
    if dtype.itemsize == 1:  # a conversion alone gives NaN or infinity, which one depends on the dtype and on torch
        wide = wide.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return wide.to(dtype)


def _allocate(
    geometry: KVGeometry, layout: KVLayout, pages: int, page: Sequence[int], device: torch.device | str
) -> list[torch.Tensor]:
    """Return zeros `[pages + 1, *page]` for each layer."""
    if instance("device pool: geometry", geometry, KVGeometry).layout is not layout:
        raise InvalidInput(f"device pool: the geometry's layout is {geometry.layout.value}, the pool's {layout.value}")
    pages, device = whole("device pool: pages", pages, 1), known_device(device)
    dtype: torch.dtype = getattr(torch, geometry.dtype)
    try:
        layers = [torch.zeros((pages + 1, *page), dtype=dtype, device=device) for _ in range(geometry.layers)]
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # no fence of the engine covers these zeros
        return layers
    except (RuntimeError, MemoryError) as error:
        needed = (pages + 1) * geometry.payload_bytes
        raise CapacityError(f"device pool: {pages} pages need {needed} bytes on {device}: {error}") from error


def create_device_pool(
    geometry: KVGeometry, pages: int, device: torch.device | str = "cpu"
) -> MHATokenToKVPool | MLATokenToKVPool:
    """Return a pool for the geometry's layout that allocates its memory. Raises as that pool does."""
    layout = instance("device pool: geometry", geometry, KVGeometry).layout
    kind = MHATokenToKVPool if layout is KVLayout.MHA else MLATokenToKVPool
    return kind(geometry, pages, device)


class RequestToTokenPool:
    """A table with one row per running request: row `r`, column `t` is the pool slot of the request's token `t`.

    `table` is `[requests, context_tokens]` int32 on the device. Attention kernels read it, only the scheduler writes.
    """

    def __init__(self, requests: int, context_tokens: int, device: torch.device | str = "cpu") -> None:
        requests, context_tokens = whole("requests", requests, 1), whole("context_tokens", context_tokens, 1)
        self.table = torch.zeros((requests, context_tokens), dtype=torch.int32, device=known_device(device))
        self._free = list(range(requests - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def free_rows(self) -> int:
        """The number of rows that are not in use."""
        return len(self._free)

    def alloc(self, count: int) -> list[int] | None:
        """Return `count` rows, or None if fewer are free. Atomic: None changes nothing.

        A request keeps its row until `free`, so a prompt that is computed in chunks allocates once.
        """
        count = whole("count", count)
        if count > len(self._free):
            return None
        rows = [self._free.pop() for _ in range(count)]
        self._used.update(rows)
        return rows

    def free(self, row: int) -> None:
        """Free a row. Raises InvalidInput if the row is not in use."""
        row = self._require_used(row)
        self._used.remove(row)
        self._free.append(row)

    def write(self, row: int, pages: PageIds, page_size: int, *, first_page: int = 0) -> None:
        """Map the row's tokens from page `first_page` on to `pages`. On CUDA this is queued on the current stream.

        Raises InvalidInput if the row is not in use, CapacityError if the tokens exceed the row's length.
        """
        row = self._require_used(row)
        slots = token_slots(pages, page_size)
        start = whole("first_page", first_page) * page_size
        columns = self.table.shape[1]
        if start >= columns or start + len(slots) >= columns + page_size:
            raise CapacityError(f"request pool: {start + len(slots)} tokens exceed the context of {columns}")
        slots = slots[: columns - start]
        self.table[row, start : start + len(slots)] = upload(slots.astype(np.int32), self.table.device)

    def _require_used(self, row: int) -> int:
        if (row := whole("row", row)) not in self._used:
            raise InvalidInput(f"request pool: row {row} is not in use; pass one that `alloc` returned")
        return row


def known_device(device: torch.device | str) -> torch.device:
    """Return the device. `cuda` without a number becomes the current device, because other threads may have another.

    Raises InvalidInput if torch does not know the name.
    """
    if not isinstance(device, torch.device):
        name = instance("device", device, str)  # torch also takes numbers and None
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise InvalidInput(f"device {name[:40]!r} is not known; use cpu, cuda or cuda:N") from error
    if str(device) == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def token_slots(pages: PageIds, page_size: int) -> npt.NDArray[np.int64]:
    """Return the slots of all tokens of `pages`, int64 `[len(pages) * page_size]`, in order. Raises as `require_pages`.
    """
    page_size = whole("page_size", page_size, 1)
    pages = np.ascontiguousarray(require_pages(pages))
    if fill_slots is None:
        slots = np.repeat(pages.astype(np.int64) * page_size, page_size)
        by_page = slots.reshape(-1, page_size)
        by_page += np.arange(page_size)
        return slots
    slots = np.empty(len(pages) * page_size, np.int64)
    fill_slots(slots, pages, page_size)
    return slots
