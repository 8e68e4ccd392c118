"""The ready configurations: the files of `configs/` in a clone, `hicache/configs` in a wheel."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

# Shorter names for some files.
_ALIASES = {"file": "single-node-file", "sharded": "sharded-file"}


@functools.cache
def ready_files() -> Mapping[str, Path]:
    """Return the ready configurations, sorted by name: the file's name without `.yaml`, or a shorter one."""
    package = Path(__file__).parents[1]
    folder = package / "configs" if (package / "configs").is_dir() else package.parent / "configs"
    found = {path.stem: path for path in folder.glob("*.yaml")}
    found |= {alias: found[name] for alias, name in _ALIASES.items() if name in found}
    return dict(sorted(found.items()))
