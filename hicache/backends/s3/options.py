"""The options of an S3 store, checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from os import PathLike

from ...config.addresses import HTTP_PORTS, split_url
from ...errors import InvalidInput

CONNECTIONS_MAX = 256
CLIENTS = ("direct", "boto3")
CHECKSUMS = ("when_required", "when_supported")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
# Characters that need no encoding in an URL, so that names are the same in requests, signatures and listings.
_PREFIX = re.compile(r"(?:[A-Za-z0-9_.-]{1,128}/){0,8}")
# It is part of a header of every request, and what botocore takes.
REGION_NAME = re.compile(r"(?![0-9]+$)[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


@dataclass(frozen=True, slots=True)
class S3Options:
    """Where an S3 store is, who asks, and how.

    Place: `bucket`, which must exist; `prefix` in front of all names, which gets a slash at its end if it has none;
    `endpoint_url` of a store that is not AWS; `region`; `path_style` puts the bucket into the path of requests (None:
    for everything but AWS).

    Identity, the first that is given: the variables `access_key_env`, `secret_key_env` and `session_token_env` of the
    environment; `credentials_file`, private, in the format of AWS, with the section `profile`; else whatever boto3
    finds: `profile`, its own variables and files, the role of the machine. `ca_file` holds the certificates that TLS
    believes instead of the system's.

    Behaviour: `checksum` "when_supported" sends a CRC32 with each page, for buckets that insist; `sign_payload` puts a
    SHA-256 of each page under the signature, at half a second per GiB; `conditional_put` asks the server to refuse what
    is there already, without it each page is asked for before it is sent.

    Performance: `client` is `direct` or `boto3`; `connections` bounds the requests in flight; `timeout_s` is how long a
    request may go on without a byte; `connect_timeout_s`.

    Raises InvalidInput for values that cannot work.
    """

    bucket: str
    prefix: str = "hicache/"
    endpoint_url: str | None = None
    region: str | None = None
    path_style: bool | None = None
    access_key_env: str | None = None
    secret_key_env: str | None = None
    session_token_env: str | None = None
    credentials_file: str | PathLike[str] | None = None
    profile: str | None = None
    ca_file: str | PathLike[str] | None = None
    checksum: str = "when_required"
    sign_payload: bool = False
    conditional_put: bool = True
    client: str = "direct"
    connections: int = 8
    timeout_s: float = 5.0
    connect_timeout_s: float = 2.0

    def __post_init__(self) -> None:
        for name in ("bucket", "prefix", "endpoint_url", "region", "access_key_env", "secret_key_env",
                     "session_token_env", "profile"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name in ("bucket", "prefix")):
                raise InvalidInput(f"s3 store: {name} must be text, got {value!r}")
        if not _BUCKET.fullmatch(self.bucket):
            raise InvalidInput(f"s3 store: bucket must be the name of a bucket, got {self.bucket!r}")
        if self.prefix and not self.prefix.endswith("/"):
            object.__setattr__(self, "prefix", f"{self.prefix}/")
        if not _PREFIX.fullmatch(self.prefix) or ".." in self.prefix:
            raise InvalidInput("s3 store: prefix must be names of letters, digits, '.', '_' and '-' with '/' between")
        self._check_endpoint()
        self._check_identity()
        self._check_numbers()
        for name, choices in (("client", CLIENTS), ("checksum", CHECKSUMS)):
            if getattr(self, name) not in choices:
                raise InvalidInput(f"s3 store: {name} must be {' or '.join(choices)}, got {getattr(self, name)!r}")

    def _check_endpoint(self) -> None:
        if self.endpoint_url is not None:
            try:
                split_url(self.endpoint_url, HTTP_PORTS)
            except ValueError as error:
                raise InvalidInput(f"s3 store: endpoint_url: {error}") from error
        if self.region is not None and not REGION_NAME.fullmatch(self.region):
            raise InvalidInput(f"s3 store: region must be the name of a region, got {self.region!r}")

    def _check_identity(self) -> None:
        variables = (self.access_key_env, self.secret_key_env, self.session_token_env)
        for name in variables:
            if name is not None and not _VARIABLE.fullmatch(name):
                raise InvalidInput("s3 store: access_key_env and the like are names of environment variables, not keys")
        if any(variables) and not (self.access_key_env and self.secret_key_env):
            raise InvalidInput("s3 store: access_key_env and secret_key_env go together")
        if self.access_key_env and self.credentials_file:
            raise InvalidInput("s3 store: give access_key_env or credentials_file, not both")

    def _check_numbers(self) -> None:
        if type(self.connections) is not int or not 1 <= self.connections <= CONNECTIONS_MAX:
            raise InvalidInput(f"s3 store: connections must be 1 .. {CONNECTIONS_MAX}, got {self.connections!r}")
        for name in ("timeout_s", "connect_timeout_s"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0.01 <= value <= 3600:
                raise InvalidInput(f"s3 store: {name} must be 0.01 .. 3600 seconds, got {value!r}")
        for name in ("sign_payload", "conditional_put"):
            if type(getattr(self, name)) is not bool:
                raise InvalidInput(f"s3 store: {name} must be true or false, got {getattr(self, name)!r}")
