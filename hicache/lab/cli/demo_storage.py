"""Storage for `hicache demo --storage`: real servers, started for the demo and stopped with it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from ...config import read_tree
from ...errors import ConfigError
from ..devservers import KINDS, make_service

STORAGES = ("file", *KINDS, "file+s3")


@contextmanager
def demo_storage(kind: str, config_file: Path) -> Iterator[Path]:
    """Start one of `STORAGES`, and yield a file with the configuration of `config_file` that uses it.

    Credentials are in this process's environment until the end. Raises ConfigError and BackendUnavailable as servers
    do.
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
    """Return the section of the configuration, which must be of type file: it sets the directory and the size."""
    if isinstance(section, dict) and section.get("type") == "file":
        return section
    raise ConfigError("demo: this --storage needs a configuration with storage.type: file; remove -c")


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
