"""The section `storage` with `type: s3`: pages as objects of a bucket."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from ..units import Count, PositiveDuration, TierSize
from .addresses import HTTP_PORTS, PROXY_PORTS, split_url
from .guard import GuardConfig
from .section import VARIABLE_PATTERN, FileSystemPath, Section

# Checked with the whole section, whose errors do not quote it: somebody may have put a secret where a name belongs.
_VARIABLE = re.compile(VARIABLE_PATTERN)
# Characters that need no encoding in an URL, so that names are the same in requests, signatures and listings.
_PREFIX = re.compile(r"(?:[A-Za-z0-9_.-]{1,128}/){0,8}")
# A region is part of a header of every request. This is what botocore takes.
_REGION = re.compile(r"(?![0-9]+$)[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")


def _check_prefix(text: str) -> str:
    """Return `text` with a slash at its end, unless it is empty."""
    prefix = text if not text or text.endswith("/") else f"{text}/"
    if not _PREFIX.fullmatch(prefix) or ".." in prefix:
        raise ValueError("must be up to 8 names of letters, digits, '.', '_' and '-' with '/' between")
    return prefix


def check_region(text: str) -> str:
    """Return `text`, the name of a region. Raises ValueError if it is not valid."""
    if not _REGION.fullmatch(text):
        raise ValueError("the name of the region is not valid; use letters, digits and '-'")
    return text


class S3StorageOptions(Section):
    """Options of the `s3` backend: one object per page in a bucket of AWS or of any store with the same API."""

    bucket: str = Field(
        min_length=3, max_length=255, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*[A-Za-z0-9]$",
        description="Name of the bucket. It must exist; HiCache makes none and changes no setting of it.",
    )
    prefix: Annotated[str, AfterValidator(_check_prefix)] = Field(
        default="hicache/", max_length=1024,
        description="What the names of all objects start with, so that a bucket can hold other things too, and a "
        "lifecycle rule can be made for the pages alone.",
    )
    capacity: TierSize | None = Field(
        default=None,
        description="Bytes that the pages below `prefix` may take; a bucket has no limit of its own. Beyond that the "
        "least recently used ends of chains are removed. Not set: no limit. The store is listed once a minute, at one "
        "request per thousand pages.",
    )
    endpoint_url: str | None = Field(
        default=None,
        description="URL of a store that is not AWS, like `https://s3.example.com:9000`. Plain `http` sends pages that "
        "everyone on the way can read: prompts can be computed from them.",
    )
    region: Annotated[str, AfterValidator(check_region)] | None = Field(
        default=None,
        description="Region of the bucket. Not set: what boto3 is configured for, or `us-east-1`.",
    )
    path_style: bool | None = Field(
        default=None,
        description="Put the bucket into the path of requests instead of the host's name. Not set: for every store but "
        "AWS, which prefers host names, and for buckets with a dot in their name.",
    )
    access_key_env: str | None = Field(
        default=None,
        description="Name of the environment variable that holds the access key, not the key itself. Goes together "
        "with `secret_key_env`. Without these and `credentials_file`, boto3 looks where it always does.",
    )
    secret_key_env: str | None = Field(
        default=None,
        description="Name of the environment variable that holds the secret key. A file is safer: child processes "
        "inherit variables.",
    )
    session_token_env: str | None = Field(
        default=None,
        description="Name of the environment variable that holds the session token of temporary credentials. They are "
        "not renewed; credentials that boto3 finds are.",
    )
    credentials_file: FileSystemPath | None = Field(
        default=None,
        description="File with credentials in the format of AWS (`[default]`, `aws_access_key_id = ...`, "
        "`aws_secret_access_key = ...`), mode 0600.",
    )
    profile: str | None = Field(
        default=None, max_length=128,
        description="Section of `credentials_file`, or without one the profile that boto3 uses.",
    )
    ca_file: FileSystemPath | None = Field(
        default=None,
        description="Certificates (PEM) that are trusted in place of the system's. Certificates are always checked.",
    )
    client: Literal["direct", "boto3"] = Field(
        default="direct",
        description="The client that makes the requests. `boto3` copies each page and takes several times the "
        "processor time: for S3 Express, for a proxy with a password, and for stores that `direct` does not work with.",
    )
    proxy: str | None = Field(
        default=None,
        description="URL of an HTTP proxy, like `http://proxy.example:3128`, through which the store is reached. Not "
        "set: none with `direct`, whatever the environment says; the one of the environment with `boto3`.",
    )
    connections: Count = Field(
        default=8, ge=1, le=256,
        description="Requests in flight, each with a thread and a connection. More hides latency of a remote store; "
        "one core moves 3 to 4 GB/s. When the store asks to slow down, fewer are used for a while.",
    )
    timeout: PositiveDuration = Field(
        default=5.0, ge=0.01, le=3600,
        description="Seconds a request may go on without a byte. Shorter gives up sooner on a store that hangs; too "
        "short turns its slow moments into misses.",
    )
    connect_timeout: PositiveDuration = Field(
        default=2.0, ge=0.01, le=3600,
        description="Seconds that making a connection may take.",
    )

    @model_validator(mode="after")
    def _check(self) -> S3StorageOptions:
        for name, url, ports in (
            ("endpoint_url", self.endpoint_url, HTTP_PORTS), ("proxy", self.proxy, PROXY_PORTS),
        ):  # fmt: skip
            try:
                if url is not None:
                    split_url(url, ports)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        variables = (self.access_key_env, self.secret_key_env, self.session_token_env)
        if not all(_VARIABLE.fullmatch(name) for name in variables if name is not None):
            raise ValueError("access_key_env and the like must be names of environment variables, not what they hold")
        if any(variables) and not all(variables[:2]):
            raise ValueError("access_key_env and secret_key_env go together")
        if self.access_key_env and self.credentials_file:
            raise ValueError("give access_key_env or credentials_file, not both")
        return self


class S3Storage(Section):
    """Storage in a bucket."""

    type: Literal["s3"] = Field(description="As above.")
    options: S3StorageOptions = Field(description="Options of the backend.")
    guard: GuardConfig = GuardConfig()
