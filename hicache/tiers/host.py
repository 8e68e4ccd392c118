"""L2: host memory as frames in one contiguous allocation, so that pages are always in their encoded form.

Locking design: the allocator belongs to the scheduler thread. The bytes of a page belong to its holder (a node of the
tree, or the operation that has reserved it); no lock guards them.

A page from `alloc` still has the header of the previous page in its frame. The first reader of the frame unseals it;
that is a worker, because writes to cold memory for each page would slow down the scheduler. It does so once, by a lock.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence

import numpy as np
import torch

from ..arguments import instance, whole
from ..errors import CapacityError, InvalidInput
from ..frame import HEADER_BYTES, frame_bytes, unseal
from ..geometry import KVGeometry, PageShape, page_shape
from ..host_memory import RESERVE_BYTES, host_memory, shortage
from ..mapping import populate_zeroed
from ..numa import NODES_MAX, bind, numa_node
from ..types import Bytes2D, PageIds
from ..units import format_size
from .allocator import PageAllocator, require_pages
from .pinning import driver_of, frames_per_chunk
from .pinning import pin as pin_memory


class HostPool:
    """`pages` frames of host memory, 4096-aligned, touched at start so that copies cause no page faults.

    `pin` is the CUDA device that copies from and to the pool: its driver pins the memory, which copies need to run
    during compute. `node` is the NUMA node of the memory: by default that of `pin`, else any. Raises CapacityError if
    memory is short (before touching it) or the driver cannot pin it, InvalidInput for fewer than one page, and for a
    `pin` that is not a CUDA device of this machine.
    """

    def __init__(
        self, shape: PageShape | KVGeometry, pages: int, *, pin: torch.device | None = None, node: int | None = None
    ) -> None:
        pages = whole("host pool: pages", pages, 1)
        driver = None if pin is None else driver_of(instance("host pool: pin", pin, torch.device))
        self.pinned = driver is not None
        if node is not None:
            self.node: int | None = whole("host pool: node", node, 0, NODES_MAX - 1)
        else:
            self.node = None if driver is None else numa_node(driver.pci_bus_id())
        self.shape = page_shape(shape)
        self.payload_bytes = self.shape.payload_bytes
        self.frame_bytes = frame_bytes(self.payload_bytes)
        self._offsets = self.shape.offsets
        self._mapping = self._map(pages)
        self.capacity_bytes = len(self._mapping)
        pages = self.capacity_bytes // self.frame_bytes  # memory that existed may keep its own number
        self.allocator = PageAllocator(pages)
        # All frames, contiguous.
        self.memory = memoryview(self._mapping)
        # uint8 [pages, frame_bytes] over the same memory.
        self.buffer: Bytes2D = np.frombuffer(self._mapping, dtype=np.uint8).reshape(pages, self.frame_bytes)
        self.tensor = torch.from_numpy(self.buffer)
        self._stale = np.zeros(pages, dtype=np.bool_)  # by page: the header is that of a previous page
        self._unsealing = threading.Lock()
        # Number of frames per registration with the driver.
        self.frames_per_chunk = frames_per_chunk(self.frame_bytes)
        if driver is not None:
            chunk_bytes = self.frames_per_chunk * self.frame_bytes
            pin_memory(driver, self.tensor.data_ptr(), self.capacity_bytes, chunk_bytes, self, self._mapping)
            # Else, after a fork, the parent's next write would move a system page while the device copies it.
            self._mapping.madvise(mmap.MADV_DONTFORK)

    def _map(self, pages: int) -> mmap.mmap:
        """Return the memory of `pages` zeroed frames, 4096-aligned and touched. Subclasses override only this."""
        self._require_available(pages)
        mapping = mmap.mmap(-1, pages * self.frame_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self.node is not None:
            bind(mapping, self.node)
        populate_zeroed(mapping)
        return mapping

    def _require_available(self, pages: int) -> None:
        """Raise CapacityError unless enough memory is available for all frames and a reserve for other programs."""
        available = host_memory().available_bytes
        short = shortage({f"{pages} pages of {self.frame_bytes} bytes": pages * self.frame_bytes}, available)
        if short is not None:
            most = format_size(max(0, available - RESERVE_BYTES))
            raise CapacityError(f"host pool: {short}; lower host.size (to at most {most}), host.tokens or host.ratio")

    @property
    def pages(self) -> int:
        """Capacity in pages."""
        return self.allocator.capacity

    def alloc(self, count: int) -> PageIds | None:
        """Return `count` pages, or None, changing nothing, if fewer are free. `frames` unseals their frames."""
        index = self.allocator.alloc_indices(count)
        if index is None:
            return None
        self._stale[index] = True
        return index.astype(np.int32)

    def free(self, pages: PageIds) -> None:
        """Free pages. REQUIRES: no node or operation holds them."""
        self.allocator.free(pages)

    def frame(self, page: int) -> memoryview:
        """Return the whole frame of one page, writable. May be called from any thread."""
        return self.frames(np.array([whole("page", page, 0, self.pages - 1)], dtype=np.int32))[0]

    def frames(self, pages: PageIds) -> list[memoryview]:
        """Return the frames of several pages, in order. May be called from any thread."""
        size = self.frame_bytes
        for page in require_pages(pages)[(pages < 0) | (pages >= self.pages)].tolist():
            whole("page", page, 0, self.pages - 1)
        with self._unsealing:
            stale = pages[self._stale[pages]]
            for page in stale.tolist():
                unseal(self.memory[page * size : (page + 1) * size])
            self._stale[stale] = False
        return [self.memory[page * size : (page + 1) * size] for page in pages.tolist()]

    def payload(self, page: int) -> memoryview:
        """Return the bytes of one page's pieces, in order."""
        start = whole("page", page, 0, self.pages - 1) * self.frame_bytes + HEADER_BYTES
        return self.memory[start : start + self.payload_bytes]

    def piece_slice(self, first: int, count: int = 1) -> slice:
        """Return the slice of a frame, in bytes, that holds `count` pieces from piece `first` on."""
        offsets, pieces = self._offsets, len(self._offsets) - 1
        first = whole("first", first, 0, pieces - 1)
        count = whole("count", count, 1, pieces - first)
        return slice(HEADER_BYTES + offsets[first], HEADER_BYTES + offsets[first + count])


