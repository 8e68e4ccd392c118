"""L1 and L2 memory: pools, their allocators, and the engines that copy between them."""

from .allocator import PageAllocator, require_pages
from .copy import CopyEngine, FailedTransfer, Transfer
from .device import (
    KVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    RequestToTokenPool,
    create_device_pool,
    token_slots,
)
from .host import HostPool
from .shared import SharedHostPool
from .token_allocator import PagedTokenToKVPoolAllocator, PageSource, TokenToKVPoolAllocator

__all__ = [
    "CopyEngine",
    "FailedTransfer",
    "HostPool",
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


def create_copy_engine(device: KVPool, host: HostPool) -> CopyEngine:
    """The engine for the device pool's kind of device: CUDA streams, or threads on the CPU."""
    if device.device.type == "cuda":
        from .copy_cuda import CudaCopyEngine  # noqa: PLC0415  needs no CUDA to import, but nobody else needs it

        return CudaCopyEngine(device, host)
    from .copy_cpu import CpuCopyEngine  # noqa: PLC0415

    return CpuCopyEngine(device, host)
