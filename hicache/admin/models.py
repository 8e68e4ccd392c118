"""The JSON requests and answers of `/v1/admin`. Sizes are bytes, times are seconds."""

from __future__ import annotations

import enum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from ..backends.base import Direction
from ..backends.guard import Override, StoreHealth
from ..ghosts import Reason
from ..units import DURATION_MAX_S, SIZE_MAX_BYTES

KEYS_MAX = 4096
# The most damaged pages that a job lists; its counts include all.
FINDINGS_MAX = 100
TOKENS_MAX = 1 << 20
PROMPTS_MAX = 4096
ACCOUNTS_MAX = 1024
PIN_TTL_S = 3600.0

Hex = Annotated[str, Field(pattern=r"^[0-9a-f]*$", max_length=64)]
PageKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# Empty means all namespaces.
NamespacePrefix = Annotated[Hex, Field(description="First hexadecimal digits of namespaces; empty for all.")]
StoreName = Annotated[str, Field(min_length=1, max_length=256, description="A store's name, as `status` shows it.")]
Last = Annotated[int, Field(ge=0, le=ACCOUNTS_MAX)]
Seconds = Annotated[float, Field(strict=True, gt=0, le=DURATION_MAX_S, allow_inf_nan=False)]


class Model(BaseModel):
    """The base of all models. Rejects unknown fields, so that a typo is an error and does not request everything."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Refusal(Model):
    """Why a request was rejected, and what to do."""

    error: str
    detail: str


# Status


class BreakerStatus(Model):
    """One direction of a store. `reason` is why its breaker opened last; empty if it never opened."""

    state: Literal["closed", "half_open", "open"]
    override: Override
    reason: str
    opens: int


class StoreStatus(Model):
    """One store of one namespace. `pages` and `bytes` are None while unknown, `read` and `write` are None for a store
    without a guard and for storage that is not open. `errors` and `damaged` are totals."""

    name: str
    namespace: Hex
    pages: int | None
    bytes: int | None
    capacity_bytes: int | None
    read: BreakerStatus | None
    write: BreakerStatus | None
    in_flight_calls: int
    errors: int
    damaged: int
    health: StoreHealth


class TierStatus(Model):
    """Memory for pages: `device`, `host`, or the `pool` of a daemon."""

    name: Literal["device", "host", "pool"]
    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    pages: int


class NamespaceStatus(Model):
    """An open namespace. `pool_bytes` are its bytes in the daemon's pool, or on L1 and L2 of an embedded cache.
    `store_hits` include pages that one read of a daemon served to several engines."""

    namespace: Hex
    label: str
    weights_epoch: int
    pool_bytes: int
    quota_bytes: int | None
    pool_hits: int
    store_hits: int
    misses: int


class ClientStatus(Model):
    """An engine whose memory the daemon has mapped."""

    name: str
    bytes: int
    operations: int
    is_alive: bool


class Status(Model):
    """The state of a daemon or engine; `state` is `degraded` if a store has a problem. `attached` False: its storage is
    detached. `overrides` are the forced breakers by `STORE/DIRECTION`."""

    kind: Literal["daemon", "embedded"]
    version: str
    instance: str
    state: str
    uptime_s: float
    attached: bool
    tiers: list[TierStatus]
    namespaces: list[NamespaceStatus]
    stores: list[StoreStatus]
    clients: list[ClientStatus]
    configured_stores: list[str]
    overrides: dict[str, Override]


# Lookup


class LookupRequest(Model):
    """Whole page keys, or the first digits of one; for an embedded cache also token ids."""

    keys: Annotated[list[PageKey], Field(max_length=KEYS_MAX)] = []
    prefix: Annotated[Hex, Field(min_length=4)] | None = None
    tokens: TokenPrefix | None = None
    namespace: NamespacePrefix = ""
    timeout_s: Annotated[Seconds, Field(le=60)] = 5.0


class PagePlace(Model):
    """The locations of one page: names of tiers (`device`, `host`, `pool`) and of stores."""

    key: PageKey
    namespace: Hex
    places: list[str]


class Lookup(Model):
    """The found or requested `pages`. `complete` False: the time was over, or there were more pages than fit into an
    answer. `unknown` are the stores that did not answer."""

    pages: list[PagePlace]
    complete: bool
    unknown: list[str]


class TokenPrefix(Model):
    """A prompt prefix of an embedded cache: token ids, and the seed of its engine's keys. The ids are the prompt: they
    are neither logged nor returned."""

    ids: Annotated[
        list[Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]], Field(min_length=1, max_length=TOKENS_MAX)
    ]
    extra_key: Annotated[str, Field(max_length=1024)] | None = None
    cache_salt: Annotated[SecretStr, Field(max_length=1024)] | None = None


class Cause(Model):
    """Tokens that were computed, or pages that a daemon did not have, for a reason of `hicache.ghosts`."""

    reason: Reason
    detail: str
    tokens: int

    def __str__(self) -> str:
        return f"{self.reason}, {self.detail}" if self.detail else self.reason


class Account(Model):
    """The sources of the tokens of a prompt that began `ago_s` ago; see `hicache.cache.explain.PromptTokens`."""

    rid: str = ""
    ago_s: float
    tokens: int
    device: int = 0
    host: int
    storage: int
    computed: list[Cause]
    diverged_at: int | None = None
    age_s: float | None = None
    written: int = 0


class Explanation(Model):
    """`total` is of all prompts of the last hour at most, or of the pages that a daemon was asked for since its start:
    `host` is its pool. `accounts` are the newest first. The measured speeds are 0 while unknown."""

    unit: Literal["tokens", "pages"]
    total: Account
    accounts: list[Account] = []
    prefill_tokens_per_s: float = 0
    storage_tokens_per_s: float = 0


# Long work


class JobKind(enum.StrEnum):
    """The kind of a job."""

    SCRUB = "scrub"
    CLEAR = "clear"
    WARM = "warm"


class JobState(enum.StrEnum):
    """The life of a job; the last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """True if the job has ended."""
        return self in (JobState.DONE, JobState.CANCELLED, JobState.FAILED)


