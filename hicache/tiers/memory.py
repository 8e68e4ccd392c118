"""How much memory there is, and how many pages fit into what a configuration asks for."""

from __future__ import annotations

from pathlib import Path

import torch

from ..config import DeviceConfig, HostConfig
from ..errors import CapacityError, ConfigError
from ..frame import frame_bytes
from ..geometry import KVGeometry
from ..units import format_size

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes() -> int:
    """Host memory that can be taken without swapping: the kernel's MemAvailable, or the cgroup's rest if smaller."""
    available = None
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    if available is None:
        raise CapacityError(f"{_MEMINFO} does not name MemAvailable; a Linux kernel of 3.14 or later is needed")
    return min([available, *_cgroup_rest()])


def _cgroup_rest() -> list[int]:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        current = int((_CGROUP / "memory.current").read_text())
        figures = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return []  # no cgroup v2, or no limit of our own
    # Page cache that nobody uses counts as taken but is given back on demand.
    return [] if limit == "max" else [max(0, int(limit) - current + int(figures.get("inactive_file", 0)))]


def device_pages(config: DeviceConfig, geometry: KVGeometry, device: torch.device) -> int:
    """Pages of L1 for `device.size` or `device.tokens`.

    Raises ConfigError if neither is given or the pool would not hold one page, CapacityError if the device is too
    small.
    """
    if config.size is not None:
        pages = config.size // geometry.payload_bytes
    elif config.tokens is not None:
        pages = config.tokens // geometry.page_size
    else:
        raise ConfigError("device: give size or tokens; the engine did not size L1 by itself")
    if pages < 1:
        raise ConfigError(
            f"device: smaller than one page of {geometry.page_size} tokens, {format_size(geometry.payload_bytes)}; "
            "raise device.size or device.tokens"
        )
    needed = (pages + 1) * geometry.payload_bytes
    available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_host_bytes()
    if needed > available:
        raise CapacityError(
            f"device: {pages} pages need {format_size(needed)} on {device}, but only {format_size(available)} are free"
        )
    return pages


def host_pages(config: HostConfig, geometry: KVGeometry, l1_pages: int) -> int:
    """Pages of L2 for `host.size`, `host.tokens` or `host.ratio` (of `l1_pages`). Raises ConfigError for none."""
    if config.size is not None:
        pages = config.size // frame_bytes(geometry.payload_bytes)
    elif config.tokens is not None:
        pages = config.tokens // geometry.page_size
    else:
        pages = int(l1_pages * (config.ratio or 0))
    if pages < 1:
        raise ConfigError("host: smaller than one page; raise host.size, host.tokens or host.ratio")
    return pages
