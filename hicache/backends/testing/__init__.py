"""The conformance tests for storage backends, built-in or from other packages. They need pytest, hypothesis and
zstandard.

`BackendContract` is the suite for backends, `RawContract` the suite for raw stores; subclass them in a test module. The
other names are helpers for tests of backends. `python -m pytest -p hicache.backends.testing.table` prints which backend
passes which test.
"""

from .contract import DAMAGES, BackendContract, SoleBackendContract
from .machine import BackendMachine, run_machine
from .pages import (
    CORRUPT,
    GET_ERROR,
    HIT,
    MISS,
    NAMESPACE,
    OTHER_NAMESPACE,
    PAYLOAD_BYTES,
    PRESENT,
    SET_ERROR,
    STORED,
    ContractFixtures,
    OpenStore,
    Store,
    churn,
    delete,
    empty_frames,
    exists,
    forged,
    full_frames,
    holds,
    in_parts,
    in_threads,
    load,
    make_keys,
    payload_of,
    sealed,
    soon,
    store_chain,
)
from .raw import OpenRaw, RawContract, by_key

__all__ = [
    "CORRUPT",
    "DAMAGES",
    "GET_ERROR",
    "HIT",
    "MISS",
    "NAMESPACE",
    "OTHER_NAMESPACE",
    "PAYLOAD_BYTES",
    "PRESENT",
    "SET_ERROR",
    "STORED",
    "BackendContract",
    "BackendMachine",
    "ContractFixtures",
    "OpenRaw",
    "OpenStore",
    "RawContract",
    "SoleBackendContract",
    "Store",
    "by_key",
    "churn",
    "delete",
    "empty_frames",
    "exists",
    "forged",
    "full_frames",
    "holds",
    "in_parts",
    "in_threads",
    "load",
    "make_keys",
    "payload_of",
    "run_machine",
    "sealed",
    "soon",
    "store_chain",
]
