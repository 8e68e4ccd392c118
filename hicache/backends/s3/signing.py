"""Signature Version 4 of the AWS API, for the few requests that a store of pages makes.

The algorithm is in "Authenticating Requests (AWS Signature Version 4)" of the Amazon S3 API reference. botocore also
implements it, but takes 0.1 ms per request, as long as a page of 256 KiB takes to arrive. Tests compare the two.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"
_VISIBLE = re.compile("[!-~]+")
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Credentials:
    """The keys of one identity. `repr` shows only the access key. Raises ValueError if the access key or the token is
    not visible ASCII, or the secret key is not printable."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        sent = (self.access_key, "-" if self.session_token is None else self.session_token)
        if not all(map(_VISIBLE.fullmatch, sent)) or not str.isprintable(self.secret_key):
            raise ValueError("contain characters that are not valid in a key; remove line ends and spaces")


def signed_headers(
    credentials: Credentials,
    region: str,
    method: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    *,
    payload_sha256: str,
    now_s: float | None = None,
) -> dict[str, str]:
    """Return `headers` plus the headers that authenticate the request, all signed. `now_s` is Unix time, by default
    now.

    REQUIRES: names of headers are lower-case; `path` and `query` are encoded; names in `query` are sorted.
    """
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
    signed = {**headers, "x-amz-content-sha256": payload_sha256, "x-amz-date": moment}
    if credentials.session_token is not None:
        signed["x-amz-security-token"] = credentials.session_token
    names = sorted(signed)
    listed = ";".join(names)
    lines = "".join(f"{name}:{signed[name]}\n" for name in names)
    request = f"{method}\n{path}\n{query}\n{lines}\n{listed}\n{payload_sha256}"
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    to_sign = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}".encode()
    signature = hmac.digest(_signing_key(credentials.secret_key, moment[:8], region), to_sign, "sha256").hex()
    signed["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, SignedHeaders={listed}, Signature={signature}"
    )
    return signed


@functools.lru_cache(maxsize=8)
def _signing_key(secret_key: str, day: str, region: str) -> bytes:
    key = f"AWS4{secret_key}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key
