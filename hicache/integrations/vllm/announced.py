"""The layouts of an engine's workers, announced to the scheduler's process: a file of JSON per rank in /dev/shm.

vLLM makes the scheduler's connector after all workers have registered their caches, so the files exist then. vLLM's own
handshake does not do: under MultiConnector all connectors get that of the first one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from ...errors import ConfigError
from ...shared_file import open_file
from ...shared_memory import FOLDER

_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    """A worker's blocks: their form, the bytes and a digest of the settings of its layers in the order of the page, and
    the memory that it shares."""

    form: str
    layer_bytes: tuple[int, ...]
    specs: str
    memory: tuple[int, int]


_FORM = TypeAdapter(WorkerLayout)


def announce(engine: str, rank: int, layout: WorkerLayout) -> None:
    """Write the file of `rank`, or replace that of an ended engine with this name. Raises SharedMemoryError if the path
    holds a file of another user."""
    path = _path(engine, rank)
    try:
        os.close(open_file(path))
        path.unlink()
    except FileNotFoundError:
        pass
    with open(open_file(path, creates=True), "wb") as file:
        file.write(_FORM.dump_json(layout))


def announced(engine: str, ranks: int) -> WorkerLayout:
    """Return the layout of all ranks, and remove the files. Raises ConfigError unless all are equal, SharedMemoryError
    for a file of another user."""
    found = [one for one in (_take(_path(engine, rank)) for rank in range(ranks)) if one is not None]
    if len(found) != ranks:
        raise ConfigError(
            f"only {len(found)} of {ranks} workers announced their blocks in {FOLDER}; run all workers of an engine on "
            "one node with one /dev/shm, with vLLM 0.32 or later"
        )
    if len(set(found)) > 1:
        raise ConfigError(f"the workers have different blocks or memory: {'; '.join(sorted(map(str, set(found))))}")
    return found[0]


def _take(path: Path) -> WorkerLayout | None:
    try:
        with open(open_file(path), "rb") as file:
            layout = _FORM.validate_json(file.read(_BYTES_MAX))
        path.unlink()
    except FileNotFoundError:
        return None
    return layout


def _path(engine: str, rank: int) -> Path:
    return FOLDER / f"hicache-layout.{engine}.{rank}"
