"""Fixtures of all composition tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ._parts import OPENED


@pytest.fixture(autouse=True)
def closed_at_the_end() -> Iterator[None]:
    """Close the backends that a test opened through a world."""
    yield
    while OPENED:
        OPENED.pop().close()
