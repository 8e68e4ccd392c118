"""The section `storage` of type `redis`: accepted values, the resulting options, and its documentation page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hicache.backends.redis.options import open_access
from hicache.backends.registry import check_backend
from hicache.config import load_config
from hicache.config.addresses import Address
from hicache.config.redis_storage import RedisStorage
from hicache.errors import ConfigError
from tests.certificates import make_certificates

PAGE = Path(__file__).resolve().parents[3] / "docs/backends/redis.md"


def loaded(tmp_path: Path, options: dict[str, Any]) -> RedisStorage:
    file = tmp_path / "hicache.yaml"
    file.write_text(yaml.safe_dump({"storage": {"type": "redis", "options": options}}))
    storage = load_config(file, environ={}, overrides={}).storage
    assert isinstance(storage, RedisStorage)
    return storage


def test_the_backend_gets_the_options_of_the_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD_OF_TESTS", "hush")
    options = loaded(tmp_path, {
        "sentinels": ["one", "two:7000"], "service": "cache", "ttl": "2h", "timeout": "250ms", "pipeline": "1MiB",
        "read_from": "replica", "connections": 3, "db": 4, "key_prefix": "c:", "username": "me", "capacity": "2GiB",
        "password_env": "PASSWORD_OF_TESTS", "tls": True, "tls_ca_file": str(make_certificates(tmp_path).ca_file),
        "tls_check_hostname": False,
    }).options  # fmt: skip
    check_backend("redis", options)
    made = open_access(options)
    assert (made.mode, options.service, options.capacity) == ("sentinel", "cache", 2 << 30)
    assert made.addresses == (Address("one", 26379), Address("two", 7000))
    assert (options.ttl, options.timeout, options.pipeline, options.connections) == (7200.0, 0.25, 1 << 20, 3)
    assert (options.read_from, made.db, options.key_prefix) == ("replica", 4, "c:")
    provider: Any = made.login.get()
    assert made.tls and provider.get_credentials() == (b"me", b"hush")
    assert "hush" not in repr(made)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "exactly one of url"),
        ({"url": "redis://h", "cluster": ["h"]}, "not url and cluster"),
        ({"unix_socket": "/run/socket", "tls": True}, "not supported with unix_socket"),
        ({"sentinels": ["h"]}, "sentinels and service: set both"),
        ({"url": "redis://h", "service": "s"}, "sentinels and service: set both"),
        ({"url": "redis://h", "read_from": "replica"}, "replicas and read_from"),
        ({"url": "redis://h", "read_from": "nowhere"}, "read_from: expected"),
        ({"url": "redis://h", "tls_ca_file": "x"}, "tls: true"),
        ({"url": "redis://h", "key_prefix": "a b"}, "key_prefix"),
        ({"url": "redis://h", "key_prefix": "{tag}"}, "key_prefix"),
        ({"url": "redis://h", "conections": 3}, "conections: unknown entry"),
        ({"url": "redis://h", "connections": 0}, "connections: must be"),
        ({"url": "redis://h", "ttl": -1.0}, "ttl: a duration"),
        ({"url": "redis://h", "timeout": 0}, "timeout"),
        ({"url": "redis://h", "db": -1}, "db: must be"),
        ({"url": "redis://h", "password": "hush"}, "password"),
        ({"url": "redis://me:hush@h"}, "must look like redis://host:6379/0.* without credentials"),
        ({"url": "redis://me:hu/sh@h"}, "without credentials"),
        ({"url": "redis://h/0?password=hush"}, "must look like"),
        ({"url": "http://h"}, "must look like"),
        ({"url": "redis://[::1"}, "must look like"),
        ({"url": "redis://h:99999"}, "the port is not"),
        ({"url": "redis://h/65536"}, "number of a database"),
        ({"cluster": []}, "cluster: expected at least 1"),
        ({"cluster": ["h:1"], "db": 1}, "a cluster only has database 0"),
        ({"cluster": ["h:1:2"]}, "must look like"),
        ({"cluster": ["h", "me:hush@h"]}, "without credentials"),
        ({"cluster": ["h"], "allowed_nodes": ["1.2.3.4/33"]}, "not valid in allowed_nodes"),
        ({"cluster": ["h"], "allowed_nodes": ["me:hush@h"]}, "not valid in allowed_nodes"),
        ({"sentinels": ["me:hush@h"], "service": "s"}, "without credentials"),
    ],
)
def test_invalid_values_are_refused_with_the_entrys_name(tmp_path: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as raised:
        loaded(tmp_path, options)
    assert "hush" not in str(raised.value)


def test_the_examples_in_the_documentation_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(examples) >= 3
    monkeypatch.setenv("REDIS_PASSWORD", "x")
    for example in examples:
        options = loaded(tmp_path, yaml.safe_load(example)["storage"]["options"]).options
        check_backend("redis", options)
        if options.password_file is None and options.credential_provider is None:  # they do not exist
            open_access(options)
