"""The secrets of a daemon: tokens and TLS, from the configured files and variables."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..backends.rotated import Rotated, no_password
from ..config.daemon import DaemonConfig, TlsConfig
from ..config.files import require_readable
from ..config.secret import read_private_file, read_secret
from ..errors import ConfigError

# The most bytes of a key in PEM.
_KEY_BYTES_MAX = 64 << 10
# OpenSSL's reason for a client without a certificate.
_NO_CERTIFICATE = "PEER_DID_NOT_RETURN_A_CERTIFICATE"


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens; None without such a token."""

    data: str | None = field(repr=False)
    admin: str | None = field(repr=False)


def open_tokens(config: DaemonConfig, environ: Mapping[str, str]) -> Rotated[Tokens]:
    """Return both tokens, which follow their files. Raises as `read_tokens`."""
    files = [config.token_file, config.admin_token_file]
    return Rotated("daemon: tokens", files, lambda: read_tokens(config, environ))


def read_tokens(config: DaemonConfig, environ: Mapping[str, str]) -> Tokens:
    """Read both tokens. Raises ConfigError for an unreadable or invalid one, and if they are equal."""
    data = _token("daemon: token", config.token_env, config.token_file, environ)
    admin = _token("daemon: admin token", config.admin_token_env, config.admin_token_file, environ)
    if data is not None and data == admin:
        raise ConfigError("daemon: the admin token equals the clients' token; use a different one")
    return Tokens(data, admin)


def _token(what: str, variable: str | None, path: Path | None, environ: Mapping[str, str]) -> str | None:
    token = read_secret(what, variable, path, environ)
    if token is not None and not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{what}: is not printable ASCII; make one with: (umask 077; openssl rand -hex 32 > FILE)")
    return token


def open_tls(config: TlsConfig) -> Rotated[ssl.SSLContext] | None:
    """Return the TLS of the TCP address, which follows its files; None without a certificate. Raises ConfigError."""
    if config.certificate is None:
        return None
    files = [config.certificate, config.key, config.client_ca]
    return Rotated("daemon.tls", files, lambda: _server_context(config))


def _server_context(config: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    assert config.certificate is not None and config.key is not None  # checked by the section
    require_readable(config.certificate, "daemon.tls.certificate")
    read_private_file(config.key, "daemon.tls.key", _KEY_BYTES_MAX)
    try:
        context.load_cert_chain(config.certificate, config.key, password=no_password)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError("daemon.tls: certificate and key are not a matching PEM pair without a password") from error
    if config.client_ca is not None:
        require_readable(config.client_ca, "daemon.tls.client_ca")
        try:
            context.load_verify_locations(config.client_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError("daemon.tls.client_ca: has no authority certificate in PEM; check the file") from error
        context.verify_mode = ssl.CERT_REQUIRED
        context.sslobject_class = _Handshake
    return context


class _Handshake(ssl.SSLObject):
    """A handshake that informs a client why its certificate is rejected. The event loop would close the connection
    before it sends OpenSSL's alert, and the client would not know the reason."""

    def do_handshake(self) -> None:
        """Raise `SSLWantReadError` instead of an error of the client's certificate: the loop then sends the alert and
        waits for the client to disconnect, until the timeout of the handshake."""
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if isinstance(error, ssl.SSLCertVerificationError) or error.reason == _NO_CERTIFICATE:
                raise ssl.SSLWantReadError from error
            raise
