"""The S3 backend: pages as objects of a bucket, shared by whoever can reach it."""

from typing import Any

from ...frame import FrameCodec
from .backend import S3Backend
from .options import S3Options
from .raw import S3RawStore

__all__ = ["S3Backend", "S3Options", "S3RawStore", "open_raw", "open_s3_backend"]


def open_s3_backend(  # noqa: PLR0913 - one per option
    codec: FrameCodec,
    *,
    bucket: str,
    prefix: str = "hicache/",
    endpoint_url: str | None = None,
    region: str | None = None,
    path_style: bool | None = None,
    access_key_env: str | None = None,
    secret_key_env: str | None = None,
    session_token_env: str | None = None,
    credentials_file: str | None = None,
    profile: str | None = None,
    ca_file: str | None = None,
    checksum: str = "when_required",
    sign_payload: bool = False,
    conditional_put: bool = True,
    client: str = "direct",
    connections: int = 8,
    timeout_s: float = 5.0,
    connect_timeout_s: float = 2.0,
) -> S3Backend:
    """The factory behind the name `s3`: see S3Options for what the options mean and what is raised."""
    options = S3Options(
        bucket=bucket,
        prefix=prefix,
        endpoint_url=endpoint_url,
        region=region,
        path_style=path_style,
        access_key_env=access_key_env,
        secret_key_env=secret_key_env,
        session_token_env=session_token_env,
        credentials_file=credentials_file,
        profile=profile,
        ca_file=ca_file,
        checksum=checksum,
        sign_payload=sign_payload,
        conditional_put=conditional_put,
        client=client,
        connections=connections,
        timeout_s=timeout_s,
        connect_timeout_s=connect_timeout_s,
    )
    return S3Backend(codec, options)


def open_raw(**options: Any) -> S3RawStore:
    """The store that these options of S3Options describe, as its operator sees it. Blocks and raises as S3RawStore."""
    return S3RawStore(S3Options(**options))
