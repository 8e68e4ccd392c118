"""The side door to a bucket: boto3, which shares no code with the tested client; and stores on a stub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hicache.backends.s3 import S3Driver
from hicache.backends.s3.driver import object_name
from hicache.backends.store import Store
from hicache.config.s3_storage import S3StorageOptions
from hicache.frame import FrameCodec
from hicache_lab.conformance import HIT, NAMESPACE, PAYLOAD_BYTES, STORED, Subject, load, store_chain, store_of
from tests.backends.s3.stub import StubS3
from tests.tuned import tuned

CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
PAGE = CODEC.frame_bytes
# For servers that answer, but may be slow on a busy machine.
PATIENCE_S = 120.0
# Backends on the stub; closed after each test.
OPENED: list[Store] = []


class Bucket:
    """One bucket, as boto3 sees it."""

    def __init__(self, url: str, name: str, client: Any) -> None:
        self.url, self.name, self.client = url, name, client

    def read(self, name: str) -> bytes | None:
        try:
            body = self.client.get_object(Bucket=self.name, Key=name)["Body"]
        except self.client.exceptions.NoSuchKey:
            return None
        with body:
            return bytes(body.read())

    def write(self, name: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=name, Body=data)

    def names(self, prefix: str) -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def close(self) -> None:
        self.client.close()


def options(url: str, prefix: str = "test/", **changes: Any) -> S3StorageOptions:
    """Return options for a store at `url`, with credentials from the environment."""
    chosen: dict[str, Any] = {
        "bucket": "pages", "prefix": prefix, "endpoint_url": url, "access_key_env": "S3_ACCESS_KEY",
        "secret_key_env": "S3_SECRET_KEY", "region": "us-east-1", "open_timeout": PATIENCE_S,
    }
    return tuned(S3StorageOptions, **(chosen | changes))


def open_s3(bucket: Bucket, prefix: str, codec: FrameCodec = CODEC, **changes: Any) -> Subject:
    """Open a backend below `prefix`, with the side door to its objects."""

    def name(key: bytes) -> str:
        return object_name(prefix, codec.namespace, key)

    return Subject(
        store_of(S3Driver, codec, options(bucket.url, prefix, bucket=bucket.name, **changes)),
        lambda key: bucket.read(name(key)),
        lambda key, data: bucket.write(name(key), data),
    )


def open_on(stub: StubS3, codec: FrameCodec = CODEC, **changes: Any) -> Subject:
    """Open a store on the stub, with the stub's dictionary as the side door. Closed after the test."""
    backend = store_of(S3Driver, codec, options(stub.url, **{"timeout": PATIENCE_S, "connections": 4, **changes}))
    OPENED.append(backend)

    def name(key: bytes) -> str:
        return object_name("test/", codec.namespace, key)

    def write(key: bytes, data: bytes) -> None:
        stub.objects[name(key)] = data

    return Subject(backend, lambda key: stub.objects.get(name(key)), write)


@contextlib.contextmanager
def opened(chosen: S3StorageOptions, codec: FrameCodec = CODEC) -> Iterator[Subject]:
    """Open a store without a side door, and close it."""
    with contextlib.closing(store_of(S3Driver, codec, chosen)) as backend:
        yield Subject(backend, lambda key: None, lambda key, data: None)


def moves_pages(store: Subject, keys: list[bytes]) -> None:
    """Store pages and read them back, without an error."""
    assert store_chain(store, keys) == [STORED] * len(keys)
    assert load(store, keys) == [HIT] * len(keys)
    assert errors(store) == {}


def name(key: bytes) -> str:
    return object_name("test/", NAMESPACE, key)


def errors(store: Subject) -> dict[str, int]:
    return dict(store.backend.statistics().errors)
