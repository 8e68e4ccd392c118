"""ReplayJob: the trace, the configuration and the number of engine processes of a replay."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hicache.config import HiCacheConfig
from hicache.errors import ConfigError

from ..speeds import Speeds
from ..traces.request import TraceRequest
from ..traces.routing import Routing
from ..traces.synthetic import synthetic_trace
from ..traces.trace import read_trace
from .hints import HintErrors

# A synthetic trace of this many requests fills and spills all three default tiers within a minute.
SYNTHETIC_REQUESTS = 1000
# The devices for which the cache has copy engines.
_DEVICES = re.compile(r"cpu|cuda(:[0-9]{1,3})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJob:
    """The arguments of a replay. `trace` None means a synthetic trace from `seed` of `requests` requests (None: a
    default number).

    Larger `running_max` and `waiting_max` mix more requests of the trace. Pages prefetched for waiting requests take
    room on L2 until the requests run, so with a long queue and a small L2 they are evicted again.
    `speeds.compute` is the simulated speed of the engine: a forward takes as long as a real one, while copies and
    storage work. Without a rate, computing takes no time and storage hardly keeps up. `decode_step_s` is the time of a
    forward of one token for each running request. `speed_up` is the factor by which the trace arrives faster than its
    timestamps; None means as fast as the queue of `waiting_max` requests accepts it. A full queue delays arrivals in
    both cases.

    With `hints`, the sessions of the trace send hints with these errors; this needs the recorded times (`speed_up`).

    A `virtual` replay takes the other `speeds` too, and moves no bytes (see `virtual`).

    This is the job of engine number `process` of `processes`: the requests that `routing` sends to it, or all requests
    with `whole_trace_each`.

    Raises ConfigError for an unknown device, for hints without recorded times, and for a configuration without the
    prefix cache or with bigram keys.
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
    speeds: Speeds = field(default_factory=Speeds)
    decode_step_s: float = 0.0
    virtual: bool = False
    speed_up: float | None = None
    process: int = 0
    processes: int = 1
    routing: Routing = Routing.ROTATE
    whole_trace_each: bool = False
    hints: HintErrors | None = None

    def __post_init__(self) -> None:
        if not _DEVICES.fullmatch(self.device):
            raise ConfigError(f"replay: unknown device {self.device[:40]!r}; known: cpu, cuda, cuda:1, ...")
        if self.hints is not None and self.speed_up is None:
            raise ConfigError("--hints needs the recorded times of the requests; add --speed-up 1")
        if not self.config.prefix_cache:
            raise ConfigError("prefix_cache: a replay needs the prefix cache; remove `prefix_cache: false`")
        if self.config.bigram_keys:
            raise ConfigError("bigram_keys: a replay does not support them; remove the entry")

    @property
    def request_count(self) -> int | None:
        """The largest possible number of requests of the trace, or None if it is unknown before the end."""
        return (self.requests or SYNTHETIC_REQUESTS) if self.trace is None else self.requests

    def requests_of_trace(self) -> Iterator[TraceRequest]:
        """Yield the requests of the trace. Raises InvalidInput as `read_trace` does, while the trace is read."""
        if self.trace is None:
            return synthetic_trace(self.requests or SYNTHETIC_REQUESTS, self.seed)
        return read_trace(self.trace, self.requests)
