"""Entries of earlier versions, for error messages: what HiCache does instead, or which entry replaces them."""

from __future__ import annotations

import re
from collections.abc import Sequence

# By dotted path; the path of a section stands for all entries below it.
REMOVED: dict[str, str] = {
    "break_even.host_bandwidth": "this speed is measured; delete the entry",
    "break_even.margin": "computing counts as much as fetching; for every hit, set break_even.mode: always",
    "break_even.prefill_tokens_per_second": "this speed is measured; delete the entry",
    "break_even.storage_bandwidth": "this speed is measured; delete the entry",
    "daemon.body_timeout": "use daemon.client_timeout",
    "daemon.head_timeout": "use daemon.client_timeout",
    "daemon.idle_timeout": "idle connections end after 60 times daemon.client_timeout; delete the entry",
    "daemon.memories_max": "the daemon maps the memory of 256 engines; delete the entry",
    "daemon.memory_max": "the daemon maps 8 TiB of memory of engines; delete the entry",
    "daemon.namespace_requests_max": "a namespace may have a quarter of daemon.connections_max; delete the entry",
    "daemon.request_timeout": "the longest deadline is 60 s; delete the entry",
    "daemon.requests_max": "daemon.connections_max also limits the requests in progress; delete the entry",
    "device.ascending_pages": "the pages freed last are used first; delete the entry",
    "events.buffer": "32 MiB of events may wait; delete the entry",
    "events.queued_batches_max": "a slow subscriber may be 1000 batches behind; delete the entry",
    "events.replay_buffer": "64 MiB of batches are kept for replay; delete the entry",
    "events.snapshot_interval": "two snapshots are at least 10 s apart; delete the entry",
    "integrity.previous_mac_key_env": "add the previous key to the variable of mac_key_env",
    "integrity.previous_mac_key_file": "write the previous key into the second line of mac_key_file",
    "metrics.allow_remote": "metrics.host may be any address; delete the entry",
    "prefetch.operations_max": "64 prefetches are in flight at most; delete the entry",
    "schedule": "the engine schedules; the reference engine takes a `Schedule` in its options; delete the entry",
    "sessions.sessions_max": "1024 sessions may be open; delete the entry",
    "slru_protected_hits": "`slru` protects pages that two requests used; delete the entry",
    "storage.guard.backoff_max": "a failed store is probed every 5 s at least; delete the entry",
    "storage.guard.backoff_min": "a failed store is probed after half a second at first; delete the entry",
    "storage.guard.damage_backoff": "the first stop after damaged pages lasts 30 s; delete the entry",
    "storage.guard.damage_pages": "16 damaged pages in a row stop the use of a store; delete the entry",
    "storage.guard.failure_share": "failures of half of the last 20 calls open the breaker; delete the entry",
    "storage.guard.failures": "three failed calls in a row open the breaker; delete the entry",
    "storage.guard.grace": "a call may end half a second after its deadline; delete the entry",
    "storage.guard.inject": "put a store of type `faulty`, of hicache-lab, around it (docs/reliability.md)",
    "storage.guard.probe_timeout": "a probe may take 5 s; delete the entry",
    "storage.guard.retry_share": "one call in ten is retried at most; delete the entry",
    "storage.options.connect_timeout": "a connection is made within 2 s or fails; delete the entry",
    "storage.options.open_timeout": "a store is opened within 5 s or fails; delete the entry",
    "storage.options.pipeline": "512 KiB are requested ahead; set `connections` for more, and delete the entry",
    "storage_format.compression_level": "the level is 1; delete the entry",
    "storage_format.previous_encryption_key_env": "add the previous key to the variable of encryption_key_env",
    "storage_format.previous_encryption_key_file":
        "write the previous key into the second line of encryption_key_file",
    "transfer.backup_workers": "one thread writes to storage; delete the entry",
    "transfer.load_pages_max": "4096 pages may be on their way to the device; delete the entry",
    "transfer.multiprocessors": "kernels of the staged path use 8 multiprocessors; delete the entry",
    "transfer.write_pages_max": "4096 pages may be on their way to the host; delete the entry",
}
# The place of a part in a composition. A part has the entries of a section `storage`.
_PART = re.compile(r"(?<=storage\.)options\.(?:levels|parts)\.\d+\.")


def removed(path: Sequence[str], *, whole: bool = True) -> str | None:
    """Return the message for the entry `path` if an earlier version had it; None for other entries. Without `whole`,
    the path begins inside a section."""
    dotted, places = ".".join(path), 1
    while places:
        dotted, places = _PART.subn("", dotted)
    for name, instead in REMOVED.items():
        if f"{dotted}.".startswith(f"{name}.") or (not whole and f".{name}".endswith(f".{dotted}")):
            return f"was removed: {instead}"
    return None
