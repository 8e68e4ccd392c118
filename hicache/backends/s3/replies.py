"""Parsing of replies: the error kind by status and code, and the few needed fields of XML documents.

A hostile store may send any bytes. Documents are read as UTF-8, must not declare entities, and have limits on depth and
on the number and length of tags. So parsing takes a small multiple of the body's size, which the client limits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple
from xml.etree import ElementTree

from ..errors import ErrorKind, StoreError
from .access import Credentials

LISTED_MAX = 1000  # keys per page of a listing and per DeleteObjects: the API's own limit
# The limit for bodies of errors, and for bodies that are not needed.
ERROR_BYTES_MAX = 64 << 10
# Enough for a thousand keys of the longest allowed length, with the elements around each.
LISTING_BYTES_MAX = 8 << 20
# Limits with room to spare: S3 documents have four levels and about fifteen elements per entry, of two tags each.
_DEPTH_MAX = 8
_TAGS_MAX = 60 * LISTED_MAX
# S3 documents have no document type, and at most one attribute per tag. Each attribute would become several objects.
_SUSPECT = re.compile(rb"<!DOCTYPE|<[^<>]{4096}")
_ENTRIES = frozenset({"Contents", "Credentials", "Error"})
# Tokens are sent in the URL of the next request, which servers limit to 8 KiB or more.
_TOKEN_LENGTH_MAX = 4096
_SIZE = re.compile("[0-9]{1,15}")
# The code in an error's body is more precise than its status. The list has codes of the S3 API reference and of other
# servers. Messages show only these codes: a hostile server could send back a secret instead of a code.
_BY_CODE: Mapping[str, ErrorKind] = {code: kind for kind, codes in {
    ErrorKind.THROTTLED: "SlowDown Throttling ThrottlingException RequestLimitExceeded TooManyRequests",
    ErrorKind.UNAVAILABLE: "ServiceUnavailable",
    ErrorKind.SERVER_ERROR: "InternalError",
    ErrorKind.TIMEOUT: "RequestTimeout",
    ErrorKind.ACCESS_DENIED: "AccessDenied",
    ErrorKind.WRONG_CREDENTIALS: "InvalidAccessKeyId SignatureDoesNotMatch ExpiredToken InvalidToken "
    "TokenRefreshRequired",
    ErrorKind.CLOCK_SKEW: "RequestTimeTooSkewed",
    ErrorKind.NO_BUCKET: "NoSuchBucket",
    ErrorKind.WRONG_REGION: "PermanentRedirect TemporaryRedirect AuthorizationHeaderMalformed",
    ErrorKind.CHECKSUM: "BadDigest XAmzContentSHA256Mismatch XAmzContentChecksumMismatch",
    ErrorKind.CONFLICT: "ConditionalRequestConflict OperationAborted",
    ErrorKind.TOO_LARGE: "EntityTooLarge",
    ErrorKind.NO_SPACE: "QuotaExceeded InsufficientStorage XMinioStorageFull",
    ErrorKind.UNSUPPORTED: "NotImplemented",
    ErrorKind.BAD_REQUEST: "InvalidArgument InvalidBucketName InvalidRequest MalformedXML MethodNotAllowed "
    "MissingContentLength",
}.items() for code in codes.split()}
_BY_STATUS: Mapping[int, ErrorKind] = {
    301: ErrorKind.WRONG_REGION,
    307: ErrorKind.WRONG_REGION,
    401: ErrorKind.WRONG_CREDENTIALS,
    403: ErrorKind.ACCESS_DENIED,
    407: ErrorKind.UNREACHABLE,  # from a proxy
    408: ErrorKind.TIMEOUT,
    409: ErrorKind.CONFLICT,
    413: ErrorKind.TOO_LARGE,
    429: ErrorKind.THROTTLED,
    500: ErrorKind.SERVER_ERROR,
    501: ErrorKind.UNSUPPORTED,
    502: ErrorKind.UNAVAILABLE,
    503: ErrorKind.UNAVAILABLE,
    504: ErrorKind.UNAVAILABLE,
    507: ErrorKind.NO_SPACE,
}


def failed_reply(status: int, code: str, retry_after_s: float = 0.0) -> StoreError:
    """Return the StoreError for an error reply."""
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status)
    if kind is None:
        kind = ErrorKind.BAD_REQUEST if 400 <= status < 500 else ErrorKind.PROTOCOL
        kind = ErrorKind.SERVER_ERROR if status >= 500 else kind
    return StoreError(kind, f"status {status} {code if code in _BY_CODE else ''}".rstrip(), retry_after_s)


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing. `modified_s` is Unix time, None if unknown."""

    name: str
    size_bytes: int
    modified_s: float | None


