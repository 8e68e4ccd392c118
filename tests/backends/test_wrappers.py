"""A backend that wraps others answers for every verb itself: a name that is inherited would not be passed on.

To add a wrapper, add its class to `WRAPPERS`.
"""

from __future__ import annotations

import inspect

import pytest

from hicache.backends.base import StorageBackend
from hicache.backends.compose.late import LatePart
from hicache.backends.faults import FaultyBackend
from hicache.backends.guard import GuardedBackend
from hicache.backends.limit import LimitedBackend

WRAPPERS: list[type[StorageBackend]] = [FaultyBackend, GuardedBackend, LatePart, LimitedBackend]
VERBS = sorted(StorageBackend.__abstractmethods__)


def inherited(wrapper: type) -> list[str]:
    """The names of the contract that `wrapper` does not define in its own package."""
    own = [base for base in wrapper.__mro__ if base is not StorageBackend]
    return [name for name in VERBS if not any(name in vars(base) for base in own)]


def test_the_contract_has_the_verbs() -> None:
    assert {"batch_exists", "batch_get", "batch_set", "delete", "usage", "statistics", "close"} <= set(VERBS)
    others = [name for name in vars(StorageBackend) if not name.startswith("_") and name not in VERBS]
    assert others == [], "what is not abstract would be inherited silently"


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_wrapper_overrides_every_name(wrapper: type[StorageBackend]) -> None:
    assert inherited(wrapper) == []
    for name in VERBS:
        assert inspect.signature(getattr(wrapper, name)) == inspect.signature(getattr(StorageBackend, name)), name


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_wrapper_names_its_parts(wrapper: type[StorageBackend]) -> None:
    assert isinstance(inspect.getattr_static(wrapper, "parts"), property), "what a Composite has"


def test_a_name_that_is_not_overridden_is_found() -> None:
    class Forgetful(StorageBackend):
        def batch_exists(self, keys: object, *, deadline: float) -> int:
            return 0

    assert inherited(Forgetful) == [name for name in VERBS if name != "batch_exists"]
