"""What holds for every test of a guard."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.backends.guard.stores import GUARDS


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """The guards of a test are closed at its end, and have ended their threads then."""
    yield
    while GUARDS:
        GUARDS.pop().close()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("hicache-probe", "hicache-usage"))]
