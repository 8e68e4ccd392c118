"""KV events: which pages were added to and removed from which medium, for readers outside the scheduler.

The cache creates events (`hicache.cache.recorder`), `EventStream` carries them, `PrefixIndex` applies them. `publisher`
and `subscriber` send them over a network in the format of docs/formats/kv_events.md; they need the extra `events`.
`blocks` translates them into events of an engine's blocks, for routers.
"""

from .index import PrefixIndex
from .stream import EventReader, EventStream, Snapshot, StreamStatistics
from .types import (
    BlockLabels,
    Cleared,
    Event,
    Medium,
    Origin,
    PageBlocks,
    Publisher,
    PublisherStatistics,
    Recorded,
    Removed,
    RemovedRun,
    Stored,
    StoredRun,
)

__all__ = [
    "BlockLabels", "Cleared", "Event", "EventReader", "EventStream", "Medium", "Origin", "PageBlocks", "PrefixIndex",
    "Publisher", "PublisherStatistics", "Recorded", "Removed", "RemovedRun", "Snapshot", "Stored", "StoredRun",
    "StreamStatistics",
]
