"""SeaweedFS: a real S3 server in one process."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from hicache.errors import MissingPackage, install_hint

from .base import Command, DevServer, Storage
from .packages import program
from .ports import LOOPBACK

# Not HICACHE_...: such variables are entries of the configuration. Not AWS_...: those may be the user's own.
ACCESS_KEY_ENV = "S3_ACCESS_KEY"
SECRET_KEY_ENV = "S3_SECRET_KEY"
REGION = "us-east-1"  # the server accepts any; clients need one for signatures
# Timeout of a probe, in seconds. The first write of a new server is slow, because it creates the volumes.
_PROBE_TIMEOUT_S = 2.0
# As long as that of a Redis client: for calls after the start.
_CLIENT_TIMEOUT_S = 20.0
# Small volumes, so that a short test needs little disk space, and enough of them for 20 GB.
_VOLUME_MB, _VOLUMES = 128, 160
# The object that the probe writes.
_PROBE_KEY = "hicache-dev-probe"


def litter(ports: Mapping[str, int]) -> list[Path]:
    """Return the sockets, named by port, that the program always creates in the system's temporary directory."""
    return [Path(f"/tmp/seaweedfs-{name.replace('.', '-')}-{port}.sock") for name, port in ports.items()]


class SeaweedServer(DevServer):
    """Master, volume server, filer and S3 gateway of SeaweedFS, with one account and a `bucket`.

    Objects survive `kill` and `restart`. A graceful stop would take half a minute, so it is always killed.
    """

    name: ClassVar[str] = "s3 (seaweedfs)"
    port_names: ClassVar[tuple[str, ...]] = (
        "s3", "s3.grpc", "master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc",
    )
    start_timeout_s: ClassVar[float] = 120.0  # a restart takes 20 s on an idle machine
    grace_s: ClassVar[float] = 0.0

    def __init__(self, *, bucket: str = "hicache", port: int | None = None, data: Path | None = None) -> None:
        super().__init__(port=port, data=data)
        self.bucket = bucket
        self.access_key = "hicache-dev"
        self.secret_key = secrets.token_urlsafe(24)

    @property
    def endpoint_url(self) -> str:
        """The address for S3 clients."""
        return f"http://{LOOPBACK}:{self.port}"

    def command(self) -> Command:
        binary = program("weed", extra="dev-servers")
        accounts = self.directory / "accounts.json"
        accounts.touch(mode=0o600)
        accounts.write_text(json.dumps(self._accounts()))
        logs = self.directory / "logs"
        logs.mkdir(exist_ok=True)
        ports = [f"-{self._flag(name)}={port}" for name, port in self.ports.items()]
        sockets = [f"-{part}.localSocket={self.directory / part}.sock" for part in ("filer", "s3")]
        self.litter = litter(self.ports)
        arguments = [
            str(binary), f"-logdir={logs}", "server", f"-dir={self.data}", f"-ip={LOOPBACK}", f"-ip.bind={LOOPBACK}",
            "-s3", f"-s3.config={accounts}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false",
            f"-master.volumeSizeLimitMB={_VOLUME_MB}", f"-volume.max={_VOLUMES}", *ports, *sockets,
        ]
        return arguments, {}

    @staticmethod
    def _flag(name: str) -> str:
        part, _, kind = name.partition(".")
        return f"{part}.port.{kind}" if kind else f"{part}.port"

    def _accounts(self) -> dict[str, Any]:
        credentials = [{"accessKey": self.access_key, "secretKey": self.secret_key}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        return {"identities": [{"name": "hicache", "credentials": credentials, "actions": actions}]}

    def client(self, timeout_s: float = _CLIENT_TIMEOUT_S, **options: Any) -> Any:
        """Return a boto3 client with credentials and without retries. Raises ConfigError without boto3."""
        try:
            import boto3  # noqa: PLC0415  optional
            from botocore.config import Config  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise MissingPackage(f"an S3 server needs a client; {install_hint('s3')}") from error
        config = Config(connect_timeout=timeout_s, read_timeout=timeout_s, retries={"total_max_attempts": 1})
        settings = {
            "endpoint_url": self.endpoint_url, "region_name": REGION, "config": config,
            "aws_access_key_id": self.access_key, "aws_secret_access_key": self.secret_key,
        }
        # Its own session: creating clients with the shared default session is not thread-safe.
        return boto3.session.Session().client("s3", **{**settings, **options})

    def serves(self) -> bool:
        """True if the bucket exists, and an object can be written, read and removed."""
        client = self.client(_PROBE_TIMEOUT_S)
        from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415  optional

        try:
            self.make_bucket(self.bucket)
            client.put_object(Bucket=self.bucket, Key=_PROBE_KEY, Body=b"x")
            with client.get_object(Bucket=self.bucket, Key=_PROBE_KEY)["Body"] as body:
                whole: bool = body.read() == b"x"
            client.delete_object(Bucket=self.bucket, Key=_PROBE_KEY)
            return whole
        except (BotoCoreError, ClientError):
            return False
        finally:
            client.close()

    def make_bucket(self, bucket: str) -> None:
        """Create `bucket` if it does not exist."""
        client = self.client()
        try:
            if bucket not in (found["Name"] for found in client.list_buckets()["Buckets"]):
                client.create_bucket(Bucket=bucket)
        finally:
            client.close()

    def storage(self, **extra: Any) -> Storage:
        options = {
            "endpoint_url": self.endpoint_url, "bucket": self.bucket, "region": REGION,
            "access_key_env": ACCESS_KEY_ENV, "secret_key_env": SECRET_KEY_ENV,
        }
        return "s3", {**options, **extra}

    def environ(self) -> dict[str, str]:
        return {ACCESS_KEY_ENV: self.access_key, SECRET_KEY_ENV: self.secret_key}
