"""Copies between device blocks and host memory: the interface, and the guarantees of a transfer.

A copy needs no tree, scheduler or storage. A cache copies between its own pools; a worker process copies between the
blocks of its engine and its window of shared frames.

A transfer borrows both lists of blocks until `done()` is true; until then no block may be freed or written. Copies of
one direction run in the order of submission. Only its fence orders a copy against compute: a backup must not read
before the last kernel has written, and a load must not overwrite a block before its last reader is done. A failed copy
does not affect other copies.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from ..errors import InvalidInput, TransferError
from ..types import Indices, PageIds
from .blocks import EngineBlocks
from .host import HostWindow

# A copy that takes longer than this is stuck, not slow: 1 TiB at 10 GB/s takes 110 s.
LAYER_WAIT_S_MAX = 120.0


@runtime_checkable
class Fence(Protocol):
    """A point in the engine's work that a copy waits for. On a CUDA device it is a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return True once the work before the fence is done. Never blocks."""

    def synchronize(self) -> None:
        """Block until the work before the fence is done."""


class Transfer(ABC):
    """A submitted copy. A handle for the scheduler thread; workers signal it."""

    @abstractmethod
    def done(self) -> bool:
        """Return True if the copy has succeeded or failed. Never blocks."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Block until the copy has ended. Return False on timeout."""

    @abstractmethod
    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """Order the caller's next work after the copy of `layer`.

        With a CUDA stream, queues a wait on that stream; blocks at most until the copy of the layer is submitted.
        Without a stream, and always on the CPU, blocks until the layer has been copied. Raises TransferError if the
        copy failed or is stuck: the blocks must then be recomputed. Raises InvalidInput for a `layer` out of range.
        """

    @property
    @abstractmethod
    def error(self) -> TransferError | None:
        """Why the copy failed; None while it runs or if it succeeded."""

    @property
    @abstractmethod
    def seconds(self) -> float | None:
        """Duration of the copy without its wait for earlier work; None while it runs or if it failed."""


class FailedTransfer(Transfer):
    """A copy that could not be started."""

    error: TransferError | None = None
    seconds: float | None = None

    def __init__(self, error: TransferError) -> None:
        self.error = error

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        return True

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        assert self.error is not None
        raise self.error


class JoinedTransfer(Transfer):
    """Several copies as one. It is done when all are done, and succeeds if all succeed."""

    def __init__(self, parts: list[Transfer]) -> None:
        self._parts = parts

    @property
    def error(self) -> TransferError | None:
        return next((part.error for part in self._parts if part.error is not None), None)

    @property
    def seconds(self) -> float | None:
        """Always None, because each part has its own duration."""
        return None

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        return all(part.wait(max(0.0, deadline - time.monotonic())) for part in self._parts)

    def wait_layer(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        for part in self._parts:
            part.wait_layer(layer, stream)


class CopyEngine(ABC):
    """Copies between the blocks of one device and one window of a host pool.

    A host block is `page * blocks_per_page + i` (see `HostWindow`). Raises InvalidInput if the layers of the blocks do
    not match the pieces of the window.
    """

    def __init__(self, blocks: EngineBlocks, window: HostWindow) -> None:
        self.blocks = blocks
        self.window = window
        # uint8 [pages, blocks_per_page, bytes] for each layer.
        self._host_rows = window.layer_rows(blocks.layer_bytes)

    @abstractmethod
    def backup(self, blocks: PageIds, host_blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        """Start copying all layers of device blocks to host blocks, pairwise. Does not block.

        The copy begins when `after` has passed; with None, at once. Raises InvalidInput, before anything is copied,
        for lists that are empty or of different lengths, for ids that are not integers or out of range, and for an
        `after` that is not a fence.
        """

    @abstractmethod
    def load(self, host_blocks: PageIds, blocks: PageIds, *, after: Fence | None = None) -> Transfer:
        """Start copying host blocks to device blocks, pairwise, layer by layer. Otherwise as `backup`."""

    @abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Wait for the submitted copies, then release streams and threads. Return False on timeout."""

    def require_fence(self, fence: Fence) -> None:
        """Raise InvalidInput unless copies of this engine can wait for `fence`."""
        # `isinstance` with a Protocol takes ten times as long, and this runs once per step.
        if not (hasattr(fence, "query") and hasattr(fence, "synchronize")):
            raise InvalidInput(f"fence: a {type(fence).__name__} has no query() and synchronize(); pass a Fence")

    def _require_pairs(self, blocks: PageIds, host_blocks: PageIds, after: Fence | None) -> tuple[Indices, Indices]:
        """Return copies of both lists for indexing, converted once for all layers. Raises as `backup` does."""
        if after is not None:
            self.require_fence(after)
        checked = (
            _indices("block", blocks, self.blocks.first, self.blocks.count),
            _indices("host block", host_blocks, 0, self.window.blocks),
        )
        if len(blocks) != len(host_blocks):
            raise InvalidInput(f"copy: {len(blocks)} blocks for {len(host_blocks)} host blocks; pass them in pairs")
        return checked


def _indices(name: str, ids: object, first: int, end: int) -> Indices:
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        shown = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise InvalidInput(f"copy: {name}s are {shown}; pass a numpy array of integers in one dimension")
    if not len(ids):
        raise InvalidInput(f"copy: got an empty list of {name}s; pass at least one")
    indices = ids.astype(np.intp)
    if indices.min() < first or indices.max() >= end:
        outside = ids[(indices < first) | (indices >= end)]
        raise InvalidInput(f"copy: {name} {outside[0]} is not one of {first} .. {end - 1}")
    return indices
