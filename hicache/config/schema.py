"""The configuration schema: every entry with its unit, default and trade-off.

All sections are frozen and reject unknown entries. `load_config` or a program builds them; wrong values raise
ConfigError in both cases. docs/configuration.md is generated from the descriptions here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..geometry import PAGE_SIZE_MAX
from ..policies import require_policy
from ..units import Count, Duration, Number, PositiveDuration, Share, TierSize, TierSizeOrShare, refuse_bool
from .daemon import DaemonConfig
from .integrity import IntegrityConfig, StorageFormatConfig
from .publishing import EventsConfig, LoggingConfig, MetricsConfig, TracingConfig
from .remote_storage import RemoteStorageOptions
from .section import VARIABLE_PATTERN, FileSystemPath, Section, Tokens, yaml_switch
from .storage import AnyStorage


class DeviceConfig(Section):
    """L1: KV memory on the device. Without `size`, `tokens` and `memory_fraction` the engine decides."""

    alternatives = (("size", "tokens", "memory_fraction"),)

    size: TierSize | None = None
    """Device memory for KV pages, per rank. More leaves less for weights and activations."""
    tokens: Tokens | None = None
    """`size` in tokens, rounded down to whole pages."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1), BeforeValidator(refuse_bool)] | None = None
    """`size` as a fraction of a CUDA device's memory minus the weights; the rest is for activations of long prompts;
    0.8 to 0.9 is usual."""

    @property
    def is_given(self) -> bool:
        """True if the configuration sets the size of L1."""
        return any(getattr(self, name) is not None for name in self.alternatives[0])


class SharedHostConfig(Section):
    """Named L2 memory, which other processes of this user can map: a storage daemon, workers of the engine."""

    # The rank's number is appended.
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9.-]{1,120}$")
    """Name of the memory, `/dev/shm/hicache.NAME`, one per engine; each rank appends its number. A daemon on this host
    then accesses pages in place. Not set: L2 is private."""
    owner: Literal["engine", "daemon"] = "engine"
    """The process that creates the memory; its cgroup memory limit must cover it. `daemon`: that at
    `storage.options.socket`, which must run when the engine starts."""
    keep: bool = False
    """Keep the memory when the engine ends or dies, for the next engine with this name (docs/operations.md). `rm
    /dev/shm/hicache.NAME` frees it. Not for several ranks, vLLM, `owner: daemon`, compressed or encrypted pages."""


class HostConfig(Section):
    """L2: KV pages in host memory."""

    alternatives = (("size", "tokens", "ratio"),)

    size: TierSizeOrShare | None = None
    """Host memory for KV pages, per rank, allocated at start. It must fit into free memory: pinned memory is not
    swapped. `80%`: a share of the memory that is available at start, within cgroup limits; with `shared` also of the
    free bytes of /dev/shm, and memory that is reused keeps its size. Not for several ranks or engines that start
    together."""
    tokens: Tokens | None = None
    """`size` in tokens, rounded down to whole pages."""
    ratio: Annotated[float, Field(gt=0, le=1024), BeforeValidator(refuse_bool)] | None = 2.0
    """`size` as a multiple of L1, if neither `size` nor `tokens` is set. Below 1, L2 adds few prefixes."""
    pin: Annotated[Literal["auto", "on", "off"], BeforeValidator(yaml_switch)] = "auto"
    """Page-lock the host memory. Pinned copies run at bus speed and overlap with compute; pinning takes seconds per 100
    GiB. `auto` pins if L1 is on a CUDA device; `on` requires one, and there `off` is rejected."""
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
            raise ValueError("set one of size, tokens, ratio")
        if isinstance(self.size, Share) and self.shared.owner == "daemon":
            raise ValueError("size: the daemon creates the memory and takes no share; write a size, such as 64GiB")
        return self


