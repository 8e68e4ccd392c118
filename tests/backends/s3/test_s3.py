"""The S3 backend against the contract on a real SeaweedFS."""

from __future__ import annotations

import pytest

from hicache.backends.testing import BackendContract, OpenStore
from tests.backends.s3.bucket import Bucket, open_s3


class TestS3(BackendContract):
    @pytest.fixture
    def open_store(self, bucket: Bucket, unique_prefix: str) -> OpenStore:
        return lambda codec: open_s3(bucket, unique_prefix, codec)


class TestWithoutConditionalPut(BackendContract):
    """Pages are asked for before they are stored, for servers that know no conditions."""

    machine_examples = 5  # random walks, where only the way to store a page differs

    @pytest.fixture
    def open_store(self, bucket: Bucket, unique_prefix: str) -> OpenStore:
        return lambda codec: open_s3(bucket, unique_prefix, codec, conditional_put=False)
