"""L2 in memory that several processes share: a `HostPool` whose frames are a `SharedMemory`, opened by name.

Locking design: only the scheduler's process uses the allocator; the other processes get page numbers from it. No lock
guards the bytes of a page: they belong to its holder, as in every host pool.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import time
from collections.abc import Callable

import torch

from ..arguments import number, whole
from ..geometry import KVGeometry, PageShape
from ..shared_memory import PROCESSES_MAX, Layout, Role, SharedMemory, path_of
from .host import HostPool


class SharedHostPool(HostPool):
    """Frames of host memory that several processes have mapped, each at a different address.

    `identity` is equal in two processes if and only if they share the memory. Compare it before the first copy if a
    process may have been restarted, because the name is free again once all `processes` have opened the pool.
    """

    def __init__(  # noqa: PLR0913 - of the pool, and of its file
        self, name: str, shape: PageShape | KVGeometry, pages: int | Callable[[], int], *, processes: int | None = None,
        pin: torch.device | None = None, node: int | None = None, timeout_s: float, role: Role = Role.OWNER,
        keep: bool = False,
    ) -> None:
        """Open the pool `name`, or create it. Blocks until it is ready, at most `timeout_s` seconds; the process that
        creates the pool also waits while the kernel zeroes the memory.

        If `pages` is a function, an existing pool keeps its number of pages, and a new one has the function's result.
        `name` is 1 to 128 letters, digits, dashes and dots. Use one name per engine, so that a restart takes over the
        memory after a crash. `processes` is the number of processes that open the pool, including this one; with None,
        the name stays until `unlink`, or until all of them have ended and another pool is opened. `pin` is the CUDA
        device that copies from and to the pool, in each process that has one. `node` is the NUMA node of the memory (by
        default that of `pin`, else any), if this process creates it.
        `role` ALONE rejects a pool that another process has open; so does GUEST, which opens a pool that a daemon has
        created for this process. With `keep` the memory also stays after its processes have ended.

        Raises CapacityError if the memory does not fit (it is then removed); SharedMemoryError if the pool has other
        pages than requested, if it is not ready in time, or if the path is a file that HiCache did not create or that
        other users may open; InvalidInput for arguments out of range.
        """
        self._processes = 0 if processes is None else whole("shared host pool: processes", processes, 1, PROCESSES_MAX)
        self._deadline = time.monotonic() + number("shared host pool: timeout_s", timeout_s)
        self.path, self._name = path_of(name), name
        self._role, self.keep = role, keep
        self._count_pages = pages if callable(pages) else None
        super().__init__(
            shape, 1 if callable(pages) else whole("shared host pool: pages", pages, 1), pin=pin, node=node
        )

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode of the memory."""
        return self._shared.identity

    def claim(self) -> None:
        """Make this process the only user of the allocator. Raises SharedMemoryError if another process uses it."""
        self._shared.claim()

    def unlink(self) -> None:
        """Remove the name if it still belongs to this pool. The last process that unmaps the memory frees it."""
        self._shared.unlink()

    def _map(self, pages: int) -> mmap.mmap:
        layout = Layout(self._processes, pages, self.frame_bytes, shape_digest(self.shape), keep=self.keep)
        self._shared = SharedMemory.open(
            self._name, layout, deadline=self._deadline, role=self._role, node=self.node,
            count_pages=self._count_pages, require_memory=self._require_available,
        )
        return self._shared.mapping


def shape_digest(shape: PageShape) -> bytes:
    """Return SHA-256 of the tokens and pieces of a page. Processes compare it to verify that their pages are equal."""
    pieces = [[piece.name, piece.bytes] for piece in shape.pieces]
    return hashlib.sha256(json.dumps([shape.tokens, pieces]).encode()).digest()
