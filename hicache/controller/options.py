"""Bounds and sizes of the controller."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerOptions:
    """Defaults suit pages of 1 to 8 MiB on one node.

    `storage_batch_pages` is what one backend call carries: larger batches cost fewer round trips, smaller ones let a
    prefetch stop sooner. `storage_deadline_s` bounds one such call. `store_host_share` is the fraction of L2 that may
    wait to be stored.
    """

    write_pages_max: int = 4096
    load_pages_max: int = 4096
    prefetch_operations_max: int = 64
    store_host_share: float = 1.0
    storage_batch_pages: int = 128
    lookup_workers: int = 1
    io_workers: int = 2
    backup_workers: int = 1
    storage_deadline_s: float = 10.0
