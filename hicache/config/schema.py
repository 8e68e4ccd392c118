"""The configuration schema: every entry with its unit, default and trade-off.

All sections are frozen, refuse unknown entries, and are built by `load_config` or directly (as an embedding engine
may); built directly, a wrong value raises ConfigError too. docs/configuration.md is generated from the descriptions
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..geometry import PAGE_SIZE_MAX
from ..policies import SLRU_PROTECTED_HITS, require_policy
from ..units import Count, Duration, Number, PositiveDuration, PositiveSize, TierSize, refuse_bool
from .admin import AdminConfig
from .daemon import DaemonConfig
from .integrity import IntegrityConfig, StorageFormatConfig
from .logging import LoggingConfig
from .publishing import EventsConfig, MetricsConfig
from .remote_storage import RemoteStorageOptions
from .section import Section, Tokens, yaml_switch
from .storage import AnyStorage


class DeviceConfig(Section):
    """L1: KV memory on the device. Without `size`, `tokens` and `memory_fraction` the engine decides."""

    alternatives = (("size", "tokens", "memory_fraction"),)

    size: TierSize | None = Field(
        default=None,
        description="Bytes of device memory for KV pages, per rank. More keeps more prefixes at no load time; what is "
        "taken here is missing for weights and activations.",
    )
    tokens: Tokens | None = Field(
        default=None,
        description="The same in tokens, rounded down to whole pages.",
    )
    memory_fraction: Annotated[float, Field(gt=0, lt=1), BeforeValidator(refuse_bool)] | None = Field(
        default=None,
        description="The same as what is left of this part of a CUDA device once the weights are loaded; the other "
        "part stays free for activations. More keeps more prefixes; too much, and a long prompt runs out of memory. "
        "0.8 to 0.9 is usual. On other devices give `size` or `tokens`.",
    )

    ascending_pages: bool = Field(
        default=False,
        description="Hand out free pages in ascending order, so that a request's pages lie close together, which some "
        "attention kernels profit from. Off, the pages freed last go out first.",
    )

    @property
    def is_given(self) -> bool:
        """Whether the configuration sizes L1, so that the engine need not."""
        return any(getattr(self, name) is not None for name in self.alternatives[0])


class SharedHostConfig(Section):
    """L2 under a name, so that other processes of this user can map it: a storage daemon, workers of the engine."""

    # The number of a rank is appended.
    name: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9.-]{1,120}$",
        description="Name of the memory, `/dev/shm/hicache.NAME`, one per engine; each rank appends its number. A "
        "daemon on this host then reads and writes pages in place (`storage.type: remote`). Not set: L2 is private to "
        "the process.",
    )
    owner: Literal["engine", "daemon"] = Field(
        default="engine",
        description="Which process creates the memory: its memory limit (cgroup) has to cover it. `daemon`: the one "
        "of `storage.options.socket`, which must run when the engine starts.",
    )
    keep: bool = Field(
        default=False,
        description="Leave the memory when the engine ends or dies, for the engine that starts next under the same "
        "name, which reads the pages that it can prove as if from a fast store. The memory is taken until then; "
        "`rm /dev/shm/hicache.NAME` frees it. What is found is what was stored, or without `storage` what would have "
        "been: it is sealed then, a hash of each page on a worker. Not for several ranks, vLLM, `owner: daemon`, "
        "compressed or encrypted pages.",
    )


class HostConfig(Section):
    """L2: KV pages in host memory."""

    alternatives = (("size", "tokens", "ratio"),)

    size: TierSize | None = Field(
        default=None,
        description="Bytes of host memory for KV pages, per rank, allocated once at start. More keeps more prefixes "
        "one copy away from the device; it must fit beside all else on the machine: pinned memory does not swap.",
    )
    tokens: Tokens | None = Field(
        default=None,
        description="The same in tokens, rounded down to whole pages.",
    )
    ratio: Annotated[float, Field(gt=0, le=1024), BeforeValidator(refuse_bool)] | None = Field(
        default=2.0,
        description="The same as a multiple of L1. Holds if neither `size` nor `tokens` is given. Below 1 the host "
        "tier is smaller than what it backs up, so little outlives L1.",
    )
    pin: Annotated[Literal["auto", "on", "off"], BeforeValidator(yaml_switch)] = Field(
        default="auto",
        description="Page-lock the host memory. Pinned copies run at bus speed and beside the computation; pinning "
        "takes seconds per 100 GiB at start. `auto` pins if L1 is on a CUDA device, `on` refuses to start if it is "
        "not. `off` is for machines without a GPU and refuses to start with L1 on a CUDA device: copies would block.",
    )
    shared: SharedHostConfig = SharedHostConfig()

    @model_validator(mode="before")
    @classmethod
    def _ratio_is_the_last_resort(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        absolute = any(data.get(name) is not None for name in ("size", "tokens"))
        return {**data, "ratio": None} if absolute and "ratio" not in data else data

    @model_validator(mode="after")
    def _check(self) -> HostConfig:
        if self.size is None and self.tokens is None and self.ratio is None:
            raise ValueError("give one of size, tokens, ratio")
        return self


class PrefetchConfig(Section):
    """Reading from storage (L3) into host memory before a request is scheduled."""

    policy: Literal["best_effort", "wait_complete", "timeout"] = Field(
        default="timeout",
        description="How long a request waits for what storage has. `best_effort`: not at all, it uses what has "
        "arrived when it is scheduled. `wait_complete`: until all is there, at most a minute. `timeout`: for a time "
        "that grows with the length, see below.",
    )
    threshold_tokens: Count = Field(
        default=256, ge=1, le=1 << 30,
        description="Tokens a stored prefix must have to be read at all. Lower finds more hits; below a few hundred "
        "tokens computing is faster than asking the store.",
    )
    timeout_base: PositiveDuration = Field(
        default=1.0,
        description="Seconds a read may take, whatever its length. When the time is over, the request uses what has "
        "arrived. Longer gains hits on slow stores and costs time to first token.",
    )
    timeout_per_1024_tokens: Duration = Field(
        default=0.25,
        description="Seconds a read may take on top of `timeout_base`, for each 1024 tokens of it.",
    )
    operations_max: Count = Field(
        default=64, ge=1, le=65536,
        description="Prefetches in flight at once. Others wait for their turn; one whose request begins before that is "
        "given up, which is counted.",
    )
    host_share: Number = Field(
        default=0.5, ge=0, le=1,
        description="Part of the host pages that prefetches may hold before their requests run. More helps bursts of "
        "long prompts; it takes the place of pages that are known to be useful. A prefetch that does not fit waits "
        "until others have given room back. 0 switches prefetching off.",
    )


class BreakEvenConfig(Section):
    """Whether a hit on a slower tier is fetched or computed again."""

    mode: Literal["measure", "always"] = Field(
        default="measure",
        description="`measure`: a hit on the host or in storage is fetched if that takes less time than computing it, "
        "by the speeds measured since start; a speed not known yet counts as fast. `always`: every hit is fetched.",
    )
    margin: Number = Field(
        default=1.0, gt=0, le=1024,
        description="Time that fetching may take, in multiples of computing. Above 1 frees the device for other "
        "requests at the expense of this one; below 1 asks for a clear gain.",
    )
    writes: Literal["measure", "always"] = Field(
        default="measure",
        description="`measure`: a page is not stored while, by the speeds measured since start, reading it back takes "
        "longer than computing it in a prefix of any length; one in sixteen is, so that a store that has become faster "
        "is noticed. `always`: pages are stored whatever was measured here, for engines that share the store and "
        "compute more slowly or are nearer to it. With `mode: always` they are as well.",
    )
    prefill_tokens_per_second: Tokens | None = Field(
        default=None,
        description="Speed of computing a prompt, instead of the measured one.",
    )
    host_bandwidth: PositiveSize | None = Field(
        default=None,
        description="Bytes per second from host memory to the device, instead of the measured speed.",
    )
    storage_bandwidth: PositiveSize | None = Field(
        default=None,
        description="Bytes per second from storage to host memory, instead of the measured speed. A prefetch also "
        "needs the speed of the host.",
    )


class TransferConfig(Section):
    """Bounds of the queues and workers that move pages. What does not fit into a bound is dropped and counted."""

    write_pages_max: Count = Field(
        default=4096, ge=1, le=1 << 24,
        description="Pages under copy from device to host at once. They cannot be evicted meanwhile; over the bound a "
        "page gets no host copy now.",
    )
    load_pages_max: Count = Field(
        default=4096, ge=1, le=1 << 24,
        description="Pages under copy from host to device at once. Over the bound a request computes instead.",
    )
    store_host_share: Annotated[float, Field(gt=0, le=1), BeforeValidator(refuse_bool)] | None = Field(
        default=None,
        description="Part of the host pages that may wait to be stored. Not set: all of them, or a quarter in an "
        "engine of several ranks. When the host has no other room, waiting stores are dropped, the newest first; "
        "several ranks cannot do that, so there the bound protects what is on the host. Over the bound a new store is "
        "dropped.",
    )
    path: Literal["auto", "direct", "staged"] = Field(
        default="auto",
        description="How copies between host and a CUDA device go. `direct`: one piece for each page and layer, by the "
        "copy engines alone; fast for long pieces. `staged`: several layers of a page at once to a buffer on the "
        "device, and from there by a kernel; fast for short pieces. `auto` measures at start and takes the faster one.",
    )
    multiprocessors: Count = Field(
        default=8, ge=1, le=1024,
        description="Multiprocessors of a CUDA device that a kernel of the `staged` path may use. More ends copies "
        "sooner, fewer leaves more to the computation.",
    )
    storage_batch_pages: Count = Field(
        default=128, ge=1, le=65536,
        description="Pages per call of a storage backend. More means fewer round trips, fewer means that a deadline or "
        "a shutdown takes effect sooner.",
    )
    lookup_workers: Count = Field(
        default=1, ge=1, le=64,
        description="Threads that ask storage which pages of a prompt it has. One suffices for stores that answer "
        "within a millisecond; more helps where a lookup takes longer than requests take to arrive.",
    )
    io_workers: Count = Field(
        default=2, ge=1, le=64,
        description="Threads that read from storage. More helps stores with high latency and costs a core each at full "
        "speed.",
    )
    backup_workers: Count = Field(
        default=1, ge=1, le=64,
        description="Threads that write to storage. Writing is not urgent; more takes bandwidth from reads.",
    )
    storage_deadline: PositiveDuration = Field(
        default=10.0,
        description="Seconds one call of a storage backend may take before it is given up. Shorter frees the worker "
        "sooner from a store that hangs; too short turns slow hits into misses.",
    )
    shutdown_deadline: PositiveDuration = Field(
        default=5.0,
        description="Seconds that closing may take. What is not stored by then is dropped, never left half written.",
    )


class ScheduleConfig(Section):
    """Which waiting request begins first. `longest_prefix_first` and the engine of this package go by it; an engine
    with a scheduler of its own need not."""

    policy: Literal["fcfs", "longest_prefix"] = Field(
        default="fcfs",
        description="`fcfs`: in the order of arrival. `longest_prefix`: the longest cached prefix first, which serves "
        "requests with a common prefix one after the other, before it is evicted, and computes it once.",
    )
    queue_max: Count = Field(
        default=128, ge=0, le=65536,
        description="Requests that one step of `longest_prefix` looks up; a longer queue is served in order of "
        "arrival. More finds more hits in long queues and costs the scheduler a lookup each.",
    )
    age_max: Duration = Field(
        default=5.0,
        description="How long `longest_prefix` may let others overtake a request. Longer gains hits and costs the "
        "worst time to first token.",
    )
    defer_tokens: Count = Field(
        default=64, ge=1, le=1 << 30,
        description="Uncached tokens that two requests must share for one to wait until the other has computed them. "
        "Fewer waits more often for less.",
    )


class SessionsConfig(Section):
    """Conversations that keep all their KV on L1 between turns, to the last token."""

    enabled: bool = Field(
        default=False,
        description="Put a `SessionCache` around the cache. It needs `prefix_cache`. Requests without a session are "
        "served as before; a session saves at most a page of work per turn, and locks its pages on L1 until others "
        "need them.",
    )
    ttl: PositiveDuration = Field(
        default=600.0,
        description="How long a session lives after its last turn. Longer bears with slower readers; shorter frees L1 "
        "sooner.",
    )
    sessions_max: Count = Field(
        default=1024, ge=1, le=1 << 20,
        description="Sessions open at once. It bounds what is remembered of them; L1 bounds the KV they hold.",
    )


class RanksConfig(Section):
    """The ranks of one engine, which decide alike."""

    deadline: PositiveDuration = Field(
        default=30.0,
        description="How long a rank waits for the others in one step. After that the engine ends with an error on all "
        "ranks. Longer than the longest forward and the longest pause of the machine; shorter notices a stuck rank "
        "sooner. A rank that died is noticed at once.",
    )


class HiCacheConfig(Section):
    """Everything that can be configured. The defaults run an engine with L1 and L2 and without storage."""

    page_size: Count = Field(
        default=64, ge=1, le=PAGE_SIZE_MAX,
        description="Tokens per page, the unit of transfer and storage. 16 to 256 is usual: larger moves faster, "
        "smaller loses less of a prefix that ends inside a page. Engines share stored pages only if they agree on it.",
    )
    prefix_cache: bool = Field(
        default=True,
        description="Reuse KV between requests. Off, every request computes its whole prompt, the device holds running "
        "requests alone, and neither the host nor storage is used: for comparing.",
    )
    bigram_keys: bool = Field(
        default=False,
        description="Key pages by pairs of tokens, for speculative decoding with EAGLE, whose draft KV depends on the "
        "next token too. The engine must make its keys so. Stored pages of the two kinds are not shared.",
    )
    device: DeviceConfig = DeviceConfig()
    host: HostConfig = HostConfig()
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = Field(
        default="write_through",
        description="When a page gets its host copy, and with it its place in storage. `write_through`: as soon as it "
        "is computed, and of a prompt that is computed in chunks 32,768 tokens at a time, so that evicting it "
        "from the device costs nothing. `write_through_selective`: once `selective_hits` requests have used "
        "it, which saves copies and storage writes of what nobody asks for again. `write_back`: when the "
        "device evicts it, which copies least, but room on the device then takes a step longer.",
    )
    selective_hits: Count = Field(
        default=2, ge=1, le=1 << 30,
        description="Requests that must have used a page before `write_through_selective` copies it. A use counts "
        "while the page is on a tier and after it has left, for the last million pages or so; a request that is "
        "preempted and runs again is one use.",
    )
    selective_first_share: Annotated[float, Field(ge=0, le=1), BeforeValidator(refuse_bool)] = Field(
        default=0.0,
        description="Part of the prompts whose new pages `write_through_selective` copies at their first use. A page "
        "that waits for its second use is computed twice, and where most of what comes back comes back once, that is "
        "half of the hits: this buys them for writes. Engines that share a store choose the same prompts.",
    )
    eviction_policy: Annotated[str, Field(max_length=256), AfterValidator(require_policy)] = Field(
        default="lru",
        description="Which page leaves a full tier first. `lru`: the one unused for longest. `lfu`: used by the fewest "
        "requests. `slru`: as `lru`, but what `slru_protected_hits` requests have used leaves after all else. "
        "`priority`: of the lowest request priority. `fifo`, `filo`: the oldest, the newest. `mru`: the one used last, "
        "for scans over more than fits. `module:Class` is a policy of your own.",
    )
    slru_protected_hits: Count = Field(
        default=SLRU_PROTECTED_HITS, ge=1, le=1 << 30,
        description="Requests that must have used a page before `slru` protects it.",
    )
    pin_host_share: Number = Field(
        default=0.5, ge=0, le=1,
        description="Part of the host pages that pinned prefixes may take. Pins beyond that are refused, with 0 all.",
    )
    load_back_threshold_tokens: Count = Field(
        default=10, ge=0, le=1 << 30,
        description="Tokens a prefix on the host must have to be copied back to the device. Shorter ones are computed "
        "again, which is faster than waiting for a copy.",
    )
    prefetch: PrefetchConfig = PrefetchConfig()
    break_even: BreakEvenConfig = BreakEvenConfig()
    transfer: TransferConfig = TransferConfig()
    integrity: IntegrityConfig = IntegrityConfig()
    storage_format: StorageFormatConfig = StorageFormatConfig()
    storage: AnyStorage | None = Field(default=None, description="The storage tier (L3). Without it there is none.")
    schedule: ScheduleConfig = ScheduleConfig()
    sessions: SessionsConfig = SessionsConfig()
    ranks: RanksConfig = RanksConfig()
    metrics: MetricsConfig = MetricsConfig()
    logging: LoggingConfig = LoggingConfig()
    events: EventsConfig = EventsConfig()
    admin: AdminConfig = AdminConfig()
    daemon: DaemonConfig = DaemonConfig()

    @model_validator(mode="after")
    def _check(self) -> HiCacheConfig:
        shared, options = self.host.shared, self.storage and self.storage.options
        if [*self.integrity.key_sources()] and [*self.storage_format.key_sources()]:
            raise ValueError(
                "integrity and storage_format: give a MAC key or an encryption key; encryption proves the page too"
            )
        if shared.keep:
            self._check_keep()
        if self.integrity.verifies_host:
            if [*self.storage_format.key_sources()]:
                raise ValueError(
                    "integrity.verify, scrub_rate: frames of an encrypted store have no tag; leave them out"
                )
            if self.integrity.tag == "none" and not [*self.integrity.key_sources()]:
                raise ValueError(
                    "integrity.verify, scrub_rate: tag none proves nothing; use tag xxh3_128, or leave them out"
                )
        if self.sessions.enabled and not self.prefix_cache:
            raise ValueError("sessions.enabled needs prefix_cache: true; without it nothing is kept between turns")
        has_socket = isinstance(options, RemoteStorageOptions) and options.url is None
        if shared.name is not None and shared.owner == "daemon" and not has_socket:
            raise ValueError("host.shared.owner: daemon needs storage.type: remote with the socket of that daemon")
        return self

    def _check_keep(self) -> None:
        shared, form = self.host.shared, self.storage_format
        if shared.name is None:
            raise ValueError("host.shared.keep: needs host.shared.name, by which the next engine finds the memory")
        if shared.owner == "daemon":
            raise ValueError("host.shared.keep: the daemon removes the memory of an engine that dies; use owner engine")
        if form.compression != "none" or [*form.key_sources()]:
            raise ValueError(
                "host.shared.keep: pages that are compressed or encrypted are sealed in other memory; leave keep or "
                "storage_format out"
            )
        if self.integrity.tag == "none" and not [*self.integrity.key_sources()]:
            raise ValueError("host.shared.keep: tag none proves nothing; use tag xxh3_128, or a MAC key")
