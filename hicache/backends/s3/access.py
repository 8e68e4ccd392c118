"""Endpoint and credentials of an S3 store, from the options or from boto3's configuration on this machine.

Also signatures by botocore: Signature Version 4 of the AWS API, with the keys of an identity or, for directory buckets,
those of a session. The algorithm is in "Authenticating Requests (AWS Signature Version 4)" of the Amazon S3 API
reference. Sessions are in "CreateSession" there: their keys are valid for five minutes and for one bucket.
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from ...clock import SYSTEM_CLOCK, Clock
from ...config.addresses import HTTP_PORTS, PROXY_PORTS, Address, split_url
from ...config.s3_storage import S3StorageOptions, check_region
from ...config.secret import read_private_file
from ...errors import BackendUnavailable, ConfigError, MissingPackage, install_hint
from ...supervised import NoThread, SupervisedPool
from ..errors import ErrorKind, StoreError
from ..http import Server, request_head
from ..rotated import Refreshed, Rotated, client_tls

# boto3 starts to renew credentials 15 minutes before they expire, so checking once per minute is enough. It returns
# none that expire within 10 minutes; after that time, the last ones may have expired.
_CREDENTIALS_AGE_MAX_S = 60.0
_CREDENTIALS_USABLE_S = 600.0
_CREDENTIALS_FILE_BYTES_MAX = 64 << 10
_REGION = "us-east-1"  # the region that stores without regions expect in signatures

_VISIBLE = re.compile("[!-~]+")

# From files, which are read again when they change, or from a service, which boto3 asks again before they expire.
CredentialsSource: TypeAlias = "Rotated[Credentials] | Refreshed[Credentials]"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Credentials:
    """The keys of one identity or session. `repr` shows only the access key. Raises ValueError if the access key or the
    token is not visible ASCII, or the secret key is not printable."""

    access_key: str
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    is_session: bool = False

    def __post_init__(self) -> None:
        sent = (self.access_key, "-" if self.token is None else self.token)
        if not all(map(_VISIBLE.fullmatch, sent)) or not str.isprintable(self.secret_key):
            raise ValueError("contain characters that are not valid in a key; remove line ends and spaces")


class Signer:
    """Signs requests to one endpoint. `service` and `region` are parts of the signature. REQUIRES: botocore is
    installed. Thread-safe."""

    def __init__(self, service: str, region: str) -> None:
        from botocore.auth import S3ExpressAuth, S3SigV4Auth  # noqa: PLC0415 - an optional dependency
        from botocore.awsrequest import AWSRequest  # noqa: PLC0415
        from botocore.config import Config  # noqa: PLC0415

        self.service, self._region = service, region
        self._auth, self._session_auth, self._request = S3SigV4Auth, S3ExpressAuth, AWSRequest
        self._unsigned_body = Config(s3={"payload_signing_enabled": False})

    def sign(
        self, credentials: Credentials, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> dict[str, str]:
        """Return `headers`, plus those that authenticate the request, with names in lower case. A `body` is a part of
        the signature; without one, any body may be sent.

        REQUIRES: `url` is encoded, and has neither a user nor a fragment.
        """
        request = self._request(method, url, headers=headers, data=body)
        if body is None:
            request.context["client_config"] = self._unsigned_body
        if credentials.is_session:
            self._session_auth(credentials, self.service, self._region, identity_cache=None).add_auth(request)
        else:
            self._auth(credentials, self.service, self._region).add_auth(request)
        return {name.lower(): value for name, value in request.headers.items()}


@dataclass(frozen=True, slots=True)
class S3Access:
    """Endpoint and credentials of the store. Paths of requests begin with `path`. For a proxy that gets whole URLs,
    `origin` precedes the path. `session` is botocore's."""

    options: S3StorageOptions
    server: Server
    host: str
    path: str
    origin: str
    signer: Signer
    credentials: CredentialsSource
    session: Any
    clock: Clock

    def authorized(self, call: Callable[[Credentials], T], deadline: float) -> T:
        """Return `call(credentials)`; see Rotated.run. Raises StoreError, also without credentials by `deadline`."""
        if isinstance(self.credentials, Rotated):
            return self.credentials.run(call)
        return call(self.credentials.get(deadline=deadline))

    @property
    def is_directory(self) -> bool:
        """True for a directory bucket (S3 Express)."""
        return self.signer.service == "s3express"

    def request_head(self, method: str, target: str, headers: Mapping[str, str]) -> bytes:
        """Return the head of a request, as the store or its proxy gets it. Raises as `http.request_head`."""
        login = {"proxy-authorization": self.server.proxy_login} if self.origin and self.server.proxy_login else {}
        return request_head(method, target, {**headers, **login}, self.origin)


