"""Models for the tests with real engines. `make test-engines` runs these tests in `.venv-engines`."""

from __future__ import annotations

from pathlib import Path

import pytest

from .model import save_model


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