class PrefetchConfig(Section):
    """Reading from storage (L3) into host memory before a request is scheduled."""

    policy: Literal["best_effort", "wait_complete", "timeout"] = "timeout"
    """How long a request waits for its pages from storage, whose arrived part it uses. `best_effort`: not at all.
    `wait_complete`: for all pages, at most a minute. `timeout`: for `timeout_base` plus `timeout_per_1024_tokens`. The
    time counts while the request could run; reads continue until it begins."""
    threshold_tokens: Count = Field(default=256, ge=1, le=1 << 30)
    """The shortest stored prefix that is read. Below a few hundred tokens computing is faster than a lookup; lower
    helps large models over a fast store."""
    timeout_base: PositiveDuration = 1.0
    """Time limit of the wait, and of one call of the store. Longer gains hits on slow stores, but costs time to first
    token."""
    timeout_per_1024_tokens: Duration = 0.25
    """Time added to `timeout_base` for each 1024 tokens. More is for stores with a low bandwidth."""
    host_share: Number = Field(default=0.5, ge=0, le=1)
    """Share of the host pages that prefetches may hold before their requests run; further ones wait. More helps bursts
    of long prompts, but evicts useful pages. 0 disables prefetching."""

    # Prefetches in flight; further ones wait. More do not make a store faster, and `host_share` limits their memory.
    operations_max: ClassVar[int] = 64


class BreakEvenConfig(Section):
    """The decision whether a hit on a slower tier is fetched or computed again."""

    mode: Literal["measure", "always"] = "measure"
    """`measure`: fetch a hit from host or storage if computing it would take longer, by measured speeds. A prefetch may
    take as much longer as its request waits for the device anyway, and as requests behind it would wait for the
    computing. An unknown speed counts as fast. `always`: fetch every hit."""
    writes: Literal["measure", "always"] = "measure"
    """`measure`: do not store a page if reading its prompt back would not pay, with the usual waits and arrivals of the
    last prefetches; one run in sixteen is stored, to detect a faster store. `always`, also implied by `mode: always`:
    store all pages, for engines that share the store and compute more slowly or are nearer to it."""


class TransferConfig(Section):
    """Limits of the queues and workers that copy pages. Work beyond a limit is dropped and counted."""

    store_host_share: Number = Field(default=0.25, gt=0, le=1)
    """Share of the host pages that may wait to be stored; further stores are dropped. A waiting page and the prompt
    before it stay on the host, so a larger share costs hits if the store is slow."""
    path: Literal["auto", "direct", "staged"] = "auto"
    """How pages are copied between host and a CUDA device. `direct`: copy engines copy each page and layer; fast for
    long pieces. `staged`: several layers at once, through a device buffer and a kernel; fast for short pieces. `auto`
    measures both at start; set one if other work on the bus disturbs the measurement."""
    storage_batch_pages: Count = Field(default=128, ge=1, le=65536)
    """Pages per call of a backend. More needs fewer round trips; fewer ends sooner at deadlines and shutdown."""
    lookup_workers: Count = Field(default=1, ge=1, le=64)
    """Threads for lookups in storage. More helps if a lookup takes longer than the time between requests."""
    io_workers: Count = Field(default=2, ge=1, le=64)
    """Threads that read from storage. More helps stores with high latency; each uses a core at full speed."""
    storage_deadline: PositiveDuration = 10.0
    """Deadline of one call of a backend. Shorter frees the worker sooner from a store that hangs; too short turns slow
    hits into misses."""
    shutdown_deadline: PositiveDuration = 5.0
    """Time limit of closing, in which pages that storage lacks and has not evicted are stored, most recently used
    first. The rest is dropped. Longer keeps more for the next engine; what ends the process must wait as long."""

    # Pages being copied from device to host, which cannot be evicted, and the other way. Beyond these, pages are not
    # copied, and requests compute. A quarter of a million tokens are more than a bus moves in a step.
    write_pages_max: ClassVar[int] = 4096
    load_pages_max: ClassVar[int] = 4096
    # A second thread for writes would take bandwidth from reads; a driver divides a batch between its connections.
    backup_workers: ClassVar[int] = 1


class SessionsConfig(Section):
    """Conversations that keep all their KV on L1 between turns, to the last token."""

    enabled: bool = False
    """Use a `SessionCache`; needs `prefix_cache`. A session saves at most a page of compute per turn, and locks its
    pages on L1 until requests need them."""
    ttl: PositiveDuration = 600.0
    """Lifetime of a session after its last turn. Longer suits slower users; shorter frees L1 sooner."""

    # Open sessions. L1 limits their KV, so this only bounds the table of a caller that never ends a session.
    sessions_max: ClassVar[int] = 1024


