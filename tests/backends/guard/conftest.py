"""What holds for every test of a guard."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """A guard that is closed has ended its threads."""
    yield
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("hicache-probe", "hicache-usage"))]
