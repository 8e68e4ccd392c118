"""KV events: which pages appeared on and left which medium, for those who cannot look into the tree.

The cache makes events (`hicache.cache.recorder`), `EventStream` carries them, `PrefixIndex` follows them. `publisher`
and `subscriber` take them over a network in the form of docs/formats/kv_events.md; they need the extra `events`.
"""

from .index import IndexStatistics, PrefixIndex
from .stream import EventReader, EventStream, StreamStatistics
from .types import Batch, Cleared, Event, Gap, Medium, Publisher, PublisherStatistics, Removed, Snapshot, Stored

__all__ = [
    "Batch",
    "Cleared",
    "Event",
    "EventReader",
    "EventStream",
    "Gap",
    "IndexStatistics",
    "Medium",
    "PrefixIndex",
    "Publisher",
    "PublisherStatistics",
    "Removed",
    "Snapshot",
    "Stored",
    "StreamStatistics",
]
