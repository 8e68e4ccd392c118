"""Addresses: one place says which are valid, and every entry of the configuration and every API that takes one asks it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hicache.config import EventsConfig, HiCacheConfig, MooncakeStorageOptions
from hicache.config.addresses import (
    HTTP_PORTS,
    Address,
    Url,
    check_host,
    check_port,
    split_address,
    split_endpoint,
    split_url,
)
from hicache.config.s3_storage import S3StorageOptions
from hicache.errors import ConfigError, InvalidInput
from hicache.events import EventStream
from hicache.events.publisher import EventPublisher
from hicache.events.subscriber import EventFollower
from hicache_lab.devservers import KINDS, make_service

BAD_PORTS = ["99999", "65536", "-1", "0x50", "80 ", "+80", "1e3", "", "٨٠", "8080808080", "80\n", "²"]
BAD_HOSTS = ["", "a b", "-x", "x-", "a..b", "x" * 64, "a.b:c", "é.example", "1.2.3", "256.1.1.1", "127.1", "a\0b",
             "[::1"]


def refused(section: str, entries: dict[str, Any]) -> bool:
    try:
        HiCacheConfig.model_validate({section: entries})
    except ValidationError:
        return True
    return False


def storage_refused(kind: str, **options: Any) -> bool:
    return refused("storage", {"type": kind, "options": options})


@pytest.mark.parametrize("port", BAD_PORTS)
def test_a_port_that_is_not_valid_is_refused_wherever_a_configuration_names_one(port: str) -> None:
    at = f"127.0.0.1:{port}"
    assert refused("metrics", {"port": port})
    assert refused("events", {"endpoint": f"tcp://{at}"})
    assert refused("events", {"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": f"tcp://{at}"})
    assert storage_refused("redis", url=f"redis://{at}") and storage_refused("redis", url=f"rediss://{at}/0")
    assert storage_refused("redis", cluster=[at]) and storage_refused("redis", sentinels=[at], service="x")
    assert storage_refused("redis", url="redis://h", replicas=[at], read_from="replica")
    assert storage_refused("s3", bucket="pages", endpoint_url=f"http://{at}")
    assert all(storage_refused("mooncake", **{name: at}) for name in ("master", "daemon", "admin", "metadata"))
    assert storage_refused("mooncake", metadata=f"http://{at}/metadata")


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_a_host_that_is_not_valid_is_refused_wherever_a_configuration_names_one(host: str) -> None:
    assert refused("metrics", {"host": host})
    assert refused("events", {"endpoint": f"tcp://{host}:1"})
    assert storage_refused("redis", url=f"redis://{host}:1") and storage_refused("redis", cluster=[f"{host}:1"])
    assert storage_refused("s3", bucket="pages", endpoint_url=f"https://{host}:1")
    assert storage_refused("mooncake", master=f"{host}:1") and storage_refused("mooncake", host=host)


def test_common_ways_to_write_an_address_are_accepted() -> None:
    HiCacheConfig.model_validate({"events": {"endpoint": "tcp://*:*", "replay_endpoint": "tcp://[::1]:0"}})
    for options in (
        {"url": "redis://redis_1"}, {"url": "rediss://[::1]:6380/3"}, {"cluster": ["10.0.0.1:7000", "node-2.example."]},
    ):
        HiCacheConfig.model_validate({"storage": {"type": "redis", "options": options}})
    for url in ("https://s3.example.com:9000/base/", "http://[fe80::1%eth0]:80", "http://localhost"):
        HiCacheConfig.model_validate({"storage": {"type": "s3", "options": {"bucket": "pages", "endpoint_url": url}}})
    for metadata in ("P2PHANDSHAKE", "http://10.0.0.1:8080/metadata", "etcd://10.0.0.1:2379;10.0.0.2:2379", "h:2379"):
        HiCacheConfig.model_validate({"storage": {"type": "mooncake", "options": {"metadata": metadata}}})


def test_an_address_has_its_parts() -> None:
    assert split_url("https://[::1]/base", HTTP_PORTS) == Url("https", "::1", 443, "/base")
    assert split_endpoint("tcp://*:*", listens=True) == Address("*", 0)
    assert split_endpoint("tcp://*:5557", listens=True) == Address("*", 5557)
    assert split_endpoint("ipc:///run/kv", listens=False) == Path("/run/kv")


@pytest.mark.parametrize("port", ["99999", "65536", "65616", "-1", "1e3", "٨٠"])
def test_a_publisher_and_a_follower_refuse_a_port_that_is_not_valid_before_they_use_it(port: str) -> None:
    endpoint, free, known = f"tcp://127.0.0.1:{port}", "tcp://127.0.0.1:*", "tcp://127.0.0.1:1"
    for use in (
        lambda: EventPublisher(EventStream(1), EventsConfig(endpoint=endpoint)),
        lambda: EventPublisher(EventStream(1), EventsConfig(endpoint=free, replay_endpoint=endpoint)),
        lambda: EventFollower(endpoint, known),
        lambda: EventFollower(known, endpoint),
    ):
        with pytest.raises(ConfigError, match="port is not a number"):
            use()


def test_a_follower_rejects_a_wildcard_address() -> None:
    for endpoint in ("tcp://127.0.0.1:*", "tcp://127.0.0.1:0", "tcp://*:5557"):
        with pytest.raises(ConfigError, match="cannot connect"):
            EventFollower(endpoint, "tcp://127.0.0.1:1")


@pytest.mark.parametrize("url", ["http://[", "http://h:99999", "http://h:x", "http://", "ftp://h", "http://h?q", "http://é"])
def test_a_store_refuses_a_url_that_is_not_valid_with_a_typed_error(url: str) -> None:
    with pytest.raises(ConfigError, match="endpoint_url"):
        S3StorageOptions(bucket="pages", endpoint_url=url)


@pytest.mark.parametrize("address", ["h:٨٠", "h", "h:0", ":1", "a b:1", "h:99999"])
def test_a_mooncake_store_refuses_an_address_that_is_not_valid(address: str) -> None:
    with pytest.raises(ConfigError, match="master: "):
        MooncakeStorageOptions(master=address)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("port", [0, -1, 65536, 1 << 70])
def test_a_development_server_refuses_a_port_that_is_not_valid(kind: str, port: int) -> None:
    with pytest.raises(InvalidInput, match="port is not a number from 1 to 65535"):
        make_service(kind, port=port)


def test_no_message_quotes_what_may_be_a_password() -> None:
    for url in ("redis://me:hunter2@h", "redis://me:hunter2", "redis://hunter2 x/0", "hunter2"):
        with pytest.raises(ValidationError) as caught:
            HiCacheConfig.model_validate({"storage": {"type": "redis", "options": {"url": url}}})
        assert "hunter2" not in str(caught.value)


_texts = st.text(max_size=30) | st.text(alphabet="[]:/@.*%0159atcphi\0\n", max_size=24)


@given(text=_texts | _texts.map("tcp://{}".format) | _texts.map("http://{}".format) | _texts.map("ipc:///{}".format))
def test_any_text_is_an_address_or_refused_with_a_value_error(text: str) -> None:
    for split in (
        lambda: check_host(text),
        lambda: check_port(text),
        lambda: split_address(text, 1),
        lambda: split_url(text, HTTP_PORTS),
        lambda: split_endpoint(text, listens=True),
    ):
        try:
            split()
        except ValueError as error:
            assert str(error).isascii()
