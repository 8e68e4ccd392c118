"""What goes over `/v1/admin`: requests and answers, as JSON. Sizes are bytes, times seconds."""

from __future__ import annotations

import enum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from ..backends.guard import Direction, Override
from ..backends.guard.breaker import BreakerState
from ..units import DURATION_MAX_S, SIZE_MAX_BYTES

KEYS_MAX = 4096
# Damaged pages that a job names; its counts are of all.
FINDINGS_MAX = 100
TOKENS_MAX = 1 << 20
PIN_TTL_S = 3600.0

Hex = Annotated[str, Field(pattern=r"^[0-9a-f]*$", max_length=64)]
PageKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
# An empty one stands for all namespaces.
NamespacePrefix = Annotated[Hex, Field(description="First hexadecimal digits of namespaces; empty for all.")]
StoreName = Annotated[str, Field(min_length=1, max_length=256, description="A store's name, as `status` shows it.")]
Seconds = Annotated[float, Field(strict=True, gt=0, le=DURATION_MAX_S, allow_inf_nan=False)]


class Model(BaseModel):
    """Base of all. Refuses what it does not know, so that a typo is an error and not a request for everything."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Refusal(Model):
    """Why a request was not done, and what to do about it."""

    error: str
    detail: str


# Status


class BreakerStatus(Model):
    """One direction of a store. `reason` is why its breaker opened last, empty if it never did."""

    state: Literal["closed", "half_open", "open"]
    override: Override
    reason: str
    opens: int

    @classmethod
    def of(cls, state: BreakerState, override: Override, reason: str, opens: int) -> BreakerStatus:
        """Return the status of a breaker."""
        names: tuple[Literal["closed", "half_open", "open"], ...] = ("closed", "half_open", "open")
        return cls(state=names[state], override=override, reason=reason, opens=opens)


class StoreStatus(Model):
    """One store of one namespace. `pages` and `bytes` are None until they are known, `read` and `write` None for a
    store without a guard. `errors` and `damaged` are totals."""

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


class TierStatus(Model):
    """Memory for pages: `device`, `host`, or the `pool` of a daemon."""

    name: Literal["device", "host", "pool"]
    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    pages: int


class NamespaceStatus(Model):
    """A namespace that is open. `pool_bytes` of it are in the daemon's pool, or in L1 and L2 of an embedded cache."""

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
    """What runs there. `attached` False: its storage is detached. `overrides` are the forced breakers by
    `STORE/DIRECTION`."""

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
    """Where one page is: names of tiers (`device`, `host`, `pool`) and of stores."""

    key: PageKey
    namespace: Hex
    places: list[str]


class Lookup(Model):
    """`pages` that were found or asked for. `complete` False: the time was over, or there were more pages than fit into
    an answer. `unknown` are the stores that did not answer."""

    pages: list[PagePlace]
    complete: bool
    unknown: list[str]


class TokenPrefix(Model):
    """A prompt prefix of an embedded cache: token ids, and what its engine seeds its keys with. The ids are the
    prompt: they are neither logged nor returned."""

    ids: Annotated[
        list[Annotated[int, Field(strict=True, ge=0, lt=1 << 31)]], Field(min_length=1, max_length=TOKENS_MAX)
    ]
    extra_key: Annotated[str, Field(max_length=1024)] | None = None
    cache_salt: Annotated[SecretStr, Field(max_length=1024)] | None = None


# Work that takes long


class JobKind(enum.StrEnum):
    """What a job does."""

    SCRUB = "scrub"
    CLEAR = "clear"


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
    """A page that is not sound: where it is, and what is wrong with it."""

    store: str
    namespace: Hex
    key: Hex
    damage: str


class Progress(Model):
    """How far a job is. `store` is the one it works on, of which `pages` and `total` are; None while it is not known.
    The counts are of all stores so far: `damaged` by reason, `removed` pages; `findings` are the first damaged pages.
    """

    store: str = ""
    pages: int = 0
    total: int | None = None
    bytes: int = 0
    damaged: dict[str, int] = {}
    unsupported: int = 0
    unverifiable: int = 0
    removed: int = 0
    skipped: list[str] = []
    findings: list[DamagedPage] = []


class Job(Model):
    """Work in the background. `what` says in words what it does, `error` why it failed."""

    id: str
    kind: JobKind
    what: str
    state: JobState
    is_cancelling: bool
    elapsed_s: float
    progress: Progress
    error: str


class ScrubRequest(Model):
    """Read every page of `store` (None: of all that can be listed) and prove it. Removes damaged pages with `remove`.
    """

    store: StoreName | None = None
    rate_bytes_per_s: Annotated[int, Field(strict=True, gt=0, le=SIZE_MAX_BYTES)] | None = None
    remove: Annotated[bool, Field(strict=True)] = False


class ClearRequest(Model):
    """Remove the pages of namespaces from `where`: `all`, the memory (`pool`), or one store (`store`, by its name)."""

    namespace: NamespacePrefix = ""
    where: Literal["all", "pool", "store"]
    store: StoreName | None = None


# Changes


class PinRequest(Model):
    """Keep a chain in memory: by its page keys in the order of the chain (daemon), or by token ids (embedded cache).

    A pin ends `ttl_s` after its last use; in a daemon after it was made.
    """

    namespace: Hex = ""
    keys: Annotated[list[PageKey], Field(max_length=KEYS_MAX)] = []
    tokens: TokenPrefix | None = None
    ttl_s: Seconds = PIN_TTL_S


class PinStatus(Model):
    """A pin, and the pages that it keeps; `asked_pages` were asked for, of which the others were not in memory."""

    id: str
    namespace: Hex
    pages: int
    asked_pages: int
    expires_in_s: float


class StoreRequest(Model):
    """A store by its name; None for the storage as a whole."""

    store: StoreName | None = None


class BreakerRequest(Model):
    """Force a direction (None: both) of a store (None: of all) on or off, or leave it to its breaker."""

    store: StoreName | None = None
    direction: Direction | None = None
    mode: Override


class QuotaRequest(Model):
    """Bytes of the daemon's pool that a namespace may take; None removes its quota."""

    namespace: Annotated[Hex, Field(min_length=1)]
    quota_bytes: Annotated[int, Field(strict=True, gt=0, le=SIZE_MAX_BYTES)] | None


class Quota(Model):
    """A quota that is set, and what the namespace takes of the pool now."""

    namespace: Hex
    quota_bytes: int
    pool_bytes: int


class LogLevel(Model):
    """The lowest level that is logged."""

    level: Literal["debug", "info", "warning", "error"]
