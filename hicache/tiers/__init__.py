"""L1 and L2 memory: pools, their allocators, and the engines that copy between them."""

from ..arguments import instance
from ..config import TransferConfig
from ..errors import InvalidInput
from .allocator import PageAllocator, require_pages
from .blocks import EngineBlocks
from .copy import CopyEngine, FailedTransfer, Fence, JoinedTransfer, Transfer
from .device import (
    KVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    RequestToTokenPool,
    create_device_pool,
    token_slots,
)
from .host import HostPool, HostWindow
from .shared import SharedHostPool
from .token_allocator import PagedTokenToKVPoolAllocator, PageSource, TokenToKVPoolAllocator

__all__ = [
    "CopyEngine",
    "EngineBlocks",
    "FailedTransfer",
    "Fence",
    "HostPool",
    "HostWindow",
    "JoinedTransfer",
    "KVPool",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "PageAllocator",
    "PageSource",
    "PagedTokenToKVPoolAllocator",
    "RequestToTokenPool",
    "SharedHostPool",
    "TokenToKVPoolAllocator",
    "Transfer",
    "create_copy_engine",
    "create_device_pool",
    "require_pages",
    "token_slots",
]


def create_copy_engine(
    blocks: EngineBlocks, window: HostWindow, config: TransferConfig | None = None
) -> CopyEngine:
    """Return the engine for the kind of device that `blocks` are on: CUDA streams, or threads on the CPU.

    `config` says how copies on a CUDA device go. Raises InvalidInput if the layers of the blocks are not the pieces of
    the window, for another kind of device, and as `CudaCopyEngine` does.
    """
    device = instance("copy: blocks", blocks, EngineBlocks).device
    instance("copy: window", window, HostWindow)
    if device.type not in ("cpu", "cuda"):
        raise InvalidInput(f"copy: the blocks are on {device}; copies work with tensors on cpu and cuda")
    if device.type == "cuda":
        from .copy_cuda import CudaCopyEngine  # noqa: PLC0415  needs no CUDA to import, but nobody else needs it

        return CudaCopyEngine(blocks, window, config)
    from .copy_cpu import CpuCopyEngine  # noqa: PLC0415

    return CpuCopyEngine(blocks, window)
