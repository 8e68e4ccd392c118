"""Fixtures of all guard tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.backends.guard.stores import GUARDS
from tests.waiting import wait_for


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Close the guards of a test at its end, and check that their threads have ended."""
    yield
    while GUARDS:
        GUARDS.pop().close()
    names = ("hicache-probe", "hicache-usage")
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith(names)])
