"""The configuration schema: every entry with its unit, default and trade-off.

All sections are frozen, refuse unknown entries, and are built by `load_config` or directly (as an embedding engine
may); built directly, a wrong value raises pydantic's ValidationError, which is a ValueError. docs/configuration.md is
generated from the descriptions here.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    model_validator,
)

from ..geometry import PAGE_SIZE_MAX
from ..units import GIB, Count, Duration, Number, PositiveDuration, PositiveSize, Size, refuse_bool
from .secret import mac_key_from_environ, read_mac_key

# As in hicache.radix.policies, which this layer does not see; a test keeps them equal.
EVICTION_POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")

# Entries that say the same thing in different ways: at most one of each group may be given, and one given by a
# stronger source (a flag, say) takes the place of another given by a weaker one (the file).
ALTERNATIVES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("device",): ("size", "tokens"),
    ("host",): ("size", "tokens", "ratio"),
    ("integrity",): ("mac_key_file", "mac_key_env"),
}


def _yaml_switch(value: Any) -> Any:
    """YAML reads `on` and `off` without quotes as booleans."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _possible_path(value: Path) -> Path:
    if "\0" in str(value) or not str(value).strip():
        raise ValueError("no path can look like this")
    return value


Tokens: TypeAlias = Annotated[int, Field(ge=1, le=1 << 40), BeforeValidator(refuse_bool)]
FileSystemPath: TypeAlias = Annotated[Path, AfterValidator(_possible_path)]


def _known_policy(name: str) -> str:
    if name not in EVICTION_POLICIES and ":" not in name:
        near = difflib.get_close_matches(name, EVICTION_POLICIES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(EVICTION_POLICIES)}, or module:Class"
        raise ValueError(f"no eviction policy is called {name!r}; {hint}")
    return name


