"""The side door to a bucket: boto3, which shares no code with the client that is tested."""

from __future__ import annotations

from typing import Any

import botocore.config
import botocore.exceptions
import botocore.session

from hicache.backends.s3 import S3Backend, S3Options
from hicache.backends.s3.names import object_name
from hicache.backends.testing import NAMESPACE, PAYLOAD_BYTES, Store
from hicache.frame import FrameCodec

ACCESS_KEY, SECRET_KEY = "tests", "tests-secret"
BUCKET = "pages"
CODEC = FrameCodec(NAMESPACE, PAYLOAD_BYTES)
PAGE = CODEC.frame_bytes


class Bucket:
    """One bucket, as boto3 sees it."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = url, name
        self.client: Any = botocore.session.Session().create_client(
            "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY, config=botocore.config.Config(
                s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
        )  # fmt: skip

    def try_to_make(self) -> bool:
        """Make the bucket; True if it is there."""
        try:
            self.client.create_bucket(Bucket=self.name)
        except botocore.exceptions.ClientError as error:
            return str(error.response["Error"]["Code"]).startswith("BucketAlready")
        except botocore.exceptions.BotoCoreError:
            return False
        return True

    def try_to_store(self, name: str) -> bool:
        """Store an object; False if the store cannot yet."""
        try:
            self.client.put_object(Bucket=self.name, Key=name, Body=b"x" * 8192)
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
            return False
        return True

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


def options(url: str, prefix: str = "test/", **changes: Any) -> S3Options:
    """Options for a store at `url`, with the credentials of the tests."""
    chosen: dict[str, Any] = {
        "bucket": BUCKET, "prefix": prefix, "endpoint_url": url, "access_key_env": "HICACHE_TEST_S3_KEY",
        "secret_key_env": "HICACHE_TEST_S3_SECRET", "region": "us-east-1",
    }  # fmt: skip
    return S3Options(**(chosen | changes))


def open_s3(bucket: Bucket, prefix: str, codec: FrameCodec = CODEC, **changes: Any) -> Store:
    """A backend below `prefix`, with the side door to its objects."""

    def name(key: bytes) -> str:
        return object_name(prefix, codec.namespace, key)

    return Store(
        S3Backend(codec, options(bucket.url, prefix, **changes)),
        lambda key: bucket.read(name(key)),
        lambda key, data: bucket.write(name(key), data),
    )
