"""Our signatures equal botocore's, and cover the request."""

from __future__ import annotations

import dataclasses
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import botocore.auth
import botocore.awsrequest
import botocore.compat
import botocore.credentials
from hypothesis import given
from hypothesis import strategies as st

from hicache.backends.s3.signing import EMPTY_SHA256, UNSIGNED_PAYLOAD, Credentials, signed_headers

MOMENT_S = 1_700_000_000.0
MOMENT = "20231114T221320Z"
CREDENTIALS = Credentials("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
_WORDS = st.text("abcXYZ019-_.~", min_size=1, max_size=20)


def by_botocore(
    credentials: Credentials, method: str, url: str, headers: dict[str, str], region: str, payload: str
) -> str:
    """Return botocore's `authorization` header for this time and digest of the body."""
    auth: Any = botocore.auth.S3SigV4Auth(
        botocore.credentials.Credentials(credentials.access_key, credentials.secret_key, credentials.session_token),
        "s3", region,
    )  # fmt: skip
    request: Any = botocore.awsrequest.AWSRequest(method, url, headers=headers)
    request.context["timestamp"] = MOMENT
    request.headers["X-Amz-Date"] = MOMENT
    request.headers["X-Amz-Content-SHA256"] = payload
    if credentials.session_token:
        request.headers["X-Amz-Security-Token"] = credentials.session_token
    signature = auth.signature(auth.string_to_sign(request, auth.canonical_request(request)), request)
    signed = auth.signed_headers(auth.headers_to_sign(request))
    return f"AWS4-HMAC-SHA256 Credential={auth.scope(request)}, SignedHeaders={signed}, Signature={signature}"


def ours(
    credentials: Credentials, method: str, url: str, headers: dict[str, str], region: str, payload: str
) -> str:
    parts = urlsplit(url)
    signed = signed_headers(
        credentials, region, method, parts.path, parts.query, {"host": parts.netloc, **headers},
        payload_sha256=payload, now_s=MOMENT_S,
    )  # fmt: skip
    return signed["authorization"]


@given(
    method=st.sampled_from(["GET", "HEAD", "PUT", "POST", "DELETE"]),
    path=st.lists(_WORDS, min_size=1, max_size=4).map("/".join),
    query=st.dictionaries(_WORDS, st.text(min_size=1, max_size=20), max_size=3),
    headers=st.dictionaries(st.sampled_from(["if-match", "if-none-match", "range", "content-type"]), _WORDS),
    region=st.sampled_from(["us-east-1", "eu-central-1"]),
    token=st.none() | _WORDS,
)
def test_a_signature_equals_that_of_botocore(
    method: str, path: str, query: dict[str, str], headers: dict[str, str], region: str, token: str | None
) -> None:
    payload = EMPTY_SHA256 if method == "GET" else UNSIGNED_PAYLOAD
    url = f"http://127.0.0.1:8333/{path}" + (f"?{urlencode(sorted(query.items()), quote_via=quote)}" if query else "")
    credentials = dataclasses.replace(CREDENTIALS, session_token=token)
    expected = by_botocore(credentials, method, url, headers, region, payload)
    assert ours(credentials, method, url, headers, region, payload) == expected


def test_a_signature_follows_a_change_of_day_and_of_credentials() -> None:
    def sign(credentials: Credentials, now_s: float) -> str:
        made = signed_headers(
            credentials, "us-east-1", "GET", "/a", "", {"host": "h"}, payload_sha256=EMPTY_SHA256, now_s=now_s
        )
        return made["authorization"]

    other = dataclasses.replace(CREDENTIALS, secret_key="other")
    made = [sign(c, s) for c in (CREDENTIALS, other) for s in (MOMENT_S, MOMENT_S + 86_400)]
    assert len(set(made)) == 4
    assert sign(CREDENTIALS, MOMENT_S) == made[0]