def open_access(options: S3StorageOptions, deadline: float, clock: Clock = SYSTEM_CLOCK) -> S3Access:
    """Find credentials, endpoint and region. May block up to `deadline` while boto3 looks for credentials.

    Raises ConfigError if boto3 or the credentials are missing, or a file or variable that the options name is missing;
    BackendUnavailable if boto3's source of credentials does not answer.
    """
    session = open_session(options)
    region = options.region or session.get_config_variable("region") or _REGION
    try:
        check_region(str(region))
    except ValueError as error:
        raise ConfigError(f"s3 store: region {str(region)[:70]!r}: {error}") from None
    endpoint, signer = _endpoint(options, session, region)
    host = endpoint.netloc
    try:
        url = split_url(f"{endpoint.scheme}://{host}{endpoint.path}", HTTP_PORTS)
    except ValueError as error:
        raise ConfigError(f"s3 store: the endpoint in boto3's configuration is not valid: {error}") from None
    tls = None
    if url.scheme == "https":
        bundle = options.ca_file or session.get_config_variable("ca_bundle")
        files = {"ca_file": Path(bundle) if bundle else None, "certificate": None, "key": None}
        tls = client_tls("s3 store", files)
    origin = tunnel = login = ""
    reached = Address(url.host, url.port)
    if (proxy := _proxy(options)) is not None:
        reached, login = proxy
        if tls is None:
            origin = f"http://{host}"
        else:
            tunnel = host if host.endswith(f":{url.port}") else f"{host}:{url.port}"
    server = Server(*reached, tls, url.host, tunnel, options.connect_timeout, options.timeout, proxy_login=login)
    file = options.credentials_file
    source: CredentialsSource
    if options.access_key_env is not None:
        source = Rotated("s3 store: credentials", [], lambda: _from_environment(options))
    elif file is not None:
        source = Rotated("s3 store: credentials", [file], lambda: _from_file(file, options.profile or "default"))
    else:
        source = _from_boto(options, session, deadline, clock)
    return S3Access(options, server, host, url.path.rstrip("/"), origin, signer, source, session, clock)


def _proxy(options: S3StorageOptions) -> tuple[Address, str] | None:
    """Return the address of the proxy, and its Proxy-Authorization header (RFC 7617), empty without a user."""
    url = options.proxy
    if options.proxy_env is not None and not (url := os.environ.get(options.proxy_env)):
        raise ConfigError(f"s3 store: the environment variable {options.proxy_env} is not set; it should hold a URL")
    if url is None:
        return None
    scheme, mark, rest = url.partition("://")
    login, _, place = rest.rpartition("@")
    try:
        proxy = split_url(f"{scheme}{mark}{place}", PROXY_PORTS)
        encoded = base64.b64encode(unquote(login, errors="strict").encode()).decode()
    except ValueError:
        raise ConfigError(
            f"s3 store: the environment variable {options.proxy_env} should hold a URL like http://user:password@host:80"
        ) from None
    return Address(proxy.host, proxy.port), f"Basic {encoded}" if login else ""


def open_session(options: S3StorageOptions) -> Any:
    """Return a session of botocore. Raises ConfigError."""
    try:
        import botocore.exceptions  # noqa: PLC0415 - an optional dependency
        import botocore.session  # noqa: PLC0415
    except ImportError as error:
        raise MissingPackage(f"s3 store: boto3 is not installed; {install_hint('s3')}") from error
    # With `credentials_file`, the profile is a section of that file instead.
    profile = None if options.credentials_file else options.profile
    try:
        session = botocore.session.Session(profile=profile)
        session.register_component("data_loader", _loader())
        session.get_scoped_config()
        return session
    except botocore.exceptions.BotoCoreError as error:
        raise ConfigError(f"s3 store: {error}") from error


