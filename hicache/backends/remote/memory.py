"""Memory that a daemon creates for an engine, so that it counts for the daemon's memory limit."""

from __future__ import annotations

from ...config.remote_storage import RemoteStorageOptions
from ...errors import BackendError, BackendUnavailable
from ...frame import frame_bytes
from ..errors import StoreError
from .access import open_access
from .causes import CONFIGURED, explain
from .client import DaemonClient, Refused

_CREATE_S = 60.0


def create_memory(options: RemoteStorageOptions, name: str, shape: bytes, payload_bytes: int, pages: int) -> None:
    """Let the daemon create shared memory `name` with frames for that many pages of the shape with this digest; the
    caller opens it next. Blocks while the daemon zeroes the memory. Raises BackendUnavailable without a reply,
    BackendError if the daemon rejects it."""
    client = DaemonClient(open_access(options))
    fields = {"frame_bytes": frame_bytes(payload_bytes), "pages": pages, "shape": shape.hex()}
    try:
        client.call("GET", "/livez", deadline=client.clock() + options.open_timeout)  # it does not hang
        client.call("PUT", f"/v1/memory/{name}", fields, deadline=client.clock() + _CREATE_S)
    except StoreError as error:
        kind = BackendError if isinstance(error, Refused) else BackendUnavailable
        where = f"host.shared: the daemon at {client.access.where} does not create the memory {name!r}"
        why = explain(error, CONFIGURED, client.access.server)
        raise kind(f"{where}: {why}; or set host.shared.owner to engine") from error
    finally:
        client.close()
