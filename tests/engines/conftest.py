"""Models for the tests with real engines. `make test-engines` runs these tests in `.venv-engines`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from .model import save_model


@pytest.fixture(autouse=True)
def log() -> Iterator[logging.Logger]:
    """HiCache's logger, whose settings a connector may change."""
    logger = logging.getLogger("hicache")
    settings = logger.handlers, logger.level, logger.propagate
    yield logger
    logger.handlers, _, logger.propagate = settings
    logger.setLevel(settings[1])


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama."""
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def other_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return save_model(tmp_path_factory.mktemp("other-llama"), seed=1)


@pytest.fixture(scope="session")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with sliding-window layers and one full-attention layer."""
    return save_model(tmp_path_factory.mktemp("hybrid"), "windows")
