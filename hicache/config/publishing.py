"""The sections `metrics` and `events`: what the cache tells others."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..units import MIB, Count, PositiveDuration, PositiveSize
from .addresses import PORT_MAX, check_host, check_port, is_loopback, ranked_endpoint, split_endpoint
from .section import FileSystemPath, Section


def _check_endpoint(endpoint: str) -> str:
    split_endpoint(endpoint, listens=True)
    return endpoint


Port: TypeAlias = Annotated[int, Field(ge=0, le=PORT_MAX), BeforeValidator(lambda port: check_port(port, lowest=0))]
Endpoint: TypeAlias = Annotated[str, Field(max_length=255), AfterValidator(_check_endpoint)]


class MetricsConfig(Section):
    """The Prometheus exporter."""

    port: Port | None = Field(
        default=None,
        description="TCP port to serve metrics on; 0 takes a free one. Without a port there is no exporter.",
    )
    host: Annotated[str, AfterValidator(check_host)] = Field(
        default="127.0.0.1",
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


class EventsConfig(Section):
    """KV events: what appeared on and left which tier, published for routers and monitors over ZeroMQ."""

    endpoint: Endpoint | None = Field(
        default=None,
        description="Where to publish KV events: `tcp://127.0.0.1:5557`, or `ipc:///run/hicache/kv` in a directory "
        "that is yours alone. Without it nothing is published. An address that others can reach needs CURVE keys.",
    )
    replay_endpoint: Endpoint | None = Field(
        default=None,
        description="Where subscribers ask for batches they missed. Without it one that missed something stays wrong.",
    )
    topic: str = Field(
        default="kv-events",
        max_length=255,
        description="Topic of the published messages.",
    )
    token_ids: bool = Field(
        default=True,
        description="Publish the token ids of stored pages. They are the prompts: whoever may subscribe can read them. "
        "Off, consumers can match page keys only.",
    )
    tenants: bool = Field(
        default=False,
        description="Publish `cache_salt` and `session_id` in clear, as vLLM and SGLang do. A salt is a secret of its "
        "tenant: who knows it can ask what the tenant has cached.",
    )
    data_parallel_rank: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        default=None,
        description="Rank of this engine among its data-parallel ones, which events name. As in vLLM and SGLang, it is "
        "added to the TCP ports of the endpoints, so that all ranks can have one configuration; the name of a Unix "
        "socket gets `_dp` and the rank.",
    )
    buffer: PositiveSize = Field(
        default=32 * MIB,
        description="Bytes of events kept in this process for those who follow. More survives longer stalls of the "
        "publisher; beyond it the oldest are dropped and a snapshot of the tree is published instead.",
    )
    replay_buffer: PositiveSize = Field(
        default=64 * MIB,
        description="Bytes of published batches kept for replay. A subscriber that missed more than this waits for a "
        "snapshot.",
    )
    queued_batches_max: Count = Field(
        default=1000,
        ge=1,
        le=65536,
        description="Batches queued for one slow subscriber, each of up to some 256 KiB, and at most a node of the "
        "tree more. Beyond that it misses some, which is counted.",
    )
    snapshot_interval: PositiveDuration = Field(
        default=10.0,
        description="Seconds between two snapshots that subscribers may cause. Each walks over the whole tree on the "
        "scheduler's thread.",
    )
    curve_secret_key_file: FileSystemPath | None = Field(
        default=None,
        description="File with the publisher's CURVE secret key: 40 characters of Z85, mode 0600. With it TCP "
        "endpoints are encrypted, may be on any address, and let in only who is listed in `curve_client_keys_file`.",
    )
    curve_client_keys_file: FileSystemPath | None = Field(
        default=None,
        description="File with the CURVE public keys of those who may subscribe, one a line, mode 0600.",
    )

    @model_validator(mode="after")
    def _check(self) -> EventsConfig:
        if self.replay_endpoint is not None and self.endpoint is None:
            raise ValueError("replay_endpoint without endpoint: there is nothing to replay")
        if (self.curve_secret_key_file is None) is not (self.curve_client_keys_file is None):
            raise ValueError("curve_secret_key_file and curve_client_keys_file need each other")
        for endpoint in filter(None, (self.endpoint, self.replay_endpoint)):
            ranked_endpoint(endpoint, self.data_parallel_rank)
        return self
