"""L2 in memory that several processes share: a `HostPool` whose frames are a `SharedMemory`, opened by name.

Locking design: one process, the scheduler's, uses the allocator; the others get page numbers from it. No lock guards
the bytes of a page: they belong to its holder, as in every host pool.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import time

import torch

from ..arguments import number, whole
from ..geometry import KVGeometry, PageShape
from ..shared_memory import PROCESSES_MAX, Layout, Role, SharedMemory, path_of
from .host import HostPool


class SharedHostPool(HostPool):
    """Frames of host memory that several processes have mapped, each at an address of its own. See `open`.

    `identity` is equal in two processes if, and only if, they share the memory: compare it before the first copy where
    a process may have been restarted, because the name is free again once all `processes` have opened the pool.
    """

    def __init__(  # noqa: PLR0913 - what `open` has checked
        self,
        name: str,
        processes: int,
        deadline: float,
        shape: PageShape | KVGeometry,
        pages: int,
        *,
        pin: torch.device | None,
        node: int | None = None,
        role: Role,
        keep: bool = False,
    ) -> None:
        """Use `open`, which checks the arguments. `deadline` is on the monotonic clock."""
        self.path = path_of(name)
        self._name = name
        self._processes = processes
        self._deadline = deadline
        self._role = role
        self.keep = keep
        super().__init__(shape, pages, pin=pin, node=node)

    @classmethod
    def open(  # noqa: PLR0913 - of the pool, and of its file
        cls,
        name: str,
        shape: PageShape | KVGeometry,
        pages: int,
        *,
        processes: int | None = None,
        pin: torch.device | None = None,
        node: int | None = None,
        timeout_s: float,
        role: Role = Role.OWNER,
        keep: bool = False,
    ) -> SharedHostPool:
        """Open the pool `name`, or create it; blocks until it is ready, at most `timeout_s` seconds (and as long as the
        kernel needs to zero the memory, for the process that creates it).

        `name` is 1 to 128 letters, digits, dashes and dots; use one per engine, so that a restart takes over what a
        crash has left. `processes` is how many open it, this one included; None keeps it until `unlink`. `pin` is the
        CUDA device that copies from and to the pool, in each process that has one. `node` is the NUMA node of the
        memory (by default that of `pin`, else any), if this process creates it. `role` ALONE refuses a pool that
        another process has open; so does GUEST, which opens one that a daemon has created for this process. `keep`
        tells daemons not to remove the memory when its engine has died.

        Raises CapacityError if the memory does not fit (then nothing is left of it), SharedMemoryError if the pool has
        other pages than asked for, is not ready in time, or if the path holds a file that HiCache did not create or
        that others may open; InvalidInput for arguments out of range.
        """
        members = 0 if processes is None else whole("shared host pool: processes", processes, 1, PROCESSES_MAX)
        deadline = time.monotonic() + number("shared host pool: timeout_s", timeout_s)
        pages = whole("shared host pool: pages", pages, 1)
        return cls(name, members, deadline, shape, pages, pin=pin, node=node, role=role, keep=keep)

    @property
    def identity(self) -> tuple[int, int]:
        """Which memory this is: device and inode."""
        return self._shared.identity

    def claim(self) -> None:
        """Be the only process that uses its allocator. Raises SharedMemoryError if another one does."""
        self._shared.claim()

    def unlink(self) -> None:
        """Remove the name, if it still is this pool's. The memory goes when the last process has unmapped it."""
        self._shared.unlink()

    def _map(self, pages: int) -> mmap.mmap:
        layout = Layout(self._processes, pages, self.frame_bytes, shape_digest(self.shape), keep=self.keep)
        self._shared = SharedMemory.open(
            self._name, layout, deadline=self._deadline, role=self._role, node=self.node,
            require_memory=lambda: self._require_available(pages),
        )  # fmt: skip
        return self._shared.mapping


def shape_digest(shape: PageShape) -> bytes:
    """Return SHA-256 of the tokens and pieces of a page, by which processes tell that they mean the same pages."""
    pieces = [[piece.name, piece.bytes] for piece in shape.pieces]
    return hashlib.sha256(json.dumps([shape.tokens, pieces]).encode()).digest()
