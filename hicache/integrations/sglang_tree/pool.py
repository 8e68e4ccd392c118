"""SGLang's KV cache of the device for an EngineCache: its tensors, its free list, and the waits of its layers.

SGLang's page 0 is padding, and slot `s` is entry `s % page_size` of page `s // page_size`, as in our pools. SGLang
keeps page ids on the device; the cache needs them in host memory, so each allocation and each read of a request's slots
copies 8 bytes per page and, on CUDA, waits for the scheduler's stream.

All calls are made on SGLang's scheduler thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, MHABufferInfo, MLABufferInfo

from ...errors import ConfigError, InvariantError
from ...geometry import DTYPE_BYTES, KVGeometry, KVLayout
from ...tiers import Transfer
from ...tiers.device import known_device
from ...tiers.upload import upload
from ...types import PageIds
from .settings import USE_OWN_TREE

# Batches whose forward SGLang may still prepare: two with overlap scheduling, and one to spare.
_WAITS_KEPT = 4


class SGLangPages:
    """The free list of SGLang's allocator as `EnginePages`, which describes the methods. The cache holds `used_pages`
    of its pages."""

    def __init__(self, allocator: Any) -> None:
        self._allocator = allocator
        self._device = known_device(allocator.device)
        self._page_size = int(allocator.page_size)
        self._offsets = torch.arange(self._page_size, device=self._device)
        self.first = 1
        self.capacity = int(allocator.size) // self._page_size
        self.used_pages = 0

    @property
    def free_pages(self) -> int:
        """Pages that can be allocated now."""
        return int(self._allocator.available_size()) // self._page_size

    @property
    def group_open(self) -> bool:
        """True while SGLang delays frees."""
        return self._allocator.free_group is not None

    def alloc(self, count: int) -> PageIds | None:
        slots = self._allocator.alloc(count * self._page_size)
        if slots is None:
            return None
        self.used_pages += count
        return self.pages_of(slots)

    def free(self, pages: PageIds) -> None:
        if len(pages) > self.used_pages:
            raise InvariantError(f"free: {len(pages)} pages, but the tree holds {self.used_pages}")
        if len(pages):
            self.used_pages -= len(pages)
            self._allocator.free_segment(self.slots_of(pages), start_pos=0)

    def take_over(self, count: int) -> None:
        self.used_pages += count

    @contextmanager
    def free_group(self) -> Iterator[None]:
        self._allocator.free_group_begin()
        try:
            yield
        finally:
            self._allocator.free_group_end()

    def check(self) -> None:
        """Raise InvariantError if SGLang's free list has a page twice, or more pages are in use than exist."""
        free = self._allocator.get_all_free_pages()
        if len(torch.unique(free)) != len(free):
            raise InvariantError("L1: a page is in SGLang's free list twice")
        if self.used_pages + len(free) > self.capacity:
            raise InvariantError(f"L1: {self.used_pages} pages held and {len(free)} free, of {self.capacity}")

    def pages_of(self, slots: torch.Tensor) -> PageIds:
        """Return the pages of slots, `[pages * page_size]` in whole pages. Waits for the device."""
        pages: PageIds = (slots[:: self._page_size] // self._page_size).to("cpu", torch.int32).numpy()
        return pages

    def slots_of(self, pages: PageIds) -> torch.Tensor:
        """Return the slots of all tokens of `pages`, int64 `[pages * page_size]`, on the device."""
        ids = upload(pages.astype(np.int64), self._device)
        return (ids[:, None] * self._page_size + self._offsets).view(-1)


class LayerWaits:
    """SGLang's counter of loaded layers. A batch has the number of the transfer that its forward waits for, -1 for
    none; the pool calls `wait_until` before it reads a layer."""

    def __init__(self, layers: int, device: torch.device) -> None:
        self.num_layers = layers
        self.consumer_index = -1
        self._device = device
        self._next = 0
        self._transfers: dict[int, Transfer] = {}

    def add(self, transfer: Transfer) -> int:
        """Return the number of `transfer`."""
        number, self._next = self._next, self._next + 1
        self._transfers[number] = transfer
        self._transfers.pop(number - _WAITS_KEPT, None)
        return number

    def set_consumer(self, index: int) -> None:
        """Set the transfer that the next forward waits for."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Order the next work after the load of `layer`. Raises TransferError if it failed."""
        if (transfer := self._transfers.get(self.consumer_index)) is not None:
            stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
            transfer.wait_layer(layer, stream)


class DraftWaits:
    """LayerWaits of a draft model whose layers follow those of the model in each page."""

    def __init__(self, waits: LayerWaits, first: int) -> None:
        self._waits = waits
        self._first = first
        self.num_layers = waits.num_layers - first

    @property
    def consumer_index(self) -> int:
        return self._waits.consumer_index

    def wait_until(self, layer: int) -> None:
        self._waits.wait_until(self._first + layer)


def device_layers(pool: Any, drafts: Sequence[Any]) -> tuple[KVGeometry, list[list[torch.Tensor]]]:
    """Return the geometry of the pages of SGLang's pool and of its packed draft pools, and the regions of each layer.

    Raises ConfigError for pools that are not one full-attention cache of equal layers.
    """
    geometries, layers = [], []
    for one in (pool, *drafts):
        geometry, regions = _layers_of(one)
        geometries.append(geometry)
        layers += regions
    if len(set(geometries)) != 1:
        raise ConfigError(f"the KV of the draft model has another shape than that of the model; {USE_OWN_TREE}")
    first = geometries[0]
    return KVGeometry(len(layers), *first), layers


def _layers_of(pool: Any) -> tuple[tuple[Any, ...], list[list[torch.Tensor]]]:
    """Return the arguments of a KVGeometry behind `layers`, and the regions."""
    try:
        infos = pool.get_device_pool_infos()
    except NotImplementedError as error:
        raise _unsupported(pool) from error
    info = infos[0].buffer_info if len(infos) == 1 else None
    if isinstance(info, MHABufferInfo) and info.scales is None and info.buffers.layout is KVBufferLayout.NHD:
        layers = [list(pair) for pair in zip(info.buffers.k, info.buffers.v, strict=True)]
        dtype = _dtype(pool, info.buffers.k[0])
        return (info.head_num, info.head_dim, info.page_size, dtype, KVLayout.MHA, info.v_head_dim), layers
    if isinstance(info, MLABufferInfo) and isinstance(info.buffers, tuple) and info.scales is None:
        layers = [[buffer] for buffer in info.buffers]
        dtype = _dtype(pool, info.buffers[0])
        return (1, info.kv_cache_dim, info.page_size, dtype, KVLayout.MLA, None), layers
    raise _unsupported(pool)


def _dtype(pool: Any, buffer: torch.Tensor) -> str:
    name = str(buffer.dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise _unsupported(pool)
    return name


def _unsupported(pool: Any) -> ConfigError:
    return ConfigError(
        f"the KV cache of this model is a {type(pool).__name__}, and HiCache's tree holds one pool of full attention; "
        f"{USE_OWN_TREE}"
    )
