"""L1 and L2 memory: pools, their allocators, and the copy engines between them."""

from ..arguments import instance
from ..config import TransferConfig
from ..errors import InvalidInput
from .allocator import EnginePages, PageAllocator, PagePool, PageSource, require_pages
from .blocks import EngineBlocks
from .copy import CopyEngine, FailedTransfer, Fence, JoinedTransfer, Transfer
from .device import (
    BlockPool,
    KVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    RequestToTokenPool,
    create_device_pool,
    token_slots,
)
from .host import HostPool, HostWindow
from .shared import SharedHostPool
from .token_allocator import Drafts, PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from .trailing import PooledCopies, TrailingPool

__all__ = [
    "BlockPool", "CopyEngine", "Drafts", "EngineBlocks", "EnginePages", "FailedTransfer", "Fence", "HostPool",
    "HostWindow", "JoinedTransfer", "KVPool", "MHATokenToKVPool", "MLATokenToKVPool", "PageAllocator", "PagePool",
    "PageSource", "PagedTokenToKVPoolAllocator", "PooledCopies", "RequestToTokenPool", "SharedHostPool",
    "TokenToKVPoolAllocator", "TrailingPool", "Transfer", "create_copy_engine", "create_device_pool", "require_pages",
    "token_slots",
]


def create_copy_engine(blocks: EngineBlocks, window: HostWindow, config: TransferConfig | None = None) -> CopyEngine:
    """Return the copy engine for the device of `blocks`: CUDA streams, or threads on the CPU.

    `config` configures copies on a CUDA device. Raises InvalidInput if the layers of the blocks do not match the pieces
    of the window, for another type of device, and as `CudaCopyEngine` does.
    """
    device = instance("copy: blocks", blocks, EngineBlocks).device
    instance("copy: window", window, HostWindow)
    if device.type not in ("cpu", "cuda"):
        raise InvalidInput(f"copy: the blocks are on {device}; copies work with tensors on cpu and cuda")
    if device.type == "cuda":
        from .copy_cuda import CudaCopyEngine  # noqa: PLC0415  imports without CUDA, but is needed only here

        return CudaCopyEngine(blocks, window, config)
    from .copy_cpu import CpuCopyEngine  # noqa: PLC0415

    return CpuCopyEngine(blocks, window)
