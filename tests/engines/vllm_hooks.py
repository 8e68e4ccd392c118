"""What tests do to HiCache inside a worker of vLLM. `HOOKS` is the `worker_extension_cls` of an engine; the methods are
called by name with the step `workers`."""

from __future__ import annotations

import threading
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from hicache.errors import TransferError
from hicache.tiers import FailedTransfer

HOOKS = "tests.engines.vllm_hooks.Hooks"


class Hooks:
    """Methods of vLLM's worker."""

    def hicache_zero_frames(self) -> int:
        """Zero what the frames hold, headers aside, and return how many bytes were not zero."""
        pool = _side().pool
        payloads = pool.buffer[:, pool.frame_bytes - pool.payload_bytes :]
        found = int((payloads != 0).sum())
        payloads[:] = 0
        return found

    def hicache_fail_loads(self, count: int) -> None:
        """Let the next `count` loads fail, as a fault of the device would."""
        copies = _side()._copies
        load, left = type(copies).load.__get__(copies), iter(range(count))

        def failing(*positional: Any, **named: Any) -> Any:
            if next(left, None) is None:
                return load(*positional, **named)
            return FailedTransfer(TransferError("injected"))

        copies.load = failing

    def hicache_hold_loads(self) -> None:
        """Let no load that begins from now on end before `hicache_release_loads`."""
        copies = _side()._copies
        load, released = type(copies).load.__get__(copies), threading.Event()

        class Held:
            query = released.is_set
            synchronize = staticmethod(released.wait)

        copies.released = released
        copies.load = lambda source, target, after=None: load(source, target, after=Held())

    def hicache_release_loads(self) -> None:
        copies = _side()._copies
        copies.released.set()
        del copies.load


def _side() -> Any:
    return get_kv_transfer_group()._worker.side
