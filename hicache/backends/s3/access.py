"""Endpoint and credentials of an S3 store, from the options or from boto3's configuration on this machine."""

from __future__ import annotations

import configparser
import contextlib
import os
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ...config.addresses import HTTP_PORTS, PROXY_PORTS, Address, split_url
from ...config.files import require_readable
from ...config.s3_storage import S3StorageOptions, check_region
from ...config.secret import read_private_file
from ...errors import ConfigError, MissingPackage, install_hint
from ..errors import ErrorKind, StoreError
from ..http import Server
from ..refreshed import Refreshed
from .signing import Credentials

# boto3 starts to renew credentials 15 minutes before they expire, so checking once per minute is enough.
_CREDENTIALS_AGE_MAX_S = 60.0
_CREDENTIALS_FILE_BYTES_MAX = 64 << 10
_REGION = "us-east-1"  # the region that stores without regions expect in signatures

# Returns credentials by a deadline, or raises StoreError.
CredentialsSource: TypeAlias = Callable[[float], Credentials]


@dataclass(frozen=True, slots=True)
class Access:
    """Endpoint and credentials of the store. Requests send `host` in their Host header; their path begins with `path`.
    For a proxy, `origin` precedes the path. `session` is botocore's, with the same credentials.
    """

    options: S3StorageOptions
    server: Server
    host: str
    path: str
    origin: str
    region: str
    credentials: CredentialsSource
    is_path_style: bool
    session: Any


def open_access(options: S3StorageOptions) -> Access:
    """Find credentials, endpoint and region. May block while boto3 looks for credentials.

    Raises ConfigError if boto3 or the credentials are missing, or a file or variable that the options name is missing.
    """
    if options.ca_file is not None:
        require_readable(options.ca_file, "s3 store: ca_file")
    session = _session(options)
    region = options.region or session.get_config_variable("region") or _REGION
    try:
        check_region(str(region))
    except ValueError as error:
        raise ConfigError(f"s3 store: region {str(region)[:70]!r}: {error}") from None
    endpoint = options.endpoint_url or _usual_endpoint(session, region)
    try:
        url = split_url(endpoint, HTTP_PORTS)
    except ValueError as error:
        raise ConfigError(f"s3 store: the endpoint in boto3's configuration is not valid: {error}") from None
    tls = None
    if url.scheme == "https":
        tls = _tls_context(options.ca_file or session.get_config_variable("ca_bundle"))
    name, host, path = url.host, endpoint.split("/")[2], url.path.rstrip("/")
    path_style = options.path_style
    if path_style is None:
        # TLS certificates of AWS cover one label before the endpoint; the name of a bucket with a dot has two.
        path_style = ".amazonaws." not in endpoint or "." in options.bucket
    if path_style:
        path = f"{path}/{options.bucket}"
    else:
        name, host = f"{options.bucket}.{name}", f"{options.bucket}.{host}"
    origin = tunnel = ""
    reached = Address(name, url.port)
    if options.proxy is not None:
        proxy = split_url(options.proxy, PROXY_PORTS)
        reached = Address(proxy.host, proxy.port)
        if tls is None:
            origin = f"http://{host}"
        else:
            tunnel = host if host.endswith(f":{url.port}") else f"{host}:{url.port}"
    server = Server(*reached, tls, name, tunnel, options.connect_timeout, options.timeout)
    fixed = _fixed_credentials(options)
    if fixed is not None:
        session.set_credentials(fixed.access_key, fixed.secret_key, fixed.session_token)
    source = _from_boto(session) if fixed is None else lambda deadline: fixed
    return Access(options, server, host, path, origin, region, source, path_style, session)