class HintsConfig(Section):
    """Limits of what agents and routers may ask for by hints."""

    session_share: Number = Field(default=0.25, ge=0, le=1)
    """Share of the host pages that one session may pin or retain; all sessions together have `pin_host_share`. More
    lets long sessions stay whole; less leaves more for others."""
    ttl_max: PositiveDuration = 600.0
    """The longest time for which a hint pins or retains pages; longer ones are shortened to it."""


class ExplainConfig(Section):
    """Why tokens are computed."""

    pages: Count = Field(default=131_072, ge=0, le=1 << 24)
    """Evicted pages that are remembered, at about 80 bytes each, so that a later prompt shows that its pages were here.
    At 0 they count as `new`, which saves the scheduler about 0.5 us per evicted page. More than the host holds is
    useful only with a larger store."""


class RanksConfig(Section):
    """The ranks of one engine, which decide identically."""

    deadline: PositiveDuration = 30.0
    """How long a rank waits for the others in one step before the engine ends with an error on all ranks. Must exceed
    the longest forward and the longest pause of the machine. Dead ranks are detected at once."""


class AdminConfig(Section):
    """The admin surface of a cache inside an engine, for `hicache ctl`. A daemon has its own, see `daemon`."""

    alternatives = (("token_file", "token_env"),)

    socket: FileSystemPath | None = None
    """Unix socket that serves `/v1/admin`, in a private directory, such as `/run/user/1000/hicache/engine.sock`; one
    per engine. Not set: no admin surface."""
    token_file: FileSystemPath | None = None
    """File with a token for the admin surface, mode 0600. Without it, this user and root have access."""
    token_env: Annotated[str, Field(pattern=VARIABLE_PATTERN)] | None = None
    """Name of the variable with that token, instead of a file."""

    @model_validator(mode="after")
    def _check(self) -> AdminConfig:
        if self.socket is None and (self.token_file is not None or self.token_env is not None):
            raise ValueError("a token needs a socket; set admin.socket too")
        return self


