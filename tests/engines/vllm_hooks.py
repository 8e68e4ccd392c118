"""Methods by which tests change HiCache inside a worker of vLLM. An engine gets them by `worker_extension_cls=HOOKS`,
and the step `workers` calls them by name."""

from __future__ import annotations

import threading
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from hicache.errors import TransferError
from hicache.integrations.vllm import worker
from hicache.tiers import FailedTransfer


class Hooks:
    """Additional methods of vLLM's worker."""

    def hicache_zero_frames(self, rank: int | None = None) -> int:
        """Zero this worker's part of all frames, on one rank or on all. Return how many bytes were not zero."""
        rows = _side()._copies._host_rows if _is_meant(rank) else []
        found = sum(int(layer.count_nonzero()) for layer in rows)
        for layer in rows:
            layer.zero_()
        return found

    def hicache_fail_loads(self, count: int, rank: int | None = None) -> None:
        """Make the next `count` loads fail, on one rank or on all, as a device fault does."""
        if not _is_meant(rank):
            return
        copies = _side()._copies
        load, left = type(copies).load.__get__(copies), iter(range(count))

        def failing(*positional: Any, **named: Any) -> Any:
            if next(left, None) is None:
                return load(*positional, **named)
            return FailedTransfer(TransferError("injected"))

        copies.load = failing

    def hicache_hold_loads(self) -> None:
        """Hold new loads until `hicache_release_loads`."""
        copies = _side()._copies
        load, released = type(copies).load.__get__(copies), threading.Event()

        class Held:
            query = released.is_set
            synchronize = staticmethod(released.wait)

        copies.released = released
        copies.load = lambda source, target, after=None: load(source, target, after=Held())

    def hicache_wait_for_loads(self, seconds: float) -> float:
        """Set how long an idle step waits for a load. Return the previous value."""
        before, worker._IDLE_WAIT_S = worker._IDLE_WAIT_S, seconds
        return before

    def hicache_release_loads(self) -> None:
        copies = _side()._copies
        copies.released.set()
        del copies.load


def _is_meant(rank: int | None) -> bool:
    return rank is None or rank == get_tensor_model_parallel_rank()


def _side() -> Any:
    return get_kv_transfer_group()._worker
