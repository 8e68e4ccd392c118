"""Requests carry the same signatures as those of botocore's own client: both send to one server, and are compared."""

from __future__ import annotations

import contextlib
import time
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from typing import Any

import botocore.config
import botocore.session
import pytest

from hicache.backends.s3.access import open_access
from hicache.backends.s3.client import S3Client
from hicache.config.s3_storage import S3StorageOptions
from hicache_lab.conformance import soon
from tests.backends.s3.bucket import options
from tests.backends.s3.stub import Answer, Request, StubS3, reply
from tests.waiting import WAIT_S

BUCKETS = ("pages", "pages--use1-az4--x-s3")
NAME, TYPE = "hicache/ab/cd", "application/octet-stream"
# Headers that are not a part of a signature, and differ between clients.
_OTHERS = frozenset({
    "accept-encoding", "amz-sdk-invocation-id", "amz-sdk-request", "content-length", "expect", "user-agent",
})
SESSION = (
    b"<CreateSessionResult><Credentials><SessionToken>a-session</SessionToken><SecretAccessKey>its-key</SecretAccessKey>"
    b"<AccessKeyId>ITSID</AccessKeyId><Expiration>2099-01-01T00:00:00Z</Expiration></Credentials></CreateSessionResult>"
)
Call = Callable[[], object]


def answer(request: Request) -> Answer | None:
    return reply(200, SESSION) if "session" in request.query else None


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubS3]:
    """A bucket that gives sessions, and credentials with a token in the environment."""
    for name in ("S3_ACCESS_KEY", "S3_SECRET_KEY", "S3_TOKEN"):
        monkeypatch.setenv(name, name.lower())
    with StubS3(request.param) as server:
        server.objects[NAME] = b"data"
        server.fault = answer
        yield server


def chosen(server: StubS3, **changes: Any) -> S3StorageOptions:
    return options(server.url, bucket=server.bucket, session_token_env="S3_TOKEN", **changes)


@pytest.fixture
def ours(place: StubS3) -> Iterator[S3Client]:
    client = S3Client(open_access(chosen(place), time.monotonic() + WAIT_S))
    yield client
    client.close()


@contextlib.contextmanager
def botocore_client(place: StubS3, *, signs_body: bool) -> Iterator[Any]:
    client: Any = botocore.session.Session().create_client(
        "s3", region_name="us-east-1", endpoint_url=place.url, aws_access_key_id="s3_access_key",
        aws_secret_access_key="s3_secret_key", aws_session_token="s3_token",
        config=botocore.config.Config(
            request_checksum_calculation="when_required", response_checksum_validation="when_required",
            s3={"addressing_style": "path", "payload_signing_enabled": signs_body},
        ),
    )
    # Like this, listings have the parameters of ours.
    client.meta.events.register_last("before-parameter-build.s3", lambda params, **_: params.pop("EncodingType", None))
    yield client
    client.close()


def sent(place: StubS3, call: Call, of: Callable[[Request], bool]) -> dict[str, str]:
    """Return the headers of the last of the requests of `call` that are meant by `of`."""
    before = len(place.received)
    call()
    found = [request for request in place.received[before:] if of(request)]
    return {name: value for name, value in found[-1].headers.items() if name not in _OTHERS}


def of_one_second(place: StubS3, call: Call, other: Call, of: Callable[[Request], bool]) -> list[dict[str, str]]:
    """Return the headers of both calls, made in the same second, which is a part of signatures."""
    for _ in range(20):
        both = [sent(place, one, of) for one in (call, other)]
        if both[0]["x-amz-date"] == both[1]["x-amz-date"]:
            return both
    raise AssertionError("no two calls were made in the same second")


@pytest.mark.parametrize("place", BUCKETS, indirect=True)
@pytest.mark.parametrize("verb", ["put", "get", "head", "delete", "list"])
def test_a_request_is_signed_as_botocores_client_signs_it(place: StubS3, ours: S3Client, verb: str) -> None:
    with botocore_client(place, signs_body=verb != "put") as theirs:
        at: dict[str, str] = {"Bucket": place.bucket, "Key": NAME}
        calls: dict[str, tuple[Call, Call]] = {
            "put": (lambda: ours.put(NAME, [memoryview(b"data")], if_absent=False, deadline=soon()),
                    lambda: theirs.put_object(**at, Body=b"data", ContentType=TYPE)),
            "get": (lambda: ours.get_start(NAME, 4, is_whole=False, deadline=soon()),
                    lambda: theirs.get_object(**at, Range="bytes=0-3")),
            "head": (lambda: ours.head(NAME, deadline=soon()), lambda: theirs.head_object(**at)),
            "delete": (lambda: ours.remove("gone", '"x"', deadline=soon()),
                       lambda: theirs.delete_object(Bucket=place.bucket, Key="gone", IfMatch='"x"')),
            "list": (lambda: ours.list("hicache/", None, 7, deadline=soon()),
                     lambda: theirs.list_objects_v2(Bucket=place.bucket, Prefix="hicache/", MaxKeys=7)),
        }
        made, expected = of_one_second(place, *calls[verb], lambda request: "session" not in request.query)
    assert made == expected
    key = "ITSID" if "--x-s3" in place.bucket else "s3_access_key"
    assert f"Credential={key}/" in made["authorization"]


@pytest.mark.parametrize("place", BUCKETS[1:], indirect=True)
def test_a_session_is_requested_as_botocores_client_requests_it(place: StubS3) -> None:
    def open_ours() -> None:
        client = S3Client(open_access(chosen(place), time.monotonic() + WAIT_S))
        client.head(NAME, deadline=soon())
        client.close()

    def open_theirs() -> None:
        with botocore_client(place, signs_body=True) as client:
            client.head_object(Bucket=place.bucket, Key=NAME)

    made, expected = of_one_second(place, open_ours, open_theirs, lambda request: "session" in request.query)
    assert made == expected
    assert "/s3express/aws4_request" in made["authorization"] and made["x-amz-security-token"] == "s3_token"


@pytest.mark.parametrize("place", BUCKETS, indirect=True)
def test_the_body_of_a_removal_is_signed_and_has_the_checksum_that_the_bucket_supports(
    place: StubS3, ours: S3Client
) -> None:
    """botocore writes another document, so this one is compared by its digests."""
    headers = sent(place, lambda: ours.remove_many([NAME], deadline=soon()), lambda request: request.method == "POST")
    body = place.received[-1].body
    crc32 = b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()
    is_directory = "--x-s3" in place.bucket
    assert headers.get("x-amz-checksum-crc32") == (crc32 if is_directory else None)
    assert ("content-md5" in headers) is not is_directory
    assert place.objects == {}