class Section(BaseModel):
    """A group of entries."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    def _refuse_two_of(self, section: str) -> None:
        names = ALTERNATIVES[(section,)]
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give at most one of {', '.join(names)}; there are {' and '.join(given)}")


class DeviceConfig(Section):
    """L1: KV memory on the device. Without `size` and `tokens` the engine decides."""

    size: PositiveSize | None = Field(
        default=None,
        description="Bytes of device memory for KV pages, per rank. More keeps more prefixes at no load time; what is "
        "taken here is missing for weights and activations.",
    )
    tokens: Tokens | None = Field(
        default=None,
        description="The same in tokens, rounded down to whole pages.",
    )

    @model_validator(mode="after")
    def _check(self) -> DeviceConfig:
        self._refuse_two_of("device")
        return self


class HostConfig(Section):
    """L2: KV pages in host memory."""

    size: PositiveSize | None = Field(
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
    pin: Annotated[Literal["auto", "on", "off"], BeforeValidator(_yaml_switch)] = Field(
        default="auto",
        description="Page-lock the host memory. Pinned copies run at bus speed and beside the computation; pinning "
        "takes seconds per 100 GiB at start. `auto` pins if there is a CUDA device, `on` refuses to start without.",
    )

    @model_validator(mode="before")
    @classmethod
    def _ratio_is_the_last_resort(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        absolute = any(data.get(name) is not None for name in ("size", "tokens"))
        return {**data, "ratio": None} if absolute and "ratio" not in data else data

    @model_validator(mode="after")
    def _check(self) -> HostConfig:
        self._refuse_two_of("host")
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
        description="Prefetches under way at once. Beyond that a request is computed without one, which is counted.",
    )
    host_share: Number = Field(
        default=0.5, ge=0, le=1,
        description="Part of the host pages that prefetches may hold before their requests run. More helps bursts of "
        "long prompts; it takes the place of pages that are known to be useful. 0 switches prefetching off.",
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
    backup_bytes_max: PositiveSize = Field(
        default=GIB,
        description="Bytes of host pages queued for storage. More rides out slow moments of the store; the pages "
        "cannot be evicted while they wait. Full: the newest store is dropped.",
    )
    storage_batch_pages: Count = Field(
        default=128, ge=1, le=65536,
        description="Pages per call of a storage backend. More means fewer round trips, fewer means that a deadline or "
        "a shutdown takes effect sooner.",
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


class IntegrityConfig(Section):
    """How a stored page proves that it is the page asked for."""

    tag: Literal["xxh3_128", "none"] = Field(
        default="xxh3_128",
        description="Checksum of every page. `none` saves the checksum and serves whatever the store returns: only for "
        "measuring. With a MAC key the tag is AES-256-GMAC, whatever stands here.",
    )
    mac_key_file: FileSystemPath | None = Field(
        default=None,
        description="File with the MAC key: 64 hexadecimal digits or 32 raw bytes, mode 0600. With a key, whoever can "
        "write the store cannot make a page that is believed. Every engine that shares the store needs the same key.",
    )
    mac_key_env: str | None = Field(
        default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$",
        description="Name of the environment variable that holds the MAC key as 64 hexadecimal digits. A file is "
        "safer: child processes inherit variables.",
    )

    @model_validator(mode="after")
    def _check(self) -> IntegrityConfig:
        self._refuse_two_of("integrity")
        return self

    def mac_key(self, environ: Mapping[str, str] | None = None) -> bytes | None:
        """The 32 key bytes, or None if no key is configured. Reads the file, or `environ` (default: `os.environ`).

        Raises ConfigError if a key is configured but cannot be had.
        """
        if self.mac_key_file is not None:
            return read_mac_key(self.mac_key_file)
        if self.mac_key_env is not None:
            return mac_key_from_environ(self.mac_key_env, os.environ if environ is None else environ)
        return None


class FileStorageOptions(Section):
    """Options of the `file` backend: one file per page below a directory of its own."""

    path: FileSystemPath = Field(
        description="Directory of the store, on a local disk. It must be this user's and closed to others; HiCache "
        "creates it if it is missing.",
    )
    capacity: PositiveSize = Field(
        default=10 * GIB,
        description="Bytes the store may take on disk. Beyond that the least recently used pages are removed.",
    )
    free_space_floor: Size = Field(
        default=GIB,
        description="Bytes of the file system that stay free for others. Below that nothing is stored, whatever "
        "`capacity` says.",
    )
    io_threads: Count = Field(
        default=4, ge=1, le=256,
        description="Threads that read and write files. More keeps a fast disk busy; one core moves a few GB/s.",
    )
    direct_io: bool = Field(
        default=False,
        description="Bypass the page cache of the system. Off is faster while the store fits into free memory; on "
        "leaves that memory to others and makes speed predictable.",
    )
    sync: bool = Field(
        default=False,
        description="Wait for the disk after each page. Off, a power loss may cost the newest pages (never a wrong "
        "one); on halves the speed of writing.",
    )


class FileStorage(Section):
    """Storage in local files."""

    type: Literal["file"] = Field(
        description="Which backend: `file`, `memory` (this process only, for tests), the name of an installed entry "
        "point of the group `hicache.backends`, or `module:Class`.",
    )
    options: FileStorageOptions = Field(description="Options of the backend; what there is depends on `type`.")

    def backend_options(self) -> dict[str, object]:
        """Keyword options as the `file` backend takes them: plain numbers, unit in the name."""
        chosen = self.options
        return {
            "path": chosen.path,
            "capacity_bytes": chosen.capacity,
            "free_space_floor_bytes": chosen.free_space_floor,
            "io_threads": chosen.io_threads,
            "direct_io": chosen.direct_io,
            "sync": chosen.sync,
        }


class PluginStorage(Section):
    """Storage in any other backend, which checks its options itself when it is opened."""

    type: str = Field(min_length=1, max_length=256, description="As above.")
    options: dict[str, JsonValue] = Field(default={}, description="Passed to the backend as they are.")

    def backend_options(self) -> dict[str, object]:
        """Keyword options for the backend: those of the configuration, unchanged."""
        return dict(self.options)


def _storage_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
    return "file" if kind == "file" else "plugin"


StorageConfig: TypeAlias = FileStorage | PluginStorage
_AnyStorage: TypeAlias = Annotated[
    Annotated[FileStorage, Tag("file")] | Annotated[PluginStorage, Tag("plugin")], Discriminator(_storage_kind)
]


class MetricsConfig(Section):
    """The Prometheus exporter."""

    port: Annotated[int, Field(ge=0, le=65535), BeforeValidator(refuse_bool)] | None = Field(
        default=None,
        description="TCP port to serve metrics on; 0 takes a free one. Without a port there is no exporter.",
    )
    host: str = Field(
        default="127.0.0.1", min_length=1, max_length=255,
        description="Address to listen on. Only a loopback address is taken, unless `allow_remote` is set.",
    )
    allow_remote: bool = Field(
        default=False,
        description="Take any address for `host`. Metrics carry no prompts, keys or tenants, but whoever reaches the "
        "port sees the load of the engine: there is no authentication.",
    )

    @model_validator(mode="after")
    def _check(self) -> MetricsConfig:
        if not self.allow_remote and not is_loopback(self.host):
            raise ValueError(f"host {self.host[:60]!r} is no loopback address; use 127.0.0.1, or allow_remote: true")
        return self


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine alone. Resolves no name: any name but `localhost` counts as remote."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class HiCacheConfig(Section):
    """Everything that can be configured. The defaults run an engine with L1 and L2 and without storage."""

    page_size: Count = Field(
        default=64, ge=1, le=PAGE_SIZE_MAX,
        description="Tokens per page, the unit of transfer and storage. 16 to 256 is usual: larger moves faster, "
        "smaller loses less of a prefix that ends inside a page. Engines share stored pages only if they agree on it.",
    )
    device: DeviceConfig = DeviceConfig()
    host: HostConfig = HostConfig()
    write_policy: Literal["write_through", "write_through_selective", "write_back"] = Field(
        default="write_through",
        description="When a page gets its host copy, and with it its place in storage. `write_through`: as soon as it "
        "is computed, so that evicting it from the device costs nothing. `write_through_selective`: once "
        "`selective_hits` requests have used it, which saves copies and storage writes of what nobody asks for again. "
        "`write_back`: when the device evicts it, which copies least, but room on the device then takes a step longer.",
    )
    selective_hits: Count = Field(
        default=2, ge=1, le=1 << 30,
        description="Requests that must have used a page before `write_through_selective` copies it.",
    )
    eviction_policy: Annotated[str, Field(max_length=256), AfterValidator(_known_policy)] = Field(
        default="lru",
        description="Which page leaves a full tier first. `lru`: the one unused for longest. `lfu`: used by the fewest "
        "requests. `slru`: as `lru`, but what `slru_protected_hits` requests have used leaves after all else. "
        "`priority`: of the lowest request priority. `fifo`, `filo`: the oldest, the newest. `mru`: the one used last, "
        "for scans over more than fits. `module:Class` is a policy of your own.",
    )
    slru_protected_hits: Count = Field(
        default=2, ge=1, le=1 << 30,
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
    transfer: TransferConfig = TransferConfig()
    integrity: IntegrityConfig = IntegrityConfig()
    storage: _AnyStorage | None = Field(default=None, description="The storage tier (L3). Without it there is none.")
    metrics: MetricsConfig = MetricsConfig()