def _tls_context(ca_file: str | os.PathLike[str] | None) -> ssl.SSLContext:
    """Return a context that checks certificates, against `ca_file` or the system's authorities. Raises ConfigError."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"s3 store: ca_file {os.fspath(ca_file or '')!r} has no readable certificates") from error


def _session(options: S3StorageOptions) -> Any:
    try:
        import botocore.exceptions  # noqa: PLC0415 - an optional dependency
        import botocore.session  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackage(f"s3 store: boto3 is not installed; {install_hint('s3')}") from error
    # With `credentials_file`, the profile is a section of that file instead.
    profile = None if options.credentials_file else options.profile
    try:
        session = botocore.session.Session(profile=profile)
        session.get_scoped_config()
        return session
    except botocore.exceptions.BotoCoreError as error:
        raise ConfigError(f"s3 store: {error}") from error


def _usual_endpoint(session: Any, region: str) -> str:
    """Return the endpoint in boto3's configuration, else AWS's endpoint for the region."""
    with config_errors("boto3 has no endpoint for the region"):
        client = session.create_client("s3", region_name=region, aws_access_key_id="-", aws_secret_access_key="-")
    return str(client.meta.endpoint_url)


@contextlib.contextmanager
def config_errors(what: str) -> Iterator[None]:
    """Turn botocore's errors about configuration and credentials into ConfigError. Omit their text: it may quote the
    reply of a credential source."""
    import botocore.exceptions  # noqa: PLC0415

    try:
        yield
    except (botocore.exceptions.BotoCoreError, LookupError, TypeError, ValueError, StoreError) as error:
        reason = str(error) if isinstance(error, StoreError) else type(error).__name__
        raise ConfigError(f"s3 store: {what} ({reason}); check the variables, files and role that it uses") from None


def _fixed_credentials(options: S3StorageOptions) -> Credentials | None:
    if options.access_key_env is not None:
        return _from_environment(options)
    if options.credentials_file is not None:
        return _from_file(options.credentials_file, options.profile or "default")
    return None


def _from_environment(options: S3StorageOptions) -> Credentials:
    values = []
    for name in (options.access_key_env, options.secret_key_env, options.session_token_env):
        value = os.environ.get(name) if name else None
        if name and not value:
            raise ConfigError(f"s3 store: the environment variable {name} is not set; it should hold a credential")
        values.append(value)
    try:
        return Credentials(values[0] or "", values[1] or "", values[2])
    except ValueError as error:
        raise ConfigError(
            f"s3 store: the credentials in {options.access_key_env} and its companion variables {error}"
        ) from None


def _from_file(path: Path, section: str) -> Credentials:
    data = read_private_file(path, "S3 credentials file", _CREDENTIALS_FILE_BYTES_MAX)
    parser = configparser.RawConfigParser()
    # Raise errors without their causes, which would quote lines of the file.
    try:
        parser.read_string(data.decode())
        keys = parser[section]
        found = keys["aws_access_key_id"], keys["aws_secret_access_key"], keys.get("aws_session_token") or None
    except (configparser.Error, KeyError, UnicodeError):
        wrong = f"has no section [{section}] with aws_access_key_id and aws_secret_access_key"
        raise ConfigError(f"S3 credentials file {os.fspath(path)!r}: {wrong}") from None
    try:
        return Credentials(*found)
    except ValueError as error:
        raise ConfigError(f"S3 credentials file {os.fspath(path)!r}: the keys of [{section}] {error}") from None


def _from_boto(session: Any) -> CredentialsSource:
    from botocore.credentials import RefreshableCredentials  # noqa: PLC0415
    from botocore.exceptions import BotoCoreError  # noqa: PLC0415

    def load() -> Credentials:
        try:
            frozen = found.get_frozen_credentials()
            return Credentials(frozen.access_key, frozen.secret_key, frozen.token)
        except (BotoCoreError, LookupError, TypeError, ValueError) as error:
            raise StoreError(ErrorKind.WRONG_CREDENTIALS, type(error).__name__) from None

    with config_errors("boto3 cannot get credentials"):
        found = session.get_credentials()
        fixed = None if found is None or isinstance(found, RefreshableCredentials) else load()
    if found is None:
        raise ConfigError(
            "s3 store: no credentials found; set access_key_env and secret_key_env, credentials_file or profile, or "
            "the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if fixed is not None:
        return lambda deadline: fixed
    refreshed = Refreshed("s3-credentials", load, _CREDENTIALS_AGE_MAX_S)
    return lambda deadline: refreshed.get(deadline=deadline)