@functools.cache
def _loader() -> Any:
    """Return botocore's descriptions of services, which take a tenth of a second to read."""
    import botocore.loaders  # noqa: PLC0415

    return botocore.loaders.create_loader()


def _endpoint(options: S3StorageOptions, session: Any, region: str) -> tuple[SplitResult, Signer]:
    """Return botocore's URL of the bucket, and the signer for requests there. Sends nothing."""
    from botocore.awsrequest import AWSResponse  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415

    style = "path" if options.path_style else None
    if options.path_style is False or (style is None and ".amazonaws." in (options.endpoint_url or "")):
        style = "virtual"
    found: list[dict[str, Any]] = []

    def answer(params: dict[str, Any], **_: Any) -> tuple[AWSResponse, dict[str, Any]]:
        found.append(params)
        return AWSResponse(params["url"], 200, {}, None), {}

    with _config_errors("boto3 has no endpoint for the bucket"):
        client = session.create_client(
            "s3", region_name=region, endpoint_url=options.endpoint_url, aws_access_key_id="-",
            aws_secret_access_key="-", config=Config(s3=style and {"addressing_style": style}),
        )
        client.meta.events.register("before-call.s3", answer)
        client.list_objects_v2(Bucket=options.bucket)
        client.close()
    signing = found[0]["context"]["signing"]
    return urlsplit(found[0]["url"]), Signer(signing["signing_name"], signing["region"])


@contextlib.contextmanager
def _config_errors(what: str) -> Iterator[None]:
    """Turn botocore's errors about configuration and credentials into ConfigError. Omit their text: it may quote the
    reply of a credential source."""
    import botocore.exceptions  # noqa: PLC0415

    try:
        yield
    except (botocore.exceptions.BotoCoreError, LookupError, TypeError, ValueError, StoreError) as error:
        reason = str(error) if isinstance(error, StoreError) else type(error).__name__
        raise ConfigError(f"s3 store: {what} ({reason}); check the variables, files and role that it uses") from None


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


def _from_boto(options: S3StorageOptions, session: Any, deadline: float, clock: Clock) -> CredentialsSource:
    from botocore.credentials import RefreshableCredentials  # noqa: PLC0415

    found = _found_by(session, deadline, clock)
    if isinstance(found, RefreshableCredentials):
        return Refreshed("s3-credentials", lambda: _frozen(found), _CREDENTIALS_AGE_MAX_S, _CREDENTIALS_USABLE_S, clock)

    def load() -> Credentials:
        by = clock() + options.open_timeout
        try:
            found = _found_by(open_session(options), by, clock)  # a session reads its files once
        except BackendUnavailable as error:
            raise ConfigError(str(error)) from None  # as other files that cannot be used now
        with _config_errors("boto3 cannot get credentials"):
            return _frozen(found)

    files = [Path(session.get_config_variable(name)).expanduser() for name in ("credentials_file", "config_file")]
    return Rotated("s3 store: boto3's credentials", files, load)


def _found_by(session: Any, deadline: float, clock: Clock) -> Any:
    """Return the credentials that botocore finds. A service or command that it asks may hang: the thread that waits for
    it is abandoned at the deadline."""
    asking = SupervisedPool[Any]("s3-credentials", 1, linger_s=0.0, clock=clock)
    try:
        with _config_errors("boto3 cannot get credentials"):
            answer = asking.call(lambda: (session.get_credentials(),), deadline)
    except NoThread as error:
        raise BackendUnavailable(f"s3 store: {error}") from None
    if answer is None:
        raise BackendUnavailable(
            "s3 store: boto3 did not get credentials in time; check the service or command from which it gets them"
        )
    (found,) = answer
    if found is None:
        raise ConfigError(
            "s3 store: no credentials found; set access_key_env and secret_key_env, credentials_file or profile, or "
            "the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    return found


def _frozen(found: Any) -> Credentials:
    """Return the current keys of botocore's credentials. Raises StoreError."""
    from botocore.exceptions import BotoCoreError  # noqa: PLC0415

    try:
        frozen = found.get_frozen_credentials()
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token)
    except (BotoCoreError, LookupError, TypeError, ValueError) as error:
        raise StoreError(ErrorKind.WRONG_CREDENTIALS, type(error).__name__) from None