class DamagedPage(Model):
    """A damaged page: its location and the kind of damage."""

    store: str
    namespace: Hex
    key: Hex
    damage: str


class Progress(Model):
    """The progress of a job. `store` is the current one, for `pages` and `total` (None while unknown). The counts are
    for all stores so far: `damaged` by reason, `removed` pages, `spared` pages that stay although they were to be
    removed, because most pages of a store are damaged; `findings` are the first damaged pages.

    Of a warm-up: `pages` of the `total` wanted pages so far are in memory, and `skipped` has the reasons for the
    others. A dry run has the progress of a warm-up with enough free memory.
    """

    store: str = ""
    pages: int = 0
    total: int | None = None
    bytes: int = 0
    damaged: dict[str, int] = {}
    unsupported: int = 0
    unverifiable: int = 0
    removed: int = 0
    spared: int = 0
    skipped: list[str] = []
    findings: list[DamagedPage] = []


class Job(Model):
    """Work in the background. `what` describes it in words, `error` is the reason of a failure."""

    id: str
    kind: JobKind
    what: str
    state: JobState
    is_cancelling: bool
    elapsed_s: float
    progress: Progress
    error: str


class ScrubRequest(Model):
    """Read and verify every page of `store` (None: of all stores that can be listed). At the end, `remove` removes the
    damaged pages of each store, if they are not most of its pages."""

    store: StoreName | None = None
    rate_bytes_per_s: Annotated[int, Field(strict=True, gt=0, le=SIZE_MAX_BYTES)] | None = None
    remove: Annotated[bool, Field(strict=True)] = False


class ClearRequest(Model):
    """Remove the pages of namespaces from `where`: `all`, the memory (`pool`), or one store (`store`, by its name)."""

    namespace: NamespacePrefix = ""
    where: Literal["all", "pool", "store"]
    store: StoreName | None = None


class WarmRequest(Model):
    """Read chains from storage into free memory: `keys`, one chain, root first; `prompts`, by their tokens; or the
    hottest chains of the stores, of at most `top_bytes` together. `dry_run` reads no pages."""

    namespace: NamespacePrefix = ""
    keys: Annotated[list[PageKey], Field(max_length=KEYS_MAX)] = []
    prompts: Annotated[list[TokenPrefix], Field(max_length=PROMPTS_MAX)] = []
    top_bytes: Annotated[int, Field(strict=True, gt=0, le=SIZE_MAX_BYTES)] | None = None
    rate_bytes_per_s: Annotated[int, Field(strict=True, gt=0, le=SIZE_MAX_BYTES)] | None = None
    dry_run: Annotated[bool, Field(strict=True)] = False


# Changes


class PinRequest(Model):
    """Keep a chain in memory: by its page keys in the order of the chain (daemon, vLLM), or by token ids.

    A pin ends `ttl_s` after its last use; in a daemon, after its creation.
    """

    namespace: Hex = ""
    keys: Annotated[list[PageKey], Field(max_length=KEYS_MAX)] = []
    tokens: TokenPrefix | None = None
    ttl_s: Seconds = PIN_TTL_S


class PinStatus(Model):
    """A pin. It keeps `pages` of the `asked_pages`: those that were in memory and within the limit of pins."""

    id: str
    namespace: Hex
    pages: int
    asked_pages: int
    expires_in_s: float


class StoreRequest(Model):
    """A store by its name; None for the whole storage."""

    store: StoreName | None = None


class BreakerRequest(Model):
    """Force a direction (None: both) of a store (None: of all) on or off, or leave it to its breaker."""

    store: StoreName | None = None
    direction: Direction | None = None
    mode: Override


class QuotaRequest(Model):
    """The limit of a namespace's bytes in the daemon's pool; None removes it."""

    namespace: Annotated[Hex, Field(min_length=1)]
    quota_bytes: Annotated[int, Field(strict=True, gt=0, le=SIZE_MAX_BYTES)] | None


class Quota(Model):
    """A quota, and the namespace's current bytes in the pool."""

    namespace: Hex
    quota_bytes: int
    pool_bytes: int


class LogLevel(Model):
    """The lowest level that is logged."""

    level: Literal["debug", "info", "warning", "error"]
