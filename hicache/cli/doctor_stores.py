"""`hicache doctor`: the facts about stores beside the pages: volumes, certificates, credentials, daemons."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Iterable, Iterator
from email.utils import parsedate_to_datetime
from pathlib import Path

from cryptography import x509

from ..backends.errors import StoreError
from ..backends.file.mounts import file_system, misplaced
from ..backends.http import Connection, ConnectionPool, Head, read_small
from ..backends.remote.client import CONFIGURED, DaemonClient, explain
from ..backends.remote.client import open_access as open_remote
from ..backends.s3.access import open_access as open_s3
from ..backends.s3.client import S3Client
from ..config.files import open_regular
from ..config.redis_storage import RedisStorageOptions
from ..config.remote_storage import RemoteStorageOptions
from ..config.s3_storage import S3StorageOptions
from ..config.storage import FileStorageOptions, SharedFilesStorageOptions
from ..units import format_size
from .doctor_machine import Figures, Row, Subject, Verdict, daemon_user
from .stores import StorePart

# The deadline of one call of a store. Engines allow 10 s (transfer.storage_deadline); a store that needs longer than
# this for a few pages is not of use.
CALL_S = 5.0
# A clock that differs by more than a minute will soon differ by the 15 minutes that S3 allows.
_SKEW_S_MAX = 60.0
_EXPIRES_SOON = datetime.timedelta(days=14)
_BODY_BYTES_MAX = 1 << 20


def certificates(subject: Subject) -> Iterator[Row]:
    """Show until when the certificates of all sections are valid."""
    sections: list[tuple[str, object]] = [(f"{part.name} ", part.spec.options) for part in subject.parts]
    for name, section in (*sections, ("daemon.tls.", subject.config.daemon.tls)):
        # Of a chain, the first to expire counts; of authorities the last, because bundles have expired ones.
        for entry, which in (
            ("certificate", min), ("tls_cert_file", min), ("ca_file", max), ("client_ca", max), ("tls_ca_file", max)
        ):
            path = getattr(section, entry, None)
            if isinstance(path, Path):
                yield _certificate(f"{name}{entry}", path, which)


def _certificate(what: str, path: Path, which: Callable[[Iterable[datetime.datetime]], datetime.datetime]) -> Row:
    try:
        with open_regular(path) as file:
            found = x509.load_pem_x509_certificates(file.read(_BODY_BYTES_MAX))
    except (OSError, ValueError):
        return Row(what, Verdict.FAIL, f"{path}: cannot be read as PEM certificates", "correct the path and its mode")
    ends = which(one.not_valid_after_utc for one in found)
    left = ends - datetime.datetime.now(datetime.UTC)
    verdict = Verdict.OK if left > _EXPIRES_SOON else Verdict.WARN if left > datetime.timedelta(0) else Verdict.FAIL
    finding = f"{path}: {'valid until' if verdict is not Verdict.FAIL else 'expired on'} {ends:%Y-%m-%d %H:%M} UTC"
    return Row(what, verdict, finding, "" if verdict is Verdict.OK else "renew it", {"left": left.total_seconds()})


def volume(name: str, options: FileStorageOptions | SharedFilesStorageOptions, used_bytes: int) -> Row:
    """Compare the volume of a store of files, which has `used_bytes` of pages, with its limits."""
    path = options.path.absolute()
    place = next(one for one in (path, *path.parents) if one.exists())
    system, found = file_system(place), os.statvfs(place)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    room = free + used_bytes - options.free_space_floor
    limits = f"capacity {'none' if options.capacity is None else format_size(options.capacity)}"
    finding = (f"{path} on {system}: {format_size(total)}, {format_size(free)} free; {limits}, free_space_floor "
               f"{format_size(options.free_space_floor)}")
    figures: Figures = {"total": total, "free": free, "room": max(0, room), "system": system}
    verdict, advice = Verdict.OK, ""
    if room <= 0:
        verdict = Verdict.FAIL
        advice = f"no page fits above the floor: free space, or set free_space_floor below {format_size(free)}"
    elif wrong := misplaced("file" if isinstance(options, FileStorageOptions) else "shared_files", system):
        verdict, advice = Verdict.WARN, wrong
    elif options.capacity is not None and options.capacity > room:
        verdict, advice = Verdict.WARN, f"the volume allows {format_size(room)}; lower capacity to it"
    elif system in ("tmpfs", "ramfs", "overlay", "fuse.fuse-overlayfs"):
        lost = "with the container" if "overlay" in system else "at a restart of the machine, and it uses its memory"
        verdict, advice = Verdict.WARN, f"the pages are lost {lost}; mount a disk there"
    return Row(f"{name} volume", verdict, finding, advice, figures)


def credentials(part: StorePart) -> Iterator[Row]:
    """Show the source of a store's credentials, and until when they are valid if that is known. For S3, this may call a
    metadata service; it also compares the clocks and asks for versions."""
    options, name = part.spec.options, f"{part.name} access"
    if isinstance(options, RedisStorageOptions):
        source = _source(options.password_env, options.password_file)
        yield Row(name, Verdict.INFO, f"user {options.username or 'default'}, password {source}")
    elif isinstance(options, RemoteStorageOptions):
        yield Row(name, Verdict.INFO, f"token {_source(options.token_env, options.token_file)}")
    elif isinstance(options, S3StorageOptions):
        yield from _of_s3(part.name, options)


def _source(variable: str | None, path: Path | None) -> str:
    if variable is not None:
        return f"from the variable {variable}"
    return "none" if path is None else f"from the file {path}"


def _of_s3(name: str, options: S3StorageOptions) -> Iterator[Row]:
    access = open_s3(options, time.monotonic() + CALL_S)
    until = ""
    if options.access_key_env is not None or options.credentials_file is not None:
        source = _source(options.access_key_env, options.credentials_file)
    else:
        found = access.session.get_credentials()
        source = f"from boto3 ({found.method})"
        ends = getattr(found, "_expiry_time", None)  # botocore has no public name for it
        until = f", until {ends:%Y-%m-%d %H:%M} UTC, then renewed" if ends is not None else ""
    yield Row(f"{name} access", Verdict.INFO, f"access key {source}{until}")
    pool, deadline = ConnectionPool(access.server), time.monotonic() + CALL_S
    try:
        head = access.request_head("GET", f"{access.path}/", {"host": access.host, "content-length": "0"})
        date = pool.exchange(head, [], lambda link, reply: _date(link, reply, deadline), deadline)
        skew_s = time.time() - parsedate_to_datetime(date).timestamp()
    except (StoreError, ValueError):
        return  # the row of the store says why the server does not answer
    finally:
        pool.close()
    is_good = abs(skew_s) <= _SKEW_S_MAX
    yield Row(f"{name} clock", Verdict.OK if is_good else Verdict.FAIL, f"{skew_s:+.0f} s against the server's",
              "" if is_good else "set the clock of this machine", {"skew": skew_s})
    if not access.is_directory:  # such buckets have no versions
        with contextlib.closing(S3Client(access)) as client:
            yield _versions(name, client)


def _versions(name: str, client: S3Client) -> Row:
    try:
        status = client.versioning(deadline=time.monotonic() + CALL_S)
    except StoreError as error:
        return Row(f"{name} versions", Verdict.INFO, f"not known ({error}); allow s3:GetBucketVersioning to see them")
    if status != "Enabled":
        return Row(f"{name} versions", Verdict.OK, "the bucket keeps no versions of removed pages")
    return Row(f"{name} versions", Verdict.WARN, "the bucket keeps versions of the pages that clear, capacity and "
               "max_age remove", "suspend versioning, or expire noncurrent versions (docs/backends/s3.md)")


def _date(link: Connection, reply: Head, deadline: float) -> str:
    read_small(link, reply, _BODY_BYTES_MAX, deadline)
    return reply.headers.get("date", "")


def daemon(name: str, options: RemoteStorageOptions) -> Row:
    """Show version and instance of the daemon that a `remote` store uses, or why it does not answer. Raises
    ConfigError."""
    access = open_remote(options)
    client = DaemonClient(access)
    try:
        deadline = time.monotonic() + CALL_S
        status = client.call("GET", "/statusz", deadline=deadline)
        version = client.call("GET", "/openapi.json", deadline=deadline).get("info", {}).get("version", "unknown")
    except StoreError as error:
        return Row(f"{name} access", Verdict.FAIL, explain(error, CONFIGURED, access.server))
    finally:
        client.close()
    user = None if options.url is not None else daemon_user(Path(access.where))
    finding = f"HiCache {version}, instance {status.get('instance')}, {status.get('state')}, at {access.where}"
    return Row(f"{name} daemon", Verdict.OK, finding + ("" if user is None else f", of {user}"), "",
               {"version": version, "instance": status.get("instance")})
