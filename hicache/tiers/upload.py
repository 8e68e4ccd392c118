"""Upload small host arrays to the device without a wait: page tables, token ids, descriptions of a batch."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def upload(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return `values` on `device`, of the same shape and dtype. On CUDA the copy is queued on the current stream, and
    the array can be reused when the call returns; on the CPU the tensor shares the array's memory.

    A copy from pageable memory would make the host wait for all work queued on the stream, loads included. So on CUDA
    the values pass through pinned memory, which torch keeps and reuses once the copy from it has ended. Only if all it
    keeps is in flight, it allocates more, which may wait for the device. REQUIRES: no CUDA graph is being captured.
    """
    host = torch.from_numpy(values)
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
