"""The sections `metrics`, `logging`, `tracing` and `events`: exporter, log, spans, and publisher of KV events."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from .addresses import PORT_MAX, HostNames, check_host, check_port, checked, ranked_endpoint, split_endpoint
from .section import FileSystemPath, Section

Port: TypeAlias = Annotated[int, Field(ge=0, le=PORT_MAX), BeforeValidator(lambda port: check_port(port, lowest=0))]
Endpoint: TypeAlias = Annotated[str, Field(max_length=255), checked(split_endpoint, listens=True)]


class MetricsConfig(Section):
    """The Prometheus exporter."""

    port: Port | None = None
    """TCP port of the exporter; 0 is a free port. Not set: no exporter."""
    host: Annotated[str, AfterValidator(check_host)] = "127.0.0.1"
    """Address to listen on. Beyond loopback, everyone who reaches it can read the metrics: the exporter has no
    authentication. They do not contain prompts, keys or tenants, but show the engine's load."""
    hosts: HostNames = Field(default=[])
    """As `daemon.hosts`, for the exporter."""


class LoggingConfig(Section):
    """The log of `hicache serve` and of the other commands. An engine that embeds a cache sets up its own."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is written. `info`: one line at the start and one for each change of state. `-v` and
    `--log-level` override it."""
    format: Literal["text", "json"] = "text"
    """`text`: lines for people. `json`: one object per line, for log collectors."""


class TracingConfig(Section):
    """OpenTelemetry spans of lookups, reads, stores and loads (docs/tracing.md)."""

    enabled: bool = False
    """Make spans, in the whole process. Needs the extra `tracing`. Their sampler and exporter are those of the engine's
    TracerProvider; without one, and in the daemon, the standard `OTEL_` variables set them."""


class EventsConfig(Section):
    """KV events: the pages added to and removed from each tier, published over ZeroMQ for routers and monitors."""

    endpoint: Endpoint | None = None
    """Address of the publisher: `tcp://127.0.0.1:5557`, or `ipc:///run/hicache/kv` in a private directory. An address
    that others can reach needs CURVE keys. Not set: no publisher."""
    replay_endpoint: Endpoint | None = None
    """Address for requests of missed batches. Without it, a subscriber that missed a batch stays wrong."""
    topic: str = Field(default="kv-events", max_length=255)
    """Topic of the published messages, for subscribers that tell engines or models apart by it."""
    token_ids: bool = True
    """Publish the token ids of stored pages, which are the prompts. Off, events have page keys only: routers that index
    tokens, such as NVIDIA Dynamo's, ignore them (docs/routing.md)."""
    tenants: bool = False
    """Publish `cache_salt` and `session_id` in clear text, as vLLM and SGLang do. With a tenant's salt, others can find
    out which prompts the tenant has cached."""
    media: Literal["vllm", "sglang"] = "vllm"
    """Names of host memory and storage in events. `vllm`: `CPU` and `STORAGE`, for NVIDIA Dynamo and llm-d. `sglang`:
    `CPU_PINNED` and `EXTERNAL`, for SGLang's router, which takes an eviction from a medium that it does not know as one
    from all (docs/routing.md)."""
    data_parallel_rank: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Data-parallel rank of this engine, published in events and added to the endpoints' TCP ports, so that all ranks
    can share one configuration. A Unix socket's name gets `_dp` and the rank."""
    curve_secret_key_file: FileSystemPath | None = None
    """File with the publisher's CURVE secret key: 40 characters of Z85, mode 0600. TCP endpoints are then encrypted and
    admit only the keys in `curve_client_keys_file`."""
    curve_client_keys_file: FileSystemPath | None = None
    """File with the CURVE public keys of subscribers, one per line, mode 0600."""

    # Bytes of events that wait for the publisher: many steps of a scheduler. Beyond it the oldest are dropped, and a
    # snapshot of the tree is published.
    buffer: ClassVar[int] = 32 << 20
    # Bytes of published batches for replay: minutes of events. A subscriber that missed more gets a snapshot.
    replay_buffer: ClassVar[int] = 64 << 20
    # Batches queued for a slow subscriber, each of about 256 KiB plus at most one tree node. It misses further ones.
    queued_batches_max: ClassVar[int] = 1000
    # The shortest time between two snapshots: each visits the whole tree on the scheduler's thread.
    snapshot_interval: ClassVar[float] = 10.0

    @model_validator(mode="after")
    def _check(self) -> EventsConfig:
        if self.replay_endpoint is not None and self.endpoint is None:
            raise ValueError("replay_endpoint: needs endpoint; set both")
        if (self.curve_secret_key_file is None) is not (self.curve_client_keys_file is None):
            raise ValueError("curve_secret_key_file and curve_client_keys_file: set both or neither")
        for endpoint in filter(None, (self.endpoint, self.replay_endpoint)):
            ranked_endpoint(endpoint, self.data_parallel_rank)
        return self
