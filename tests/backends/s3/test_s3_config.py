"""The configuration of S3 storage: accepted values, and the resulting options of the backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hicache.backends.registry import check_backend
from hicache.config import HiCacheConfig, load_config
from hicache.config.s3_storage import S3Storage, S3StorageOptions
from hicache.errors import ConfigError


def load(folder: Path, options: str) -> HiCacheConfig:
    path = folder / "test.yaml"
    path.write_text(f"storage: {{type: s3, options: {{{options}}}}}")
    return load_config(path, environ={}, overrides={})


def test_a_short_section_is_enough(tmp_path: Path) -> None:
    config = load(tmp_path, "bucket: pages").storage
    assert isinstance(config, S3Storage)
    check_backend("s3", config.options)
    assert config.options.timeout == 5.0


def test_all_options_can_be_set(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "bucket: pages, prefix: kv/, capacity: 2TiB, max_age: 30d, endpoint_url: 'http://127.0.0.1:8333', "
        "region: eu-west-1, path_style: true, credentials_file: /etc/s3, profile: p, ca_file: /etc/ca, "
        "proxy: 'http://proxy:3128', connections: 3, timeout: 250ms",
    ).storage
    assert isinstance(config, S3Storage)
    assert config.options.model_dump() == {
        "bucket": "pages", "prefix": "kv/", "capacity": 2 << 40, "max_age": 2_592_000.0, "endpoint_url": "http://127.0.0.1:8333",
        "region": "eu-west-1", "path_style": True, "access_key_env": None, "secret_key_env": None,
        "session_token_env": None, "credentials_file": Path("/etc/s3"), "profile": "p", "ca_file": Path("/etc/ca"),
        "proxy": "http://proxy:3128", "proxy_env": None,
        "connections": 3, "timeout": 0.25,
    }


def test_a_prefix_always_ends_with_a_slash() -> None:
    assert S3StorageOptions(bucket="pages", prefix="kv").prefix == "kv/"
    assert S3StorageOptions(bucket="pages", prefix="").prefix == ""


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"bucket": None}, "bucket"), ({"bucket": ""}, "bucket"), ({"bucket": "a/b"}, "bucket"),
     ({"prefix": "a b"}, "prefix"), ({"prefix": "../x"}, "prefix"), ({"prefix": "/x"}, "prefix"),
     ({"endpoint_url": "127.0.0.1:80"}, "endpoint_url"), ({"endpoint_url": "http://me:s3cr3t@host"}, "endpoint_url"),
     ({"endpoint_url": "http://127.0.0.1:99999"}, "endpoint_url"), ({"endpoint_url": "http://[::1"}, "endpoint_url"),
     ({"endpoint_url": "http://h/\r\nx: y"}, "endpoint_url"), ({"endpoint_url": "http://h\n"}, "endpoint_url"),
     ({"proxy": "https://p:1"}, "proxy"), ({"client": "boto3"}, "there is one client for S3"),
     ({"proxy": "http://me:s3cr3t@p:1"}, "proxy"),
     ({"region": "a\nb"}, "region"), ({"region": "us-east-1\n"}, "region"), ({"region": ""}, "region"),
     ({"connections": 0}, "connections"), ({"connections": True}, "connections"), ({"capacity": 0}, "capacity"),
     ({"timeout": 0}, "timeout"), ({"timeout": "soon"}, "timeout"),
     ({"access_key_env": "KEY"}, "secret_key_env"), ({"secret_key": "s3cr3t"}, "secret_key"),
     ({"access_key_env": "s3cr3t/x", "secret_key_env": "B"}, "access_key_env"),
     ({"access_key_env": "A", "secret_key_env": "B", "credentials_file": "/x"}, "not both"),
     ({"proxy_env": "http://me:s3cr3t@p:1"}, "proxy_env"), ({"proxy": "http://p", "proxy_env": "P"}, "not both")],
)
def test_invalid_values_are_refused_by_name_and_without_secrets(
    tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        load(tmp_path, json.dumps({"bucket": "pages", **changes})[1:-1])
    assert "s3cr3t" not in str(caught.value)
