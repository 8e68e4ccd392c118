"""Publishers from the section `events` of a configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zmq

from hicache.config import EventsConfig
from hicache.errors import ConfigError
from hicache.events import EventStream
from hicache.events.factory import create_publisher
from hicache.events.security import check_events


def config(**section: Any) -> EventsConfig:
    return EventsConfig(**section)


def private_file(path: Path, text: str) -> str:
    path.touch(mode=0o600)
    path.write_text(text)
    return str(path)


def test_the_section_becomes_a_publisher() -> None:
    loopback = "tcp://127.0.0.1:*"
    assert create_publisher(config(), EventStream(1)) is None
    publisher = create_publisher(config(endpoint=loopback, replay_endpoint=loopback), EventStream(1))
    assert publisher is not None and publisher.replay_endpoint is not None
    with publisher:
        assert publisher.endpoint.startswith("tcp://127.0.0.1:") and publisher.statistics().alive


def test_keys_are_read_from_files(tmp_path: Path) -> None:
    public, secret = zmq.curve_keypair()
    other, _ = zmq.curve_keypair()
    section = {
        "endpoint": "tcp://*:*",
        "curve_secret_key_file": private_file(tmp_path / "secret", f"{secret.decode()}\n"),
        "curve_client_keys_file": private_file(tmp_path / "clients", f"{public.decode()}\n\n{other.decode()}\n"),
    }
    publisher = create_publisher(config(**section), EventStream(1))
    assert publisher is not None and publisher.close()
    (tmp_path / "secret").chmod(0o644)
    with pytest.raises(ConfigError, match=r"CURVE secret key file.*chmod 600"):
        create_publisher(config(**section), EventStream(1))
    private_file(tmp_path / "clients", "")
    (tmp_path / "secret").chmod(0o600)
    with pytest.raises(ConfigError, match="list of CURVE client keys is empty"):
        create_publisher(config(**section), EventStream(1))


@pytest.mark.parametrize(
    ("section", "message"),
    [({"endpoint": "tcp://0.0.0.0:1"}, "can be reached by other users or hosts"),
     ({"endpoint": "tcp://127.0.0.1:1", "curve_secret_key_file": "/no/s", "curve_client_keys_file": "/no/c"},
      "No such file")],
)
def test_config_check_rejects_the_same_configurations_as_the_start(section: dict[str, object], message: str) -> None:
    for call in (lambda: check_events(config(**section)), lambda: create_publisher(config(**section), EventStream(1))):
        with pytest.raises(ConfigError, match=message):
            call()


@pytest.mark.parametrize(
    ("section", "message"),
    [({"replay_endpoint": "tcp://127.0.0.1:5558"}, "set both"),
     ({"endpoint": "udp://x"}, "the endpoint is not valid"),
     ({"endpoint": "tcp://127.0.0.1:99999"}, "port is not a number from 0 to 65535"),
     ({"endpoint": "tcp://127.0.0.1:1", "replay_endpoint": "tcp://127.0.0.1:65536"}, "port is not a number"),
     ({"curve_secret_key_file": "x"}, "both or neither"), ({"buffer": 0}, "buffer")],
)
def test_an_invalid_section_is_rejected(section: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**section)


def test_without_the_extra_the_error_names_it() -> None:
    code = (
        "import sys; sys.modules['zmq'] = None\n"
        "from hicache.config import EventsConfig\n"
        "from hicache.events import EventStream\n"
        "from hicache.events.factory import create_publisher\n"
        "create_publisher(EventsConfig(endpoint='tcp://127.0.0.1:1'), EventStream(1))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert "MissingPackage: events need the package zmq; install the extra events, in a clone by pip" in result.stderr


def test_events_are_recorded_and_checked_without_the_extra() -> None:
    code = (
        "import sys; sys.modules['zmq'] = sys.modules['msgspec'] = None\n"
        "import hicache.events, hicache.cache.recorder\n"
        "from hicache.config import EventsConfig\n"
        "from hicache.events.security import check_events\n"
        "check_events(EventsConfig(endpoint='tcp://127.0.0.1:1'))\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=300, check=True)