class HostWindow:
    """The pieces of each page of `host` that one rank copies, as host blocks: `pieces` of them from piece `first_piece`
    on (default: to the end).

    A page is `blocks_per_page` (k) blocks of an engine. The payload of a frame is ordered `[rank][block of the
    page][layer][bytes of the engine]`. A window is one rank of it: k equal runs of pieces, one run per block. Block i
    of page p is host block p * k + i.

    A view of the host pool's memory. Raises InvalidInput if the pages lack the pieces, or if the pieces are not
    `blocks_per_page` runs of the same sizes.
    """

    def __init__(
        self, host: HostPool, first_piece: int = 0, pieces: int | None = None, blocks_per_page: int = 1
    ) -> None:
        self.host = instance("host window: host", host, HostPool)
        there = len(host.shape.pieces)
        first = whole("host window: first_piece", first_piece, 0, there - 1)
        count = whole("host window: pieces", there - first if pieces is None else pieces, 1, there - first)
        self.blocks_per_page = whole("host window: blocks_per_page", blocks_per_page, 1, count)
        if count % self.blocks_per_page:
            raise InvalidInput(
                f"host window: {count} pieces are not {self.blocks_per_page} blocks of equally many pieces"
            )
        self._pieces = host.shape.pieces[first : first + count // self.blocks_per_page]
        sizes = [piece.bytes for piece in host.shape.pieces[first : first + count]]
        run = [piece.bytes for piece in self._pieces]
        if sizes != run * self.blocks_per_page:
            raise InvalidInput(
                f"host window: pieces {first} to {first + count - 1} are not {self.blocks_per_page} runs of the same "
                f"sizes; give each block of a page the pieces of the first one, which have {run} bytes"
            )
        self.blocks = host.pages * self.blocks_per_page
        self.block_bytes = sum(run)
        # Offset of the first block in a frame, in bytes.
        self.offset = host.piece_slice(first, count).start
        # uint8 [pages, blocks of a page, bytes of a block], a view of the frames.
        self.rows = host.tensor[:, host.piece_slice(first, count)].view(host.pages, self.blocks_per_page, -1)

    def layer_rows(self, layer_bytes: Sequence[int]) -> list[torch.Tensor]:
        """View each layer of the blocks as uint8 `[pages, blocks_per_page, bytes]`.

        `layer_bytes` are the bytes of one block in each layer. Raises InvalidInput unless each layer is a run of whole
        pieces, in order, and the layers together use all pieces of a block.
        """
        found, end, used = [], 0, 0
        for layer, size in enumerate(layer_bytes):
            begin, first = end, used
            while end - begin < size and used < len(self._pieces):
                end += self._pieces[used].bytes
                used += 1
            if end - begin != size:
                names = ", ".join(piece.name for piece in self._pieces[first:used]) or "none"
                raise InvalidInput(
                    f"host window: layer {layer} has {size} bytes in a block of the engine, but its pieces on the host "
                    f"({names}) have {end - begin}; the shape of a page must list the layers as the engine has them"
                )
            found.append(self.rows[:, :, begin:end])
        if used < len(self._pieces):
            raise InvalidInput(
                f"host window: the engine's {len(layer_bytes)} layers have {end} bytes in a block, the window has "
                f"{self.block_bytes}: piece {self._pieces[used].name} has no layer"
            )
        return found
