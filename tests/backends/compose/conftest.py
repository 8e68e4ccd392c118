"""What holds for every test of a composition."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ._parts import OPENED


@pytest.fixture(autouse=True)
def closed_at_the_end() -> Iterator[None]:
    """Close what a test has opened by a world."""
    yield
    while OPENED:
        OPENED.pop().close()
