"""Available memory, and the number of pages for a configured size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..config import DeviceConfig, HostConfig
from ..errors import CapacityError, ConfigError
from ..frame import frame_bytes
from ..geometry import KVGeometry, PageShape, page_shape
from ..host_memory import host_memory, resolve
from ..units import Share, format_size

# Staging of copies on a CUDA device: one ring of slots per direction. Several slots keep link and kernels busy.
STAGING_SLOTS = 3
STAGING_SLOT_BYTES = 16 << 20
STAGING_BYTES = 2 * STAGING_SLOTS * STAGING_SLOT_BYTES

@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Free and total memory of one device at one time, in bytes."""

    available_bytes: int
    total_bytes: int


def cuda_memory(device: torch.device) -> DeviceMemory:
    """Return the memory as reported by the driver, so memory of other processes is not free. First empties torch's
    cache.

    An engine with several ranks uses the smallest `available_bytes` of all ranks, so that all have equally many pages.
    """
    with torch.cuda.device(device):
        torch.cuda.empty_cache()
    return DeviceMemory(*torch.cuda.mem_get_info(device))


def profile_max_num_tokens(memory: DeviceMemory, memory_fraction: float, token_bytes: int) -> int:
    """Return the number of tokens whose KV fits on the device in addition to the weights; 0 if none fits.

    `memory_fraction` of the device is for weights and KV together; the rest stays free for activations. REQUIRES: the
    weights are loaded; `token_bytes`, the KV of one token on one rank, is at least 1.
    """
    reserved_bytes = math.ceil(memory.total_bytes * (1 - memory_fraction))
    return max(0, memory.available_bytes - reserved_bytes) // token_bytes


def device_pages(
    config: DeviceConfig, geometry: KVGeometry, device: torch.device, memory: DeviceMemory | None = None
) -> int:
    """Return the pages of L1 for `device.size`, `device.tokens` or `device.memory_fraction`, without the padding page.

    `memory` replaces the driver's numbers of this rank, such as by the minimum of all ranks (see `cuda_memory`). Raises
    ConfigError if no size is configured, if the pool would not hold one page, or for a fraction of a device that is not
    CUDA; CapacityError if the device is too small.
    """
    fraction = config.memory_fraction
    if fraction is not None and device.type != "cuda":
        # L2, the page cache and all other programs share host memory.
        raise ConfigError(
            f"device.memory_fraction: {fraction} needs a CUDA device, but the engine runs on {device}; "
            "set device.size or device.tokens"
        )
    if memory is None and device.type == "cuda":
        memory = cuda_memory(device)
    if memory is not None and device.type == "cuda":  # staging needs memory too
        memory = replace(memory, available_bytes=max(0, memory.available_bytes - STAGING_BYTES))
    available = host_memory().available_bytes if memory is None else memory.available_bytes
    if fraction is not None and memory is not None:
        pages = profile_max_num_tokens(memory, fraction, geometry.token_bytes) // geometry.page_size - 1
        if pages < 1:
            raise CapacityError(
                f"device.memory_fraction: {fraction} leaves no room for KV on {device}, which has "
                f"{format_size(available)} free of {format_size(memory.total_bytes)}; raise it, or free memory"
            )
        return pages
    if config.size is not None:
        pages = config.size // geometry.payload_bytes
    elif config.tokens is not None:
        pages = config.tokens // geometry.page_size
    else:
        raise ConfigError("device: L1 has no size; set device.size, device.tokens or device.memory_fraction")
    if pages < 1:
        raise ConfigError(
            f"device: smaller than one page of {geometry.page_size} tokens, {format_size(geometry.payload_bytes)}; "
            "raise device.size or device.tokens"
        )
    needed = (pages + 1) * geometry.payload_bytes
    if needed > available:
        raise CapacityError(
            f"device: {pages} pages need {format_size(needed)} on {device}, but only {format_size(available)} are free"
        )
    return pages


def host_pages(
    config: HostConfig, page: PageShape | KVGeometry, l1_pages: int, *, shared: bool = False
) -> int | Callable[[], int]:
    """Return the pages of L2 for `host.size`, `host.tokens` or `host.ratio` (of `l1_pages`). For a share of memory,
    return a function that counts them when L2 is allocated, with `shared` or `host.shared.name` in /dev/shm.

    Raises ConfigError if that is less than one page; the function does so too.
    """
    size, shape = config.size, page_shape(page)
    if isinstance(size, Share):
        shared = shared or config.shared.name is not None
        return lambda: _at_least_one(resolve(size, "L2", shared=shared) // frame_bytes(shape.payload_bytes))
    if size is not None:
        pages = size // frame_bytes(shape.payload_bytes)
    elif config.tokens is not None:
        pages = config.tokens // shape.tokens
    else:
        pages = int(l1_pages * (config.ratio or 0))
    return _at_least_one(pages)


def _at_least_one(pages: int) -> int:
    if pages < 1:
        raise ConfigError("host: smaller than one page; raise host.size, host.tokens or host.ratio")
    return pages


def host_is_pinned(config: HostConfig, platform: str) -> bool:
    """Return True if L2 of an engine on `platform` (`cuda`, `cpu`, ...) is pinned, which is so on CUDA only. Raises
    ConfigError if the platform does not allow the value of `host.pin`."""
    if config.pin == "on" and platform != "cuda":
        raise ConfigError(f"host.pin: 'on' needs a CUDA device, but the engine runs on {platform}; use auto or off")
    if config.pin == "off" and platform == "cuda":
        raise ConfigError(
            "host.pin: 'off' is for machines without a GPU, but the engine runs on cuda; use auto or on: copies of "
            "memory that is not pinned block their thread and go through a buffer of the driver"
        )
    return platform == "cuda"