class HiCacheConfig(Section):
    """The whole configuration. The defaults run an engine with L1 and L2 and without storage.

        >>> config = HiCacheConfig.model_validate({"page_size": 16, "host": {"size": "2GiB"}})
        >>> config.page_size, config.host.size
        (16, 2147483648)
    """

    # For each block, the shadows of the adaptive eviction take 650 bytes of memory, and the scheduler about 4 us.
    adaptive_block_tokens: ClassVar[int] = 2048
    page_size: Count = Field(default=64, ge=1, le=PAGE_SIZE_MAX)
    """Tokens per page; usually 16 to 256. Larger pages transfer faster; smaller ones lose less at the end of a prefix.
    Engines with different values do not share stored pages."""
    model_label: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._+:@-]{0,63}$")
    """Name of the model for people (docs/operations.md). Not set: the name of the model's folder or hub."""
    prefix_cache: bool = True
    """Reuse KV between requests. Off, for comparisons: every request computes its whole prompt."""
    bigram_keys: bool = False
    """Key pages by pairs of tokens, for EAGLE, whose draft KV also depends on the next token. The engine must do the
    same. The two kinds do not share stored pages."""
    device: DeviceConfig = DeviceConfig()
    host: HostConfig = HostConfig()
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through"
    """When a page is copied to the host and stored. `write_through`: as soon as it is computed (in chunked prompts
    every 32,768 tokens); evicting it from the device is then free. `write_through_selective`: after `selective_hits`
    uses. `write_back`: when the device evicts it, or when the cache is closed; copies least, but freeing device memory
    takes a step longer, and a crash loses more."""
    selective_hits: Count = Field(default=2, ge=1, le=1 << 30)
    """Requests that must use a page before `write_through_selective` copies it. Uses before an eviction count too, for
    about the last million pages. A preempted request counts once."""
    selective_first_share: Annotated[float, Field(ge=0, le=1), BeforeValidator(refuse_bool)] = 0.0
    """Share of the prompts whose new pages `write_through_selective` copies at their first use. At 0 a page is computed
    twice before it is copied, which can lose half of the hits. Engines that share a store choose the same prompts."""
    eviction_policy: Annotated[str, Field(max_length=256), AfterValidator(require_policy)] = "adaptive"
    """The page that a full tier evicts first. `lru`: least recently used. `adaptive`: as `lru`, but not what S3-FIFO or
    ARC would keep, if one of them has more hits at this size. `lfu`: used by the fewest requests. `slru`: as `lru`, but
    pages used by two requests last. `priority`: lowest request priority. `fifo`: oldest. `filo`: newest. `mru`: most
    recently used. `module:Class`: your own."""
    pin_host_share: Number = Field(default=0.5, ge=0, le=1)
    """Share of the host pages for pinned prefixes; further pins are rejected. More leaves less for the prompts that are
    not pinned."""
    load_back_threshold_tokens: Count = Field(default=10, ge=0, le=1 << 30)
    """The shortest prefix that is copied from host to device; shorter ones are computed. Higher avoids copies that save
    little; lower helps models that compute slowly."""
    prefetch: PrefetchConfig = PrefetchConfig()
    break_even: BreakEvenConfig = BreakEvenConfig()
    transfer: TransferConfig = TransferConfig()
    integrity: IntegrityConfig = IntegrityConfig()
    storage_format: StorageFormatConfig = StorageFormatConfig()
    storage: AnyStorage | None = None
    """The storage tier (L3). Not set: no storage."""
    sessions: SessionsConfig = SessionsConfig()
    hints: HintsConfig = HintsConfig()
    explain: ExplainConfig = ExplainConfig()
    ranks: RanksConfig = RanksConfig()
    metrics: MetricsConfig = MetricsConfig()
    logging: LoggingConfig = LoggingConfig()
    tracing: TracingConfig = TracingConfig()
    events: EventsConfig = EventsConfig()
    admin: AdminConfig = AdminConfig()
    daemon: DaemonConfig = DaemonConfig()

    @property
    def write_pages_max(self) -> int:
        """As in `transfer`, for runs of pages of this size: those of one token are four times as long."""
        return self.transfer.write_pages_max * max(1, 4 // self.page_size)

    @property
    def load_pages_max(self) -> int:
        """As `write_pages_max`."""
        return self.transfer.load_pages_max * max(1, 4 // self.page_size)

    @model_validator(mode="after")
    def _check(self) -> HiCacheConfig:
        shared, options = self.host.shared, self.storage and self.storage.options
        if self.integrity.key_source and self.storage_format.key_source:
            raise ValueError(
                "integrity and storage_format: set a MAC key or an encryption key; encryption also authenticates pages"
            )
        if shared.keep:
            self._check_keep()
        if self.integrity.verifies_host:
            if self.storage_format.key_source:
                raise ValueError(
                    "integrity.verify, scrub_rate: frames of an encrypted store have no tag; remove the entries"
                )
            if self.integrity.tag == "none" and not self.integrity.key_source:
                raise ValueError(
                    "integrity.verify, scrub_rate: tag none cannot be verified; use tag xxh3_128, or remove them"
                )
        if self.sessions.enabled and not self.prefix_cache:
            raise ValueError("sessions.enabled: needs prefix_cache: true, which keeps KV between turns")
        has_socket = isinstance(options, RemoteStorageOptions) and options.url is None
        if shared.name is not None and shared.owner == "daemon" and not has_socket:
            raise ValueError("host.shared.owner: daemon needs storage.type: remote with the daemon's socket")
        return self

    def _check_keep(self) -> None:
        shared, form = self.host.shared, self.storage_format
        if shared.name is None:
            raise ValueError("host.shared.keep: needs host.shared.name, so that the next engine finds the memory")
        if shared.owner == "daemon":
            raise ValueError("host.shared.keep: the daemon removes the memory of an engine that dies; use owner engine")
        if form.compression != "none" or form.key_source:
            raise ValueError(
                "host.shared.keep: does not work with compressed or encrypted pages; remove keep or storage_format"
            )
        if self.integrity.tag == "none" and not self.integrity.key_source:
            raise ValueError("host.shared.keep: tag none cannot be verified; use tag xxh3_128, or a MAC key")
