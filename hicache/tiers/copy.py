"""Copies between L1 and L2: the interface, and what a transfer promises.

A transfer borrows both page lists from `submit` until `done()` is true; until then neither list may be freed or
written. Copies of one direction run in the order in which they were submitted. On devices with streams they are
ordered against compute by events: a copy starts after the work the caller has queued so far, so a backup reads what
the last kernel wrote and a load overwrites a page only after its last reader.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from ..errors import InvalidInput, TransferError
from ..types import PageIds
from .device import KVPool
from .host import HostPool

# A copy that takes longer than this is not slow but stuck: 1 TiB at 10 GB/s is 110 s.
LAYER_WAIT_S_MAX = 120.0


class Transfer(ABC):
    """A submitted copy. A handle for the scheduler thread; workers signal it."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the copy has ended, well or not. Never blocks."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Block until the copy has ended; False on timeout."""

    @abstractmethod
    def wait_layer(self, layer: int) -> None:
        """Order the caller's next work after the copy of `layer`.

        On a stream device this queues a wait on the current stream and returns at once; on the CPU it blocks. Raises
        TransferError if the copy failed or is stuck: the pages must then be recomputed.
        """

    @property
    @abstractmethod
    def error(self) -> TransferError | None:
        """Why the copy failed, None while it runs or when it went well."""

    @property
    @abstractmethod
    def seconds(self) -> float | None:
        """How long the copy itself took, without its wait for earlier work; None while it runs or if it failed."""


class FailedTransfer(Transfer):
    """A copy that could not be started."""

    def __init__(self, error: TransferError) -> None:
        self._error = error

    @property
    def error(self) -> TransferError:
        return self._error

    @property
    def seconds(self) -> None:
        return None

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        return True

    def wait_layer(self, layer: int) -> None:
        raise self._error


class CopyEngine(ABC):
    """Moves pages between one device pool and one host pool."""

    def __init__(self, device: KVPool, host: HostPool) -> None:
        if device.geometry.shape != host.shape:
            raise InvalidInput("copy engine: the device pool and the host pool hold pages of different shapes")
        self.device = device
        self.host = host

    @abstractmethod
    def backup(self, device_pages: PageIds, host_pages: PageIds) -> Transfer:
        """Start copying device pages to host pages, pairwise, all layers. Does not block."""

    @abstractmethod
    def load(self, host_pages: PageIds, device_pages: PageIds) -> Transfer:
        """Start copying host pages to device pages, pairwise, layer by layer. Does not block."""

    @abstractmethod
    def close(self, timeout_s: float) -> bool:
        """Wait for what was submitted, then release streams and threads. False if something did not end in time."""

    def _require_pairs(self, device_pages: PageIds, host_pages: PageIds) -> None:
        if len(device_pages) != len(host_pages) or len(device_pages) == 0:
            raise InvalidInput(f"copy: {len(device_pages)} device pages for {len(host_pages)} host pages")
        if int(np.min(device_pages)) < 1:
            raise InvalidInput("copy: device page 0 is padding and holds no KV")
