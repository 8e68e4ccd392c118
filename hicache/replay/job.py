"""ReplayJob: what is replayed, on what, and by how many engine processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..config import HiCacheConfig
from ..errors import ConfigError
from .synthetic import synthetic_trace
from .trace import TraceRequest, read_trace

# A synthetic trace of this many requests fills and spills all three default tiers within a minute.
SYNTHETIC_REQUESTS = 1000
# Those whose copies the cache knows how to make; torch knows more.
_DEVICES = re.compile(r"cpu|cuda(:[0-9]{1,3})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJob:
    """What to replay. `trace` None: a synthetic one from `seed`, of `requests` requests (None: a default number).

    More `running_max` and `waiting_max` mix more of the trace at once; what storage reads for requests that wait takes
    room on L2 until they run, so a long queue before a small L2 loses it again. `prefill_tokens_per_s` is how fast the
    engine pretends to compute: its forward takes as long as a real one, which is when copies and storage do their work;
    None: computing takes no time, so storage hardly keeps up. `speed_up` is how many times faster than its timestamps
    the trace arrives; None: as fast as the queue of `waiting_max` requests takes it. A full queue delays arrivals
    either way.

    This is the job of the process number `process` of `processes`: every `processes`-th request from that number on,
    or all with `whole_trace_each`.

    Raises ConfigError for an unknown device, and for a configuration without the prefix cache or with bigram keys.
    """

    config: HiCacheConfig
    trace: Path | None = None
    seed: int = 0
    requests: int | None = None
    preset: str = "tiny"
    device: str = "cpu"
    running_max: int = 32
    waiting_max: int = 8
    prefill_tokens_max: int = 8192
    prefill_tokens_per_s: float | None = None
    speed_up: float | None = None
    process: int = 0
    processes: int = 1
    whole_trace_each: bool = False

    def __post_init__(self) -> None:
        if not _DEVICES.fullmatch(self.device):
            raise ConfigError(f"replay: unknown device {self.device[:40]!r}; known: cpu, cuda, cuda:1, ...")
        if not self.config.prefix_cache:
            raise ConfigError("prefix_cache: false reuses no page, so a replay would have none to compare; leave it on")
        if self.config.bigram_keys:
            raise ConfigError("bigram_keys: a replay keys pages by single tokens; leave it out")

    @property
    def request_count(self) -> int | None:
        """How many requests the trace has at most, None if that is not known before its end."""
        return (self.requests or SYNTHETIC_REQUESTS) if self.trace is None else self.requests

    def is_mine(self, request: TraceRequest) -> bool:
        """True if this process replays `request`, and does not only take note of it."""
        return self.whole_trace_each or request.index % self.processes == self.process

    def requests_of_trace(self) -> Iterator[TraceRequest]:
        """The trace. Raises InvalidInput as `read_trace` does, while it is read."""
        if self.trace is None:
            return synthetic_trace(self.requests or SYNTHETIC_REQUESTS, self.seed)
        return read_trace(self.trace, self.requests)
