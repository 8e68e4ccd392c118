"""A worker process of the test engine: one tensor-parallel rank.

It owns its blocks, computes, and copies between its blocks and its window of the shared frames. It takes commands from
a pipe and sends reports back. It has no tree, scheduler or storage. It ends when the pipe is closed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeAlias

import numpy as np
import torch

from hicache.geometry import PageShape, Piece
from hicache.tiers import EngineBlocks, Fence, HostWindow, SharedHostPool, Transfer, create_copy_engine
from tests.steps import StepCounter
from tests.workers.model import ModelShape, RankModel

# How often a worker checks its copies in flight.
_POLL_S = 0.0005
_OPEN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Task:
    """The parameters of one worker: its rank, its model and the shared pool."""

    rank: int
    ranks: int
    shape: ModelShape
    blocks: int
    pool: str
    pool_pages: int
    pool_processes: int | None


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy between blocks and host blocks, pairwise. The worker replies with a `Copied` of the same job."""

    job: int
    load: bool
    blocks: list[int]
    host_blocks: list[int]


@dataclass(frozen=True, slots=True)
class Forward:
    """Compute one batch: for each request its new tokens, their first position and its block table."""

    batch: list[tuple[list[int], int, list[int]]]


@dataclass(frozen=True, slots=True)
class Hold:
    """While `on`, new copies wait, as on a slow worker."""

    on: bool


@dataclass(frozen=True, slots=True)
class BreakNextCopy:
    """Make the next copy fail."""


@dataclass(frozen=True, slots=True)
class DropBlocks:
    """Overwrite all blocks, so that no computed KV is on the device."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker accepts commands. It has mapped the pool `identity` and imported `modules` of hicache."""

    identity: tuple[int, int]
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy has ended; `seconds` is None if it failed."""

    job: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Computed:
    """The parts of the logits of one batch."""

    parts: list[int]


Command: TypeAlias = Copy | Forward | Hold | BreakNextCopy | DropBlocks
Report: TypeAlias = Ready | Copied | Computed


def page_of(shape: ModelShape, ranks: int) -> PageShape:
    """Return the page of all ranks: rank by rank, block by block, layer by layer."""
    pieces = [
        Piece(f"rank{rank}.block{block}.layer{layer}", shape.block_bytes(ranks))
        for rank in range(ranks)
        for block in range(shape.blocks_per_page)
        for layer in range(shape.layers)
    ]
    return PageShape(shape.page_tokens, tuple(pieces))


class _Broken:
    """The fence of a failed device."""

    def query(self) -> bool:
        raise RuntimeError("the device failed (planted by the test)")

    def synchronize(self) -> None:
        self.query()


class Worker:
    """A rank: its model, blocks and copies. Runs on the main thread of its process."""

    def __init__(self, task: Task, pipe: Connection) -> None:
        shape = task.shape
        self._pipe = pipe
        self._model = RankModel(shape, task.rank, task.ranks, task.blocks)
        self._host = SharedHostPool(
            task.pool, page_of(shape, task.ranks), task.pool_pages, processes=task.pool_processes,
            timeout_s=_OPEN_TIMEOUT_S,
        )
        pieces = shape.blocks_per_page * shape.layers
        window = HostWindow(self._host, task.rank * pieces, pieces, shape.blocks_per_page)
        self._copies = create_copy_engine(EngineBlocks([[kv[0], kv[1]] for kv in self._model.kv], first=1), window)
        self._transfers: dict[int, Transfer] = {}
        self._held = StepCounter()  # counts how often `Hold` was switched off
        self._hold = False
        self._break_next = False

    def run(self) -> None:
        """Handle commands until the other end of the pipe is closed."""
        modules = tuple(name for name in sys.modules if name.startswith("hicache."))
        self._pipe.send(Ready(self._host.identity, modules))
        while True:
            if self._pipe.poll(_POLL_S if self._transfers else None):
                self._take(self._pipe.recv())
            for job, transfer in list(self._transfers.items()):
                if transfer.done():
                    del self._transfers[job]
                    self._pipe.send(Copied(job, transfer.seconds))

    def close(self) -> None:
        """End the copies."""
        self._held.advance()
        self._copies.close(_OPEN_TIMEOUT_S)

    def _take(self, command: Command) -> None:
        match command:
            case Copy():
                self._start(command)
            case Forward():
                self._pipe.send(Computed([self._model.forward(*request) for request in command.batch]))
            case Hold(on):
                if self._hold and not on:
                    self._held.advance()
                self._hold = on
            case BreakNextCopy():
                self._break_next = True
            case DropBlocks():
                for kv in self._model.kv:
                    kv.fill_(-1)

    def _start(self, copy: Copy) -> None:
        fence: Fence | None = None  # the forward has returned, so its KV is written
        if self._break_next:
            fence, self._break_next = _Broken(), False
        elif self._hold:
            fence = self._held.fence(self._held.steps + 1)
        blocks, host_blocks = _ids(copy.blocks), _ids(copy.host_blocks)
        if copy.load:
            self._transfers[copy.job] = self._copies.load(host_blocks, blocks, after=fence)
        else:
            self._transfers[copy.job] = self._copies.backup(blocks, host_blocks, after=fence)


def _ids(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def main(task: Task, pipe: Connection) -> None:
    """Run a worker process from start to end."""
    torch.set_num_threads(1)
    worker = Worker(task, pipe)
    try:
        worker.run()
    except (EOFError, OSError):  # the engine has ended, or ends this worker
        worker.close()
