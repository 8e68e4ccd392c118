"""Pin host memory for a CUDA device: register it with the driver in chunks, and unregister all of them together.

With recent drivers, one registration of some hundred GiB fails, so chunks have at most 64 GiB. A chunk ends at the end
of a frame and of a system page, so each frame is in one chunk and no copy crosses a boundary.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import weakref

import torch

from ..errors import CapacityError, InvalidInput, TransferError
from ..units import format_size
from .cuda_driver import CudaDriver

logger = logging.getLogger(__name__)

CHUNK_BYTES_MAX = 64 << 30


def frames_per_chunk(frame_bytes: int, chunk_bytes_max: int = CHUNK_BYTES_MAX) -> int:
    """Return how many frames are registered in one call: at least the fewest that fill whole system pages."""
    step = math.lcm(frame_bytes, mmap.PAGESIZE)
    return max(1, chunk_bytes_max // step) * step // frame_bytes


def pin(driver: CudaDriver, address: int, size_bytes: int, chunk_bytes: int, owner: object, mapping: object) -> None:
    """Register memory chunk by chunk. It is unregistered when `owner` is collected, before `mapping` is unmapped.

    Raises CapacityError if the driver cannot pin a chunk; the earlier chunks are then unregistered.
    """
    chunks = range(address, address + size_bytes, chunk_bytes)
    with contextlib.ExitStack() as undo:
        for chunk in chunks:
            length = min(chunk_bytes, address + size_bytes - chunk)
            try:
                driver.register(chunk, length)
            except TransferError as error:
                raise CapacityError(
                    f"host pool: CUDA refused to pin {format_size(length)} at {format_size(chunk - address)} of "
                    f"{format_size(size_bytes)}: {error}; lower host.size, or free memory of the machine or of its "
                    "memory cgroup (the limit of `ulimit -l` does not count for CUDA)"
                ) from error
            undo.callback(_unregister, driver, [chunk])
        undo.pop_all()
    # The finalizer holds the mapping; a late operation with a frame keeps it alive even longer. At process exit the
    # finalizer does not run: the system releases everything after the copies that may still run.
    weakref.finalize(owner, _unregister, driver, list(chunks), mapping).atexit = False


def driver_of(device: torch.device) -> CudaDriver:
    """Return the driver of a CUDA device. Raises InvalidInput for another device, or if torch finds no CUDA."""
    if device.type != "cuda" or not torch.cuda.is_available():
        raise InvalidInput(f"host pool: pin: {device} is not a CUDA device that torch sees; leave pin out")
    return CudaDriver(torch.cuda.current_device() if str(device) == "cuda" else device.index)


def _unregister(driver: CudaDriver, chunks: list[int], mapping: object = None) -> None:
    for chunk in chunks:
        try:
            driver.unregister(chunk)
        except TransferError as error:
            logger.warning("host memory could not be unpinned: %s", error)
