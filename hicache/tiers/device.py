"""L1: the KV cache of the device, in pages, and the table that maps a request's tokens to it.

Page 0 of every pool is padding: kernels that must write somewhere write there, and it is never handed out. Slot `s` of
page `p` is row `p * page_size + s` of each layer's buffer. Owned by the scheduler thread; the bytes are ordered by the
copy engine's events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from ..arguments import instance, whole
from ..errors import CapacityError, InvalidInput
from ..geometry import KVGeometry, KVLayout
from ..types import PageIds
from .allocator import PageAllocator, require_pages
from .blocks import EngineBlocks


class KVPool(ABC):
    """Device memory of all layers, as `pages` pages plus the padding page. For `ascending` see `PageAllocator`.

    Raises CapacityError, with the numbers, if the device has not that much memory.
    """

    def __init__(
        self, geometry: KVGeometry, pages: int, device: torch.device | str = "cpu", *, ascending: bool = False
    ) -> None:
        pages = whole("device pool: pages", pages, 1)
        self.geometry = instance("device pool: geometry", geometry, KVGeometry)
        self.device = known_device(device)
        self.dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._rows = (pages + 1) * geometry.page_size
        try:
            self._create_buffers()
        except (RuntimeError, MemoryError) as error:
            needed = (pages + 1) * geometry.payload_bytes
            raise CapacityError(f"device pool: {pages} pages need {needed} bytes on {self.device}: {error}") from error
        self.allocator = PageAllocator(pages, first=1, ascending=ascending)
        self.blocks = EngineBlocks([self.layer_blocks(layer) for layer in range(geometry.layers)], first=1)

    @abstractmethod
    def _create_buffers(self) -> None: ...

    @abstractmethod
    def layer_tensors(self, layer: int) -> list[torch.Tensor]:
        """The buffers of one layer in frame order (K, V; or the latent), each `[rows, heads, head_dim]`."""

    @property
    def pages(self) -> int:
        """Pages that can be handed out, the padding page not counted."""
        return self.allocator.capacity

    def layer_blocks(self, layer: int) -> list[torch.Tensor]:
        """The same memory as bytes, one row a page: each `[pages + 1, block_bytes]` uint8."""
        blocks = []
        for tensor in self.layer_tensors(layer):
            blocks.append(tensor.view(self.pages + 1, -1).view(torch.uint8))
        return blocks

    def _zeros(self) -> torch.Tensor:
        shape = (self._rows, self.geometry.heads, self.geometry.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


class MHATokenToKVPool(KVPool):
    """Separate K and V buffers per layer, each `[(pages + 1) * page_size, heads, head_dim]`."""

    def _create_buffers(self) -> None:
        if self.geometry.layout is not KVLayout.MHA:
            raise InvalidInput(f"MHATokenToKVPool: the geometry's layout is {self.geometry.layout.value}")
        self.k_buffer = [self._zeros() for _ in range(self.geometry.layers)]
        self.v_buffer = [self._zeros() for _ in range(self.geometry.layers)]

    def layer_tensors(self, layer: int) -> list[torch.Tensor]:
        return [self.k_buffer[layer], self.v_buffer[layer]]

    def get_kv_buffer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, for an attention kernel to read."""
        return self.k_buffer[layer], self.v_buffer[layer]

    def set_kv_buffer(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write K and V `[tokens, heads, head_dim]` of one layer at `slots` `[tokens]` (int64, on the device)."""
        self.k_buffer[layer][slots] = k
        self.v_buffer[layer][slots] = v


class MLATokenToKVPool(KVPool):
    """One latent buffer per layer, `[(pages + 1) * page_size, 1, latent_dim]`; `heads` is 1."""

    def _create_buffers(self) -> None:
        if self.geometry.layout is not KVLayout.MLA:
            raise InvalidInput(f"MLATokenToKVPool: the geometry's layout is {self.geometry.layout.value}")
        self.kv_buffer = [self._zeros() for _ in range(self.geometry.layers)]

    def layer_tensors(self, layer: int) -> list[torch.Tensor]:
        return [self.kv_buffer[layer]]

    def get_kv_buffer(self, layer: int) -> torch.Tensor:
        """The latent cache of one layer."""
        return self.kv_buffer[layer]

    def set_kv_buffer(self, layer: int, slots: torch.Tensor, latent: torch.Tensor) -> None:
        """Write latents `[tokens, 1, latent_dim]` of one layer at `slots` `[tokens]` (int64, on the device)."""
        self.kv_buffer[layer][slots] = latent


def create_device_pool(
    geometry: KVGeometry, pages: int, device: torch.device | str = "cpu", *, ascending: bool = False
) -> KVPool:
    """The pool that fits the geometry's layout. Raises as `KVPool` does."""
    geometry = instance("device pool: geometry", geometry, KVGeometry)
    kind = MHATokenToKVPool if geometry.layout is KVLayout.MHA else MLATokenToKVPool
    return kind(geometry, pages, device, ascending=ascending)


class RequestToTokenPool:
    """One row per running request: row `r`, column `t` is the pool slot of the request's token `t`.

    `table` is `[requests, context_tokens]` int32 on the device; attention kernels read it, only the scheduler writes
    it.
    """

    def __init__(self, requests: int, context_tokens: int, device: torch.device | str = "cpu") -> None:
        requests, context_tokens = whole("requests", requests, 1), whole("context_tokens", context_tokens, 1)
        self.table = torch.zeros((requests, context_tokens), dtype=torch.int32, device=known_device(device))
        self._free = list(range(requests - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def free_rows(self) -> int:
        """Rows that `alloc` can still hand out."""
        return len(self._free)

    def alloc(self) -> int | None:
        """A row, or None if all are in use."""
        if not self._free:
            return None
        row = self._free.pop()
        self._used.add(row)
        return row

    def free(self, row: int) -> None:
        """Return a row. Raises InvalidInput for a row that is not in use."""
        row = self._require_used(row)
        self._used.remove(row)
        self._free.append(row)

    def write(self, row: int, pages: PageIds, page_size: int, *, first_page: int = 0) -> None:
        """Point the row's tokens from page `first_page` on at `pages`.

        Raises InvalidInput for a row that is not in use, CapacityError beyond the row's length.
        """
        row = self._require_used(row)
        slots = token_slots(pages, page_size)
        start = whole("first_page", first_page) * page_size
        columns = self.table.shape[1]
        if start >= columns or start + len(slots) >= columns + page_size:
            raise CapacityError(f"request pool: {start + len(slots)} tokens exceed the context of {columns}")
        slots = slots[: columns - start]
        self.table[row, start : start + len(slots)] = torch.from_numpy(slots).to(self.table.device)

    def _require_used(self, row: int) -> int:
        if (row := whole("row", row)) not in self._used:
            raise InvalidInput(f"request pool: row {row} is not in use; pass one that `alloc` returned")
        return row


def known_device(device: torch.device | str) -> torch.device:
    """Return the device. Raises InvalidInput for a name that torch does not know."""
    if isinstance(device, torch.device):
        return device
    try:
        return torch.device(instance("device", device, str))  # which also takes numbers and None
    except RuntimeError as error:
        raise InvalidInput(f"device {device[:40]!r} is not known; use cpu, cuda or cuda:N") from error


def upload(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small host tensor on `device`, queued on the current stream; on the CPU the tensor itself."""
    if device.type == "cpu":
        return values
    # From pageable memory the copy would wait for the whole stream, and the scheduler with it.
    return values.pin_memory().to(device, non_blocking=True)


def token_slots(pages: PageIds, page_size: int) -> PageIds:
    """Pool rows of all tokens of `pages`, int32 `[len(pages) * page_size]`, in order. Raises as `require_pages`."""
    page_size = whole("page_size", page_size, 1)
    offsets = np.arange(page_size, dtype=np.int32)
    return (require_pages(pages)[:, None] * np.int32(page_size) + offsets).reshape(-1)
