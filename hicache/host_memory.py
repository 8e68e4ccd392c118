"""The memory of this machine, within the limits of this process's memory cgroup (version 2 or 1)."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .errors import CapacityError
from .units import Share, format_size

logger = logging.getLogger(__name__)

SHM = Path("/dev/shm")
# New pools leave at least this much memory available to other programs.
RESERVE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class HostMemory:
    """`total_bytes` is the machine's memory, `limit_bytes` the smallest limit of the cgroup and of those above it, None
    without a limit. `available_bytes` can be used without swapping, within both."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None

    @property
    def usable_bytes(self) -> int:
        """The most memory that this process could ever use."""
        return self.total_bytes if self.limit_bytes is None else min(self.total_bytes, self.limit_bytes)


def host_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Read the memory of the machine and the limits. Raises CapacityError for a kernel without these figures."""
    lines = re.findall(r"^(MemTotal|MemAvailable): *(\d+)", (proc / "meminfo").read_text(), re.MULTILINE)
    found = {name: int(size_kib) * 1024 for name, size_kib in lines}
    if len(found) < 2:
        raise CapacityError(f"{proc}/meminfo has no MemAvailable; use a Linux kernel of 3.14 or later")
    total = found["MemTotal"]
    limits = [one for one in _limits(proc, cgroups) if one[0] < total]  # version 1 writes a huge number for no limit
    available = min([found["MemAvailable"], *(rest for _, rest in limits)])
    return HostMemory(total, available, min((limit for limit, _ in limits), default=None))


def shortage(needs: Mapping[str, int], available_bytes: int) -> str | None:
    """Return why `available_bytes` do not suffice for `needs` (bytes, by the entry or thing that needs them) and
    `RESERVE_BYTES`; None if they do."""
    if sum(needs.values()) + RESERVE_BYTES <= available_bytes:
        return None
    listed = " and ".join(f"{format_size(size)} for {name}" for name, size in needs.items())
    return (f"{listed} are needed, and {format_size(RESERVE_BYTES)} must stay free, but only "
            f"{format_size(available_bytes)} are available")


def resolve(
    size: int | Share, name: str, *, shared: bool = False,
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup"),
) -> int:
    """Return the bytes of a size. A share is of the memory that is available now; with `shared`, of the free bytes of
    /dev/shm if these are fewer. Logs the result for a share as the size of `name`. Raises as `host_memory`."""
    if isinstance(size, int):
        return size
    base_bytes, where = host_memory(proc, cgroups).available_bytes, "available"
    if shared:
        system = os.statvfs(SHM)
        free_bytes = system.f_bavail * system.f_frsize
        if system.f_blocks and free_bytes < base_bytes:  # no blocks: a tmpfs without a limit
            base_bytes, where = free_bytes, f"free in {SHM}"
    found = int(base_bytes * size.percent / 100)
    logger.info("%s: %s of %s %s = %s", name, size, format_size(base_bytes), where, format_size(found))
    return found


def _limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the free memory of each cgroup of this process, from its own to the root. In a container the
    paths may be those of the host, which do not exist here; the root is then the container's own cgroup."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, used, cached = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, used = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        for below in (own, *own.parents):
            if ".." not in below.parts:
                yield from _limit(root / below, limit, used, cached)


def _limit(folder: Path, limit: str, used: str, cached: str) -> Iterator[tuple[int, int]]:
    try:
        most, current = int((folder / limit).read_text()), int((folder / used).read_text())
        figures = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return  # no such cgroup, or `max`
    # Inactive page cache counts as used, but the kernel frees it on demand.
    yield most, max(0, most - current + int(figures.get(cached, 0)))
