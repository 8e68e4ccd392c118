"""Daemons for tests: one that the tests of a module share, and separate ones for single tests."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.daemons import Client, Daemon, EngineMemory


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon over a memory store, shared by the tests of a module."""
    with tempfile.TemporaryDirectory(prefix="hc-") as folder, Daemon(Path(folder)) as made:
        yield made


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    """A connection to the shared daemon, with the namespace of the tests open."""
    with contextlib.closing(daemon.client()) as made:
        assert made.open()[0] == 200
        yield made


@pytest.fixture
def start(scratch: Path) -> Iterator[Callable[..., Daemon]]:
    """A function that starts a daemon with additional entries of the section `daemon`, and whole other sections."""
    made: list[Daemon] = []

    def begin(daemon: dict[str, Any] | None = None, **sections: Any) -> Daemon:
        made.append(Daemon(scratch, daemon, **sections))
        return made[-1].start()

    yield begin
    for one in made:
        one.kill()


@pytest.fixture
def memory() -> Iterator[EngineMemory]:
    """Shared memory of this process, which acts as the engine."""
    made = EngineMemory()
    yield made
    made.close()