@dataclass(frozen=True, slots=True)
class Listing:
    """One page of a listing. `next_token` is None on the last page."""

    objects: Sequence[Listed]
    next_token: str | None


class Document(NamedTuple):
    """The name of the root element, its fields, and the fields of each entry."""

    root: str
    fields: Mapping[str, str]
    entries: Sequence[Mapping[str, str]]


class _Builder(ElementTree.TreeBuilder):
    _depth = 0

    def start(self, tag: str, attributes: Mapping[str, str]) -> ElementTree.Element:
        self._depth += 1
        if self._depth > _DEPTH_MAX:
            raise StoreError(ErrorKind.PROTOCOL, "the reply is deeper than an S3 document")
        return super().start(tag, {})

    def end(self, tag: str) -> ElementTree.Element:
        self._depth -= 1
        return super().end(tag)


def read_document(reply: bytes) -> Document:
    """Parse `reply`. Raises StoreError if it is not an S3 document."""
    if _SUSPECT.search(reply) or reply.count(b"<") > _TAGS_MAX:
        raise StoreError(ErrorKind.PROTOCOL, "the reply is not an S3 document")
    # The encoding is fixed; otherwise the document could choose any of Python's codecs.
    parser = ElementTree.XMLParser(target=_Builder(), encoding="utf-8")
    try:
        parser.feed(reply)
        root = parser.close()
    except ElementTree.ParseError as error:
        raise StoreError(ErrorKind.PROTOCOL, "the reply is not XML") from error
    entries = [_fields(child) for child in root if _name(child) in _ENTRIES]
    if len(entries) > LISTED_MAX:
        raise StoreError(ErrorKind.PROTOCOL, f"the reply has more than {LISTED_MAX} entries")
    return Document(_name(root), _fields(root), entries)


def _fields(element: ElementTree.Element) -> dict[str, str]:
    """Return the texts in an element by name; of several with the same name, the first."""
    return {_name(child): child.text or "" for child in reversed(element)}


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _expect_root(reply: bytes, root: str) -> Document:
    """Parse `reply`. Raises StoreError if its root is not `root`, also for an error document sent with status 200."""
    document = read_document(reply)
    if document.root == "Error":
        raise failed_reply(500, document.fields.get("Code", ""))
    if document.root != root:
        raise StoreError(ErrorKind.PROTOCOL, f"the reply is not a {root}")
    return document


def error_code(reply: bytes) -> str:
    """Return the code in the body of an error reply, empty if there is none."""
    try:
        return read_document(reply).fields.get("Code", "")
    except StoreError:
        return ""


def read_removals(reply: bytes) -> list[str]:
    """Return the error kind of each object that was not removed. Raises StoreError."""
    entries = _expect_root(reply, "DeleteResult").entries
    return [failed_reply(400, entry.get("Code", "")).kind for entry in entries]


def read_session(reply: bytes) -> Credentials:
    """Return the keys of a session. Raises StoreError."""
    entries = _expect_root(reply, "CreateSessionResult").entries
    try:
        keys = entries[0]
        return Credentials(keys["AccessKeyId"], keys["SecretAccessKey"], keys["SessionToken"], is_session=True)
    except (LookupError, ValueError):
        raise StoreError(ErrorKind.PROTOCOL, "the reply has no keys of a session") from None


def read_versioning(reply: bytes) -> str:
    """Return the status in the versioning of a bucket, empty if there is none. Raises StoreError."""
    return _expect_root(reply, "VersioningConfiguration").fields.get("Status", "")


def read_listing(reply: bytes) -> Listing:
    """Return one page of a listing. Raises StoreError."""
    document = _expect_root(reply, "ListBucketResult")
    if "IsTruncated" not in document.fields:
        raise StoreError(ErrorKind.PROTOCOL, "the listing has no IsTruncated")
    sizes = [entry.get("Size", "0") for entry in document.entries]
    if not all(map(_SIZE.fullmatch, sizes)):
        raise StoreError(ErrorKind.PROTOCOL, "a size in the listing is not a number")
    objects = [
        Listed(entry.get("Key", ""), int(size), _unix_time(entry.get("LastModified", "")))
        for entry, size in zip(document.entries, sizes, strict=True)
    ]
    if document.fields["IsTruncated"] != "true":
        return Listing(objects, None)
    token = document.fields.get("NextContinuationToken", "")
    if not 0 < len(token) <= _TOKEN_LENGTH_MAX:
        raise StoreError(ErrorKind.PROTOCOL, f"the listing is truncated, and its token has {len(token)} characters")
    return Listing(objects, token)


def _unix_time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):  # the latter for years out of this machine's range
        return None
