"""Storage for the helpers of the contract, without direct access to its stored bytes."""

from __future__ import annotations

from hicache.backends.storage import Storage
from hicache_lab.conformance import Subject


def doorless(storage: Storage) -> Subject:
    return Subject(storage, lambda key: None, lambda key, data: None)
