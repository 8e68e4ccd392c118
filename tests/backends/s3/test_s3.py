"""The S3 backend against the contract: on a real SeaweedFS, and on a server that knows no conditions."""

from __future__ import annotations

import pytest

from hicache.backends.s3 import S3Backend
from hicache.backends.s3.objects import object_name
from hicache.backends.testing import BackendContract, OpenStore, Store
from hicache.frame import FrameCodec
from tests.backends.s3.bucket import Bucket, open_s3, options
from tests.backends.s3.stub import StubS3, error


class TestS3(BackendContract):
    @pytest.fixture
    def open_store(self, bucket: Bucket, unique_prefix: str) -> OpenStore:
        return lambda codec: open_s3(bucket, unique_prefix, codec)


class TestWithoutConditions(BackendContract):
    """Pages are asked for before they are stored."""

    machine_examples = 5  # random walks, where only the way to store a page differs

    @pytest.fixture
    def open_store(self, stub: StubS3) -> OpenStore:
        stub.fault = lambda request: error(501, "NotImplemented") if "if-none-match" in request.headers else None

        def open_it(codec: FrameCodec) -> Store:
            def name(key: bytes) -> str:
                return object_name("test/", codec.namespace, key)

            return Store(
                S3Backend(codec, options(stub.url)),
                lambda key: stub.objects.get(name(key)),
                lambda key, data: stub.objects.update({name(key): data}),
            )

        return open_it
