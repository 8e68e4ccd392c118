"""KV events: which pages appeared on and left which medium, for those who cannot look into the tree.

The cache makes events (`hicache.cache.recorder`), `EventStream` carries them, `PrefixIndex` follows them. `publisher`
and `subscriber` take them over a network in the form of docs/formats/kv_events.md; they need the extra `events`.
"""

from .index import PrefixIndex
from .stream import EventReader, EventStream, Snapshot, StreamStatistics
from .types import (
    Cleared,
    Event,
    Medium,
    Origin,
    Publisher,
    PublisherStatistics,
    Recorded,
    Removed,
    RemovedRun,
    Stored,
    StoredRun,
)

__all__ = [
    "Cleared",
    "Event",
    "EventReader",
    "EventStream",
    "Medium",
    "Origin",
    "PrefixIndex",
    "Publisher",
    "PublisherStatistics",
    "Recorded",
    "Removed",
    "RemovedRun",
    "Snapshot",
    "Stored",
    "StoredRun",
    "StreamStatistics",
]
