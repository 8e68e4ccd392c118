"""The S3 backend against the contract on a real SeaweedFS, with each client."""

from __future__ import annotations

import pytest

from hicache.backends.testing import BackendContract, OpenStore
from tests.backends.s3.bucket import Bucket, open_s3

# Random walks where only the way to the server differs.
_FEW = 5


class TestDirectClient(BackendContract):
    @pytest.fixture
    def open_store(self, bucket: Bucket, unique_prefix: str) -> OpenStore:
        return lambda codec: open_s3(bucket, unique_prefix, codec)


class TestBotoClient(BackendContract):
    machine_examples = _FEW

    @pytest.fixture
    def open_store(self, bucket: Bucket, unique_prefix: str) -> OpenStore:
        return lambda codec: open_s3(bucket, unique_prefix, codec, client="boto3")


class TestWithoutConditionalPut(BackendContract):
    """Pages are asked for before they are stored, for servers that know no conditions."""

    machine_examples = _FEW

    @pytest.fixture
    def open_store(self, bucket: Bucket, unique_prefix: str) -> OpenStore:
        return lambda codec: open_s3(bucket, unique_prefix, codec, conditional_put=False)
