"""What `hicache demo --storage` stores in: real servers, started for the demo and ended with it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ..config import read_tree
from ..devservers import KINDS, make_service
from ..errors import ConfigError

STORAGES = ("file", *KINDS, "file+s3")


@contextmanager
def demo_storage(kind: str, config_file: Path) -> Iterator[Path]:
    """Inside, storage of one of `STORAGES` is there, and a file holds the configuration of `config_file` that uses it.

    Credentials are in this process's environment meanwhile. Raises ConfigError and BackendUnavailable as servers do.
    """
    config = read_tree(config_file)
    base = config.get("storage")
    if kind == "file":
        with _written({**config, "storage": _file_part(base)}) as path:
            yield path
        return
    above = [_file_part(base)] if kind == "file+s3" else []
    with make_service("s3" if above else kind) as service, _environment(service.environ()):
        name, options = service.storage()
        storage: dict[str, Any] = {"type": name, "options": options}
        if above:
            storage = {"type": "levels", "options": {"levels": [*above, storage]}}
        with _written({**config, "storage": storage}) as path:
            yield path


def _file_part(section: Any) -> Any:
    """The section of the configuration if it is one of files, which may say where and how much."""
    if isinstance(section, dict) and section.get("type") == "file":
        return section
    raise ConfigError("demo: this --storage needs a configuration whose storage is of type file; leave -c out")


@contextmanager
def _written(config: dict[str, Any]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hicache-demo-") as folder:
        path = Path(folder, "demo.yaml")
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        yield path


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
