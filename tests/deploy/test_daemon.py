"""configs/daemon.yaml works unchanged, except for the port and the directories of the test."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.deploy.served import PORT, Place, served
from tests.test_ready_configs import carries_pages

pytestmark = pytest.mark.servers


def test_the_ready_configuration_works(repository: Path, tmp_path: Path) -> None:
    path = repository / "configs/daemon.yaml"
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["daemon"]["listen"] == f"127.0.0.1:{PORT}"
    place = Place.make(tmp_path)
    settings = ["--set", f"daemon.socket={place.socket}", "--set", f"daemon.listen=127.0.0.1:{place.port}"]
    engine = tmp_path / "engine.yaml"
    engine.write_text(f"device: {{}}\nstorage: {{type: remote, options: {{socket: {place.socket}}}}}\n")
    with served(place, ["serve", "-c", str(path), *settings], {"HOME": str(tmp_path)}):
        pages = ("/", "/livez", "/readyz", "/statusz", "/openapi.json")
        assert {page: place.get(page, port=place.port) for page in pages} == dict.fromkeys(pages, 200)
        assert carries_pages(engine)
    assert list((tmp_path / ".cache/hicache/pages").rglob("*"))
