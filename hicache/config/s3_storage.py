"""The section `storage` with `type: s3`: pages as objects of a bucket."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from ..units import Count, PositiveDuration, TierSize
from .addresses import HTTP_PORTS, PROXY_PORTS, split_url
from .guard import GuardConfig
from .section import VARIABLE_PATTERN, FileSystemPath, Section, ServerOptions

# Checked with the whole section, whose errors do not quote values: a user may have set a secret instead of a name.
_VARIABLE = re.compile(VARIABLE_PATTERN)
# Characters that are not encoded in a URL, so that names are the same in requests, signatures and listings.
_PREFIX = re.compile(r"(?:[A-Za-z0-9_.-]{1,128}/){0,8}")
# A region is part of a header of every request. This is botocore's pattern.
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


class S3StorageOptions(ServerOptions):
    """Options of the `s3` backend: one object per page in a bucket of AWS or of any store with the same API."""

    bucket: str = Field(min_length=3, max_length=255, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*[A-Za-z0-9]$")
    """Name of the bucket, which must exist."""
    prefix: Annotated[str, AfterValidator(_check_prefix)] = Field(default="hicache/", max_length=1024)
    """Prefix of all object names, which separates pages from other objects, also for lifecycle rules."""
    capacity: TierSize | None = None
    """Limit of the bytes of pages below `prefix` (docs/storage.md). Not set: no limit."""
    max_age: PositiveDuration | None = Field(default=None, ge=60)
    """Pages are removed this long after they were stored, also if they are used (docs/storage.md). Not set: age does
    not matter."""
    endpoint_url: str | None = None
    """URL of a store that is not AWS, like `https://s3.example.com:9000`. With plain `http`, others on the network can
    read the pages."""
    region: Annotated[str, AfterValidator(check_region)] | None = None
    """Region of the bucket. Not set: that of boto3's configuration, or `us-east-1`."""
    path_style: bool | None = None
    """Put the bucket into the path of requests instead of the host name. Not set: for stores that are not AWS, and for
    buckets with a dot in their name."""
    access_key_env: str | None = None
    """Name of the variable with the access key. Needs `secret_key_env`. Without these and `credentials_file`, boto3's
    usual credentials are used."""
    secret_key_env: str | None = None
    """Name of the variable with the secret key."""
    session_token_env: str | None = None
    """Name of the variable with the session token of temporary credentials. Unlike boto3's, these are not renewed."""
    credentials_file: FileSystemPath | None = None
    """File with credentials in the format of AWS, mode 0600."""
    profile: str | None = Field(default=None, max_length=128)
    """Section of `credentials_file`; without that file, boto3's profile."""
    ca_file: FileSystemPath | None = None
    """Certificates (PEM) that replace the system's. Certificates are always checked."""
    proxy: str | None = None
    """URL of an HTTP proxy without a password, like `http://proxy.example:3128`. Not set: none; variables such as
    HTTPS_PROXY have no effect by themselves."""
    proxy_env: str | None = None
    """Name of the variable with the URL of an HTTP proxy, which may have a user and a password
    (`http://user:password@proxy.example:3128`), such as `HTTPS_PROXY`."""
    connections: Count = Field(default=8, ge=1, le=256)
    """Requests in flight, each with a thread and a connection; fewer while the store throttles. More hides latency; one
    core transfers 3 to 4 GB/s."""
    timeout: PositiveDuration = Field(default=5.0, ge=0.01, le=3600)
    """Time without a byte after which a request fails. Too short turns slow moments into misses."""

    @model_validator(mode="after")
    def _check(self) -> S3StorageOptions:
        for name, url, ports in (("endpoint_url", self.endpoint_url, HTTP_PORTS), ("proxy", self.proxy, PROXY_PORTS)):
            try:
                if url is not None:
                    split_url(url, ports)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
        variables = (self.access_key_env, self.secret_key_env, self.session_token_env)
        if not all(_VARIABLE.fullmatch(name) for name in (*variables, self.proxy_env) if name is not None):
            names = "access_key_env, secret_key_env, session_token_env, proxy_env"
            raise ValueError(f"{names}: set names of variables, not values")
        if any(variables) and not all(variables[:2]):
            raise ValueError("access_key_env and secret_key_env: set both or neither")
        if self.access_key_env and self.credentials_file:
            raise ValueError("set access_key_env or credentials_file, not both")
        if self.proxy and self.proxy_env:
            raise ValueError("set proxy or proxy_env, not both")
        return self


class S3Storage(Section):
    """Storage in a bucket."""

    type: Literal["s3"]
    """As above."""
    options: S3StorageOptions
    """Options of the backend."""
    guard: GuardConfig = GuardConfig()
