"""The bodies of requests and answers of `/v1`, with their limits, which the OpenAPI document shows."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from ..backends.base import GetOutcome, SetOutcome
from ..backends.guard import HealthState
from ..errors import HiCacheError
from ..keys import PAGE_KEY_BYTES

# A lookup of a million tokens in pages of 64.
KEYS_MAX = 16384
# Larger than the frames of any engine: 1 GiB.
PAYLOAD_BYTES_MAX = 1 << 30
# The longest deadline of a request; the configuration has a lower limit.
TIMEOUT_S_MAX = 3600.0
_LABEL_MAX = 256

_HEX_64 = "^[0-9a-f]{64}$"
Digest: TypeAlias = Annotated[str, Field(pattern=_HEX_64)]
MemoryName: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9.-]{1,128}$")]
MappingId: TypeAlias = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


def _raw_keys(keys: Any) -> Any:
    """Check all keys as one text: a pattern for each of 500 keys would double the time of a lookup."""
    if not isinstance(keys, list) or len(keys) > KEYS_MAX:
        raise ValueError(f"keys must be a list of at most {KEYS_MAX}")
    try:
        joined = "".join(keys)
        raw = bytes.fromhex(joined)
    except (TypeError, ValueError):
        raise ValueError("a key is not 64 hexadecimal digits in lower case") from None
    if {*map(len, keys)} - {2 * PAGE_KEY_BYTES} or raw.hex() != joined:  # white space, or capital letters
        raise ValueError("a key is not 64 hexadecimal digits in lower case")
    return [raw[start : start + PAGE_KEY_BYTES] for start in range(0, len(raw), PAGE_KEY_BYTES)]


# Page keys; bytes after the check.
Keys: TypeAlias = Annotated[
    list[bytes], BeforeValidator(_raw_keys),
    WithJsonSchema({"type": "array", "maxItems": KEYS_MAX, "items": {"type": "string", "pattern": _HEX_64}}),
]
Timeout: TypeAlias = Annotated[float, Field(gt=0, le=TIMEOUT_S_MAX)]
Frames: TypeAlias = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 40)]], Field(max_length=KEYS_MAX)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class OpenNamespace(_Body):
    """An engine's description of its namespace."""

    payload_bytes: Annotated[int, Field(ge=1, le=PAYLOAD_BYTES_MAX)]
    weights_epoch: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    label: Annotated[str, Field(max_length=_LABEL_MAX)] = ""
    timeout_s: Timeout = 30.0


class NamespaceOpened(BaseModel):
    """`body_pages_max` pages fit into one `read` or `write`."""

    frame_bytes: int
    instance: str
    body_pages_max: int


class NamespaceReleased(BaseModel):
    """The daemon no longer counts the engine as a user of the namespace."""

    instance: str


class AttachMemory(_Body):
    """The memory of an engine. `device` and `inode` identify the file that the engine has open; without them the daemon
    creates it, for pages whose shape has the digest `shape`."""

    frame_bytes: Annotated[int, Field(ge=4096, le=PAYLOAD_BYTES_MAX + 4096, multiple_of=4096)]
    pages: Annotated[int, Field(ge=1, lt=1 << 32)]
    device: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    inode: Annotated[int, Field(ge=0, lt=1 << 64)] | None = None
    shape: Digest | None = None
    timeout_s: Timeout = 30.0

    @property
    def identity(self) -> tuple[int, int] | None:
        return None if self.device is None or self.inode is None else (self.device, self.inode)


class MemoryAttached(BaseModel):
    """`mapping` identifies this attachment. Calls should send it with the memory: a call that waits while the memory is
    detached and attached again is then rejected."""

    instance: str
    mapping: str


class LookupRequest(_Body):
    """Keys to look up, to remove, or to read."""

    keys: Keys
    timeout_s: Timeout


class TransferRequest(LookupRequest):
    """Pages between the stores and frames of an engine's memory, one frame for each key."""

    memory: MemoryName
    mapping: MappingId | None = None
    frames: Frames


class StoreRequest(TransferRequest):
    """As TransferRequest; `parent` is the key of the page before the first, null at the start of a chain."""

    parent: Digest | None = None


class Deadline(_Body):
    """A call without keys."""

    timeout_s: Timeout


class Pages(BaseModel):
    """A number of pages: the length of the stored prefix, or of removed pages."""

    pages: int
    errors: list[str]


class Stored(BaseModel):
    """For each page, whether it is stored."""

    stored: list[bool]
    errors: list[str]


class GetOutcomes(BaseModel):
    """The outcome of each page of a `get`."""

    outcomes: list[GetOutcome]
    errors: list[str]


class SetOutcomes(BaseModel):
    """The outcome of each page of a `set` or `write`."""

    outcomes: list[SetOutcome]
    errors: list[str]


class UsageAnswer(BaseModel):
    """The content of the namespace's store."""

    pages: int
    bytes: int
    capacity_bytes: int | None


class DegradedStore(BaseModel):
    """A store that keeps nothing or fails, since `since_s` (seconds since 1970). Without labels and paths, because
    probes do not need a token; `/statusz` and `hicache ctl status` have more."""

    store: str
    state: HealthState
    since_s: float
    cause: str
    advice: str


class State(BaseModel):
    """The reply to a probe. `degraded`: the daemon is ready, and stores have `problems`."""

    state: Literal["starting", "ready", "degraded", "draining"]
    problems: list[DegradedStore] = []


class ErrorAnswer(BaseModel):
    """Every reply other than 200. `error` is the kind of error, `detail` says what to do."""

    error: str
    detail: str


class Refused(HiCacheError):
    """A request is rejected; nothing was changed. The only exception that becomes a reply other than 200: an
    ErrorAnswer with `status`.

    `kind` is an ErrorKind if a store would count it. `detail` says what to do, and does not quote the request.
    `retry_after_s` is the pause before the next try, 0 if another try does not help.
    """

    def __init__(self, status: int, kind: str, detail: str, retry_after_s: int = 0) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> bytes:
        return ErrorAnswer(error=self.kind, detail=self.detail).model_dump_json().encode()

    def answer(self) -> Response:
        headers = {"retry-after": str(self.retry_after_s)} if self.retry_after_s else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(self.body, self.status, headers, "application/json")
